"""What NVIDIA's management library (NVML) says of one GPU: utilisation, memory, power, temperature, clock.

The package is nvidia-ml-py (`import pynvml`). Where it is missing nothing is measured and nothing is said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from utils.common.threads import BackgroundWatch

# Name of each reading, its unit in the name; `gpu_util` is the share of time (0-1) in which any kernel ran.
READINGS = ("gpu_util", "gpu_memory_bytes", "gpu_power_w", "gpu_temperature_c", "gpu_clock_mhz")
PERIOD_S = 1.0  # the driver itself averages utilisation over up to a second


class Gpu:
    """One GPU as NVML sees it. Raises ImportError without the package, else what NVML raises (RuntimeError's kin or not).

    device_index counts as PyTorch does, within CUDA_VISIBLE_DEVICES; NVML counts all GPUs, so the UUID is what they share.
    """

    def __init__(self, device_index: int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device_index).uuid)
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        self._unsupported: set[str] = set()

    def read(self) -> dict[str, float]:
        """Return what this GPU offers of READINGS; a few milliseconds at most, the power being the slowest."""
        nvml, handle = self._nvml, self._handle
        calls: dict[str, Callable[[], float]] = {
            "gpu_util": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        }
        found = {}
        for name, call in calls.items():
            if name in self._unsupported:
                continue
            try:
                found[name] = float(call())
            except nvml.NVMLError_NotSupported:  # a slice of a GPU (MIG) has no power of its own
                self._unsupported.add(name)
        return found


class GpuWatch(BackgroundWatch):
    """Reads one GPU every second in a thread of its own, so that a slow or hanging driver delays nobody.

    Use it as a context manager. A first failure ends the readings and is told once, through `tell`.
    """

    def __init__(self, device_index: int, tell: Callable[[str], None], period_s: float = PERIOD_S) -> None:
        super().__init__("GPU watch", most_wait_s=2 * period_s)  # one that hangs in the driver ends with the process
        self.device_index = device_index
        self.period_s = period_s
        self._tell = tell
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._count = 0
        self._last: dict[str, float] = {}

    def means(self) -> dict[str, float]:
        """Return the means since the last call, or the last reading where there is none newer; empty without NVML."""
        with self._lock:
            if self._count:
                self._last = {name: total / self._count for name, total in self._sums.items()}
                self._sums, self._count = {}, 0
            return dict(self._last)

    def _watch(self) -> None:
        try:
            gpu = Gpu(self.device_index)
            while not self._is_over.is_set():
                self._add(gpu.read())
                self._is_over.wait(self.period_s)
        except ImportError:
            return  # not installed: nothing to measure with
        except Exception as error:  # noqa: BLE001 # whatever a driver comes up with, the training goes on
            with self._lock:
                self._last, self._sums, self._count = {}, {}, 0
            self._tell(f"GPU {self.device_index}: utilisation and power are not measured any more: {error}")

    def _add(self, reading: dict[str, float]) -> None:
        with self._lock:
            for name, value in reading.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            self._count += 1
