"""A rank's own time, on the clock of the CPU and on a made-up one of a GPU; which rank counts as slow."""

from __future__ import annotations

import math
import time

import pytest
import torch

from utils.engine import meters
from utils.engine.meters import FIELDS, RankMeter


def named(lap: list[float]) -> dict[str, float]:
    return dict(zip(FIELDS, lap, strict=True))


def test_own_time_ends_where_the_ranks_meet() -> None:
    meter = RankMeter(torch.device("cpu"))
    with meter:
        for _ in range(2):
            meter.begin()
            time.sleep(0.01)
            meter.meet()
            time.sleep(0.05)  # waiting for the others
            meter.meet()  # a second meeting of the same batch changes nothing
        found = named(meter.lap(0.25))
    assert 10 <= found["own_ms"] < 40
    assert found["data_wait_share"] == 0.25
    assert found["cpu_cores"] < 0.9  # it slept
    assert found["rss_bytes"] > 2**20
    assert math.isnan(found["gpu_util"])
    assert math.isnan(named(meter.lap(0.0))["own_ms"])  # nothing since


class FakeEvent:
    """A CUDA event whose time is the number of events before it, reached once `reached` is as high."""

    made = 0
    reached = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1
        self.number = FakeEvent.made

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.number <= FakeEvent.reached

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.query(), "asking for the time of what is not done waits for the device"
        return float(other.number - self.number)


def test_on_a_gpu_only_what_the_device_has_done_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(meters, "GpuWatch", lambda *arguments: None)
    meter = RankMeter(torch.device("cuda", 0))
    for _ in range(3):
        meter.begin()
        meter.meet()
    FakeEvent.reached = 4  # two of the three batches
    assert named(meter.lap(0.0))["own_ms"] == 1.0
    assert math.isnan(named(meter.lap(0.0))["own_ms"])
    FakeEvent.reached = 6
    assert named(meter.lap(0.0))["own_ms"] == 1.0
