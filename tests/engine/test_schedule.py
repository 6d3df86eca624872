"""The learning rate of each step, and the sums that ranks report."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from yolo_seg_ddp.engine import meters
from yolo_seg_ddp.engine.meters import FIELDS, RankMeter
from yolo_seg_ddp.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps

SPEC = ScheduleSpec(lr=0.1, total_steps=100, warmup_steps=10, final_lr_fraction=0.05)


def optimizer_of(kind: type[torch.optim.SGD | torch.optim.AdamW]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "weight"},
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "head", "lr_multiplier": 10.0},
    ]
    return kind(groups, lr=1.0)


def test_each_steps_rates_and_momentum_are_those_of_the_formula() -> None:
    """A warm-up over ten steps, then half a cosine to a twentieth, which stays."""
    sgd, adam = optimizer_of(torch.optim.SGD), optimizer_of(torch.optim.AdamW)
    schedules = [StepSchedule(optimizer, SPEC) for optimizer in (sgd, adam)]
    for step in (5000, *range(103)):  # what came before changes nothing
        cosine = 0.1 * (0.05 + 0.95 * (1 + math.cos(math.pi * min(step, 100) / 100)) / 2)
        share = min((step + 1) / 10, 1)
        rates = [cosine * share, 10 * cosine * share]  # the second has a multiplier of 10
        momentum = pytest.approx(0.8 + 0.137 * share)
        for schedule in schedules:
            schedule.step_update(step)
            assert [group["lr"] for group in schedule.optimizer.param_groups] == pytest.approx(
                rates
            ), step
        assert [group["momentum"] for group in sgd.param_groups] == [momentum] * 2
        assert [group["betas"] for group in adam.param_groups] == [(momentum, 0.999)] * 2


def test_without_a_warm_up_the_first_step_is_the_peak() -> None:
    spec = ScheduleSpec(lr=0.2, total_steps=10)
    assert spec.lr_at(0) == pytest.approx(0.2)
    assert spec.momentum_at(0) == 0.937
    assert spec.lr_at(10) == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("warmup_epochs", "steps_per_epoch", "num_epochs", "expected"),
    [
        *((3, 100, 100, 300), (3, 200, 10, 200), (0.5, 100, 100, 200), (3, 4, 100, 100)),
        *((3, 20, 100, 200), (3, 2, 100, 50), (0, 100, 100, 0), (3, 1, 2, 1)),
    ],
)
def test_a_warm_up_takes_at_most_a_tenth_of_the_run_but_200_steps_or_a_quarter(
    warmup_epochs: float, steps_per_epoch: int, num_epochs: int, expected: int
) -> None:
    assert warmup_steps(warmup_epochs, steps_per_epoch, num_epochs) == expected


def named(lap: list[float]) -> dict[str, float]:
    return dict(zip(FIELDS, lap, strict=True))


@pytest.mark.parametrize(
    ("waits", "own_ms"), [(False, 30), (True, 10)], ids=["loss waits", "network waits"]
)
def test_own_time_ends_where_the_ranks_meet(
    waits: bool, own_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=100.0)
    made_up = SimpleNamespace(
        perf_counter=lambda: clock.now_s, process_time=lambda: 0.1 * clock.now_s
    )
    monkeypatch.setattr(meters, "time", made_up)
    meter = RankMeter(torch.device("cpu"))

    def compute(inputs: str) -> str:
        clock.now_s += 0.02
        return inputs

    network = meter.around(compute, waits=waits)
    for _ in range(2):
        meter.begin()
        clock.now_s += 0.01
        assert network("outputs") == "outputs"
        clock.now_s += 0.05  # in the loss and the gradients
    found = named(meter.lap(0.25))
    assert found["own_ms"] == pytest.approx(own_ms)
    assert found["data_wait_share"] == 0.25
    assert found["cpu_cores"] == pytest.approx(0.1)
    assert found["rss_bytes"] > 2**20
    assert math.isnan(found["gpu_util"])
    assert math.isnan(named(meter.lap(0.0))["own_ms"])  # nothing since


class FakeEvent:
    """A CUDA event whose time is the number of events before it, reached
    once `reached` is as high.
    """

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
