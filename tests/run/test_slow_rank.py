"""Which rank is slow."""

from __future__ import annotations

import math

import pytest

from utils.run.slow_rank import SlowRank


def test_a_rank_is_slow_once_it_was_so_in_two_laps() -> None:
    slow_rank = SlowRank()
    assert slow_rank.update([100, 150, 101], 300, 10) is None
    assert slow_rank.update([100, 150, 101], 300, 10) == 1
    assert slow_rank.update([100, 150, 101], 300, 1) == 1  # too short a lap to change anything
    assert slow_rank.update([100, 101, 150], 300, 10) is None  # another one: perhaps chance
    assert slow_rank.update([100, 101, 150], 300, 10) == 2
    assert slow_rank.update([100, 101, 110], 300, 10) is None


@pytest.mark.parametrize(
    ("own_ms", "step_ms"),
    [([100.0], 300), ([100.0, 115.0], 300), ([1.0, 3.0], 300), ([100.0, math.nan, 200.0], 300)],
    ids=["alone", "little", "little of the step", "unknown"],
)
def test_nobody_is_slow(own_ms: list[float], step_ms: float) -> None:
    slow_rank = SlowRank()
    assert [slow_rank.update(own_ms, step_ms, 10) for _ in range(3)] == [None] * 3
