"""When all ranks agree whether to stop, and what is written when none of them makes progress.

A launcher or a scheduler kills what has not stopped within its grace period, which is at least 30
seconds: the ranks agree every few steps, and after every step where steps are slow. The stacks of
all threads are written before the process group times out.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from yolo_seg_ddp.utils.distributed import max_over_ranks
from yolo_seg_ddp.utils.threads import BackgroundWatch

STOP_CHECK_STEPS = 10  # optimizer steps, at most, between two agreements
LONGEST_S = 2.0  # between two agreements, unless a single step takes longer


class StopAgreement:
    """Decides when the next agreement is due, alike on all ranks: from the step and a time that all
    ranks share.
    """

    def __init__(self) -> None:
        self._step_s = 0.0  # of the slowest rank; 0: not known yet
        self._last_step = 0
        self._last_s = time.perf_counter()

    def start(self, step: int) -> None:
        """Count from `step` on: the time before it was not spent on steps alone."""
        self._last_step = step
        self._last_s = time.perf_counter()

    @staticmethod
    def is_regular(step: int) -> bool:
        """Whether `step` is a multiple of STOP_CHECK_STEPS, after which every run agrees."""
        return step % STOP_CHECK_STEPS == 0

    def is_due(self, step: int) -> bool:
        """Whether to agree after `step` steps: at regular ones, and
        before LONGEST_S have passed.
        """
        # the very first step shows how long steps take
        allowed = LONGEST_S / self._step_s if self._step_s else 1
        return self.is_regular(step) or step - self._last_step >= max(int(allowed), 1)

    def agree(self, step: int, wants_stop: bool, save_is_due: bool) -> tuple[bool, bool]:
        """Return whether any rank wants to stop, and whether any wants to save.

        Every rank must reach this.
        """
        num_steps = step - self._last_step
        step_s = (time.perf_counter() - self._last_s) / num_steps if num_steps else 0.0
        stops, saves, slowest_step_s = max_over_ranks([wants_stop, save_is_due, step_s])
        self._step_s = slowest_step_s or self._step_s
        self.start(step)
        return bool(stops), bool(saves)


POLL_S = 1.0


class StallWatch(BackgroundWatch):
    """Dumps the stacks of all threads when `beat` was not called for `limit_s` seconds, once per
    pause.

    The dump goes to stderr and to `stacks-rank<rank>.txt` in `folder`. Use it as a context manager
    around the work.
    """

    def __init__(self, folder: Path, rank: int, limit_s: float) -> None:
        super().__init__("stall watch")
        self.file = Path(folder) / f"stacks-rank{rank}.txt"
        self.rank = rank
        self.limit_s = limit_s
        self._last_beat_s = time.monotonic()
        self._is_dumped = False

    def __enter__(self) -> Self:
        self.beat()
        return super().__enter__()

    def beat(self) -> None:
        """Report progress."""
        self._last_beat_s = time.monotonic()
        self._is_dumped = False

    def _watch(self) -> None:
        while not self._is_over.wait(min(POLL_S, self.limit_s / 4)):
            if not self._is_dumped and time.monotonic() - self._last_beat_s > self.limit_s:
                self._is_dumped = True
                self._dump()

    def _dump(self) -> None:
        heading = (
            f"[rank {self.rank}] no progress for {self.limit_s:.0f} s; where each thread stands"
        )
        print(f"{heading} (also in {self.file}):", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{heading}, {time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime())}:\n")
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError as error:
            print(f"[rank {self.rank}] {self.file}: {error.strerror}", file=sys.stderr, flush=True)


class Watched:
    """An iterable of batches that calls the watch's `beat` for each."""

    def __init__(self, watch: StallWatch, batches: Iterable[Any]) -> None:
        self._watch = watch
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type] # a loader has a length

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self._watch.beat()
            yield batch
