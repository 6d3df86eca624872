"""Results in order, few of them waiting, errors at their item."""

from __future__ import annotations

import time

import pytest

from utils.common.threads import MAX_WAITING_PER_THREAD, ordered_map


def test_results_come_in_order_whoever_is_first() -> None:
    def slow_for_some(number: int) -> int:
        time.sleep(0.01 * (number % 3 == 0))
        return number * number

    assert list(ordered_map(slow_for_some, range(40), threads=4)) == [number * number for number in range(40)]
    assert list(ordered_map(slow_for_some, [], threads=2)) == []


def test_few_results_wait_for_a_slow_user() -> None:
    done: list[int] = []
    results = ordered_map(done.append, range(100), threads=1)
    next(results)
    time.sleep(0.2)
    assert len(done) <= MAX_WAITING_PER_THREAD + 1
    assert len(list(results)) == 99
    assert done == list(range(100))


def test_an_error_is_raised_at_its_item() -> None:
    results = ordered_map(lambda number: 1 / (number - 2), range(5), threads=2)
    assert [next(results), next(results)] == [-0.5, -1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_a_user_who_leaves_early_leaves_no_work_behind() -> None:
    done: list[int] = []
    results = ordered_map(done.append, range(1000), threads=1)
    next(results)
    results.close()  # type: ignore[attr-defined]
    count = len(done)
    time.sleep(0.05)
    assert len(done) == count < 20
