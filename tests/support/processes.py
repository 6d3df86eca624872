"""Looks at processes from outside, waits for what they do, and keeps
commands from other machines.
"""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tests.support.ranks import run_forked

T = TypeVar("T")


def is_running(process_id: int) -> bool:
    """Whether a process exists and is more than an entry that its parent has not collected yet."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], T], timeout_s: float = 120) -> T:
    """Return the first true answer of `condition`; fail when none comes in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.005)
    return answer


def forbid_other_machines() -> None:
    """Let this process end at its first attempt to reach another machine."""
    connect_to, resolve = socket.socket.connect, socket.getaddrinfo

    def connect(self: socket.socket, address: Any) -> Any:
        if self.family == socket.AF_UNIX or str(address[0]).startswith(
            ("127.", "::1", "localhost")
        ):
            return connect_to(self, address)
        raise SystemExit(f"opened a socket to {address}")

    def look_up(host: Any, *rest: Any, **named: Any) -> Any:
        if host in (None, "", "localhost", "127.0.0.1", "::1"):
            return resolve(host, *rest, **named)
        raise SystemExit(f"looked up {host}")

    socket.socket.connect = socket.socket.connect_ex = connect  # type: ignore[method-assign,assignment]
    socket.getaddrinfo = look_up


def run_guarded(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command that ends at its first attempt to reach another machine."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return run_forked([str(word) for word in words], environment, 240, forbid_other_machines)
