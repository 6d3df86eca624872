"""Is there room in /dev/shm for the batches that loader workers hand over? Containers give 64 MB unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from utils.runtime import shared_memory_free_bytes

RESERVE_BYTES = 8 << 20  # for what else lives there: semaphores, NCCL's small segments
BYTES_PER_PIXEL = 3 + 4 / 16  # RGB, and an int32 mask at a quarter of each side
CURE = "give the container more: docker run --shm-size=8g, or in Kubernetes an emptyDir of medium: Memory at /dev/shm"


@dataclass(frozen=True)
class LoaderPlan:
    """How many workers each rank's loader may have, and what to tell the user when that is fewer than asked for."""

    workers: int
    notes: tuple[str, ...] = ()


def batch_bytes(batch_size: int, side_px: int) -> int:
    """Return what one batch of square pictures takes between two processes."""
    return round(batch_size * side_px * side_px * BYTES_PER_PIXEL)


def needed_bytes(workers: int, prefetch: int, bytes_per_batch: int, num_ranks: int) -> int:
    """Return what the loaders of a machine's ranks may hold: twice what is prefetched, as validation's batches are
    twice as large, and one batch more is in use."""
    return num_ranks * 2 * workers * prefetch * bytes_per_batch


def plan_loader(
    workers: int, prefetch: int, bytes_per_batch: int, num_ranks: int, free_bytes: int | None = None
) -> LoaderPlan:
    """Choose as many of `workers` as shared memory has room for; 0 loads in the rank itself and needs none.

    Without this a loader dies at some later batch with `Bus error`. `num_ranks` counts this machine's, which share the
    memory; `free_bytes` is measured when not given, so call it before any loader starts.
    """
    free = shared_memory_free_bytes() if free_bytes is None else free_bytes
    if free is None or workers < 1:
        return LoaderPlan(workers)
    needed = needed_bytes(workers, prefetch, bytes_per_batch, num_ranks)
    if needed + RESERVE_BYTES <= free:
        return LoaderPlan(workers)
    per_worker = needed_bytes(1, prefetch, bytes_per_batch, num_ranks)
    fitting = max(0, min(workers, (free - RESERVE_BYTES) // per_worker))
    note = (
        f"Shared memory: {workers} loader workers in each of {num_ranks} process(es) may need {_megabytes(needed)} in "
        f"/dev/shm and {_megabytes(free)} are free; {fitting} workers are used. To have all, {CURE}"
    )
    return LoaderPlan(fitting, (note,))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
