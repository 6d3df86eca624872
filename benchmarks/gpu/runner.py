"""Runs the parts: those that measure alone, the others side by side; within the time, and not again what is finished."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.gpu.plan import BAD, FAILED, FINISHED, NO_TIME, TOO_SLOW, Json, Outcome, Part, Setting
from benchmarks.jobs import Job
from utils.common.files import write_text_atomic

POLL_S = 0.1
RUN_PART = ("-m", "benchmarks.gpu.run_part")


class Store:
    """Keeps the outcomes in a folder, one file per part. `key` names code, device and versions: others do not count."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        folder.mkdir(parents=True, exist_ok=True)

    def finished(self, part: Part) -> Outcome | None:
        """Return an earlier outcome of a part that need not run again."""
        try:
            content = json.loads(self._file(part).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if content.pop("key", None) != self.key or content["status"] not in FINISHED:
            return None
        return Outcome(**{**content, "is_kept": True})

    def keep(self, part: Part, outcome: Outcome) -> None:
        """Remember how a part ended."""
        write_text_atomic(self._file(part), json.dumps({"key": self.key, **asdict(outcome)}))

    def forget(self, part: Part) -> None:
        """Let a part run again."""
        self._file(part).unlink(missing_ok=True)

    def _file(self, part: Part) -> Path:
        return self.folder / f"{part.name}.json"


class Running:
    """A part in a process of its own. `close` ends it with everything that it started."""

    def __init__(self, part: Part, setting: Setting, logs: Path, limit_s: float) -> None:
        self.part = part
        self.limit_s = limit_s
        self.log = logs / f"{part.name}.log"
        self.start_s = time.monotonic()
        self._answer = logs / f"{part.name}.answer.json"
        self._stack = ExitStack()
        for file in (self.log, self._answer):
            file.unlink(missing_ok=True)
        setting_file = logs / "setting.json"
        logs.mkdir(parents=True, exist_ok=True)
        write_text_atomic(setting_file, json.dumps({**asdict(setting), "folder": str(setting.folder)}))
        # The dry run may share its cores with others: threads that wait must not spin.
        environment = {} if setting.is_gpu else {"OMP_WAIT_POLICY": "PASSIVE"}
        files = (str(setting_file), str(self._answer))
        command = [sys.executable, *RUN_PART, part.name, *files]
        self._job = self._stack.enter_context(Job(command, self.log, **environment))

    def outcome(self) -> Outcome | None:
        """Return how the part ended; None while it runs within its time."""
        seconds = time.monotonic() - self.start_s
        code = self._job.popen.poll()
        if code is None:
            if seconds <= self.limit_s:
                return None
            return Outcome(TOO_SLOW, seconds, f"not done after {self.limit_s:.0f} s; {self._last_line()}")
        try:
            content: Json = json.loads(self._answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Outcome(FAILED, seconds, f"ended with code {code}; {self._last_line()}")
        return replace(Outcome(**content), seconds=seconds)

    def close(self) -> None:
        """End the process and its descendants."""
        self._stack.close()

    def _last_line(self) -> str:
        lines = [line.strip() for line in self._job.output().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it printed nothing"


Start = Callable[[Part, float], Running]


def run_parts(
    parts: Sequence[Part],
    kept: Mapping[str, Outcome],
    start: Start,
    left_s: Callable[[], float],
    slots: int,
    on_end: Callable[[Part, Outcome], None],
) -> dict[str, Outcome]:
    """Run the parts that are not `kept`, in the order of the table; return how every part ended.

    A part that measures begins when all others have ended, and nothing begins beside it. Of the others at most `slots`
    run at once. `start(part, left_s)` begins a part with the time left for all, which `left_s` returns.
    """
    outcomes = dict(kept)
    waiting = [part for part in parts if part.name not in outcomes]
    names = {part.name for part in parts}
    running: list[Running] = []

    def end(part: Part, outcome: Outcome) -> None:
        outcomes[part.name] = outcome
        on_end(part, outcome)

    try:
        while waiting or running:
            for one in list(running):
                found = one.outcome()
                if found is not None:
                    running.remove(one)
                    one.close()
                    end(one.part, found)
            for part in list(waiting):
                if any(name in names and name not in outcomes for name in part.after):
                    if part.alone:
                        break  # what follows in the table is less important
                    continue
                if part.alone and running:
                    break
                if len(running) >= slots or any(one.part.alone for one in running):
                    break
                waiting.remove(part)
                if left_s() < part.needed_s:
                    end(part, Outcome(NO_TIME, said=f"needs about {part.needed_s:.0f} s"))
                    continue
                running.append(start(part, left_s()))
            time.sleep(POLL_S)
    finally:
        for one in running:
            one.close()
    return {part.name: outcomes[part.name] for part in parts}


def has_failed(outcomes: Mapping[str, Outcome]) -> bool:
    """Return whether a part failed or took too long."""
    return any(outcome.status in BAD for outcome in outcomes.values())
