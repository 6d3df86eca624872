"""A thread beside the work, for as long as a `with` block lasts."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class BackgroundWatch(ABC):
    """Runs `_watch` in a daemon thread while used as a context manager; `_watch` returns soon after `_is_over` is set.

    name: of the thread, as stack dumps show it. most_wait_s: how long leaving may wait for the thread; None: until it ends.
    """

    def __init__(self, name: str, most_wait_s: float | None = None) -> None:
        self._is_over = threading.Event()
        self._name = name
        self._most_wait_s = most_wait_s
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._is_over.clear()
        self._thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(self._most_wait_s)

    @abstractmethod
    def _watch(self) -> None:
        """What the thread does."""
