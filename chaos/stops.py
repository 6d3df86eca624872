"""Stop trainings by a signal and start them again; the result must equal that of an undisturbed training bitwise."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos.jobs import POLL_S, PROJECT, Job, TooSlow, require
from chaos.kills import await_training
from chaos.scenario import Result, Setting, spread
from chaos.trainers import difference, draw_sample, place, small, status, yolo, yolo_environment

PHASES = ("at random", "at random", "in validation", "at an epoch's start", "at random")
MAX_SAVING_S = 5.0  # from the signal to a complete checkpoint
MAX_STOP_S = 30.0  # time that a launcher waits before it kills


def at_any_moment(setting: Setting) -> Result:
    """R3: SIGTERM while YOLOv8n-seg accumulates, validates or begins an epoch, then the same command again; ten times."""
    return _stop_and_go(setting, setting.count(10, 2), itertools.repeat(0), PHASES)


def other_workers(setting: Setting) -> Result:
    """R4: the same within longer epochs; each start has another number of loader processes."""
    return _stop_and_go(setting, 3, itertools.cycle((0, 2, 1)), ("at random",), photographs=200)


def _stop_and_go(
    setting: Setting, stops: int, workers: Iterator[int], phases: tuple[str, ...], photographs: int = 80
) -> Result:
    result, rng = Result(), random.Random(setting.seed)
    data = draw_sample(setting.folder, photographs)
    options: dict[str, Any] = {"batch": 1, "epochs": 2 * stops + 2, "accumulate": 2}
    folder, reference = setting.folder / "stopped", setting.folder / "reference"
    # On a machine with few cores the trainer ignores --num-workers and starts no loader processes.
    environment = yolo_environment(TRAIN_SCRIPT=str(PROJECT / "chaos" / "many_cores.py"))
    require(yolo(data, reference, **options), reference / "log", **environment)
    times, places = [], []
    for number in range(stops):
        num_workers = next(workers)
        command = yolo(data, folder, **options, num_workers=num_workers)
        phase = phases[number % len(phases)]
        with Job(command, folder / f"log-{number}", **environment) as job:
            try:
                await_training(job, 0)
                _await_phase(job, phase, rng)
                job.process.send(signal.SIGTERM)
                start_s = time.monotonic()
                job.wait(MAX_STOP_S)
                times.append(time.monotonic() - start_s)
                state = status(folder / "run").get("state")
                result.trial(phase, "" if state == "stopped" else f"status says {state}")
            except TooSlow as error:
                result.trial(phase, str(error))
        places.append(place(folder / "run"))
    require(yolo(data, folder, **options, num_workers=next(workers)), folder / "log-last", **environment)
    result.trial("the end", difference(folder / "run", reference / "run"))
    in_mid_epoch = sum(batch > 0 for _, batch, _ in places)
    result.figures = {"signal to exit": spread(times), "stopped in mid-epoch": f"{in_mid_epoch} of {stops}"}
    return result


def _await_phase(job: Job, phase: str, rng: random.Random) -> None:
    """Wait until the log shows a phase of an epoch, then for a random moment."""
    if phase == "at random":
        time.sleep(rng.uniform(0, 3.0))
        return
    seen = job.output()
    sign = "  Average Loss" if phase == "at an epoch's start" else "Batch ["
    lines = seen.count(sign)
    if phase == "in validation":  # it follows the last batch's line, and precedes the epoch's line
        last = f"Batch [{_last_batch(seen)}/"
        job.wait_until(lambda: last in job.output()[len(seen) :], "an epoch's last batch", 60)
    else:
        job.wait_until(lambda: job.output().count(sign) > lines, "an epoch's end", 60)
    time.sleep(rng.uniform(0, 0.1))


def _last_batch(output: str) -> int:
    """Return the number of an epoch's last batch, 16 for `Batch [3/17]`."""
    return int(output.rpartition("Batch [")[2].partition("/")[2].partition("]")[0]) - 1


def second_signal(setting: Setting) -> Result:
    """R11: SIGTERM to the launcher, and again 10 ms later."""

    def send(job: Job) -> None:
        job.process.send(signal.SIGTERM)
        time.sleep(0.01)
        job.process.send(signal.SIGTERM)

    return _signal_small(setting, setting.count(10, 1), send, is_graceful=True)


def ctrl_c(setting: Setting) -> Result:
    """R12: Ctrl-C, which reaches the launcher and its ranks: once, and three times in a row."""

    def once(job: Job) -> None:
        os.killpg(job.popen.pid, signal.SIGINT)

    def three_times(job: Job) -> None:
        for _ in range(3):
            os.killpg(job.popen.pid, signal.SIGINT)
            time.sleep(0.6)  # the trainer takes signals within half a second for one key press

    result = Result()
    for name, send in (("once", once), ("three times", three_times)):
        folder = setting.folder / name
        folder.mkdir()
        part = _signal_small(replace(setting, folder=folder), setting.count(5, 1), send, is_graceful=name == "once")
        result.trials += part.trials
        result.failures += [f"{name} {failure}" for failure in part.failures]
        result.figures.update({f"{name}, {key}": value for key, value in part.figures.items()})
    return result


def _signal(job: Job, run: Path, send: Callable[[Job], None]) -> tuple[str, float, float]:
    """Send signals and wait for the end; return what is wrong, and the seconds to the checkpoint and to the end."""
    family = job.family()
    start_s = time.monotonic()
    send(job)
    while job.popen.poll() is None and status(run).get("state") != "stopped":
        if time.monotonic() - start_s > MAX_STOP_S:
            break
        time.sleep(POLL_S)
    saved_s = time.monotonic() - start_s
    code = job.wait(MAX_STOP_S)
    left = sum(process.is_alive() for process in family)
    problem = f"{left} processes left" if left else "exit code 0" if code == 0 else ""
    return problem, saved_s, time.monotonic() - start_s


def _signal_small(setting: Setting, count: int, send: Callable[[Job], None], *, is_graceful: bool) -> Result:
    """Send signals to a small training, check its status, run it to the end and compare the result."""
    result, rng = Result(), random.Random(setting.seed)
    saves: list[float] = []
    ends: list[float] = []
    reference = setting.folder / "reference"
    require(small(reference, num_workers=1), reference / "log")
    for number in range(count):
        folder = setting.folder / str(number)
        command = small(folder, num_workers=1)
        with Job(command, folder / "log") as job:
            try:
                await_training(job, 0)
                time.sleep(rng.uniform(0, 0.6))
                problem, saved_s, end_s = _signal(job, folder / "run", send)
            except TooSlow as error:
                result.trial("signal", str(error))
                continue
        state = status(folder / "run").get("state")
        saves.append(saved_s)
        ends.append(end_s)
        # A quick trial checks the status only: the machine may be too busy for the time limit.
        unclean = state != "stopped" or (saved_s > MAX_SAVING_S and not setting.quick)
        unclean_stop = f"status says {state} after {saved_s:.1f} s" if is_graceful and unclean else ""
        require(command, folder / "log-again")
        result.trial("signal", problem, unclean_stop, difference(folder / "run", reference / "run"))
    result.figures = {"signal to checkpoint": spread(saves)} if is_graceful else {}
    result.figures["signal to exit"] = spread(ends)
    return result
