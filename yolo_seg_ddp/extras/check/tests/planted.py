"""A small data set on disk without a fault, and faults to plant in it."""

from pathlib import Path

import numpy as np

from tests.prepare.parsing.raw_folder import picture
from yolo_seg_ddp.data.images import write_jpeg

NAMES = ("pole", "insulator", "crossarm", "cutout", "unused")
NUM_TRAIN, NUM_VAL = 24, 12
# A pole and an insulator, as normalised corners; neither touches the edge nor is an upright
# rectangle.
POLE = ((0.42, 0.1), (0.5, 0.12), (0.52, 0.9), (0.4, 0.9))
INSULATOR = ((0.6, 0.3), (0.75, 0.32), (0.72, 0.5), (0.62, 0.48))


def row(class_id: int, points: object) -> str:
    return f"{class_id} " + " ".join(f"{value:.6f}" for value in np.ravel(np.array(points)))


class DataFolder:
    """The data set in a folder: photographs 0.jpg, 1.jpg, … of train and
    val with two objects each.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.yaml = root / "dataset.yaml"
        for split, count in (("train", NUM_TRAIN), ("val", NUM_VAL)):
            for kind in ("images", "labels"):
                (root / split / kind).mkdir(parents=True)
            for number in range(count):
                write_jpeg(self.photo(split, number), picture(number + 1000 * (split == "val")))
                self.write_rows(split, number, row(0, POLE), row(1, INSULATOR))
        self.write_yaml(NAMES[:2])

    def write_yaml(self, names: tuple[str, ...]) -> None:
        names_block = "".join(f"  {number}: {name}\n" for number, name in enumerate(names))
        self.yaml.write_text(
            f"path: .\ntrain: train/images\nval: val/images\nnames:\n{names_block}"
        )

    def photo(self, split: str, number: int) -> Path:
        return self.root / split / "images" / f"{number}.jpg"

    def labels(self, split: str, number: int) -> Path:
        return self.root / split / "labels" / f"{number}.txt"

    def write_rows(self, split: str, number: int, *rows: str) -> None:
        self.labels(split, number).write_text("".join(f"{one}\n" for one in rows))
