"""Checkpoints whose writing process is killed, that are damaged afterwards, or that find no room on the disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.jobs import Job, difference, require, run
from tests.chaos.trainings import ENVIRONMENT, position, read_json, records, yolo
from utils.common.errors import UserError
from utils.run.checkpoint import MANIFEST_FILE, STATE_FILE, load_latest, save_checkpoint, verify

# A separate process that saves one step after the other; all tensors hold the step's number.
SAVER = """
import sys
from pathlib import Path
from tests.chaos.test_saves import filled_state
from utils.run.checkpoint import save_checkpoint
for step in range(1, 100_000):
    print("saving", step, flush=True)
    save_checkpoint(Path(sys.argv[1]), step, filled_state(step, megabytes=20))
"""
EPOCHS = 6  # on the small disk
# A checkpoint of YOLOv8n-seg takes 52 MB and best.pt and last.pt 7 each: one of each fits, a second checkpoint does not.
SMALL_MB, LARGE_MB = 75, 300


def filled_state(step: int, megabytes: float = 0.1) -> dict[str, Any]:
    """Return a state whose tensors are filled with the step, or with its negative."""
    count = int(megabytes * 1e6 / 8)
    return {"model": torch.full((count,), float(step)), "optimizer": torch.full((count,), -float(step)), "step": step}


def whole_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that loads; -1 if there is none, or if it mixes several steps."""
    try:
        found = load_latest(folder)
    except UserError:
        return -1
    if found is None:
        return -1
    state = found[1]
    is_whole = bool((state["model"] == state["step"]).all() and (state["optimizer"] == -state["step"]).all())
    return int(state["step"]) if is_whole else -1


@pytest.mark.chaos(50, 3)
def test_r6_the_process_that_saves_is_killed(
    trial: int, rng: random.Random, tmp_path: Path, record_property: Any
) -> None:
    folder = tmp_path / "checkpoint"
    with Job([sys.executable, "-c", SAVER, folder], tmp_path / "log") as job:
        job.wait_until(lambda: "saving 3\n" in job.output(), "a third save", 120)
        save_s = job.wait_until(lambda: "saving 4\n" in job.output(), "a save", 120)
        time.sleep(rng.uniform(0, 1.2 * save_s))
        job.kill()
        begun = int(job.output().split()[-1])
    record_property("killed in a write", bool(list(folder.glob(".tmp-*"))))
    record_property("one save s", save_s)
    assert whole_step(folder) in (begun - 1, begun)
    save_checkpoint(folder, begun + 1, filled_state(begun + 1))
    assert list(folder.glob(".tmp-*")) == [], "the next save removes leftovers"


@pytest.mark.chaos(100, 10, always=True)
def test_r8_a_damaged_checkpoint_is_detected_and_the_one_before_is_loaded(
    trial: int, rng: random.Random, tmp_path: Path
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, filled_state(step))
    newest = tmp_path / "step-00000002"
    file = newest / (MANIFEST_FILE if trial % 10 == 9 else STATE_FILE)
    before, data = meaning(file), bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if trial % 4 == 3:
        os.truncate(file, at)
    else:
        data[at] ^= rng.randrange(1, 256)
        file.write_bytes(data)
    is_harmless = before is not None and meaning(file) == before
    assert (verify(newest) is None) == is_harmless, f"{file.name} at {at}"
    assert whole_step(tmp_path) == (2 if is_harmless else 1)


def meaning(file: Path) -> Any:
    """Return what verification reads of a manifest, which is not its step; None if it cannot be read."""
    try:
        content = json.loads(file.read_bytes())
        return content["size_bytes"], content["sha256"]
    except (ValueError, KeyError, TypeError):
        return None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root (run it as root)")
@pytest.mark.chaos(1, 1)
def test_r7_the_disk_becomes_full_and_is_enlarged(sample: Any, tmp_path: Path, record_property: Any) -> None:
    data, reference, disk, log = sample(16), tmp_path / "reference", tmp_path / "disk", tmp_path / "log"
    require(yolo(data, reference, epochs=EPOCHS), reference / "log", **ENVIRONMENT)
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_MB}m", "tmpfs", str(disk)], check=True)
    try:
        command, folder = yolo(data, disk, epochs=EPOCHS), disk / "run"
        assert run(command, log, timeout_s=600, **ENVIRONMENT) != 0, "nothing could be saved"
        assert "exitcode  : 74" in log.read_text()
        epoch, _, step = position(folder)
        logged = max((record["epoch"] for record in records(folder, "epoch")), default=0)
        record_property("epochs trained after the last checkpoint", logged - epoch)
        assert step > 0
        assert epoch < EPOCHS
        assert logged >= epoch + 2, "the training continued"
        assert "No space left on device" in str(read_json(folder / "status.json").get("reason"))
        assert [path.name for path in folder.rglob("*") if ".tmp" in path.name] == []
        subprocess.run(["mount", "-o", f"remount,size={LARGE_MB}m", str(disk)], check=True)
        require(command, log, **ENVIRONMENT)
        assert difference(folder, reference / "run") == ""
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(disk)
