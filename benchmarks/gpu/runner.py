"""Runs the parts within the time limit: parts that measure alone, others side by side.

Finished parts do not run again.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

from benchmarks.gpu.plan import FAILED, FINISHED, NO_TIME, TOO_SLOW, Outcome, Part, Setting
from benchmarks.jobs import Job, TooSlow
from yolo_seg_ddp.utils.contents import read_mapping
from yolo_seg_ddp.utils.files import write_text_atomic

RUN_PART = ("-m", "benchmarks.gpu.parts")


class Store:
    """Keeps the outcomes in a folder, one file per part.

    `key` names code, device and versions: others do not count.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        folder.mkdir(parents=True, exist_ok=True)

    def finished(self, part: Part) -> Outcome | None:
        """Return an earlier outcome of a part that need not run again."""
        content = read_mapping(self.folder / f"{part.name}.json")
        if content.pop("key", None) != self.key or content["status"] not in FINISHED:
            return None
        return Outcome(**{**content, "is_kept": True})

    def keep(self, part: Part, outcome: Outcome) -> None:
        """Remember how a part ended."""
        content = {"key": self.key, **asdict(outcome)}
        write_text_atomic(self.folder / f"{part.name}.json", json.dumps(content))

    def forget(self, part: Part) -> None:
        """Let a part run again."""
        (self.folder / f"{part.name}.json").unlink(missing_ok=True)


class Runner:
    """Runs each part in a process of its own, which ends with everything that it started."""

    def __init__(self, setting: Setting, logs: Path) -> None:
        self.setting = setting
        self.logs = logs
        self._running: set[Job] = set()
        self._is_ended = False

    def run(self, part: Part, left_s: float) -> Outcome:
        """Run a part within its time and what is left for all; return how it ended."""
        limit_s = min(part.limit_s * self.setting.patience, left_s)
        log, answer, setting_file = (
            self.logs / f"{part.name}.{kind}" for kind in ("log", "answer.json", "setting.json")
        )
        for file in (log, answer):
            file.unlink(missing_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        write_text_atomic(
            setting_file, json.dumps({**asdict(self.setting), "folder": str(self.setting.folder)})
        )
        # The dry run may share its cores with others: threads that wait must not spin.
        environment = {} if self.setting.is_gpu else {"OMP_WAIT_POLICY": "PASSIVE"}
        start_s = time.monotonic()
        with Job(
            [sys.executable, *RUN_PART, part.name, setting_file, answer], log, **environment
        ) as job:
            self._running.add(job)
            if self._is_ended:
                job.kill()
            try:
                code = job.wait(limit_s)
            except TooSlow:
                outcome = Outcome(
                    TOO_SLOW, said=f"not done after {limit_s:.0f} s; {job.last_line()}"
                )
            else:
                fields = read_mapping(answer) or {
                    "status": FAILED,
                    "said": f"ended with code {code}; {job.last_line()}",
                }
                outcome = Outcome(**fields)
            self._running.remove(job)
        return replace(outcome, seconds=time.monotonic() - start_s)

    def end(self) -> None:
        """End all that runs, and what is just beginning."""
        self._is_ended = True
        for job in list(self._running):
            job.kill()


def run_parts(
    parts: Sequence[Part],
    kept: Mapping[str, Outcome],
    runner: Runner,
    left_s: Callable[[], float],
    slots: int,
    on_end: Callable[[Part, Outcome], None],
) -> dict[str, Outcome]:
    """Run the parts that are not `kept`, in the order of the table; return how every part ended.

    Parts that measure run one by one, when all before them have ended; of others in a row at most
    `slots` run at once. `left_s` returns the time left for all. `on_end` is called by one thread at
    a time.
    """
    outcomes = dict(kept)
    lock, is_stopped = threading.Lock(), threading.Event()

    def run(part: Part, needed: list[Future[None]]) -> None:
        wait(needed)
        seconds = left_s()
        has_time = seconds >= part.needed_s
        outcome = (
            runner.run(part, seconds)
            if has_time
            else Outcome(NO_TIME, said=f"needs about {part.needed_s:.0f} s")
        )
        with lock:
            if not is_stopped.is_set():
                outcomes[part.name] = outcome
                on_end(part, outcome)

    waiting = [part for part in parts if part.name not in kept]
    for is_alone, row in groupby(waiting, lambda part: part.alone):
        with ThreadPoolExecutor(1 if is_alone else slots) as pool:
            futures: dict[str, Future[None]] = {}
            try:
                for part in row:
                    needed = [futures[name] for name in part.after if name in futures]
                    futures[part.name] = pool.submit(run, part, needed)
                for future in futures.values():
                    future.result()
            except BaseException:  # such as Ctrl-C
                is_stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                runner.end()
                raise
    return {part.name: outcomes[part.name] for part in parts}
