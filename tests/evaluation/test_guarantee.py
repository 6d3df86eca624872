"""Guaranteed confidences hold over draws of flights, and only there where flights are the unit."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from tests.evaluation.made_up import one_image
from utils.common.errors import UsageError
from utils.evaluation.guarantee import Assessed, Promise, choose, p_value, report_class, upper_bound
from utils.evaluation.metrics.matching import LEVELS
from utils.evaluation.metrics.results import ImageResult

DRAWS = 400
OBJECTS = 20
RECALL = Promise("recall", 0.8)
MOST_FAILURES = int(binom.ppf(0.999, DRAWS, 0.05))  # of a guarantee with 95 % certainty


def flights(number: int, seed: int = 0) -> tuple[list[ImageResult], list[str]]:
    """Return flights of OBJECTS photographs of an object each; haze lowers the confidences of all objects of a flight."""
    rng = np.random.default_rng(seed)
    clear = np.repeat(rng.beta(1.5, 1, number), OBJECTS)
    results = [one_image([score], [True], 1, place) for place, score in enumerate(clear * rng.beta(9, 1, len(clear)))]
    return results, [f"flight {place // OBJECTS}" for place in range(len(results))]


def failures(losses: np.ndarray, unit: np.ndarray, num_groups: int, promise: Promise) -> tuple[int, int]:
    """Return in how many draws the true risk exceeds the promise, and in how many a threshold is given.

    Flights are drawn with replacement from those of `losses` (flights, levels), so their mean is the true risk.
    unit: the losses of what is taken for independent, (flights, units, levels).
    """
    truth, rng = losses.mean(axis=0), np.random.default_rng(1)
    levels = []
    for _ in range(DRAWS):
        drawn = unit[rng.integers(0, len(losses), num_groups)].reshape(-1, len(LEVELS))
        levels.append(choose([Assessed.of(promise, drawn, 0.05)]))
    given = [level for level in levels if level is not None]
    return sum(truth[np.searchsorted(LEVELS, np.float32(level))] > promise.limit for level in given), len(given)


def test_the_guarantee_fails_in_at_most_its_share_of_draws_and_objects_as_units_break_it() -> None:
    results, names = flights(300)
    losses = RECALL.losses(results, names, 0)
    failed, given = failures(losses, losses[:, None], 50, RECALL)
    assert given > 0.9 * DRAWS
    assert failed <= MOST_FAILURES
    of_objects = RECALL.losses(results, [f"{place:06}" for place in range(len(results))], 0)
    failed, _ = failures(losses, of_objects.reshape(len(losses), OBJECTS, -1), 50, RECALL)
    assert failed > 3 * MOST_FAILURES, "a unit that is not independent must be noticed"


def test_false_alarms_are_promised_from_the_high_end_and_both_promises_meet() -> None:
    rng = np.random.default_rng(0)
    results = [
        one_image(sorted([0.9, *rng.uniform(0, 0.6, 4)], reverse=True), [True] + [False] * 4, 1, number)
        for number in range(200)
    ]
    names = [str(number // 2) for number in range(200)]
    promises = [Promise("recall", 0.9), Promise("false_alarms", 1.0)]
    recall, alarms = (Assessed.of(one, one.losses(results, names, 0), 0.025) for one in promises)
    assert not alarms.holds[0]
    assert alarms.holds[-1]
    assert recall.holds[0]
    assert not recall.holds[-1]
    assert choose([recall, alarms]) == pytest.approx(0.9), "the highest that keeps both"
    assert (alarms.promise.shown(alarms.bounds) >= alarms.promise.shown(alarms.means)).all()
    strict = Assessed.of(
        Promise("recall", 0.9), np.minimum(1, recall.means + (LEVELS >= 0.3)) * np.ones((100, 1)), 0.025
    )
    never = report_class(
        "pole", [strict, Assessed.of(promises[1], np.ones((100, 1)) * (LEVELS < 0.5), 0.025)], 9, "flights"
    )
    assert never["words"] == "pole: no threshold: no confidence keeps both promises"


def test_too_few_flights_get_no_threshold_but_the_number_that_is_missing() -> None:
    found = one_image([0.9], [True])
    for num_groups, more in ((28, 1), (5, 24)):
        losses = Promise("recall", 0.9).losses([found] * num_groups, [str(n) for n in range(num_groups)], 0)
        report = report_class("pole", [Assessed.of(Promise("recall", 0.9), losses, 0.05)], 2 * num_groups, "flights")
        assert report["threshold"] is None
        assert (
            f"{num_groups} flights are too few; {more} more are needed, with about {2 * more} objects"
            in report["words"]
        )
    enough = Promise("recall", 0.9).losses([found] * 29, [str(n) for n in range(29)], 0)
    assert choose([Assessed.of(Promise("recall", 0.9), enough, 0.05)]) == pytest.approx(0.9)
    missed = np.full((500, len(LEVELS)), 0.2)
    words = report_class("pole", [Assessed.of(Promise("recall", 0.9), missed, 0.05)], 9, "flights")["words"]
    assert words == "pole: no threshold: recall is 0.8 at best, which more flights do not change"
    nothing = report_class("pole", [Assessed.of(Promise("recall", 0.9), missed[:0], 0.05)], 0, "flights")["words"]
    assert nothing == "pole: no threshold: none of the flights has an object"


def test_p_values_are_those_of_the_two_inequalities_and_are_valid_for_coins() -> None:
    assert p_value(np.array(0.0), 29, 0.1) == pytest.approx(0.9**29), "no loss at all: the chance of that"
    assert p_value(np.array(0.2), 40, 0.1) == 1
    for number in (10, 50):  # the chance of a p-value of at most 0.05, if the risk is just above the limit
        counts = np.arange(number + 1)
        is_low = p_value(counts / number, number, 0.3) <= 0.05
        assert binom.pmf(counts, number, 0.3)[is_low].sum() <= 0.05
    bound = upper_bound(np.array([0.0, 0.05]), 60, 0.05)
    assert p_value(np.array([0.0, 0.05]), 60, bound) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("word", ["recall", "recall=1", "recall=x", "precision=0.9", "false_alarms=0", "recall=nan"])
def test_an_odd_promise_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="must be recall=SHARE"):
        Promise.parse(word)
