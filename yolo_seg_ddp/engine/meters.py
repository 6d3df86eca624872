"""What the loop measures: one epoch's means and speed, and each rank's own time and machine."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from yolo_seg_ddp.utils.distributed import all_reduce_sum, communication_device, gather_json
from yolo_seg_ddp.utils.errors import print_warning
from yolo_seg_ddp.utils.nvml import READINGS, GpuWatch

# of each rank, since the last log
FIELDS = ("own_ms", "data_wait_share", "cpu_cores", "rss_bytes", *READINGS)


class RankMeter:
    """Measures this rank. `gpu` reads the GPU's utilisation, power and temperature in its context;
    None on a CPU.

    Call `begin` before each wait for a batch. Nothing here waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []  # CUDA events not yet read
        self._own_ms: list[float] = []
        self._cpu = time.process_time(), time.perf_counter()
        self.gpu = GpuWatch(device.index or 0, print_warning) if self.is_cuda else None

    def begin(self) -> None:
        """Mark the beginning of a batch; work launched before is not counted."""
        self._begun = self._now()

    def around(self, network: Callable[[Any], Any], waits: bool) -> Callable[[Any], Any]:
        """Return a network whose calls end this rank's own time: before them if it `waits` for the
        other ranks, else after.
        """

        def measured(inputs: Any) -> Any:
            # The first BatchNorm that is synchronised is the first to wait for the other ranks,
            # else the loss.
            if waits:
                self.meet()
            outputs = network(inputs)
            self.meet()
            return outputs

        return measured

    def meet(self) -> None:
        """Mark the point where this rank first waits for the others."""
        if self._begun is None:
            return
        if self.is_cuda:
            self._pairs.append((self._begun, self._now()))
        else:
            self._own_ms.append((self._now() - self._begun) * 1000)
        self._begun = None

    def lap(self, data_wait_share: float) -> list[float]:
        """Return FIELDS since the last lap; NaN where a value is unknown."""
        # Events not yet reached belong to the next lap.
        while self._pairs and self._pairs[0][1].query():
            first, second = self._pairs.pop(0)
            self._own_ms.append(first.elapsed_time(second))
        own_ms = statistics.fmean(self._own_ms) if self._own_ms else math.nan
        self._own_ms = []
        before_s, since_s = self._cpu
        self._cpu = time.process_time(), time.perf_counter()
        cpu_cores = (self._cpu[0] - before_s) / max(self._cpu[1] - since_s, 1e-9)
        gpu = self.gpu.means() if self.gpu is not None else {}
        known = {"own_ms": own_ms, "data_wait_share": data_wait_share, "cpu_cores": cpu_cores}
        with contextlib.suppress(psutil.Error):
            # Child processes are not counted.
            known["rss_bytes"] = float(psutil.Process().memory_info().rss)
        return [{**known, **gpu}.get(name, math.nan) for name in FIELDS]

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True)
class Lap:
    """Batches of one rank between two calls of `EpochMeter.lap`."""

    num_batches: int
    elapsed_s: float
    data_wait_s: float

    @property
    def step_ms(self) -> float:
        """Mean time of a batch."""
        return 1000 * self.elapsed_s / max(self.num_batches, 1)

    @property
    def data_wait_share(self) -> float:
        """Share of the time spent waiting for batches."""
        return self.data_wait_s / max(self.elapsed_s, 1e-9)


class EpochMeter:
    """Sums of one epoch on this rank. Values stay on the device until `means` reads them."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, ...], torch.Tensor] = {}  # float64, by the names of the values
        self.num_samples = 0
        self.num_batches = 0
        self.data_wait_s = 0.0
        self.start_s = time.perf_counter()
        self._last_lap = (0, 0.0, 0.0)

    def lap(self) -> Lap:
        """Return the batches since the last call, or since the epoch began."""
        before = self._last_lap
        self._last_lap = (self.num_batches, self.elapsed_s, self.data_wait_s)
        return Lap(
            self._last_lap[0] - before[0],
            self._last_lap[1] - before[1],
            self._last_lap[2] - before[2],
        )

    def add(self, values: dict[str, torch.Tensor], num_samples: int) -> None:
        """Add one batch's mean values, weighted by its number of samples."""
        if values:
            # All values are in one tensor, as each operator on one value would be a kernel on a
            # GPU.
            names = tuple(sorted(values))
            with torch.no_grad():
                weighted = torch.stack([values[name] for name in names]).double() * num_samples
            self.sums[names] = self.sums[names] + weighted if names in self.sums else weighted
        self.num_samples += num_samples
        self.num_batches += 1

    def means(self) -> dict[str, float]:
        """Return the means over all ranks. Every rank must reach this."""
        names = [name for group in self.sums for name in group]
        sums = torch.cat(list(self.sums.values())).tolist() if names else []
        local_sums: Any = [list(zip(names, sums, strict=True)), self.num_samples]
        total: dict[str, float] = {}
        num_samples = 0
        # A rank with an empty share has no names.
        for of_rank, count in gather_json(local_sums):
            num_samples += count
            for name, value in of_rank:
                total[name] = total.get(name, 0.0) + value
        return {name: value / num_samples for name, value in total.items()}

    @property
    def elapsed_s(self) -> float:
        """Seconds since the epoch began on this rank."""
        return time.perf_counter() - self.start_s

    def speed(self, num_batches: int, world_size: int) -> dict[str, float]:
        """Return the epoch's time and throughput over all ranks. Every rank must reach this.

        `batches_per_s` counts every rank's batches, as the guide's sample output does.
        """
        seconds = self.elapsed_s
        local = torch.tensor(
            [self.num_samples, self.data_wait_s], dtype=torch.float64, device=communication_device()
        )
        num_samples, data_wait_s = all_reduce_sum(local).tolist()
        return {
            "epoch_time_s": seconds,
            "images_per_s": num_samples / seconds,
            "batches_per_s": num_batches * world_size / seconds,
            "data_wait_share": data_wait_s / world_size / seconds,
        }
