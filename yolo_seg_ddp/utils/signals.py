"""Signals: a flag that stops the training, and helper processes that end with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from yolo_seg_ddp.utils.errors import EXIT_DONE

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
_SAME_KEY_PRESS_S = 0.5


class StopFlag:
    """Turns SIGTERM, SIGINT, SIGUSR1 and SIGHUP (unless ignored) into a flag, which the loop reads
    between steps.

    Use it as a context manager; at its end it restores the old handlers. Python handles signals in
    the main thread only: in another thread, such as Ray Train's, no signal sets the flag. A second
    Ctrl-C raises KeyboardInterrupt, except within half a second: then it is the same key press,
    forwarded by the launcher.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.reason = ""
        self._first_interrupt_s: float | None = None
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in stop_signals():
            if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                # With `nohup` the training must outlive its terminal.
                continue
            self._old_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._old_handlers.items():
            # None: the handler was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old_handlers.clear()

    def set(self, reason: str) -> None:
        """Request a stop. The first reason is kept."""
        if not self.is_set:
            self.reason = reason
        self.is_set = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.set(signal.Signals(number).name)
        if number != signal.SIGINT:
            return
        now_s = time.monotonic()
        if self._first_interrupt_s is None:
            self._first_interrupt_s = now_s
        elif now_s - self._first_interrupt_s > _SAME_KEY_PRESS_S:
            raise KeyboardInterrupt


def ignore_signals_except_from_parent() -> None:
    """Ignore a StopFlag's signals unless this process's parent sends them; those end the process.

    Call it in a helper process's main thread before it starts others. Signals of the parent must
    work: at its end, Python sends SIGTERM to its children and waits for them. Does nothing outside
    Linux, where the sender is unknown.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    numbers = stop_signals()
    # in all threads; only `sigwaitinfo` receives them
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def wait() -> None:
        while signal.sigwaitinfo(numbers).si_pid != os.getppid():
            pass
        os._exit(EXIT_DONE)

    threading.Thread(target=wait, name="stop signals", daemon=True).start()


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Delay a StopFlag's signals; processes started meanwhile begin with them blocked in all their
    threads.

    Some libraries start a thread in a forked process at once. It would receive what the main thread
    blocks later.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_signals() -> list[signal.Signals]:
    """Return the signals of STOP_SIGNALS that this system has."""
    return [signal.Signals[name] for name in STOP_SIGNALS if name in signal.Signals.__members__]


def die_with_parent(parent_id: int | None = None, *, only_under_torchrun: bool = True) -> bool:
    """Ask Linux to kill this process when its parent dies, so that no rank outlives a killed
    launcher.

    Returns whether Linux will do so. By default only under torchrun: `nohup python
    train_yolo_ddp.py` must survive. `parent_id` is the process that started this one. Only with it
    is a parent noticed that died before this call.
    """
    if not sys.platform.startswith("linux") or (
        only_under_torchrun and "TORCHELASTIC_RUN_ID" not in os.environ
    ):
        return False
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
    parent_id = parent_id or os.getppid()
    arranged = ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0) == 0
    if os.getppid() != parent_id:  # the parent died before the call: no signal will come
        os.kill(os.getpid(), signal.SIGKILL)
    return arranged
