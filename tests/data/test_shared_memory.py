"""Loader workers and the shared memory that they hand batches over in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import PROJECT
from utils import assembly
from utils.data.dataset import Photo, SegmentationDataset, collate
from utils.data.loader import (
    RESERVE_BYTES,
    SHARED_MEMORY_ADVICE,
    EpochBatches,
    LoaderPlan,
    batch_bytes,
    get_dataloader,
    needed_bytes,
    plan_loader,
)
from utils.train_config import TrainConfig

SIDE_PX, BATCH = 64, 4


def photos(tmp_path: Path, count: int) -> list[Photo]:
    from utils.data.images import write_jpeg

    write_jpeg(tmp_path / "a.jpg", np.full((48, 64, 3), 90, np.uint8))
    return [Photo(tmp_path / "a.jpg", np.zeros(0, np.int64), [])] * count


def test_a_batch_is_as_large_as_is_said(tmp_path: Path) -> None:
    dataset = SegmentationDataset(photos(tmp_path, BATCH), SIDE_PX)
    batch = collate([dataset[0, index] for index in range(BATCH)])
    tensors = (batch.images, batch.masks)
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == batch_bytes(BATCH, SIDE_PX)


@pytest.mark.parametrize(
    ("workers", "ranks", "free_mb", "chosen"),
    [(8, 1, 10_000, 8), (8, 8, 10_000, 7), (8, 1, 64, 0), (8, 1, 400, 2), (4, 2, 900, 2), (0, 8, 16, 0), (2, 1, 4, 0)],
)
def test_as_many_workers_as_there_is_room_for(workers: int, ranks: int, free_mb: int, chosen: int) -> None:
    size = batch_bytes(16, 640)  # 21 MB
    plan = plan_loader(workers, 4, size, ranks, free_mb * 1_000_000)
    assert plan.workers == chosen
    assert needed_bytes(plan.workers, 4, size, ranks) + RESERVE_BYTES <= free_mb * 1_000_000 or chosen == 0
    assert bool(plan.notes) == (chosen != workers)


def test_the_note_names_both_sizes_and_the_cure() -> None:
    (note,) = plan_loader(8, 4, batch_bytes(16, 640), 2, 64_000_000).notes
    assert "8 loader workers in each of 2 process(es) may need 2,726 MB" in note
    assert "64 MB are free; 0 workers are used" in note
    assert "--shm-size" in SHARED_MEMORY_ADVICE
    assert "medium: Memory" in note
    assert "\n" not in note


def test_where_there_is_no_such_place_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.shared_memory_free_bytes", lambda: None)
    assert plan_loader(8, 4, batch_bytes(16, 640), 8) == LoaderPlan(8)


def test_the_trainer_plans_with_its_own_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.data.loader.shared_memory_free_bytes", lambda: 120_000_000)
    config = TrainConfig(batch_size=4, img_size=640, prefetch=2, multi_scale=False)
    assert assembly.plan_workers(config, 8, 1).workers == 5
    larger = TrainConfig(batch_size=4, img_size=640, prefetch=2, multi_scale=True)
    assert assembly.plan_workers(larger, 8, 1).workers == 2  # sides up to 1.5 times


def test_a_loader_never_holds_more_than_is_planned_for_and_leaves_nothing(tmp_path: Path) -> None:
    dataset = SegmentationDataset(photos(tmp_path, 64), SIDE_PX)
    batches = EpochBatches(64, BATCH, 0, 1, 0)
    before = set(os.listdir("/dev/shm"))
    held = 0
    loader = get_dataloader(dataset, batches, 1, pin_memory=False, prefetch=2)
    for _ in loader:
        held = max(held, segments_bytes(os.getpid()))
    assert 0 < held <= needed_bytes(1, 2, batch_bytes(BATCH, SIDE_PX), 1)
    del loader
    assert {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} <= before


def segments_bytes(process: int) -> int:
    """Return the size of the shared segments that a process has open; they are named in its maps, once unlinked too."""
    total = 0
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if "/torch_" in line:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            total += end - start
    return total


def test_a_container_with_little_shared_memory_is_measured() -> None:
    """The plan where /dev/shm really has 16 MB; needs the right to mount one."""
    probe = ["unshare", "--mount", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a mount namespace")
    script = (
        "mount -t tmpfs -o size=16m tmpfs /dev/shm && "
        f"exec {sys.executable} -c 'from utils.data.loader import *; print(plan_loader(2, 4, batch_bytes(2, 640), 1))'"
    )
    command = ["unshare", "--mount", "bash", "-c", script]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "workers=0" in done.stdout
    assert "17 MB are free" in done.stdout
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
