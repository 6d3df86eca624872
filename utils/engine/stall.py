"""Writes the stacks of all threads when a training makes no progress, before the process group times out."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from utils.common.threads import BackgroundWatch

POLL_S = 1.0


class StallWatch(BackgroundWatch):
    """Dumps the stacks of all threads when `beat` was not called for `limit_s` seconds, once per pause.

    The dump goes to stderr and to `stacks-rank<rank>.txt` in `folder`. Use it as a context manager around the work.
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

    def watched(self, batches: Iterable[Any]) -> Watched:
        """Return an iterable of the same batches that calls `beat` for each."""
        return Watched(self, batches)

    def _watch(self) -> None:
        while not self._is_over.wait(min(POLL_S, self.limit_s / 4)):
            if not self._is_dumped and time.monotonic() - self._last_beat_s > self.limit_s:
                self._is_dumped = True
                self._dump()

    def _dump(self) -> None:
        heading = f"[rank {self.rank}] no progress for {self.limit_s:.0f} s; where each thread stands"
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
