"""Where the batches of a measurement come from: the trainer's own loader, and what tells when each was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from utils.augment import AugmentConfig
from utils.dataset import (
    Batch,
    EpochBatches,
    EpochLoader,
    SegmentationDataset,
    get_dataloader,
    open_images,
    read_photos,
)
from utils.dataset_yaml import load_dataset_yaml
from utils.step_timer import Marker

DATA = "data"  # the phase in which a step waits for its batch
_NO_EPOCH = 10**9  # mosaic never ends


def training_loader(
    data: str, img_size: int, batch_size: int, workers: int, pin_memory: bool, *, rank: int = 0, world_size: int = 1
) -> EpochLoader:
    """Build the trainer's loader over a rank's share of a data set's training photographs, with default augmentation.

    `batch_size` is per rank.
    """
    spec = load_dataset_yaml(Path(data))
    photos = read_photos(spec, "train")
    say = print if rank == 0 else _say_nothing
    packed = open_images(photos, img_size, spec.root / ".cache", "train", say)
    dataset = SegmentationDataset(photos, img_size, packed=packed, augment=AugmentConfig(), mosaic_epochs=_NO_EPOCH)
    batches = EpochBatches(len(photos), batch_size, rank=rank, world_size=world_size, seed=0)
    return get_dataloader(dataset, batches, workers, pin_memory)


def _say_nothing(*_: str) -> None:
    """Leave the announcements to rank 0."""


class MarkedLoader:
    """The first `num_batches` batches of a loader, over as many epochs as they need; marks when each is asked for."""

    def __init__(self, loader: Any, num_batches: int, marker: Marker) -> None:
        self.loader = loader
        self.num_batches = num_batches
        self.marker = marker
        self.num_images: list[int] = []  # of each batch

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        batches = self._all()
        for _ in range(self.num_batches):
            self.marker.mark(DATA)
            batch = next(batches)
            self.num_images.append(len(batch))
            yield batch

    def _all(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            yield from self.loader
