"""Reads a GPU's utilisation, memory, power, temperature and clock from NVIDIA's management library
(NVML).

The package is nvidia-ml-py (`import pynvml`). Without it nothing is measured, and no warning is
printed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from yolo_seg_ddp.utils.threads import BackgroundWatch

# `gpu_util` is the share of time (0-1) in which any kernel ran.
READINGS = ("gpu_util", "gpu_memory_bytes", "gpu_power_w", "gpu_temperature_c", "gpu_clock_mhz")
PERIOD_S = 1.0  # the driver averages utilisation over up to a second


class Gpu:
    """One GPU in NVML. Raises ImportError without the package, and any error of NVML.

    `device_index` is PyTorch's, within CUDA_VISIBLE_DEVICES. NVML numbers all GPUs, so the UUID
    identifies the GPU.
    """

    def __init__(self, device_index: int) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        # Without NVML's prefix.
        uuid = str(torch.cuda.get_device_properties(device_index).uuid)
        try:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        # A slice of a GPU (MIG).
        except pynvml.NVMLError_NotFound:
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        self._unsupported: set[str] = set()

    def read(self) -> dict[str, float]:
        """Return the READINGS that this GPU supports. Takes a few milliseconds at most."""
        nvml, handle = self._nvml, self._handle
        calls: dict[str, Callable[[], float]] = {
            "gpu_util": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "gpu_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        }
        values = {}
        for name, call in calls.items():
            if name in self._unsupported:
                continue
            try:
                values[name] = float(call())
            # such as the power of a MIG slice
            except (nvml.NVMLError_NotSupported, nvml.NVMLError_InvalidArgument):
                self._unsupported.add(name)
        return values


class GpuWatch(BackgroundWatch):
    """Reads one GPU every `period_s` in a thread, so that a slow or hanging driver does not delay
    the training.

    Use it as a context manager. The first error ends the readings and is passed to `warn`.
    """

    def __init__(
        self, device_index: int, warn: Callable[[str], None], period_s: float = PERIOD_S
    ) -> None:
        # a thread that hangs ends with the process
        super().__init__("GPU watch", max_wait_s=2 * period_s)
        self.device_index = device_index
        self.period_s = period_s
        self._warn = warn
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._count = 0
        self._last: dict[str, float] = {}

    def means(self) -> dict[str, float]:
        """Return the means since the last call, or its means again if there is no newer reading;
        empty without NVML.
        """
        with self._lock:
            if self._count:
                self._last = {name: total / self._count for name, total in self._sums.items()}
                self._sums = {}
                self._count = 0
            return dict(self._last)

    def _watch(self) -> None:
        try:
            gpu = Gpu(self.device_index)
            while not self._is_over.is_set():
                reading = gpu.read()
                with self._lock:
                    for name, value in reading.items():
                        self._sums[name] = self._sums.get(name, 0.0) + value
                    self._count += 1
                self._is_over.wait(self.period_s)
        except ImportError:
            # pynvml is not installed.
            return
        except Exception as error:  # noqa: BLE001 # no error of the driver may end the training
            with self._lock:
                self._last = {}
                self._sums = {}
                self._count = 0
            self._warn(
                f"GPU {self.device_index}: utilisation and power are not measured any more: {error}"
            )
