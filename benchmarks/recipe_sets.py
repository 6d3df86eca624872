"""Public data sets of real photographs with outlines, on which recipes of training are compared.

Each is taken from one commit of a public repository, so git and a network are needed once.
Photographs of the same object (copies, tiles of one picture, two shots of one plant) get the same
split.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.data.mask_rings import join_rings, mask_rings
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER
from yolo_seg_ddp.utils.errors import UserError

HUB = "https://github.com/"
MOST_PHOTOGRAPHS = 300
LONG_SIDE_PX = 640
VAL_FRACTION = 0.25
FETCHED = "fetched.txt"  # in a clone: its commit, once all files are there
MIN_CRACK_PX = 30  # smaller parts of a mask are specks


@dataclass(frozen=True)
class PublicSet:
    """The place of a data set, and which of its photographs belong together.

    labels: COCO files in the repository, beside their photographs; none: CrackForest's own format.
    same: a pattern for file names; photographs with an equal first group belong together.
    """

    repository: str
    commit: str
    licence: str = "CC BY 4.0"
    labels: tuple[str, ...] = ()
    same: str = r"(.+)\.rf\."  # as Roboflow names copies of one photograph


def _splits(folder: str = "") -> tuple[str, ...]:
    return tuple(f"{folder}{split}/_annotations.coco.json" for split in ("train", "valid", "test"))


PUBLIC_SETS = {
    "mushrooms": PublicSet(
        "tomsains/SegMush", "78bc16de1c83846e6e4324d8bb2e2c7e58f971da", labels=_splits("data/")
    ),
    "facades": PublicSet(
        "a-hwang/building-facade-segmentation",
        "fdf532443d1c83547218bfbfce8fece3ab848c21",
        labels=_splits(),
        same=r"(.+?)(?:_scaled_\d+.*)?\.rf\.",
    ),
    # a plant is photographed twice within a minute: the first digits are its minute
    "seedlings": PublicSet(
        "ArtemZhelnin/plant_project",
        "7d7564b6d893e893bd917b5a3b7e055a8b4f6ef1",
        labels=_splits("training/"),
        same=r"([a-z]+_\d{12})",
    ),
    "breadboards": PublicSet(
        "liuandy1207/BreadCrumb",
        "a739d7465d745e8990fec5bd38372ccb5e6210cb",
        labels=_splits("dataset/"),
    ),
    "potholes": PublicSet(
        "gbadrain/Pothole-Image-Segmentation-with-YOLOv8",
        "e5c5ecb5ab92d92f77d30176ac880c2630d068f5",
        labels=_splits("data/"),
    ),
    "cracks": PublicSet(
        "cuilimeng/CrackForest-dataset",
        "ed57c2d96754e6c7d105805cd29aeeb3a799f267",
        "research only, not commercial",
        same=r"(\d+)",
    ),
}


def make_public_set(name: str, folder: Path, hub: str = HUB) -> Path:
    """Fetch a set of PUBLIC_SETS and convert it, unless `folder` holds it; return its data-set
    YAML.

    Raises UserError when git or the conversion fails.
    """
    public_set = PUBLIC_SETS[name]
    processed = folder / name
    if (processed / "dataset.yaml").exists():
        return processed / "dataset.yaml"
    clone, raw = folder / "repositories" / name, folder / "raw" / name
    fetch(f"{hub}{public_set.repository}", public_set.commit, clone)
    shutil.rmtree(raw, ignore_errors=True)
    write_coco(clone, public_set, raw)
    shape = [
        "--long-side",
        str(LONG_SIDE_PX),
        "--split-by",
        "circuit",
        "--val-fraction",
        str(VAL_FRACTION),
    ]
    parse = [
        "parse_labels.py",
        "--format",
        "coco",
        "--input",
        str(raw),
        "--output",
        str(processed),
        *shape,
    ]
    _run([sys.executable, *parse], PROJECT_FOLDER)
    return processed / "dataset.yaml"


def fetch(url: str, commit: str, clone: Path) -> None:
    """Bring the files of one commit of a repository into `clone`, unless they are there."""
    mark = clone / FETCHED
    if mark.exists() and mark.read_text(encoding="utf-8") == commit:
        return
    clone.mkdir(parents=True, exist_ok=True)
    _run(["git", "init", "--quiet"], clone)
    _run(["git", "fetch", "--quiet", "--depth", "1", url, commit], clone)
    _run(["git", "checkout", "--quiet", "--force", "FETCH_HEAD"], clone)
    mark.write_text(commit, encoding="utf-8")


def write_coco(clone: Path, public_set: PublicSet, raw: Path) -> None:
    """Write a repository's photographs and one COCO file into `raw`, with a folder for those that
    show the same.
    """
    items = _from_coco(clone, public_set.labels) if public_set.labels else _from_masks(clone)
    names = set()
    groups: dict[str, list[tuple[Path, list[tuple[str, list[list[float]]]]]]] = defaultdict(list)
    for file, objects in items:
        match = re.match(public_set.same, file.name)
        groups[match[1] if match else file.stem].append((file, objects))
        names |= {name for name, _ in objects}
    categories = {name: number for number, name in enumerate(sorted(names), 1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for group in sorted(groups, key=lambda group: hashlib.sha256(group.encode()).hexdigest()):
        if len(images) + len(groups[group]) > MOST_PHOTOGRAPHS:
            break
        folder = raw / re.sub(r"[^\w-]", "_", group)
        folder.mkdir(parents=True, exist_ok=True)
        for file, objects in groups[group]:
            shutil.copyfile(file, folder / file.name)
            height, width = _size(file)
            image_id = len(images) + 1
            images.append(
                {
                    "id": image_id,
                    "file_name": f"{folder.name}/{file.name}",
                    "width": width,
                    "height": height,
                }
            )
            for name, rings in objects:
                place = {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": categories[name],
                }
                annotations.append({**place, "segmentation": rings, "iscrowd": 0})
    classes = [{"id": number, "name": name} for name, number in categories.items()]
    content = {"images": images, "annotations": annotations, "categories": classes}
    (raw / "labels.json").write_text(json.dumps(content), encoding="utf-8")


def _from_coco(
    clone: Path, labels: tuple[str, ...]
) -> Iterator[tuple[Path, list[tuple[str, list[list[float]]]]]]:
    """Yield each photograph of COCO files and its objects: class and outlines as x, y, x, y, ..."""
    for label in labels:
        content = json.loads((clone / label).read_text(encoding="utf-8"))
        names = {category["id"]: category["name"] for category in content["categories"]}
        objects = defaultdict(list)
        for annotation in content["annotations"]:
            rings = [ring for ring in annotation["segmentation"] if len(ring) >= 6]
            if rings:
                objects[annotation["image_id"]].append((names[annotation["category_id"]], rings))
        for image in content["images"]:
            folder = (clone / label).parent
            file = folder / image["file_name"]
            yield (
                (file if file.exists() else folder / "images" / image["file_name"]),
                objects[image["id"]],
            )


def _from_masks(clone: Path) -> Iterator[tuple[Path, list[tuple[str, list[list[float]]]]]]:
    """Yield CrackForest's photographs and the connected parts of their masks.

    Its .seg files list runs of pixels as `segment row first last`; segment 0 is the road.
    """
    for file in sorted((clone / "seg").glob("*.seg")):
        head, _, body = file.read_text(encoding="latin-1").partition("\ndata\n")
        width, height = (
            int(re.findall(rf"^{side} (\d+)", head, re.MULTILINE)[0])
            for side in ("width", "height")
        )
        mask = np.zeros((height, width), np.uint8)
        for line in body.splitlines():
            if line.strip():
                segment, row, first, last = map(int, line.split())
                mask[row, first : last + 1] |= segment > 0
        count, parts, statistics, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
        large = [
            part for part in range(1, count) if statistics[part, cv2.CC_STAT_AREA] >= MIN_CRACK_PX
        ]
        outlines = [join_rings(mask_rings(parts == part)).ravel().tolist() for part in large]
        yield clone / "image" / f"{file.stem}.jpg", [("crack", [outline]) for outline in outlines]


def _size(file: Path) -> tuple[int, int]:
    image = cv2.imread(str(file))
    if image is None:
        raise UserError(f"{file}: cannot be read; remove its folder and start again")
    return image.shape[0], image.shape[1]


def _run(command: list[str], folder: Path) -> None:
    """Run a command in a folder. Raises UserError with its last line when it fails."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = [line for line in (result.stderr or result.stdout).splitlines() if line.strip()]
        raise UserError(
            f"{' '.join(command[:4])}: failed in {folder}: "
            f"{lines[-1] if lines else 'it printed nothing'}"
        )
