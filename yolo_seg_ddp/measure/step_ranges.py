"""Measure how a rank spends the time of its steps: the phases, the wait for data and every
collective.

Also the loaders for such measurements: the trainer's own over photographs, and one that marks each
request for a batch.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.cache import CachePlace
from yolo_seg_ddp.data.dataset import Batch, SegmentationDataset, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.loader import EpochBatches, EpochLoader, get_dataloader
from yolo_seg_ddp.data.packed_images import open_images
from yolo_seg_ddp.measure.step_timer import Mark, StepTimer
from yolo_seg_ddp.utils.distributed import main_printer

DATA = "data"  # the phase in which a step waits for its batch
COMMUNICATION = "communication"
_MANY_EPOCHS = 10**9  # the measurement never reaches the epochs without mosaic


# --- ranges ---------------------------------------------------------------------------------------


class RangeTimer(StepTimer):
    """A StepTimer that also times collectives within phases. A step begins when its batch is
    requested.

    On a GPU the marks are events on the compute stream. That stream waits for a collective's
    result, so the time between the marks around a collective is the time in which no arithmetic
    runs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._phase = DATA

    def mark(self, phase: str) -> None:
        """Begin `phase`: DATA, COMMUNICATION or one of PHASES."""
        super().mark(phase)
        self._phase = phase

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Count the time inside the context as a collective, then continue the phase around it."""
        around = self._phase
        self.mark(COMMUNICATION)
        try:
            yield
        finally:
            self.mark(around)

    def gradients_ready(self) -> None:
        """Begin to wait for the other ranks' gradients; the next phase ends it.

        The last call of a step counts.
        """
        # the gradient before was not the last one: that time belongs to backward
        if self._phase == COMMUNICATION:
            self._marks[-1] = ("backward", self._marks[-1][1])
        self.mark(COMMUNICATION)

    def steps(self) -> list[list[tuple[str, float]]]:
        """Return the ranges of each complete step in order, as (name, ms). Waits for the GPU.

        A step is complete when the next one has begun.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        steps: list[list[tuple[str, float]]] = []
        for (name, start), (_, end) in itertools.pairwise(self._marks):
            if name == DATA:
                steps.append([])
            if steps:
                steps[-1].append((name, self._between_ms(start, end)))
        return steps[:-1]


@contextmanager
def timed_collectives(timer: RangeTimer, model: torch.nn.Module) -> Iterator[None]:
    """Report to `timer` every all-reduce that the training itself calls, and the wait for DDP's
    gradients.
    """
    reduce = dist.all_reduce

    def timed(*arguments: Any, **keywords: Any) -> Any:
        with timer.collective():
            return reduce(*arguments, **keywords)

    hooks = []
    if isinstance(model, DistributedDataParallel):
        # The first layers get their gradients last: the first convolution and its BatchNorm.
        weights = [weight for weight in model.parameters() if weight.requires_grad][:3]
        hooks = [
            weight.register_post_accumulate_grad_hook(lambda _: timer.gradients_ready())
            for weight in weights
        ]
    dist.all_reduce = timed
    try:
        yield
    finally:
        dist.all_reduce = reduce
        for hook in hooks:
            hook.remove()


# --- loaders --------------------------------------------------------------------------------------


def training_loader(
    data: str,
    img_size: int,
    batch_size: int,
    workers: int,
    pin_memory: bool,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> EpochLoader:
    """Build the trainer's loader for a rank's share of the training photographs, with default
    augmentation.

    `batch_size` is per rank. `pin_memory`: for a GPU, which also varies the colours.
    """
    spec = load_dataset_yaml(Path(data))
    photos = read_photos(spec, "train")
    say = main_printer(rank)
    place = CachePlace(spec.root, spec.cache_folder, "train", say)
    packed = open_images([photo.file for photo in photos], img_size, place)
    if isinstance(packed, str):
        say(f"packed cache off: {packed}")
    dataset = SegmentationDataset(
        photos,
        img_size,
        packed=None if isinstance(packed, str) else packed,
        augment=Augmentation(),
        mosaic_epochs=_MANY_EPOCHS,
        colours_on_device=pin_memory,
    )
    batches = EpochBatches(len(photos), batch_size, rank=rank, world_size=world_size, seed=0)
    return get_dataloader(dataset, batches, workers, pin_memory)


class MarkedLoader:
    """Yields the first `num_batches` batches of a loader, over several epochs if needed, and marks
    each request.
    """

    def __init__(self, loader: Any, num_batches: int, mark: Mark) -> None:
        self.loader = loader
        self.num_batches = num_batches
        self.mark = mark
        self.num_images: list[int] = []  # of each batch

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        batches = self._all()
        for _ in range(self.num_batches):
            self.mark(DATA)
            batch = next(batches)
            self.num_images.append(len(batch))
            yield batch

    def _all(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            yield from self.loader
