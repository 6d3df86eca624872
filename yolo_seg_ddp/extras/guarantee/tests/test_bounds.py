"""Guaranteed confidences hold over draws of flights, and only there where flights are the unit."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from tests.evaluation.made_up import one_image
from yolo_seg_ddp.evaluation.metrics.matching import LEVELS
from yolo_seg_ddp.extras.guarantee.bounds import Assessed, Guarantee, report_class, upper_bound
from yolo_seg_ddp.utils.errors import UsageError

DRAWS, FLIGHTS, OBJECTS = 400, 300, 8
MOST_FAILURES = int(binom.ppf(0.999, DRAWS, 0.05))  # of a guarantee with 95 % certainty
NINE_OF_TEN = Guarantee("recall", 0.9)


def threshold_of(guarantee: Guarantee, losses: np.ndarray) -> float | None:
    return report_class("pole", [Assessed.of(guarantee, losses, 0.05)], 1, "flights")["threshold"]


def words_of(losses: np.ndarray, objects: int = 9) -> str:
    return str(
        report_class("pole", [Assessed.of(NINE_OF_TEN, losses, 0.05)], objects, "flights")["words"]
    )


def failures(units: list[np.ndarray], truth: np.ndarray, guarantee: Guarantee) -> tuple[int, int]:
    """Count the draws of 50 flights, units: of each (n, levels), in which the guarantee and the
    naive threshold fail.
    """
    rng = np.random.default_rng(50)
    failed = [0, 0]
    for _ in range(DRAWS):
        losses = np.concatenate([units[place] for place in rng.integers(0, len(units), 50)])
        kept = (Assessed.of(guarantee, losses, 0.05).holds, losses.mean(axis=0) <= guarantee.limit)
        for number, levels in enumerate(kept):
            highest = np.flatnonzero(levels).max(initial=-1)
            failed[number] += bool(highest >= 0 and truth[highest] > guarantee.limit)
    return failed[0], failed[1]


def test_the_guarantee_fails_in_at_most_its_share_of_draws_and_objects_as_units_break_it() -> None:
    """Haze lowers the confidences of all of a flight's objects.

    The true risk is the mean over the flights that are drawn from.
    """
    guarantee, rng = Guarantee("recall", 0.8), np.random.default_rng(0)
    scores = np.repeat(rng.beta(1.5, 1, FLIGHTS), OBJECTS) * rng.beta(9, 1, FLIGHTS * OBJECTS)
    results = [one_image([score], [True], 1, place) for place, score in enumerate(scores)]
    losses = guarantee.losses(
        results, [f"flight {place // OBJECTS}" for place in range(len(results))], 0
    )
    of_objects = guarantee.losses(results, [f"{place:06}" for place in range(len(results))], 0)
    truth = losses.mean(axis=0)
    assert of_objects.mean(axis=0) == pytest.approx(truth)
    flights, objects = list(losses[:, None]), list(of_objects.reshape(FLIGHTS, OBJECTS, -1))
    right, naive = failures(flights, truth, guarantee)
    assert right <= MOST_FAILURES < naive
    assert failures(objects, truth, guarantee)[0] > 2 * MOST_FAILURES, (
        "a unit that is not independent must be noticed"
    )


def test_false_alarms_are_promised_from_the_high_end_and_both_promises_meet() -> None:
    rng = np.random.default_rng(0)
    alarms = np.sort(rng.uniform(0.01, 0.6, (200, 4)))[:, ::-1]
    results = [
        one_image([0.9, *scores], [True, *[False] * 4], 1, number)
        for number, scores in enumerate(alarms.tolist())
    ]
    names = [str(number // 2) for number in range(200)]
    guarantees = [NINE_OF_TEN, Guarantee("false_alarms", 0.5)]
    both = [Assessed.of(one, one.losses(results, names, 0), 0.025) for one in guarantees]
    assert [one.holds[[0, -1]].tolist() for one in both] == [[True, False], [False, True]]
    for one, safest, uncertain in zip(
        both, (0, len(LEVELS) - 1), (1, len(LEVELS) - 2), strict=True
    ):
        bounds = (np.arange(len(LEVELS)) == uncertain).astype(float)
        assert np.flatnonzero(replace(one, bounds=bounds).holds).tolist() == [safest], (
            "not those beyond the uncertain"
        )
    assert both[1].means[0] == 1, "four a photograph, of which 2.5 count: five times the limit"
    report = report_class("pole", both, 200, "flights")
    assert report["threshold"] == 0.9, "the highest that keeps both"
    assert (np.array(report["certain"]["false_alarms"]) >= 2.5 * both[1].means - 1e-4).all()
    ignored = [replace(one, mask_ignored=np.array([0, 1, 1, 1, 1])) for one in results]
    losses = [one.losses(ignored, names, 0) for one in guarantees]
    assert losses[1].sum() == 0 < losses[0].sum() == both[0].losses.sum()
    early = Assessed.of(NINE_OF_TEN, np.ones((100, 1)) * (LEVELS >= 0.1), 0.025)
    assert (
        "no confidence keeps both guarantees"
        in report_class("pole", [early, both[1]], 9, "flights")["words"]
    )


def test_too_few_flights_get_no_threshold_but_the_number_that_is_missing() -> None:
    for number, more in ((28, 1), (5, 24)):
        assert threshold_of(NINE_OF_TEN, losses_of(number)) is None
        words = (
            f"pole: no threshold: {number} flights are too few; {more} more are needed, with about "
            f"{2 * more} objects"
        )
        assert words_of(losses_of(number), 2 * number) == words
    assert threshold_of(NINE_OF_TEN, losses_of(29)) == 0.7
    missed = np.full((500, len(LEVELS)), 0.2)
    assert (
        words_of(missed) == "pole: no threshold: recall is 0.8 at best; more flights would not help"
    )
    assert words_of(missed[:0]) == "pole: no threshold: none of the flights has an object"


def test_the_bound_fails_in_at_most_its_share_and_is_lower_for_losses_that_vary_less() -> None:
    coins = (np.random.default_rng(0).random((100, 4000)) < 0.1).astype(float)
    bounds = upper_bound(coins, 0.1, 0.05)
    assert 0.02 * 4000 < (bounds < 0.1).sum() <= binom.ppf(0.999, 4000, 0.05)
    assert (bounds >= coins.mean(axis=0)).all()
    one = np.array([[0.0, 0.2, 0.4]])  # the stake does not see the loss that it is put on
    win = (1 / 0.9 - 1) / np.sqrt(-2 * np.log(0.9) / 0.25)
    assert upper_bound(one, 0.5, 0.9) == pytest.approx(one[0] + win, abs=1e-5)
    worse = np.repeat([0.0, 0.2], 50)[:, None]  # from flight to flight: the order is shuffled
    assert upper_bound(worse, 0.1, 0.05)[0] > 0.12
    even = np.full((100, 1), 0.05)
    assert upper_bound(even, 0.1, 0.05)[0] < 0.08, "Hoeffding's and Bentkus' bounds are 0.13"
    for number, limit in ((29, 0.1), (59, 0.05), (14, 0.2), (5, 0.5)):  # no method needs fewer
        assert [
            upper_bound(np.zeros((n, 1)), limit, 0.05)[0] <= limit for n in (number, number - 1)
        ] == [True, False]


def test_of_a_thin_class_its_own_missed_length_counts() -> None:
    lengths = [
        [number, total, *np.where(LEVELS <= 0.5, found, 0)]
        for number, total, found in ((0, 90, 30), (1, 20, 5))
    ]
    result = replace(one_image([0.7], [True]), lengths=np.array(lengths))
    assert (NINE_OF_TEN.losses([result], ["a"], 1) == np.where(LEVELS <= 0.5, 0.75, 1)).all()
    # What has no outline has no length: it is left out.
    boxed = replace(one_image([0.7], [True], image_id=1), boxed=np.array([True]))
    boxed = replace(boxed, target_class_ids=np.ones(1, int))
    for names in (["a", "a"], ["a", "b"]):
        losses = NINE_OF_TEN.losses([result, boxed], names, 1)
        assert (losses == np.where(LEVELS <= 0.5, 0.75, 1)).all()


def test_an_object_with_a_box_and_no_outline_is_no_missed_mask() -> None:
    """Its class is judged by boxes in its photograph, also a second detection of the object."""
    seen = one_image([0.9, 0.6], [True, False])
    boxed = replace(seen, mask_hits=np.zeros((2, 10)), mask_ignored=np.ones(2))
    boxed = replace(boxed, boxed=np.array([True]))
    alarms = Guarantee("false_alarms", 0.5)
    for promise in (NINE_OF_TEN, alarms):
        of_boxed, of_outlined = (promise.losses([one], ["a"], 0) for one in (boxed, seen))
        assert (of_boxed == of_outlined).all()
        assert 0 < of_boxed.mean() < 1

    # Another class of the photograph is judged by its masks.
    ids = np.array([0, 1])
    other = replace(boxed, class_ids=ids, target_class_ids=ids, boxed=np.array([True, False]))
    other = replace(other, box_hits=np.ones((2, 10)), mask_ignored=np.zeros(2))
    assert [NINE_OF_TEN.losses([other], ["a"], number).min() for number in (0, 1)] == [0, 1]
    assert [alarms.losses([other], ["a"], number).max() for number in (0, 1)] == [0, 0.4]
    row = report_class("pole", [Assessed.of(NINE_OF_TEN, losses_of(30), 0.05)], 30, "flights", 4)
    assert row["words"].endswith("(30 flights, 30 objects); 4 objects without an outline")


def losses_of(number: int) -> np.ndarray:
    results = [one_image([0.7], [True])] * number
    return NINE_OF_TEN.losses(results, [f"{place}" for place in range(number)], 0)


@pytest.mark.parametrize(
    "word", ["recall", "recall=1", "recall=x", "precision=0.9", "false_alarms=0", "recall=nan"]
)
def test_an_odd_promise_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="must be recall=SHARE"):
        Guarantee.parse(word)
