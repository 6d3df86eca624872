"""What a rank does with the time of its steps: the phases of the step, the wait for data and every collective.

A collective takes as long as its slowest participant lets it: the part that the last rank to arrive needs is the
transfer, whatever another rank spends on top of that is waiting for that last one (`split_collectives`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.data.augment import AugmentConfig
from utils.data.dataset import Batch, SegmentationDataset, open_images, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.loader import EpochBatches, EpochLoader, get_dataloader
from utils.distributed import main_printer
from utils.distributed.ddp import gradient_bytes
from utils.measure.step_timer import PHASES, Marker, StepTimer

DATA = "data"  # the phase in which a step waits for its batch
COMMUNICATION = "communication"
RANGES = (DATA, *PHASES, COMMUNICATION)


@dataclass(frozen=True)
class StepRanges:
    """The steps of one rank: ms by RANGES, float64 (steps, 7), and each step's blocking collectives in their order.

    A collective is (ms that this rank stood in it, bytes); the gradients' one counts from the last gradient on.
    """

    ranges_ms: np.ndarray
    collectives: list[list[tuple[float, int]]]


class RangeTimer(StepTimer):
    """A StepTimer whose phases may be interrupted by collectives; a step begins where its batch is asked for.

    On a GPU its marks are events on the stream that computes: that stream waits for a collective's result, and the
    time between the marks around it is the time which the arithmetic stood still.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._phase = DATA
        self._bytes: list[int] = []

    def mark(self, phase: str) -> None:
        """Begin `phase`, one of RANGES."""
        super().mark(phase)
        self._phase = phase

    @contextmanager
    def collective(self, num_bytes: int) -> Iterator[None]:
        """Count what happens inside as a collective over `num_bytes`; the phase around it goes on afterwards."""
        around = self._phase
        self._bytes.append(num_bytes)
        self.mark(COMMUNICATION)
        try:
            yield
        finally:
            self.mark(around)

    def gradients_ready(self, num_bytes: int) -> None:
        """Begin to wait for the gradients of the other ranks; the next phase ends it. Counts from the last call on."""
        if self._phase == COMMUNICATION:  # an earlier gradient was not the last one: this time was still backward
            self._marks[-1] = ("backward", self._marks[-1][1])
            self._bytes.pop()
        self._bytes.append(num_bytes)
        self.mark(COMMUNICATION)

    def ranges(self) -> StepRanges:
        """Return all complete steps: the last one is once the next has begun. Waits for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        numbers = iter(self._bytes)
        steps: list[dict[str, float]] = []
        collectives: list[list[tuple[float, int]]] = []
        for (name, start), (_, end) in itertools.pairwise(self._marks):
            duration_ms = self._between_ms(start, end)
            if name == DATA:
                steps.append(dict.fromkeys(RANGES, 0.0))
                collectives.append([])
            if not steps:
                if name == COMMUNICATION:
                    next(numbers)
                continue
            steps[-1][name] += duration_ms
            if name == COMMUNICATION:
                collectives[-1].append((duration_ms, next(numbers)))
        values = [[step[name] for name in RANGES] for step in steps]
        return StepRanges(np.array(values, np.float64).reshape(-1, len(RANGES))[:-1], collectives[:-1])


@contextmanager
def timed_collectives(timer: RangeTimer, model: torch.nn.Module) -> Iterator[None]:
    """Tell `timer` of every all-reduce that the training itself calls, and of the wait for DDP's gradients."""
    reduce = dist.all_reduce

    def timed(tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        with timer.collective(tensor.numel() * tensor.element_size()):
            return reduce(tensor, *arguments, **keywords)

    hooks = []
    if isinstance(model, DistributedDataParallel):
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        num_bytes = gradient_bytes(model)

        def ready(_: torch.Tensor) -> None:
            timer.gradients_ready(num_bytes)

        # What the network uses first gets its gradient last: the first convolution and the normalisation behind it.
        hooks = [weight.register_post_accumulate_grad_hook(ready) for weight in weights[:3]]
    dist.all_reduce = timed
    try:
        yield
    finally:
        dist.all_reduce = reduce
        for hook in hooks:
            hook.remove()


def split_collectives(durations_ms: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Split what each rank spent in the same collectives, (ranks, collectives) ms, into transfer and waiting.

    Returns ms of transfer, alike for all ranks, (collectives,), and of waiting (ranks, collectives). Nobody waits less
    than the last rank to arrive, and it waits for the transfer alone.
    """
    spent = np.asarray(durations_ms, np.float64)
    transfer = spent.min(0)
    return transfer, spent - transfer


_NO_EPOCH = 10**9  # mosaic never ends


def training_loader(
    data: str, img_size: int, batch_size: int, workers: int, pin_memory: bool, *, rank: int = 0, world_size: int = 1
) -> EpochLoader:
    """Build the trainer's loader over a rank's share of a data set's training photographs, with default augmentation.

    `batch_size` is per rank.
    """
    spec = load_dataset_yaml(Path(data))
    photos = read_photos(spec, "train")
    packed = open_images(photos, img_size, spec.root / ".cache", "train", main_printer(rank))
    dataset = SegmentationDataset(photos, img_size, packed=packed, augment=AugmentConfig(), mosaic_epochs=_NO_EPOCH)
    batches = EpochBatches(len(photos), batch_size, rank=rank, world_size=world_size, seed=0)
    return get_dataloader(dataset, batches, workers, pin_memory)


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
