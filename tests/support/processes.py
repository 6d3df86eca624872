"""Looks at processes from outside, and waits for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def is_running(process_id: int) -> bool:
    """Whether a process exists and is more than an entry that its parent has not collected yet."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], T], timeout_s: float = 10) -> T:
    """Return the first true answer of `condition`; fail when none comes in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.005)
    return answer
