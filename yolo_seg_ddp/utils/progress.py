"""Shows the progress of long work on stderr: a bar on a terminal, otherwise a line about every ten
seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TypeVar

from tqdm import tqdm

from yolo_seg_ddp.utils.text import format_duration, is_terminal

T = TypeVar("T")
DELAY_S = 5.0
SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Shows how many of `total` items are done and how much time is left.

    Call it with the items; a further call continues the count.
    """

    def __init__(self, title: str, total: int, is_shown: bool = True) -> None:
        self.title = title
        self.total = total
        self.is_shown = is_shown
        self._done = 0
        self._bar: tqdm[None] | None = None
        self._start = self._last = 0.0

    def __call__(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items."""
        if self._bar is None:
            is_off = not (self.is_shown and is_terminal(sys.stderr))
            self._bar = tqdm(
                desc=self.title, total=self.total, delay=DELAY_S, leave=False, disable=is_off
            )
            self._start = self._last = monotonic()
        for item in items:
            self._done += 1
            self._bar.update()
            if self._done >= self.total:
                self._bar.close()
            elif self.is_shown and not is_terminal(sys.stderr):
                self._print_line()
            yield item

    def _print_line(self) -> None:
        now = monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            left_s = (now - self._start) / self._done * (self.total - self._done)
            # the first one alone is often slow
            left = f", {format_duration(left_s)} left" if self._done > 1 else ""
            print(
                f"  {self.title}: {self._done} of {self.total}{left}", file=sys.stderr, flush=True
            )
            self._last = now
