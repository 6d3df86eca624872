"""Batches and loaders: every image once, the same pixels for any number of ranks and workers,
bounded shared memory.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.data.conftest import SHAPES, windows_as_samples
from tests.data.pictures import content, dataset_of
from tests.support.plugin import PRETENCE, must_run, run_script
from tests.support.processes import wait_until
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.dataset import Photo, SegmentationDataset, collate
from yolo_seg_ddp.data.images import write_jpeg
from yolo_seg_ddp.data.loader import (
    RESERVE_BYTES,
    SHARED_MEMORY_ADVICE,
    EpochBatches,
    EpochLoader,
    ShardBatches,
    batch_bytes,
    get_dataloader,
    needed_bytes,
    plan_loader,
)
from yolo_seg_ddp.data.windows import WindowedPhotos
from yolo_seg_ddp.utils.errors import UserError


def epoch_of(
    num_samples: int, batch_size: int, world_size: int, epoch: int = 0
) -> list[list[list[tuple[int, ...]]]]:
    """Return each rank's list of batches."""
    ranks = [
        EpochBatches(num_samples, batch_size, rank, world_size, seed=5)
        for rank in range(world_size)
    ]
    for batches in ranks:
        batches.epoch = epoch
    assert {len(batches) for batches in ranks} == {len(list(batches)) for batches in ranks}
    return [list(batches) for batches in ranks]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [3, 4, 5, 6, 7, 37, 64])
def test_samples_come_once_and_ranks_have_as_many_batches(
    num_samples: int, world_size: int, batch_size: int
) -> None:
    per_rank = epoch_of(num_samples, batch_size, world_size, epoch=2)
    keys = [key for rank in per_rank for batch in rank for key in batch]
    assert sorted(keys) == [(2, index) for index in range(num_samples)]
    assert len({len(rank) for rank in per_rank}) == 1
    sizes = [len(batch) for rank in per_rank for batch in rank]
    assert min(sizes) > 0  # no rank may be left without an image while others compute gradients
    assert max(sizes) <= max(batch_size, 2)  # a batch of one cannot give an odd image away
    assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize("num_samples", [8, 37, 64])
def test_one_rank_and_two_with_the_same_global_batch_see_the_same_batches(num_samples: int) -> None:
    (alone,) = epoch_of(num_samples, 4, 1)
    first, second = epoch_of(num_samples, 2, 2)
    assert len(alone) == len(first)
    for together, left, right in zip(alone, first, second, strict=True):
        assert together[0::2] == left
        assert together[1::2] == right


def test_order_changes_with_epoch_and_seed_only() -> None:
    assert epoch_of(37, 4, 1) == epoch_of(37, 4, 1)

    def order(seed: int, epoch: int) -> list[int]:
        batches = EpochBatches(37, 4, 0, 1, seed)
        batches.epoch = epoch
        return [index for batch in batches for _, index in batch]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert order(0, 0) != list(range(37))


