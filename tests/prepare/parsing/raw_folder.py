"""A small folder of raw photographs and labels, and how the tests of parsing build it."""

import ast
import csv
import io
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image

from tests.prepare.download.archives import zip_bytes
from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.prepare.parsing.build import BuildOptions, build_dataset
from yolo_seg_ddp.prepare.parsing.formats import EPRI, FORMATS, candidates
from yolo_seg_ddp.prepare.parsing.photograph import PhotographOptions
from yolo_seg_ddp.prepare.parsing.reading import choose_format
from yolo_seg_ddp.prepare.parsing.sources import LABEL_CSV, Source
from yolo_seg_ddp.prepare.parsing.state import LOCK_FILE

NAMES = load_dataset_yaml(DEFAULT_DATASET_YAML).names


def photo(
    width: int = 400, height: int = 300, shade: int = 90, orientation: int | None = None
) -> bytes:
    pixels = np.full((height, width, 3), shade, np.uint8)
    cv2.rectangle(pixels, (40, 30), (119, 89), (250, 20, 20), -1)
    if orientation is None:
        return encode_jpeg(pixels)
    exif, stream = Image.Exif(), io.BytesIO()
    exif[274] = orientation
    Image.fromarray(pixels).save(stream, "JPEG", quality=95, exif=exif)
    return stream.getvalue()


def picture(seed: int, size: tuple[int, int] = (400, 300)) -> np.ndarray:
    """Draw a photograph-like picture: coarse and fine structure, RGB uint8 (H, W, 3)."""
    rng = np.random.default_rng(seed)
    image = np.zeros((size[1], size[0], 3), np.float32)
    for cells, strength in ((3, 55), (8, 30), (24, 20), (70, 12), (200, 8)):
        noise = rng.normal(0, strength, (cells * 3 // 4, cells, 3)).astype(np.float32)
        image += cv2.resize(noise, size, interpolation=cv2.INTER_CUBIC)
    return np.clip(image + 120, 0, 255).astype(np.uint8)


def polygon(value: str, *pairs: tuple[float, float]) -> dict[str, Any]:
    return {"value": value, "polygon": [{"x": x, "y": y} for x, y in pairs]}


BOX = polygon("insulator", (40, 30), (120, 30), (120, 90), (40, 90))
WIRE = {"value": "conductor", "line": [{"x": 10, "y": 200}, {"x": 390, "y": 200}]}


def write_csv(folder: Path, rows: list[tuple[str, object]]) -> None:
    with (folder / LABEL_CSV).open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["Label", "External ID"])
        for name, content in rows:
            text = (
                content
                if isinstance(content, str)
                else repr({"objects": content, "classifications": []})
            )
            writer.writerow([text, name])


def options(**changes: Any) -> BuildOptions:
    photograph: dict[str, Any] = {
        "class_names": NAMES,
        "long_side_px": 500,
        "line_width_px": 6.0,
        "exif_frame": "auto",
        "boxes": (),
    }
    photograph |= {key: changes.pop(key) for key in list(changes) if key in photograph}
    values: dict[str, Any] = {
        "split_by": "hash",
        "val_fraction": 0.4,
        "keep_unlabelled": False,
    } | changes
    return BuildOptions(PhotographOptions(**photograph), **values)


def build(raw: Path, **changes: Any) -> dict[str, Any]:
    return balanced(
        raw,
        build_dataset(
            [Source(EPRI, "", raw)], raw.parent / "processed", options(**changes), num_workers=2
        ),
    )


def balanced(raw: Path, manifest: dict[str, Any], label_format: str = "auto") -> dict[str, Any]:
    """Return the manifest.

    In its account source = written + left out for each class, and the source has what is in the
    files.
    """
    account = manifest["account"]
    for name, facts in account.items():
        in_source, left_out = sum(facts["source"].values()), sum(facts["left_out"].values())
        assert in_source == facts["written"] + left_out, f"{name}: {facts}"
        assert facts["written"] == sum(manifest["counts"]["objects"].get(name, {"": 0}).values())
    chosen = choose_format(raw) if label_format == "auto" else label_format
    # whose objects only the reader tells apart
    if chosen not in FORMATS or not FORMATS[chosen].are_pictures:
        patterns = FORMATS[chosen].patterns if chosen in FORMATS else ("*.csv",)
        files = [file for file in candidates(raw, patterns) if not file.is_symlink()]
        assert sum(sum(facts["source"].values()) for facts in account.values()) == sum(
            map(objects_in, files)
        )
    return manifest


def objects_in(file: Path) -> int:
    """Count the objects in a label file without its reader; 0 in a file that is none."""
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    if file.suffix == ".csv":
        found = 0
        for row in csv.DictReader(io.StringIO(text)):
            with suppress(SyntaxError, ValueError):
                found += len(ast.literal_eval(row["Label"])["objects"])
        return found
    if file.suffix != ".json":
        shapes = r"(?i)<(polygon|polyline|box|ellipse|mask|points|skeleton|root) |<object>"
        pattern = r"(?m)^\s*\d+( +[-.\w]+){2,}\s*$" if file.suffix == ".txt" else shapes
        return len(re.findall(pattern, text))
    with suppress(ValueError):
        content = json.loads(text)
        if isinstance(content, list):
            annotations = [
                one
                for task in content
                for one in task.get("annotations", task.get("completions", []))
            ]
            return sum(
                str(one.get("type")).endswith("labels")
                for each in annotations
                for one in each["result"]
            )
        lists = [content.get(key) for key in ("annotations", "shapes")]
        photographs = content.get("_via_img_metadata", content).values()
        lists += [
            one["regions"] for one in photographs if isinstance(one, dict) and "regions" in one
        ]
        return sum(len(one) for one in lists if isinstance(one, list | dict))
    return 0


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file of a data set but the lock."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def problems_of(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["place"], item["kind"]) for item in manifest["problems"]]


def record(manifest: dict[str, Any], file: str) -> dict[str, Any]:
    (found,) = [item for item in manifest["photographs"] if item["file"] == file]
    return found


def write_raw_folder(folder: Path) -> Path:
    """Write six photographs of two circuits: one circuit in a folder, the other in a zip, all
    labelled.
    """
    (folder / "Circuit1").mkdir(parents=True)
    for number in range(1, 4):
        (folder / "Circuit1" / f"1 ({number}).JPG").write_bytes(photo(shade=60 + number))
    members = {
        f"Circuit2/2 ({number}).JPG": photo(1000, 500, shade=70 + number) for number in range(1, 4)
    }
    (folder / "Circuit2.zip").write_bytes(zip_bytes(members))
    names = [f"{circuit} ({number}).jpg" for circuit in (1, 2) for number in range(1, 4)]
    write_csv(folder, [(name, [BOX, WIRE]) for name in names])
    return folder
