"""The batches of each rank, their loader, and the number of loader workers that fit into shared
memory.

Batches depend only on (seed, epoch): a loader that starts in the middle of an epoch gives the same
remaining batches.
"""

import atexit
import math
import weakref
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from yolo_seg_ddp.utils.cores import shared_memory_free_bytes
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.signals import (
    die_with_parent,
    ignore_signals_except_from_parent,
    stop_signals_blocked,
)

Key = tuple[int, ...]  # (epoch, index), or (epoch, index, size in pixels) if batches differ in size

MODEL_STRIDE = 32  # of the network's coarsest level; input sides are multiples of it
SIZE_STREAM = 1  # separates the random numbers of a batch's size from those of its samples

RESERVE_BYTES = 8 << 20  # of shared memory for semaphores and NCCL's small segments
BYTES_PER_PIXEL = 3 + 4 / 16  # RGB, and an int32 mask at a quarter of each side
# iterators with a thread that copies batches for a GPU
_COPYING: weakref.WeakSet[Any] = weakref.WeakSet()
SHARED_MEMORY_ADVICE = (
    "run docker with --shm-size=8g, or in Kubernetes mount an emptyDir of medium: Memory at "
    "/dev/shm"
)


def multi_scale_sizes(size_px: int) -> tuple[int, ...]:
    """Return the input sides for `--multi-scale`: multiples of 32 from 0.5 to 1.5 times `size_px`,
    at least 64.
    """
    low = max(-(-size_px // (2 * MODEL_STRIDE)) * MODEL_STRIDE, 2 * MODEL_STRIDE)
    return tuple(range(low, size_px * 3 // 2 + 1, MODEL_STRIDE))


def largest_side_px(size_px: int, *, multi_scale: bool) -> int:
    """Return the largest side that a network input may have."""
    return max(multi_scale_sizes(size_px)) if multi_scale else size_px


class EpochBatches(Sampler[list[Key]]):
    """This rank's batches of an epoch as lists of (epoch, index), or of (epoch, index, size) with
    `sizes_px`.

    The shuffled epoch is split into ceil(N / global batch) groups whose sizes differ by at most
    one, one group for each optimizer step. Each group is split into `batches_per_group`
    (accumulation) batches for each rank: every sample exactly once, the same number of batches on
    every rank, no tiny last batch, no padding. Groups depend on the global batch size only, not on
    world size and accumulation. A group's size in pixels depends on (seed, epoch, group).
    """

    def __init__(
        self,
        num_samples: int,
        batch_size_per_gpu: int,
        rank: int,
        world_size: int,
        seed: int,
        sizes_px: tuple[int, ...] = (),
        batches_per_group: int = 1,
    ) -> None:
        if num_samples < world_size:
            raise UserError(
                f"{num_samples} training images cannot feed {world_size} processes; start at most "
                f"{num_samples}"
            )
        shares = world_size * batches_per_group
        if num_samples < shares:
            raise UserError(
                f"{num_samples} training images cannot fill {world_size} processes x --accumulate "
                f"{batches_per_group}; "
                f"use --accumulate {num_samples // world_size} at most"
            )
        self.num_samples, self.rank, self.world_size, self.seed = (
            num_samples,
            rank,
            world_size,
            seed,
        )
        # The second bound avoids empty batches in tiny data sets; a batch may then hold one image
        # more.
        self.num_groups = min(
            -(-num_samples // (batch_size_per_gpu * shares)), num_samples // shares
        )
        self.batches_per_group = batches_per_group
        self.sizes_px = sizes_px
        self.epoch, self.start_batch = 0, 0

    def __len__(self) -> int:
        return self.num_groups * self.batches_per_group

    def __iter__(self) -> Iterator[list[Key]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)
        groups = np.array_split(order, self.num_groups)
        shares = self.world_size * self.batches_per_group
        for number in range(self.start_batch, len(self)):
            group, part = divmod(number, self.batches_per_group)
            size: tuple[int, ...] = ()
            if self.sizes_px:
                rng = np.random.default_rng((self.seed, self.epoch, group, SIZE_STREAM))
                size = (int(rng.choice(self.sizes_px)),)
            share = groups[group][part * self.world_size + self.rank :: shares]
            yield [(self.epoch, int(index), *size) for index in share]


class ShardBatches(Sampler[list[Key]]):
    """This rank's share of a split, in order, as batches.

    Each image is on exactly one rank; a share may be empty.
    """

    def __init__(self, num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, num_samples, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[start : start + self.batch_size]]


class EpochLoader(DataLoader[Any]):
    """A DataLoader whose epoch and first batch can be set, also with persistent workers."""

    _begun: Any = None  # (epoch, first batch), and the iterator over them

    def begin(self, epoch: int) -> None:
        """Let the workers load the first batches of an epoch now.

        The next iteration takes them if it is of this epoch.
        """
        if self.num_workers:
            self.set_epoch(epoch)
            self._begun = (epoch, 0), super().__iter__()

    def __iter__(self) -> Any:
        sampler: Any = self.batch_sampler
        begun, self._begun = self._begun, None
        if begun and begun[0] == (sampler.epoch, sampler.start_batch):
            return begun[1]
        return super().__iter__()

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Set epoch and first batch of the next iteration.

        Workers get the epoch with each index.
        """
        sampler = self.batch_sampler
        assert isinstance(sampler, EpochBatches)
        sampler.epoch, sampler.start_batch = epoch, start_batch

    def _get_iterator(self) -> Any:
        with stop_signals_blocked():  # `prepare_worker` relies on it
            iterator = super()._get_iterator()
        if hasattr(iterator, "_pin_memory_thread"):
            _COPYING.add(iterator)
        return iterator


@atexit.register
def _end_copying() -> None:
    """End the threads that copy batches, then their workers.

    torch 2.11 lets them outlive the interpreter. C++ then aborts the process (-6; seen on an H200),
    whatever its exit code.
    """
    for iterator in list(_COPYING):
        iterator._shutdown_workers()


def get_dataloader(
    dataset: Any, batches: Sampler[Any], num_workers: int, pin_memory: bool, prefetch: int = 4
) -> EpochLoader:
    """Build the loader of one rank.

    The data set is indexed by a Key and has a `collate` of its own.
    """
    return EpochLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=dataset.collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        prefetch_factor=prefetch if num_workers > 0 else None,
        worker_init_fn=prepare_worker,
    )


def prepare_worker(worker: int) -> None:
    """Prepare a loader process: one thread, no reaction to stop signals, and an end together with
    its rank.

    torchrun sends stop signals to a rank's loader processes too. They must continue, because the
    rank needs batches until all ranks stop at the same step. A worker alone would notice a killed
    rank up to five seconds late.
    """
    ignore_signals_except_from_parent()
    die_with_parent(only_under_torchrun=False)
    cv2.setNumThreads(0)
    torch.set_num_threads(1)


def batch_bytes(batch_size: int, side_px: int) -> int:
    """Return the shared memory of one batch of square images."""
    return round(batch_size * side_px * side_px * BYTES_PER_PIXEL)


def needed_bytes(workers: int, prefetch: int, bytes_per_batch: int, num_ranks: int) -> int:
    """Return the shared memory of all loaders of a machine. During a validation, whose batches are
    twice as large, there are those of the next epoch, too.
    """
    return num_ranks * workers * (prefetch + 2 * val_prefetch(prefetch)) * bytes_per_batch


def val_prefetch(prefetch: int) -> int:
    """Return the batches that each validation worker loads ahead: half as many as in training,
    because they are larger.
    """
    return max(1, prefetch // 2)


def plan_loader(
    workers: int, prefetch: int, bytes_per_batch: int, num_ranks: int, free_bytes: int | None = None
) -> tuple[int, list[str]]:
    """Return `workers`, or fewer if shared memory holds no more, and then a note to print; 0:
    loading in the rank itself.

    With too many a worker dies with `Bus error` at some batch. `num_ranks` is the number of ranks
    on this machine. `free_bytes` is measured by default, so call this before any loader starts.
    """
    free = shared_memory_free_bytes() if free_bytes is None else free_bytes
    if free is None or workers < 1:
        return workers, []
    needed = needed_bytes(workers, prefetch, bytes_per_batch, num_ranks)
    fitting = max(0, (free - RESERVE_BYTES) // (needed // workers))
    if fitting >= workers:
        return workers, []
    note = (
        f"Shared memory: {workers} loader workers in each of {num_ranks} process(es) may need "
        f"{_megabytes(needed)} in "
        f"/dev/shm and {_megabytes(free)} are free; {fitting} workers are used. To use all, "
        f"{SHARED_MEMORY_ADVICE}"
    )
    return fitting, [note]


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
