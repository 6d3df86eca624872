"""Two trainings with the same run folder."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from chaos.jobs import Job, TooSlow
from chaos.scenario import Result, Setting, spread
from chaos.trainers import small
from utils.common.errors import EXIT_LOCKED

HOLDER = """
import sys, time
from pathlib import Path
from utils.common.errors import run_script
from utils.run.status import RunLock
def main():
    lock = RunLock(Path(sys.argv[1]), wait_s=1.0)
    print("held", flush=True)
    time.sleep(120)
run_script(main)
"""


def two_in_one_folder(setting: Setting) -> Result:
    """R23: two processes start in one folder; one gets the lock. After its SIGKILL the next start needs no cleanup."""
    result, times = Result(), []
    folder = setting.folder / "run"
    for number in range(setting.count(10, 2)):
        logs = [setting.folder / f"{number}-{name}.log" for name in "ab"]
        with Job(_holder(folder), logs[0]) as first, Job(_holder(folder), logs[1]) as second:
            problem = _one_wins(first, second)
        with Job(_holder(folder), setting.folder / f"{number}-next.log") as successor:
            try:
                times.append(successor.wait_until(lambda: "held" in successor.output(), "the folder", 60))
                again = ""
            except TooSlow as error:
                again = str(error)
        result.trial("start", problem, again)
    if not setting.quick:
        result.trial("the trainer itself", _second_trainer(setting.folder / "trainer"))
    result.figures = {"a killed owner's folder is held again, start included, after": spread(times)}
    return result


def _holder(folder: Path) -> list[str]:
    return [sys.executable, "-c", HOLDER, str(folder)]


def _one_wins(first: Job, second: Job) -> str:
    """Wait until one of the two has exited, then kill the other; return what is wrong."""
    deadline_s = time.monotonic() + 60
    while first.popen.poll() is None and second.popen.poll() is None:
        if time.monotonic() > deadline_s:
            return "both continued"
        time.sleep(0.05)
    loser, winner = (first, second) if first.popen.poll() is not None else (second, first)
    if loser.popen.returncode != EXIT_LOCKED:
        return f"the loser exited with {loser.popen.returncode}"
    if "held" not in winner.output() or winner.popen.poll() is not None:
        return "nobody won"
    named = f"process {winner.popen.pid} on " in loser.output()
    winner.process.send(signal.SIGKILL)
    winner.popen.wait(30)
    return "" if named else "the loser did not name the winner"


def _second_trainer(folder: Path) -> str:
    """Start a training in the folder of another one, which runs longer than the start waits for the lock (a minute)."""
    alone = [sys.executable, str(Path(__file__).with_name("small_training.py")), f"--save-dir={folder / 'run'}"]
    with Job(small(folder, epochs=100_000), folder / "log-owner") as owner:
        owner.wait_until(lambda: "Batch [" in owner.output(), "a batch", 120)
        with Job(alone, folder / "log-second") as second:
            try:
                code = second.wait(100)
            except TooSlow as error:
                return str(error)
        return "" if code == EXIT_LOCKED else f"exit code {code}"
