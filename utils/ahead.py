"""Work done a little ahead of its use, on several threads, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD_PER_THREAD = 4  # results that may wait to be used


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield `function(item)` for each item in order, computed on `threads` threads.

    Only a few results wait in memory when whoever uses them is the slower one. What the function raises is raised here,
    at its item.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                if len(waiting) >= AHEAD_PER_THREAD * threads:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
