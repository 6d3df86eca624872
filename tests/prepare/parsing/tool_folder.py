"""A folder of photographs with the files of annotation tools beside them, and masks that are hard
to keep.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tests.prepare.parsing.raw_folder import balanced, options, photo
from yolo_seg_ddp.data.labels import read_yolo_label
from yolo_seg_ddp.evaluation.native_masks import fill_outline
from yolo_seg_ddp.predict.regions import Region, column_runs
from yolo_seg_ddp.prepare.parsing.build import build_dataset
from yolo_seg_ddp.prepare.parsing.reading import choose_format
from yolo_seg_ddp.prepare.parsing.sources import Source

WIDTH, HEIGHT = 150, 90
NAMES = ("pole", "wire")
Mask = np.ndarray  # bool (H, W)


BOX = (30, 20, 60, 50)  # of a pole; beside it there is a wire 8 px wide, from (10, 76) to (140, 84)
STRIP = (10, 76, 140, 84)
PHOTO = photo(WIDTH, HEIGHT)


def hard_masks() -> dict[str, Mask]:
    """Return masks with holes, parts, thin lines and pixels at the border: bool (HEIGHT, WIDTH)."""
    found = {
        key: np.zeros((HEIGHT, WIDTH), np.uint8)
        for key in ("hole", "parts", "wire", "border", "nested", "noise")
    }
    cv2.circle(found["hole"], (60, 40), 30, 1, -1)
    cv2.circle(found["hole"], (55, 40), 12, 0, -1)
    cv2.rectangle(found["parts"], (5, 5), (40, 30), 1, -1)
    cv2.circle(found["parts"], (100, 60), 18, 1, 3)
    cv2.ellipse(found["parts"], (60, 75), (9, 5), 20, 0, 360, 1, -1)
    cv2.line(found["wire"], (0, 20), (149, 61), 1, 1)
    cv2.line(found["wire"], (30, 89), (149, 3), 1, 2)
    found["border"][:20, 100:] = 1
    found["border"][70:, :50] = 1
    for side, value in ((40, 1), (30, 0), (20, 1), (10, 0)):
        cv2.rectangle(found["nested"], (75 - side, 45 - side), (75 + side, 45 + side), value, -1)
    found["noise"][:] = cv2.blur(np.random.default_rng(3).random((HEIGHT, WIDTH)), (9, 9)) > 0.53
    return {name: mask.astype(bool) for name, mask in found.items()}


def run_lengths(mask: Mask) -> dict[str, Any]:
    return {
        "size": [mask.shape[0], mask.shape[1]],
        "counts": column_runs(Region(0, 0, mask), mask.shape[::-1]),
    }


def annotation(number: int, image_id: Any, segmentation: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "image_id": image_id,
        "category_id": 1,
        "segmentation": segmentation,
        "iscrowd": 0,
        **more,
    }


def coco(
    annotations: Sequence[Any], files: Sequence[str] = ("a.jpg",), **more: Any
) -> dict[str, Any]:
    images = [
        {"id": k, "file_name": name, "width": WIDTH, "height": HEIGHT}
        for k, name in enumerate(files, 1)
    ]
    categories = [
        {"id": number, "name": name, "supercategory": ""} for number, name in enumerate(NAMES, 1)
    ]
    return {
        "info": {},
        "categories": categories,
        "images": images,
        "annotations": list(annotations),
        **more,
    }


def write_folder(
    folder: Path, content: Any, photographs: Sequence[str] = ("images/a.jpg",)
) -> Path:
    """Write photographs and a COCO file (a dictionary) or a Label Studio export (a list)."""
    for name in photographs:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(photo(WIDTH, HEIGHT))
    file = folder / (
        "annotations/instances_default.json" if isinstance(content, dict) else "export.json"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return folder


def build(
    folder: Path, announce: Callable[[str], None] = lambda _: None, **changes: Any
) -> dict[str, Any]:
    values: dict[str, Any] = {
        "class_names": ("conductor", "insulator"),
        "long_side_px": 1280,
        "val_fraction": 0.5,
    } | changes
    label_format = values.pop("label_format", None) or choose_format(folder)
    chosen = options(**{"use_file_classes": True} | values)
    manifest = build_dataset(
        [Source(label_format, "", folder)],
        folder.parent / "processed",
        chosen,
        num_workers=1,
        announce=announce,
    )
    return balanced(folder, manifest, label_format)


def labels_of(
    processed: Path, stem: str = "a", num_classes: int = 2
) -> list[tuple[int, np.ndarray]]:
    """Return class id and polygon (V, 2), 0..1, of each object of a photograph."""
    (file,) = processed.glob(f"*/labels/{stem}.txt")
    class_ids, polygons = read_yolo_label(file, num_classes)
    return list(zip(class_ids.tolist(), polygons, strict=True))


def drawn(polygon: np.ndarray, width: int = WIDTH, height: int = HEIGHT) -> Region:
    """Fill a normalised polygon."""
    return fill_outline(polygon.astype(np.float64) * (width, height), (width, height))


def whole(found: Region, width: int = WIDTH, height: int = HEIGHT) -> Mask:
    mask = np.zeros((height, width), bool)
    mask[
        found.top : found.top + found.mask.shape[0], found.left : found.left + found.mask.shape[1]
    ] = found.mask
    return mask


def box_of(
    polygon: np.ndarray, width: int = WIDTH, height: int = HEIGHT
) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the pixels inside a normalised polygon; right and
    bottom are excluded.
    """
    rows, columns = np.nonzero(whole(drawn(polygon, width, height), width, height))
    return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def iou(first: Mask, second: Mask) -> float:
    return float((first & second).sum() / (first | second).sum())


def texts_of(manifest: Mapping[str, Any]) -> str:
    return "\n".join(f"{item['place']}: {item['text']}" for item in manifest["problems"])


# -- YOLO's text and mask PNGs ---------------------------------------------------------------------


def mask(*boxes: tuple[int, int, int, int], value: int = 255) -> np.ndarray:
    """Return a mask uint8 (HEIGHT, WIDTH) with boxes of a value."""
    values = np.zeros((HEIGHT, WIDTH), np.uint8)
    for left, top, right, bottom in boxes:
        values[top:bottom, left:right] = value
    return values


def png(values: np.ndarray) -> bytes:
    return cv2.imencode(".png", values)[1].tobytes()


def files(folder: Path, contents: Mapping[str, bytes | str]) -> Path:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def corners(box: tuple[int, int, int, int]) -> list[tuple[int, int]]:
    left, top, right, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def yolo(class_id: int, box: tuple[int, int, int, int]) -> str:
    return f"{class_id} " + " ".join(f"{x / WIDTH} {y / HEIGHT}" for x, y in corners(box))


TEXT = yolo(0, BOX) + "\n" + yolo(1, STRIP)
