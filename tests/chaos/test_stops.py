"""Stop trainings by a signal and start them again; the result must equal that of an undisturbed training bitwise."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import POLL_S, Job, difference, is_alive, require
from tests.chaos.trainings import ENVIRONMENT, await_training, position, small, state_of, yolo
from utils.common.environment import PROJECT_FOLDER

PHASES = ("at random", "at random", "in validation", "at an epoch's start", "at random")
MAX_SAVING_S = 5.0  # from the signal to a complete checkpoint
MAX_STOP_S = 30.0  # time that a launcher waits before it kills
# On a machine with few cores the trainer ignores --num-workers and starts no loader processes.
MANY_CORES = {**ENVIRONMENT, "TRAIN_SCRIPT": str(PROJECT_FOLDER / "tests" / "chaos" / "many_cores.py")}


@pytest.mark.chaos(10, 2)
def test_r3_sigterm_at_any_moment(times: int, sample: Any, rng: random.Random, tmp_path: Path, request: Any) -> None:
    stop_and_go(request, sample(80), times, itertools.repeat(0), PHASES)


@pytest.mark.chaos(3, 3)
def test_r4_each_start_has_another_number_of_loader_processes(
    times: int, sample: Any, rng: random.Random, tmp_path: Path, request: Any
) -> None:
    stop_and_go(request, sample(200), times, itertools.cycle((0, 2, 1)), ("at random",))


def stop_and_go(request: Any, data: Path, stops: int, workers: Iterator[int], phases: tuple[str, ...]) -> None:
    """Stop a training in one phase after the other, run it to the end, and compare."""
    tmp_path, rng, record_property = map(request.getfixturevalue, ("tmp_path", "rng", "record_property"))
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
        assert state_of(folder / "run") == "stopped"
        record_property("stopped in mid-epoch", position(folder / "run")[1] > 0)
    require(yolo(data, folder, **options, num_workers=next(workers)), folder / "log-last", **MANY_CORES)
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
    """Send SIGTERM to the launcher, and again 10 ms later."""
    job.process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
    job.process.send_signal(signal.SIGTERM)


def press_ctrl_c(job: Job) -> None:
    """Send SIGINT to the launcher and its ranks."""
    os.killpg(job.popen.pid, signal.SIGINT)


def press_ctrl_c_three_times(job: Job) -> None:
    """Do it three times; the trainer takes signals within half a second for one key press."""
    for _ in range(3):
        press_ctrl_c(job)
        time.sleep(0.6)


@pytest.mark.chaos(10, 1, always=True)
def test_r11_a_second_sigterm_follows_at_once(trial: int, tmp_path: Path, request: Any) -> None:
    signal_and_resume(request, terminate_twice, is_graceful=True)


@pytest.mark.chaos(5, 1)
@pytest.mark.parametrize("send", [press_ctrl_c, press_ctrl_c_three_times])
def test_r12_ctrl_c(send: Any, trial: int, tmp_path: Path, request: Any) -> None:
    signal_and_resume(request, send, is_graceful=send is press_ctrl_c)


def signal_and_resume(request: Any, send: Callable[[Job], None], *, is_graceful: bool) -> None:
    """Send signals to a small training, check its status, run it to the end and compare the result."""
    folder, rng, record_property = map(request.getfixturevalue, ("tmp_path", "rng", "record_property"))
    reference = request.getfixturevalue("undisturbed")(num_workers=1)
    command, run = small(folder, num_workers=1), folder / "run"
    with Job(command, folder / "log") as job:
        await_training(job, 0)
        time.sleep(rng.uniform(0, 0.6))
        family = job.family()
        start_s = time.monotonic()
        send(job)
        while job.popen.poll() is None and state_of(run) != "stopped" and time.monotonic() < start_s + MAX_STOP_S:
            time.sleep(POLL_S)
        saved_s = time.monotonic() - start_s
        code = job.wait(MAX_STOP_S)
        assert [process for process in family if is_alive(process)] == []
    assert code != 0
    record_property("signal to exit s", time.monotonic() - start_s)
    if is_graceful:
        record_property("signal to checkpoint s", saved_s)
        assert state_of(run) == "stopped"
        # A quick trial checks the status only: the machine may be too busy for the time limit.
        assert saved_s <= MAX_SAVING_S or request.config.getoption("quick", True)
    require(command, folder / "log-again")
    assert difference(run, reference) == ""