@pytest.mark.parametrize(("num_samples", "world_size"), [(1, 2), (2, 3), (0, 1)])
def test_fewer_images_than_processes_are_refused(num_samples: int, world_size: int) -> None:
    with pytest.raises(
        UserError, match=f"{num_samples} training images cannot feed {world_size} processes"
    ):
        EpochBatches(num_samples, 4, 0, world_size, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_samples", [0, 1, 2, 7, 64])
def test_shards_cover_a_split_exactly_even_when_some_are_empty(
    num_samples: int, world_size: int
) -> None:
    shards = [ShardBatches(num_samples, 4, rank, world_size) for rank in range(world_size)]
    indices = [index for shard in shards for batch in shard for _, index in batch]
    assert sorted(indices) == list(range(num_samples))
    for shard in shards:
        sizes = [len(batch) for batch in shard]
        assert len(sizes) == len(shard)
        assert all(0 < size <= 4 for size in sizes)


def test_an_empty_shard_makes_an_empty_loader(plain_set: SegmentationDataset) -> None:
    assert list(get_dataloader(plain_set, ShardBatches(2, 4, 2, 3), 0, False)) == []


EVERYTHING = Augmentation(degrees=10, shear=5, mixup=0.5, copy_paste=0.5, paste=0.5)


@pytest.mark.parametrize("kind", ["photographs", "windows"])
def test_workers_ranks_epochs_before_and_a_mid_epoch_start_change_no_byte(
    windowed: WindowedPhotos, kind: str
) -> None:
    data = (
        dataset_of(EVERYTHING)
        if kind == "photographs"
        else windows_as_samples(windowed, EVERYTHING)
    )

    def loader_of(workers: int, rank: int = 0, ranks: int = 1) -> EpochLoader:
        batches = EpochBatches(len(data), 2 // ranks, rank, ranks, seed=3, sizes_px=(96, 128))
        return get_dataloader(data, batches, workers, False)

    def batches_of(loader: EpochLoader, epoch: int, start: int = 0) -> list[list[list[bytes]]]:
        loader.set_epoch(epoch, start)
        return [[batch.images.numpy().tobytes(), *map(content, batch.samples)] for batch in loader]

    here, worker = loader_of(0), loader_of(1)
    first, second = batches_of(here, 0), batches_of(here, 1)
    assert sum(len(batch) - 1 for batch in first) == len(data)
    assert first != second
    assert batches_of(worker, 0) == first
    assert batches_of(worker, 1, start=2) == second[2:]
    assert batches_of(here, 0) == first
    shares = [batches_of(loader_of(0, rank, 2), 0) for rank in range(2)]
    for batch, left, right in zip(first, *shares, strict=True):
        assert sorted(left[1:] + right[1:]) == sorted(batch[1:])


starts_thread_at_fork = False


def _start_thread() -> None:
    if starts_thread_at_fork:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


os.register_at_fork(after_in_child=_start_thread)


@pytest.mark.parametrize("a_library_starts_a_thread", [False, True])
def test_a_stop_told_to_a_loader_process_too_costs_no_batch(
    augmented_set: SegmentationDataset,
    a_library_starts_a_thread: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher sends a stop to a rank's whole process group, and the rank wants batches until
    all ranks agree.

    With SciPy imported, a forked process had a second thread before it could block the signals;
    that one died of them.
    """
    monkeypatch.setattr(sys.modules[__name__], "starts_thread_at_fork", a_library_starts_a_thread)
    loader = get_dataloader(
        augmented_set, EpochBatches(len(SHAPES), 1, 0, 1, seed=0), 1, False, prefetch=1
    )
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers  # type: ignore[attr-defined]
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    assert len(list(batches)) == len(SHAPES) - 1
    assert worker.is_alive()  # it persists from epoch to epoch
    os.kill(worker.pid, signal.SIGTERM)  # its own rank may end it
    worker.join(10)
    assert worker.exitcode == 0


LEAVES_A_LOADER_OPEN = """
from torch.utils.data import DataLoader
from yolo_seg_ddp.data.loader import prepare_worker

options = {"num_workers": 1, "persistent_workers": True, "worker_init_fn": prepare_worker}
batches = iter(DataLoader(list(range(8)), **options))
next(batches)
raise RuntimeError("in the middle of an epoch")
"""


def test_a_process_that_fails_in_the_middle_of_an_epoch_ends() -> None:
    """Python waits at its end for the helpers to which it has sent SIGTERM."""
    done = run_script("python", "-c", LEAVES_A_LOADER_OPEN, timeout_s=60)
    assert done.returncode == 1
    assert "in the middle of an epoch" in done.stderr


COPIES_BATCHES_AT_ITS_END = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # called last
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Iterator
from yolo_seg_ddp.data.loader import EpochLoader, prepare_worker
Iterator._register_persistent_workers_atexit = lambda self: None  # as in torch 2.11
options = {"persistent_workers": True, "pin_memory": True, "worker_init_fn": prepare_worker}
loader = EpochLoader(torch.zeros(99, 9), 1, num_workers=1, **options)
print(next(iter(loader)).shape, [thread.name for thread in threading.enumerate()])
"""


def test_threads_that_copy_batches_for_a_gpu_end_before_the_interpreter() -> None:
    pretended = {"PRETEND_GPUS": "1", "PYTHONPATH": str(PRETENCE)}
    done = run_script(
        "python", "-W", "ignore", "-c", COPIES_BATCHES_AT_ITS_END, timeout_s=60, **pretended
    )
    during, after = done.stdout.splitlines()
    assert ("pin_memory" in during, "pin_memory" in after, done.stderr) == (True, False, "")


def test_pixels_travel_once_between_processes(augmented_set: SegmentationDataset) -> None:
    (here, *_), (sent, *_) = (
        list(
            get_dataloader(
                augmented_set, EpochBatches(len(SHAPES), 4, 0, 1, seed=0), workers, False
            )
        )
        for workers in (0, 1)
    )
    assert len(ForkingPickler.dumps(here)) < here.images.numel() / 2
    for position, (ours, theirs) in enumerate(zip(here.samples, sent.samples, strict=True)):
        np.testing.assert_array_equal(theirs.image, ours.image)
        np.testing.assert_array_equal(theirs.masks, ours.masks)
        assert np.shares_memory(theirs.image, sent.images[position].numpy())
        assert np.shares_memory(theirs.masks, sent.masks[position].numpy())


SIDE_PX, BATCH = 64, 4


def photos(tmp_path: Path, count: int) -> list[Photo]:
    write_jpeg(tmp_path / "a.jpg", np.full((48, 64, 3), 90, np.uint8))
    return [Photo(tmp_path / "a.jpg", np.zeros(0, np.int64), [])] * count


class Counting(torch.utils.data.Dataset[torch.Tensor]):
    """Its samples are their keys; `num_loaded` counts those of all processes."""

    collate = staticmethod(torch.stack)

    def __init__(self) -> None:
        self.num_loaded = torch.zeros((), dtype=torch.int64).share_memory_()

    def __getitem__(self, key: tuple[int, ...]) -> torch.Tensor:
        self.num_loaded += 1
        return torch.tensor(key)


@pytest.mark.parametrize(("epoch", "start"), [(1, 0), (0, 0), (1, 1)])
def test_an_epoch_that_has_begun_is_not_loaded_again_and_another_is_loaded(
    epoch: int, start: int
) -> None:
    data = Counting()
    loader = get_dataloader(data, batches := EpochBatches(4, 2, 0, 1, seed=0), 1, False)
    loader.begin(1)
    wait_until(lambda: data.num_loaded == 4)
    loader.set_epoch(epoch, start)
    expected = [list(map(list, keys)) for keys in batches]
    assert [batch.tolist() for batch in loader] == expected
    assert data.num_loaded == 4 + (0 if (epoch, start) == (1, 0) else sum(map(len, expected)))
    assert len(list(loader)) == len(list(batches))  # a roll-back starts the same epoch again


def test_a_batch_is_as_large_as_is_said(tmp_path: Path) -> None:
    dataset = SegmentationDataset(photos(tmp_path, BATCH), SIDE_PX)
    batch = collate([dataset[0, index] for index in range(BATCH)])
    tensors = (batch.images, batch.masks)
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == batch_bytes(
        BATCH, SIDE_PX
    )


@pytest.mark.parametrize(
    ("workers", "ranks", "free_mb", "chosen"),
    [
        (8, 1, 10_000, 8),
        (8, 8, 10_000, 7),
        (8, 1, 64, 0),
        (8, 1, 400, 2),
        (4, 2, 900, 2),
        (0, 8, 16, 0),
        (2, 1, 4, 0),
    ],
)
def test_as_many_workers_as_there_is_room_for(
    workers: int, ranks: int, free_mb: int, chosen: int
) -> None:
    size = batch_bytes(16, 640)  # 21 MB
    planned, notes = plan_loader(workers, 4, size, ranks, free_mb * 1_000_000)
    assert planned == chosen
    assert (
        needed_bytes(planned, 4, size, ranks) + RESERVE_BYTES <= free_mb * 1_000_000 or chosen == 0
    )
    assert bool(notes) == (chosen != workers)


def test_the_note_names_both_sizes_and_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (note,) = plan_loader(8, 4, batch_bytes(16, 640), 2, 64_000_000)
    assert "8 loader workers in each of 2 process(es) may need 2,726 MB" in note
    assert f"64 MB are free; 0 workers are used. To use all, {SHARED_MEMORY_ADVICE}" in note
    assert "\n" not in note
    monkeypatch.setattr(
        "yolo_seg_ddp.data.loader.shared_memory_free_bytes", lambda: None
    )  # a system without such a place
    assert plan_loader(8, 4, batch_bytes(16, 640), 8) == (8, [])


@pytest.mark.alone  # it lists the shared memory of the whole machine
def test_a_loader_never_holds_more_than_is_planned_for_and_leaves_nothing(tmp_path: Path) -> None:
    dataset = SegmentationDataset(photos(tmp_path, 64), SIDE_PX)
    batches = EpochBatches(64, BATCH, 0, 1, 0)
    before = set(os.listdir("/dev/shm"))
    held = 0
    loader = get_dataloader(dataset, batches, 1, pin_memory=False, prefetch=2)
    for _ in loader:
        # shared segments that it has open, once unlinked too
        maps = psutil.Process().memory_maps(grouped=False)
        held = max(held, sum(part.size for part in maps if "/torch_" in part.path))
    assert 0 < held <= needed_bytes(1, 2, batch_bytes(BATCH, SIDE_PX), 1)
    del loader
    assert {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} <= before


def test_a_container_with_little_shared_memory_is_measured() -> None:
    """The plan where /dev/shm really has 16 MB; needs the right to mount one."""
    probe = ["unshare", "--mount", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace (run them as root on Linux)")
    script = (
        "mount -t tmpfs -o size=16m tmpfs /dev/shm && "
        f"exec {sys.executable} -c 'from yolo_seg_ddp.data.loader import *; print(plan_loader(2, "
        "4, batch_bytes(2, 640), 1))'"
    )
    said = must_run("unshare", "--mount", "bash", "-c", script, timeout_s=60)
    assert said.startswith("(0, [")
    assert "17 MB are free" in said
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
