"""A map that computes a few results ahead on threads, and a base class for background threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
# results that are computed, or may be before they are used; 120 MB if they are of a drone
MAX_WAITING_PER_THREAD = 2


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item in order, computed on `threads` threads.

    At most MAX_WAITING_PER_THREAD x `threads` results wait in memory. An error of `function` is
    raised at its item.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                if len(waiting) >= MAX_WAITING_PER_THREAD * threads:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(function, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


class BackgroundWatch(ABC):
    """Context manager that runs `_watch` in a daemon thread; `_watch` must return soon after
    `_is_over` is set.

    `name` is the thread's name in stack dumps. `__exit__` waits `max_wait_s` at most for it; None:
    no limit.
    """

    def __init__(self, name: str, max_wait_s: float | None = None) -> None:
        self._is_over = threading.Event()
        self._name = name
        self._max_wait_s = max_wait_s
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._is_over.clear()
        self._thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(self._max_wait_s)

    @abstractmethod
    def _watch(self) -> None:
        """Do the thread's work."""
