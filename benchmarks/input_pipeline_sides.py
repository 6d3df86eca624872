"""The two loaders that `input_pipeline.py` compares, with one interface.

Their batches follow the order of the files and start again at the end.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import utils.data.dataset as our_loader
from benchmarks.comparison import run_script
from utils.common.config import words_of
from utils.common.errors import UserError
from utils.data.augment import AugmentConfig
from utils.data.dataset_yaml import load_dataset_yaml

ORIGINAL_LONG_SIDE_PX = 16384  # more than any camera has: parse_labels.py then keeps each photograph's size
MANY_EPOCHS = 10**9  # the measurement never reaches the epochs without mosaic
COLOUR = ("hsv_h", "hsv_s", "hsv_v")


class OurSide:
    """The project's data set, with its photographs in the packed cache."""

    def __init__(self, data: Path, cache_folder: Path, img_size: int, batch_size: int, has_colour: bool) -> None:
        photos = our_loader.read_photos(load_dataset_yaml(data), "train")
        files = [photo.file for photo in photos]
        packed = our_loader.open_images(files, img_size, cache_folder, "train", lambda line: None)
        if packed is None:
            raise UserError(f"{cache_folder}: no room for the packed cache; free some or choose another --output")
        config = AugmentConfig() if has_colour else AugmentConfig(**dict[str, Any](dict.fromkeys(COLOUR, 0.0)))
        self.dataset = our_loader.SegmentationDataset(
            photos, img_size, packed=packed, augment=config, mosaic_epochs=MANY_EPOCHS
        )
        self.batch_size, self.positions = batch_size, itertools.count()
        self.warm_up_samples = len(photos)

    def next_batch(self) -> our_loader.Batch:
        """Return the next batch. Each pass over the files is an epoch with its own random numbers."""
        positions = itertools.islice(self.positions, self.batch_size)
        return our_loader.collate([self.dataset[divmod(position, len(self.dataset))] for position in positions])

    def num_targets(self, batch: our_loader.Batch) -> int:
        """Return how many objects a batch holds."""
        return len(batch.boxes)


class TheirSide:
    """Ultralytics' training data set with its default settings, photographs read from their files.

    It writes a `labels.cache` beside the folder of the labels.
    """

    def __init__(self, data: Path, img_size: int, batch_size: int, has_colour: bool) -> None:
        # Do not print its settings and files.
        os.environ.setdefault("YOLO_VERBOSE", "False")
        import cv2
        import ultralytics.data.base as reader
        from ultralytics.cfg import get_cfg
        from ultralytics.data.build import build_yolo_dataset
        from ultralytics.utils import DEFAULT_CFG

        cv2.setNumThreads(0)
        spec = load_dataset_yaml(data)
        colour: dict[str, float] = {} if has_colour else dict.fromkeys(COLOUR, 0.0)
        config: Any = get_cfg(DEFAULT_CFG, {"task": "segment", "imgsz": img_size, **colour})
        description = {"names": dict(enumerate(spec.names)), "channels": 3}
        folders = [str(source) for source in spec.splits["train"]]
        self.reader: Any = reader
        self.dataset = cast("Any", build_yolo_dataset(config, folders, batch_size, description, mode="train"))
        self.batch_size, self.positions = batch_size, itertools.count()
        # Mosaic takes three of its four photographs from a buffer of those read last. In file order, one photograph is
        # read per sample, as in a data set that is larger than the buffer.
        self.warm_up_samples: int = self.dataset.max_buffer_length

    def next_batch(self) -> Any:
        """Return the next batch."""
        positions = itertools.islice(self.positions, self.batch_size)
        return self.dataset.collate_fn([self.dataset[position % len(self.dataset)] for position in positions])

    def num_targets(self, batch: Any) -> int:
        """Return how many objects a batch holds."""
        return len(batch["bboxes"])

    @contextmanager
    def counting_decodes(self) -> Iterator[list[int]]:
        """Yield a list that grows by one entry for each image file decoded inside the block."""
        counted: list[int] = []
        read = self.reader.imread

        def counting(*arguments: Any, **options: Any) -> Any:
            counted.append(1)
            return read(*arguments, **options)

        self.reader.imread = counting
        try:
            yield counted
        finally:
            self.reader.imread = read


Side = OurSide | TheirSide


def parse_raw(raw: Path, folder: Path, long_side_px: int | None) -> Path:
    """Run parse_labels.py to build a data set in `folder`, unless it exists; return its YAML. None: the default size."""
    data = folder / "dataset.yaml"
    if not data.exists():
        options = words_of({"input": raw, "output": folder, "long_side": long_side_px})
        folder.parent.mkdir(parents=True, exist_ok=True)
        run_script(["parse_labels.py", *options], folder.with_suffix(".log"))
    return data
