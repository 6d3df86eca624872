"""The learning rate of each step, the moving average, and the sums that ranks report."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from utils.engine import meters
from utils.engine.ema import ModelEMA
from utils.engine.meters import FIELDS, RankMeter
from utils.engine.schedule import ScheduleSpec, StepSchedule, warmup_steps

# --- Learning rate and momentum as pure functions of the step --------------------------------------------------------


SPEC = ScheduleSpec(lr=0.1, total_steps=100, warmup_steps=10, final_lr_fraction=0.05, warmup_bias_lr=0.3)


def optimizer_of(kind: type[torch.optim.SGD | torch.optim.AdamW]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "weight"},
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "bias"},
        {"params": [torch.nn.Parameter(torch.ones(1))], "name": "head", "lr_multiplier": 10.0},
    ]
    return kind(groups, lr=1.0)


def test_the_peak_comes_with_the_last_step_of_the_warm_up() -> None:
    assert SPEC.lr_at(9) == pytest.approx(SPEC.cosine_at(9))
    assert max(range(100), key=SPEC.lr_at) == 9
    assert SPEC.lr_at(10) == SPEC.cosine_at(10)
    assert SPEC.lr_at(0) == pytest.approx(0.1 * SPEC.lr_at(9), rel=0.03)


def test_the_end_is_the_final_fraction_and_stays_there() -> None:
    assert SPEC.lr_at(100) == pytest.approx(0.1 * 0.05)
    assert SPEC.lr_at(99) == pytest.approx(SPEC.lr_at(100), rel=0.01)
    assert SPEC.lr_at(5000) == SPEC.lr_at(100)
    assert ScheduleSpec(lr=0.1, total_steps=100).lr_at(100) == pytest.approx(0.001)


def test_half_way_is_half_the_cosine() -> None:
    assert SPEC.cosine_at(0) == pytest.approx(0.1)
    assert SPEC.cosine_at(50) == pytest.approx(0.1 * (0.05 + 0.95 / 2))
    assert SPEC.cosine_at(25) == pytest.approx(0.1 * (0.05 + 0.95 * (1 + math.sqrt(0.5)) / 2))


def test_the_warm_up_climbs_and_the_cosine_falls() -> None:
    rates = [SPEC.lr_at(step) for step in range(101)]
    assert all(later > earlier for earlier, later in pairwise(rates[:10]))
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))


def test_biases_begin_high_and_meet_the_others_after_the_warm_up() -> None:
    biases = [SPEC.lr_at(step, is_bias=True) for step in range(12)]
    assert biases[0] == pytest.approx(0.3 + (SPEC.cosine_at(0) - 0.3) / 10)
    assert all(later < earlier for earlier, later in pairwise(biases[:10]))
    assert biases[9:] == pytest.approx([SPEC.lr_at(step) for step in (9, 10, 11)])


def test_momentum_warms_up_to_its_value() -> None:
    values = [SPEC.momentum_at(step) for step in range(12)]
    assert values[0] == pytest.approx(0.8 + 0.137 / 10)
    assert values[9:] == pytest.approx([0.937] * 3)
    assert values == sorted(values)


def test_without_a_warm_up_the_first_step_is_the_peak() -> None:
    spec = ScheduleSpec(lr=0.2, total_steps=10)
    assert spec.lr_at(0) == pytest.approx(0.2)
    assert spec.momentum_at(0) == 0.937


def test_the_optimizer_gets_what_the_step_says_whatever_came_before() -> None:
    jumped, walked = optimizer_of(torch.optim.SGD), optimizer_of(torch.optim.SGD)
    for step in range(38):
        StepSchedule(walked, SPEC).step_update(step)
    StepSchedule(jumped, SPEC).step_update(80)
    StepSchedule(jumped, SPEC).step_update(37)
    assert [group["lr"] for group in jumped.param_groups] == [group["lr"] for group in walked.param_groups]
    assert [group["lr"] for group in jumped.param_groups] == [SPEC.lr_at(37), SPEC.lr_at(37), 10 * SPEC.lr_at(37)]


def test_groups_named_bias_follow_the_bias_warm_up_and_multipliers_count() -> None:
    optimizer = optimizer_of(torch.optim.SGD)
    StepSchedule(optimizer, SPEC).step_update(3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(
        [SPEC.lr_at(3), SPEC.lr_at(3, is_bias=True), 10 * SPEC.lr_at(3)]
    )
    assert {group["momentum"] for group in optimizer.param_groups} == {SPEC.momentum_at(3)}


def test_adam_takes_the_momentum_as_its_first_beta() -> None:
    optimizer = optimizer_of(torch.optim.AdamW)
    StepSchedule(optimizer, SPEC).step_update(0)
    assert {group["betas"] for group in optimizer.param_groups} == {(SPEC.momentum_at(0), 0.999)}


@pytest.mark.parametrize(
    ("warmup_epochs", "steps_per_epoch", "num_epochs", "expected"),
    [(3, 100, 100, 300), (3, 100, 10, 100), (0.5, 100, 100, 50), (0, 100, 100, 0), (3, 1, 2, 1)],
)
def test_the_warm_up_never_takes_more_than_a_tenth(
    warmup_epochs: float, steps_per_epoch: int, num_epochs: int, expected: int
) -> None:
    assert warmup_steps(warmup_epochs, steps_per_epoch, num_epochs) == expected


# --- The moving average of the weights -------------------------------------------------------------------------------


def test_the_moving_average_is_the_one_worked_out_by_hand() -> None:
    model = torch.nn.BatchNorm1d(2)
    assert model.running_mean is not None
    assert model.num_batches_tracked is not None
    ema = ModelEMA(model, decay=0.9, ramp_updates=5.0)
    weight, mean = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for update in range(1, 8):
        with torch.no_grad():
            model.weight.fill_(update**2)
        model.running_mean.fill_(-update)
        model.num_batches_tracked.fill_(update)
        ema.update(model)
        decay = 0.9 * (1 - math.exp(-update / 5))
        weight = decay * weight + (1 - decay) * update**2
        mean = decay * mean - (1 - decay) * update
    torch.testing.assert_close(ema.module.get_parameter("weight").double(), weight, rtol=1e-6, atol=0)
    torch.testing.assert_close(ema.module.get_buffer("running_mean").double(), mean, rtol=1e-6, atol=0)
    assert ema.module.get_buffer("num_batches_tracked").item() == 7  # counters are copied, not averaged
    assert ema.updates == 7
    assert not ema.module.training
    assert not any(parameter.requires_grad for parameter in ema.module.parameters())
    assert model.weight.tolist() == [49, 49]


# --- A rank's own time, on the clock of the CPU and on a made-up one of a GPU; which rank counts as slow -------------


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
