"""Trainings that are stopped by signals, and checkpoints that are killed, damaged
or find no room.
"""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.jobs import POLL_S, Job, difference, is_alive, require, run
from tests.chaos.trainings import ENVIRONMENT, await_training, position, small, yolo
from yolo_seg_ddp.run.checkpoint import (
    MANIFEST_FILE,
    STATE_FILE,
    load_latest,
    save_checkpoint,
    verify,
)
from yolo_seg_ddp.run.records import read_epochs, read_status
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER
from yolo_seg_ddp.utils.errors import UserError

# --- Stop trainings by a signal and start them again; the result must equal that of an undisturbed
# traini ---

PHASES = ("at random", "at random", "in validation", "at an epoch's start", "at random")
MAX_SAVING_S = 5.0  # from the signal to a complete checkpoint
MAX_STOP_S = 30.0  # time that a launcher waits before it kills
# On a machine with few cores the trainer ignores --num-workers and starts no loader processes.
MANY_CORES = {
    **ENVIRONMENT,
    "TRAIN_SCRIPT": str(PROJECT_FOLDER / "tests" / "chaos" / "many_cores.py"),
}


@pytest.mark.chaos(10, 2)
def test_r3_sigterm_at_any_moment(
    times: int, sample: Any, rng: random.Random, tmp_path: Path, request: Any
) -> None:
    assert_stops_change_nothing(request, sample(80), times, itertools.repeat(0), PHASES)


@pytest.mark.chaos(3, 3)
def test_r4_each_start_has_another_number_of_loader_processes(
    times: int, sample: Any, rng: random.Random, tmp_path: Path, request: Any
) -> None:
    assert_stops_change_nothing(
        request, sample(200), times, itertools.cycle((0, 2, 1)), ("at random",)
    )


def assert_stops_change_nothing(
    request: Any, data: Path, stops: int, workers: Iterator[int], phases: tuple[str, ...]
) -> None:
    """Stop a training in one phase after the other, run it to the end, and compare."""
    tmp_path, rng, record_property = map(
        request.getfixturevalue, ("tmp_path", "rng", "record_property")
    )
    options: dict[str, Any] = {"batch": 1, "epochs": 2 * stops + 2, "accumulate": 2}
    folder, reference = tmp_path / "stopped", tmp_path / "reference"
    require(yolo(data, reference, **options), reference / "log", **MANY_CORES)
    for number in range(stops):
        command = yolo(data, folder, **options, num_workers=next(workers))
        with Job(command, folder / f"log-{number}", **MANY_CORES) as job:
            await_training(job, 0)
            await_phase(job, phases[number % len(phases)], rng)
            job.process.send_signal(signal.SIGTERM)
            start_s = time.monotonic()
            job.wait(MAX_STOP_S)
            record_property("signal to exit s", time.monotonic() - start_s)
        assert read_status(folder / "run").get("state") == "stopped"
        record_property("stopped in mid-epoch", position(folder / "run")[1] > 0)
    require(
        yolo(data, folder, **options, num_workers=next(workers)), folder / "log-last", **MANY_CORES
    )
    assert difference(folder / "run", reference / "run") == ""


def await_phase(job: Job, phase: str, rng: random.Random) -> None:
    """Wait until the log shows a phase of an epoch, then for a random moment."""
    if phase == "at random":
        time.sleep(rng.uniform(0, 3.0))
        return
    seen = job.output()
    if phase == "in validation":  # it follows the last batch's line, and precedes the epoch's line
        num_batches = int(seen.rpartition("Batch [")[2].partition("/")[2].partition("]")[0])
        last = f"Batch [{num_batches - 1}/"
        job.wait_until(lambda: last in job.output()[len(seen) :], "an epoch's last batch", 60)
    else:
        job.wait_until(lambda: "  Average Loss" in job.output()[len(seen) :], "an epoch's end", 60)
    time.sleep(rng.uniform(0, 0.1))


def terminate_twice(job: Job) -> None:
    job.process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    job.process.send_signal(signal.SIGTERM)


def press_ctrl_c(job: Job) -> None:
    os.killpg(job.popen.pid, signal.SIGINT)


def press_ctrl_c_three_times(job: Job) -> None:
    """Do it three times; the trainer takes signals within half a second for one key press."""
    for _ in range(3):
        press_ctrl_c(job)
        time.sleep(0.6)


@pytest.mark.chaos(10, 1, always=True)
def test_r11_a_second_sigterm_follows_at_once(trial: int, tmp_path: Path, request: Any) -> None:
    assert_signals_change_nothing(request, terminate_twice, is_graceful=True)


@pytest.mark.chaos(5, 1)
@pytest.mark.parametrize("send", [press_ctrl_c, press_ctrl_c_three_times])
def test_r12_ctrl_c(send: Any, trial: int, tmp_path: Path, request: Any) -> None:
    assert_signals_change_nothing(request, send, is_graceful=send is press_ctrl_c)


