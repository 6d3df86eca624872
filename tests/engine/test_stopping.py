"""The ranks agree whether to stop every few steps, more often when steps are slow, and always at the same ones."""

from __future__ import annotations

import pytest

from utils.engine import stopping
from utils.engine.stopping import StopAgreement


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


def agreements(monkeypatch: pytest.MonkeyPatch, step_s: list[float], slowest_s: float = 0.0) -> list[int]:
    """Return the steps after which one rank, whose steps take `step_s`, comes to agree (with a rank of `slowest_s`)."""
    clock = Clock()
    monkeypatch.setattr(stopping, "time", clock)
    monkeypatch.setattr(stopping, "max_over_ranks", lambda own: [*own[:2], max(own[2], slowest_s)])
    own = StopAgreement()
    own.start(0)
    found = []
    for step, seconds in enumerate(step_s, start=1):
        clock.now_s += seconds
        if own.is_due(step):
            found.append(step)
            own.agree(step, False, False)
    return found


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        ([0.1] * 30, [1, 10, 20, 30]),
        ([0.6] * 9, [1, 4, 7]),
        ([5.0] * 4, [1, 2, 3, 4]),
        ([60.0] + [0.1] * 11, [1, 2, 10]),  # the first step of a process, which sets everything up
        ([0.1] * 12 + [3.0] * 10, [1, 10, 20, 21, 22]),
    ],
)
def test_a_stop_is_heard_within_ten_steps_or_two_seconds(
    monkeypatch: pytest.MonkeyPatch, step_s: list[float], expected: list[int]
) -> None:
    assert agreements(monkeypatch, step_s) == expected


def test_all_ranks_follow_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [1, 3, 5, 7, 9, 10, 12]
    for step_s in (0.01, 0.5, 1.0):
        assert agreements(monkeypatch, [step_s] * 12, slowest_s=1.0) == expected


def test_what_comes_between_epochs_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stopping, "time", clock)
    own = StopAgreement()
    own.start(6)
    clock.now_s += 0.1
    own.agree(7, False, False)
    clock.now_s += 500  # validation
    own.start(12)
    own.agree(12, False, False)
    assert [step for step in range(13, 31) if own.is_due(step)] == [20, 30]
