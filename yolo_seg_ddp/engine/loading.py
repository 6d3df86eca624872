"""How the loop takes batches from loaders: reproducibly, equally many on every rank, and each
validation sample once.

On a GPU the next batch is copied on a second CUDA stream while the previous step still computes:
from the loss on, the host is ahead of the GPU, and during the backward pass the copy comes from
page-locked memory. On a CPU nothing overlaps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from yolo_seg_ddp.utils.devices import seed_everything
from yolo_seg_ddp.utils.distributed import max_over_ranks, rank
from yolo_seg_ddp.utils.errors import UserError


def batches_from(loader: Any, epoch: int, start: int, seed: int | None) -> Iterator[Any]:
    """Yield the batches of an epoch from number `start` on.

    With a `seed`, Python, NumPy and PyTorch are seeded before a batch is loaded and again before it
    is used, with a function of (seed, rank, epoch, batch). Random augmentation and dropout are then
    the same after a resume, if the number of loader workers is the same and workers do not outlive
    an epoch (`persistent_workers=False`).
    """
    skip = _set_epoch(loader, epoch, start)
    # Loader workers take their seeds from PyTorch's generator.
    _seed_for(seed, epoch)
    iterator = iter(loader)
    for position in range(start - skip, len(loader)):
        _seed_for(seed, epoch, position, 0)
        batch = next(iterator)
        if position >= start:
            _seed_for(seed, epoch, position, 1)
            yield batch


def require_equal_batches(loader: Any) -> None:
    """Raise UserError when ranks have different numbers of batches: they would wait for each other
    without end.

    Every rank must reach this.
    """
    largest, negated_smallest = max_over_ranks([len(loader), -len(loader)])
    if largest != -negated_smallest:
        raise UserError(
            f"the training loaders have between {-negated_smallest:.0f} and {largest:.0f} "
            f"batches, {len(loader)} on rank "
            f"{rank()}: all ranks need the same number; give each loader a DistributedSampler"
        )


@contextmanager
def each_sample_once(loader: Any) -> Iterator[None]:
    """Within this block a loader's DistributedSampler repeats no sample: some ranks get one sample
    less.

    The sampler repeats samples so that all shares are equally long, which an evaluation does not
    need.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        yield
        return
    before = dict(vars(sampler))
    num_samples = len(sampler.dataset)  # type: ignore[arg-type] # the sampler needs its length, too
    sampler.drop_last = True
    sampler.total_size = num_samples
    sampler.num_samples = len(range(sampler.rank, num_samples, sampler.num_replicas))
    try:
        yield
    finally:
        vars(sampler).update(before)


def _seed_for(seed: int | None, *place: int) -> None:
    if seed is not None:
        mixed = np.random.SeedSequence([seed, rank(), *place]).generate_state(1, np.uint64)
        seed_everything(int(mixed[0]) >> 1)


def _set_epoch(loader: Any, epoch: int, start_batch: int) -> int:
    """Tell a loader which epoch begins; return how many batches remain to be skipped by hand."""
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch, start_batch)
        return 0
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
            break
    return start_batch


class Upload:
    """Calls `prepare(batch, device)` on the second stream, so that its work does not wait for the
    step before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, prepare: Callable[[Any, torch.device], Any], batch: Any) -> Any:
        """Return what `prepare` returns. The current stream waits for it."""
        if self._stream is None:
            return prepare(batch, self.device)
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            prepared = prepare(batch, self.device)
        computing.wait_stream(self._stream)
        for tensor in tensors_in(prepared):
            # Otherwise its memory could be reused by the next batch before the step ends.
            tensor.record_stream(computing)
        return prepared


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in (nested) lists, tuples, dictionaries and objects with attributes, such
    as dataclasses.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))
