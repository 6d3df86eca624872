"""SIGKILL for ranks and launchers. After the launcher's restarts the result must be the same as without a kill."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.jobs import POLL_S, Job, Process, TooSlow, require
from chaos.scenario import Result, Setting, spread
from chaos.trainers import LOOPBACK, difference, draw_sample, place, small, status, yolo, yolo_environment

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
BATCH_LINE = "  Batch ["
START_TIMEOUT_S = 240.0  # imports are slow on a busy machine
MAX_RECOVERY_S = 20.0  # the goal on an idle machine


def ranks_of_attempt(job: Job, attempt: int, world_size: int) -> list[Process]:
    """Return the living ranks of the launcher's start number `attempt` (from 0); empty unless all of them live."""
    found = [rank for rank in job.ranks().values() if rank.environment().get(ATTEMPT) == str(attempt)]
    return found if len(found) == world_size else []


def await_training(job: Job, attempt: int, world_size: int = 2) -> float:
    """Wait until the ranks of start number `attempt` train; return the seconds."""
    start_s = time.monotonic()
    job.wait_until(lambda: bool(ranks_of_attempt(job, attempt, world_size)), f"start {attempt}", START_TIMEOUT_S)
    before = len(job.output())  # earlier ranks have ended and print nothing more
    job.wait_until(lambda: BATCH_LINE in job.output()[before:], f"a batch of start {attempt}", START_TIMEOUT_S)
    return time.monotonic() - start_s


def kill_again_and_again(job: Job, kills: int, window_s: float, rng: random.Random) -> list[float]:
    """Kill a random rank at a random moment after each start; return the seconds from each kill to the next batch."""
    recoveries = []
    await_training(job, 0)
    for attempt in range(kills):
        time.sleep(rng.uniform(0, window_s))
        victims = ranks_of_attempt(job, attempt, 2)
        if not victims:
            raise TooSlow(f"the ranks of start {attempt} were gone before kill {attempt + 1}: too short a training")
        rng.choice(victims).send(signal.SIGKILL)
        recoveries.append(await_training(job, attempt + 1))
    return recoveries


def random_kills(setting: Setting) -> Result:
    """R1: YOLOv8n-seg under train_ddp.sh; after each start, a random rank is killed at a random moment."""
    result, rng = Result(), random.Random(setting.seed)
    kills = setting.count(20, 2)
    epochs, window_s = (60, 2.5) if kills > 3 else (12, 2.0)
    data = draw_sample(setting.folder, 12)
    reference, folder = setting.folder / "reference", setting.folder / "killed"
    restarts = ["--max-restarts=25"]
    require(yolo(data, reference, epochs=epochs, launcher=restarts), reference / "log", **yolo_environment())
    command = yolo(data, folder, epochs=epochs, launcher=restarts)
    recoveries: list[float] = []
    code, problem = -1, ""
    with Job(command, folder / "log", **yolo_environment()) as job:
        try:
            recoveries = kill_again_and_again(job, kills, window_s, rng)
            code = job.wait(600)
        except TooSlow as error:
            problem = str(error)
        starts = job.output().count("Distributed YOLOv8 Training")
    problem = problem or (f"exit code {code}" if code else difference(folder / "run", reference / "run"))
    # Each start prints the banner once, so this counts the restarts: one per kill, and no other.
    at_the_end = [problem, "" if starts == kills + 1 else f"{starts} starts for {kills} kills"]
    for number in range(kills):
        lost = number >= len(recoveries)
        result.trial("kill", "no recovery" if lost else "", *(at_the_end if number == kills - 1 else []))
    slow = sum(seconds > MAX_RECOVERY_S for seconds in recoveries)
    result.figures = {"restarts": starts - 1, "recovery": spread(recoveries), f"above {MAX_RECOVERY_S:.0f} s": slow}
    return result


