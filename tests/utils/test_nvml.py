"""NVML's readings, with a driver that is made up: means, what a GPU lacks, and failures that delay
and end nothing.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.processes import wait_until
from yolo_seg_ddp.utils.nvml import READINGS, Gpu, GpuWatch


class FakeDriver:
    """Stands for the module pynvml: one GPU, known by its UUID,
    whose utilisation follows `utils`.
    """

    NVMLError = type("NVMLError", (Exception,), {})
    NVMLError_NotSupported = type("NVMLError_NotSupported", (NVMLError,), {})
    NVMLError_InvalidArgument = type("NVMLError_InvalidArgument", (NVMLError,), {})
    NVMLError_NotFound = type("NVMLError_NotFound", (NVMLError,), {})
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    nvmlInit = staticmethod(lambda: None)
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(used=5 * 2**30))
    nvmlDeviceGetTemperature = staticmethod(lambda handle, kind: 61)
    nvmlDeviceGetClockInfo = staticmethod(lambda handle, kind: 1410)

    def __init__(
        self,
        utils: list[int],
        fails_at: int = -1,
        lacks_power: bool = False,
        uuid: str = "GPU-1234",
    ) -> None:
        self.utils, self.fails_at, self.lacks_power, self.uuid = utils, fails_at, lacks_power, uuid
        self.reads = self.power_reads = 0
        self.holds: threading.Event | None = None

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != self.uuid:
            raise self.NVMLError_NotFound("Not Found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if self.holds is not None:
            self.holds.wait(30)
        if self.reads == self.fails_at:
            raise self.NVMLError("GPU is lost")
        self.reads += 1
        if self.uuid.startswith("MIG-"):
            raise self.NVMLError_InvalidArgument("Invalid Argument")
        return SimpleNamespace(gpu=self.utils[(self.reads - 1) % len(self.utils)])

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self.power_reads += 1
        if self.lacks_power:
            raise self.NVMLError_NotSupported("Not Supported")
        return 250_500


Install = Callable[[Any], Any]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(driver: Any) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1234")
        )
        return driver

    return put


def test_a_reading_holds_every_quantity_in_its_unit(install: Install) -> None:
    install(FakeDriver([93]))
    assert Gpu(0).read() == {
        "gpu_util": 0.93,
        "gpu_memory_bytes": 5 * 2**30,
        "gpu_power_w": 250.5,
        "gpu_temperature_c": 61,
        "gpu_clock_mhz": 1410,
    }
    assert tuple(Gpu(0).read()) == READINGS


def test_a_watch_returns_means_and_then_the_last_ones(install: Install) -> None:
    driver = install(FakeDriver([20, 60]))
    said: list[str] = []
    with GpuWatch(0, said.append, period_s=0.001) as watch:
        wait_until(lambda: driver.reads >= 20)
    assert 0.35 < watch.means()["gpu_util"] < 0.45
    assert 0.35 < watch.means()["gpu_util"] < 0.45  # nothing newer: the same again
    assert said == []


def test_a_failing_driver_is_told_of_once_and_measured_no_more(install: Install) -> None:
    driver = install(FakeDriver([50], fails_at=2))
    said: list[str] = []
    with GpuWatch(0, said.append, period_s=0.001) as watch:
        wait_until(lambda: said)
        time.sleep(0.02)
    assert said == ["GPU 0: utilisation and power are not measured any more: GPU is lost"]
    assert watch.means() == {}
    assert driver.reads == 2


def test_without_the_package_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # makes the import fail
    said: list[str] = []
    with GpuWatch(0, said.append, period_s=0.001) as watch:
        time.sleep(0.02)
    assert (watch.means(), said) == ({}, [])


def test_a_hanging_driver_delays_neither_a_reading_nor_the_end(install: Install) -> None:
    driver = install(FakeDriver([50]))
    driver.holds = threading.Event()
    began_s = time.monotonic()
    with GpuWatch(0, print, period_s=0.05) as watch:
        assert watch.means() == {}
    assert time.monotonic() - began_s < 60, "it does not wait for the driver"
    driver.holds.set()


def test_what_a_slice_of_a_gpu_does_not_offer_is_left_out_and_not_asked_for_again(
    install: Install,
) -> None:
    driver = install(FakeDriver([50], lacks_power=True, uuid="MIG-1234"))
    gpu = Gpu(0)  # found by the slice's own UUID
    for _ in range(3):
        assert gpu.read() == {
            "gpu_memory_bytes": 5 * 2**30,
            "gpu_temperature_c": 61,
            "gpu_clock_mhz": 1410,
        }
    assert driver.power_reads == 1


@pytest.mark.gpu
def test_a_real_gpu_says_how_it_is() -> None:
    pytest.importorskip("pynvml", reason="needs pynvml (pip install nvidia-ml-py)")
    found = Gpu(0).read()
    assert 0 <= found["gpu_util"] <= 1
    assert found["gpu_memory_bytes"] > 2**20