def assert_signals_change_nothing(
    request: Any, send: Callable[[Job], None], *, is_graceful: bool
) -> None:
    """Send signals to a small training, check its status, run it to the
    end and compare the result.
    """
    folder, rng, record_property = map(
        request.getfixturevalue, ("tmp_path", "rng", "record_property")
    )
    reference = request.getfixturevalue("undisturbed")()  # loader processes change nothing
    command, run = small(folder, num_workers=1), folder / "run"
    with Job(command, folder / "log") as job:
        await_training(job, 0)
        time.sleep(rng.uniform(0, 0.6))
        family = job.family()
        start_s = time.monotonic()
        send(job)
        while (
            job.popen.poll() is None
            and read_status(run).get("state") != "stopped"
            and time.monotonic() < start_s + MAX_STOP_S
        ):
            time.sleep(POLL_S)
        saved_s = time.monotonic() - start_s
        code = job.wait(MAX_STOP_S)
        assert [process for process in family if is_alive(process)] == []
    assert code != 0
    record_property("signal to exit s", time.monotonic() - start_s)
    if is_graceful:
        record_property("signal to checkpoint s", saved_s)
        assert read_status(run).get("state") == "stopped"
        # A quick trial checks the status only: the machine may be too busy for the time limit.
        assert saved_s <= MAX_SAVING_S or request.config.getoption("quick", True)
    require(command, folder / "log-again")
    assert difference(run, reference) == ""


# --- Checkpoints whose writing process is killed, that are damaged afterwards, or that find no room
# on the disk

# A separate process that saves one step after the other; all tensors hold the step's number.
SAVER = """
import sys
from pathlib import Path
from tests.chaos.test_stops import filled_state
from yolo_seg_ddp.run.checkpoint import save_checkpoint
for step in range(1, 100_000):
    print("saving", step, flush=True)
    save_checkpoint(Path(sys.argv[1]), step, filled_state(step, megabytes=20))
"""
EPOCHS = 6  # on the small disk
# A checkpoint of YOLOv8n-seg takes 52 MB and best.pt and last.pt 7 each: one of each fits, a second
# checkpoint does not.
SMALL_MB, LARGE_MB = 75, 300


def filled_state(step: int, megabytes: float = 0.1) -> dict[str, Any]:
    """Return a state whose tensors are filled with the step, or with its negative."""
    count = int(megabytes * 1e6 / 8)
    return {
        "model": torch.full((count,), float(step)),
        "optimizer": torch.full((count,), -float(step)),
        "step": step,
    }


def whole_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that loads; -1 if there is none, or if it mixes
    several steps.
    """
    try:
        found = load_latest(folder)
    except UserError:
        return -1
    if found is None:
        return -1
    state = found[1]
    is_whole = bool(
        (state["model"] == state["step"]).all() and (state["optimizer"] == -state["step"]).all()
    )
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
    """Return what verification reads of a manifest, which is not its step; None if it cannot be
    read.
    """
    try:
        content = json.loads(file.read_bytes())
        return content["size_bytes"], content["sha256"]
    except (ValueError, KeyError, TypeError):
        return None


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root (run it as root)")
@pytest.mark.chaos(1, 1)
def test_r7_the_disk_becomes_full_and_is_enlarged(
    sample: Any, tmp_path: Path, record_property: Any
) -> None:
    data, reference, disk, log = (
        sample(16),
        tmp_path / "reference",
        tmp_path / "disk",
        tmp_path / "log",
    )
    require(yolo(data, reference, epochs=EPOCHS), reference / "log", **ENVIRONMENT)
    disk.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_MB}m", "tmpfs", str(disk)], check=True
    )
    try:
        command, folder = yolo(data, disk, epochs=EPOCHS), disk / "run"
        assert run(command, log, timeout_s=600, **ENVIRONMENT) != 0, "nothing could be saved"
        assert "exitcode  : 74" in log.read_text()
        epoch, _, step = position(folder)
        logged = max((record["epoch"] for record in read_epochs(folder)), default=0)
        record_property("epochs trained after the last checkpoint", logged - epoch)
        assert step > 0
        assert epoch < EPOCHS
        assert logged >= epoch + 2, "the training continued"
        assert "No space left on device" in str(read_status(folder).get("reason"))
        assert [path.name for path in folder.rglob("*") if ".tmp" in path.name] == []
        subprocess.run(["mount", "-o", f"remount,size={LARGE_MB}m", str(disk)], check=True)
        require(command, log, **ENVIRONMENT)
        assert difference(folder, reference / "run") == ""
    finally:
        subprocess.run(["umount", str(disk)], check=True)
        shutil.rmtree(disk)
