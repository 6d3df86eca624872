"""What each rank does on its own: how long it takes before the ranks meet in a step, and what it uses of its machine.

The ranks of a step wait for one another, so the step's time is the same on all of them, and says nothing about which
is slow. What differs is the time from asking for a batch to the first collective: the rank that takes longest there is
the one the others wait for. On a GPU it is taken from CUDA events, on the device's own clock and without waiting.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from utils.nvml import READINGS, GpuWatch, to_stderr

FIELDS = ("own_ms", "data_wait_share", "cpu_cores", "rss_bytes", *READINGS)  # of each rank, since the last log
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class RankMeter:
    """Measures this rank. Use it as a context manager while a training runs: then the GPU is watched too.

    Call `begin` before each wait for a batch and `meet` before the ranks first meet: neither waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []  # CUDA events not yet read
        self._own_ms: list[float] = []
        self._cpu = time.process_time(), time.perf_counter()
        self._gpu = GpuWatch(device.index or 0, to_stderr) if self.is_cuda else None

    def __enter__(self) -> RankMeter:
        if self._gpu is not None:
            self._gpu.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._gpu is not None:
            self._gpu.__exit__(kind, error, trace)

    def begin(self) -> None:
        """Mark the beginning of a batch: all that was launched before is not counted to it."""
        self._begun = self._now()

    def meet(self) -> None:
        """Mark the place where this rank will first wait for the others."""
        if self._begun is None:
            return
        if self.is_cuda:
            self._pairs.append((self._begun, self._now()))
        else:
            self._own_ms.append((self._now() - self._begun) * 1000)
        self._begun = None

    def lap(self, data_wait_share: float) -> list[float]:
        """Return FIELDS since the last lap; NaN is what is not known."""
        while self._pairs and self._pairs[0][1].query():  # what the device has not reached yet belongs to the next lap
            first, second = self._pairs.pop(0)
            self._own_ms.append(first.elapsed_time(second))
        own_ms = statistics.fmean(self._own_ms) if self._own_ms else math.nan
        self._own_ms = []
        before_s, since_s = self._cpu
        self._cpu = time.process_time(), time.perf_counter()
        cpu_cores = (self._cpu[0] - before_s) / max(self._cpu[1] - since_s, 1e-9)
        gpu = self._gpu.means() if self._gpu is not None else {}
        known = {"own_ms": own_ms, "data_wait_share": data_wait_share, "cpu_cores": cpu_cores, "rss_bytes": rss_bytes()}
        return [{**known, **gpu}.get(name, math.nan) for name in FIELDS]

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def rss_bytes() -> float:
    """Return the memory this process holds now, without its loader processes; NaN where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return float(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return math.nan
