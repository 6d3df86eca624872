"""Looks at processes from outside, and waits for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def is_running(process_id: int) -> bool:
    """Whether a process exists and is more than an entry that its parent has not collected yet."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], T], timeout_s: float = 10) -> T:
    """Return the first true answer of `condition`; fail when none comes in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.005)
    return answer
