"""The two loaders that `input_pipeline.py` compares, with one interface: the next batch, and functions to time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import utils.data.dataset as our_loader
from utils.common.environment import PROJECT_FOLDER
from utils.common.errors import UserError
from utils.data.augment import AugmentConfig
from utils.data.dataset_yaml import load_dataset_yaml

ORIGINAL_LONG_SIDE_PX = 16384  # more than any camera has: parse_labels.py then keeps each photograph's size
MANY_EPOCHS = 10**9  # the measurement never reaches the epochs without mosaic
COLOUR = ("hsv_h", "hsv_s", "hsv_v")


@dataclass
class StageClock:
    """CPU seconds of this thread by stage. Time in a nested stage does not count for the outer one."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inner: list[float] = field(default_factory=list)

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` wrapped so that its time is added to `stage`."""

        def run(*arguments: Any, **options: Any) -> Any:
            start_s = time.thread_time()
            self._inner.append(0.0)
            result = function(*arguments, **options)
            whole_s = time.thread_time() - start_s
            self.seconds[stage] += whole_s - self._inner.pop()
            if self._inner:
                self._inner[-1] += whole_s
            return result

        return run

    @contextmanager
    def watching(self, stages: list[tuple[Any, str, str]]) -> Iterator[None]:
        """Time the functions given as (owner, name, stage) until the end of the block."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in stages]
        for (owner, name, function), (_, _, stage) in zip(originals, stages, strict=True):
            setattr(owner, name, self.timed(stage, function))
        try:
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)


class Side(Protocol):
    """One loader. Its batches follow the order of the files and start again at the end."""

    warm_up_samples: int

    def next_batch(self) -> Any:
        """Return the next `batch_size` samples, augmented and collated."""

    def num_targets(self, batch: Any) -> int:
        """Return how many objects a batch holds."""

    def stages(self) -> list[tuple[Any, str, str]]:
        """Return (owner, function, stage) of the functions to time."""


class OurSide:
    """The project's data set, with its photographs in the packed cache."""

    def __init__(self, data: Path, cache_folder: Path, img_size: int, batch_size: int, has_colour: bool) -> None:
        photos = our_loader.read_photos(load_dataset_yaml(data), "train")
        packed = our_loader.open_images(photos, img_size, cache_folder, "train", lambda line: None)
        if packed is None:
            raise UserError(f"{cache_folder}: no room for the packed cache; free some or choose another --output")
        config = AugmentConfig() if has_colour else AugmentConfig(**dict.fromkeys(COLOUR, 0.0))
        self.dataset = our_loader.SegmentationDataset(
            photos, img_size, packed=packed, augment=config, mosaic_epochs=MANY_EPOCHS
        )
        self.batch_size, self.position = batch_size, 0
        self.warm_up_samples = len(photos)

    def next_batch(self) -> our_loader.Batch:
        """Return the next batch. Each pass over the files is an epoch with its own random numbers."""
        positions = range(self.position, self.position + self.batch_size)
        self.position = positions.stop
        samples = [self.dataset[divmod(position, len(self.dataset))] for position in positions]
        return our_loader.collate(samples)

    def num_targets(self, batch: our_loader.Batch) -> int:
        """Return how many objects a batch holds."""
        return len(batch.boxes)

    def stages(self) -> list[tuple[Any, str, str]]:
        """Return (owner, function, stage) of the functions to time."""
        names = {
            "warp_into": "mosaic and warp",
            "jitter_colour": "colour",
            "_visible": "outlines",
            "large_to_small": "outlines",
            "polygon_boxes": "outlines",
            "draw_masks": "masks",
            "collate": "collate",
        }
        packed = self.dataset.packed
        reading = (self.dataset, "image", "read") if packed is None else (packed, "read", "read")
        return [reading, *((our_loader, name, stage) for name, stage in names.items())]


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
        self.batch_size, self.position = batch_size, 0
        # Mosaic takes three of its four photographs from a buffer of those read last. In file order, one photograph is
        # read per sample, as in a data set that is larger than the buffer.
        self.warm_up_samples: int = self.dataset.max_buffer_length

    def next_batch(self) -> Any:
        """Return the next batch."""
        positions = range(self.position, self.position + self.batch_size)
        self.position = positions.stop
        samples = [self.dataset[position % len(self.dataset)] for position in positions]
        return self.dataset.collate_fn(samples)

    def num_targets(self, batch: Any) -> int:
        """Return how many objects a batch holds."""
        return len(batch["bboxes"])

    def stages(self) -> list[tuple[Any, str, str]]:
        """Return (owner, function, stage) of the functions to time."""
        from ultralytics.data.augment import Format, Mosaic, RandomHSV, RandomPerspective

        transforms = self.dataset.transforms.transforms
        perspective = next(step for step in transforms[0].transforms if isinstance(step, RandomPerspective))
        return [
            (self.dataset, "load_image", "read"),
            (self.dataset, "update_labels_info", "outlines"),
            (Mosaic, "__call__", "mosaic and warp"),
            (RandomPerspective, "__call__", "mosaic and warp"),
            (perspective, "apply_instances", "outlines"),
            (RandomHSV, "__call__", "colour"),
            (Format, "__call__", "masks"),
            (self.dataset, "collate_fn", "collate"),
        ]

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


def parse_raw(raw: Path, folder: Path, long_side_px: int | None) -> Path:
    """Run parse_labels.py to build a data set in `folder`, unless it exists; return its YAML. None: the default size."""
    data = folder / "dataset.yaml"
    if not data.exists():
        size = [] if long_side_px is None else ["--long-side", str(long_side_px)]
        script = PROJECT_FOLDER / "parse_labels.py"
        command = [sys.executable, str(script), "--input", str(raw), "--output", str(folder), *size]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise UserError(f"parse_labels.py failed (code {done.returncode}): {reason.removeprefix('error: ')}")
    return data