def kills_on_windows(setting: Setting) -> Result:
    """R26: YOLOv8n-seg on windows of large photographs; a rank is killed once a checkpoint of mid-epoch exists."""
    result, rng = Result(), random.Random(setting.seed)
    kills = setting.count(5, 1)
    data = draw_sample(setting.folder, 40, long_side="native")
    reference, folder = setting.folder / "reference", setting.folder / "killed"
    # Minutes between checkpoints: one after every few batches.
    options: dict[str, Any] = {"epochs": kills + 2, "windows": 3, "launcher": ["--max-restarts=10"]}
    options |= {"save_every_minutes": 0.01, "mosaic": 0.5}
    require(yolo(data, reference, **options), reference / "log", **yolo_environment())
    places, code, problem = [], -1, ""
    with Job(yolo(data, folder, **options), folder / "log", **yolo_environment()) as job:
        try:
            for attempt in range(kills):
                await_training(job, attempt)
                is_new = _new_in_mid_epoch(folder / "run", place(folder / "run"))
                job.wait_until(is_new, "a checkpoint of mid-epoch", 120)
                rng.choice(ranks_of_attempt(job, attempt, 2)).send(signal.SIGKILL)
                places.append(place(folder / "run"))
            code = job.wait(600)
        except TooSlow as error:
            problem = str(error)
    problem = problem or (f"exit code {code}" if code else difference(folder / "run", reference / "run"))
    for number in range(kills):
        lost = number >= len(places) or not places[number][1]
        result.trial("kill", "not in mid-epoch" if lost else "", problem if number == kills - 1 else "")
    result.figures = {"resumed at batches": " ".join(str(batch) for _, batch, _ in places)}
    return result


def _new_in_mid_epoch(run: Path, before: tuple[int, int, int]) -> Callable[[], bool]:
    """Return a function that tells whether the run's newest checkpoint is another one, of the middle of an epoch."""
    return lambda: place(run)[1] > 0 and place(run) != before


def default_rendezvous(setting: Setting) -> Result:
    """R2: plain torchrun in its default environment, with both kinds of rendezvous; one kill, one restart."""
    result, rng = Result(), random.Random(setting.seed)
    recoveries: list[float] = []
    reference = setting.folder / "reference"
    require(small(reference, epochs=8), reference / "log")
    for name, launcher in (("c10d", LOOPBACK), ("static", ("--master-addr=127.0.0.1",))):
        for number in range(setting.count(10, 1)):
            folder = setting.folder / f"{name}-{number}"
            port = [] if name == "c10d" else [f"--master-port={_free_port()}"]
            command = small(folder, launcher=[*launcher, *port, "--max-restarts=3"], epochs=8)
            result.trial(name, _killed_once(command, folder, reference, rng, recoveries))
    result.figures = {"recovery": spread(recoveries)}
    return result


def _killed_once(
    command: Sequence[str], folder: Path, reference: Path, rng: random.Random, recoveries: list[float]
) -> str:
    # The variable must be absent, as in a user's shell: an empty value would count as set.
    with Job(["env", "--unset=TORCH_DISABLE_SHARE_RDZV_TCP_STORE", *command], folder / "log") as job:
        try:
            recoveries += kill_again_and_again(job, 1, 1.0, rng)
            code = job.wait(300)
        except TooSlow as error:
            return str(error)
    return f"exit code {code}" if code else difference(folder / "run", reference / "run")


def killed_launcher(setting: Setting) -> Result:
    """R13: SIGKILL of the launcher, which then ends no rank: ranks and loader processes must end by themselves."""
    result, times = Result(), []
    for number in range(setting.count(10, 1)):
        folder = setting.folder / str(number)
        with Job(small(folder, epochs=1000, num_workers=1), folder / "log") as job:
            await_training(job, 0)
            family = job.family()
            assert len(family) >= 5, "a launcher, two ranks, two loader processes"
            job.process.send(signal.SIGKILL)
            start_s = time.monotonic()
            while (left := [process for process in family if process.is_alive()]) and time.monotonic() < start_s + 10:
                time.sleep(POLL_S)
            times.append(time.monotonic() - start_s)
            result.trial("launcher", f"{len(left)} of {len(family)} left after 2 s" if times[-1] > 2 else "")
        state = status(folder / "run").get("state")
        result.failures += [] if state == "running" else [f"{result.trials} launcher: status says {state}"]
    result.figures = {"processes": len(family), "all gone after": spread(times)}
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
