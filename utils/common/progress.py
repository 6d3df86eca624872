"""Shows how far long work is: a bar on a terminal, otherwise a line about every ten seconds; on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
DELAY_S = 5.0
SECONDS_BETWEEN_LINES = 10.0


def shown(items: Iterable[T], title: str, total: int, is_shown: bool = True) -> Iterator[T]:
    """Yield items while showing how many of `total` are done and how much time is left."""
    if sys.stderr.isatty():
        yield from tqdm(items, title, total, delay=DELAY_S, leave=False, disable=not is_shown)
        return
    start = last = monotonic()
    for number, item in enumerate(items, start=1):
        now = monotonic()
        if is_shown and now - last >= SECONDS_BETWEEN_LINES:
            left_s = (now - start) / number * max(total - number, 0)
            print(f"  {title}: {number} of {total}, {left_s / 60:.1f} min left", file=sys.stderr, flush=True)
            last = now
        yield item
