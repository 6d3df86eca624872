"""Confidences with a guarantee that assumes no distribution: Learn then Test (Angelopoulos et al. 2021, arXiv 2110.01052).

The unit is a group: a flight, circuit or folder. Objects of one group are alike, so they are no independent trials. A group's
loss is its own share of missed objects (of missed length, for thin classes), and the risk is the mean loss over all groups that
could be flown. With the certainty asked for, over the draw of the groups that were judged, the risk at the chosen confidence
is at most the limit, whatever the losses' distribution is. This assumes that the groups are independent draws of one kind, the later ones,
too. It says nothing of a single flight, and each class has its own guarantee. Groups without an object of the class have no
such loss: the recall is that of flights with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.common.errors import UsageError
from utils.evaluation.metrics.matching import LEVELS
from utils.evaluation.metrics.results import ImageResult

RECALL, FALSE_ALARMS = "recall", "false_alarms"
ALARM_CAP = 5.0  # times the number asked for: a group with more false alarms a photograph counts as if it had so many
MOST_GROUPS = 100_000  # that are worth naming


def p_value(mean: np.ndarray, num_groups: np.ndarray | int, limit: np.ndarray | float) -> np.ndarray:
    """Return how likely losses in 0 to 1 are, at most, to have so low a mean if their expectation exceeds `limit`.

    Hoeffding's and Bentkus' inequalities, the smaller value (proposition 2 of Bates et al. 2021, arXiv 2101.02703). All arguments
    broadcast.
    """
    from scipy.special import xlogy
    from scipy.stats import binom  # takes 0.5 s

    low = np.minimum(mean, limit)
    entropy = xlogy(low, low / limit) + xlogy(1 - low, (1 - low) / (1 - np.asarray(limit)))
    bentkus = np.e * binom.cdf(np.ceil(np.round(num_groups * np.asarray(mean), 9)), num_groups, limit)
    return np.minimum(np.exp(-num_groups * entropy), np.minimum(bentkus, 1))


def upper_bound(mean: np.ndarray, num_groups: int, error: float) -> np.ndarray:
    """Return the lowest limit that the expectation exceeds with a probability of at most `error`, within 1e-9; 1 if there is none."""
    low, high = np.asarray(mean, float), np.ones(np.shape(mean))
    for _ in range(30):
        middle = (low + high) / 2
        holds = p_value(mean, num_groups, np.minimum(middle, 1 - 1e-12)) <= error
        low, high = np.where(holds, low, middle), np.where(holds, middle, high)
    return high


@dataclass(frozen=True)
class Promise:
    """What is asked for: a share of the objects to be found, or most false alarms of a class in a photograph."""

    name: str
    value: float

    @classmethod
    def parse(cls, word: str) -> Promise:
        """Read `recall=0.9` or `false_alarms=2`. Raises UsageError for anything else."""
        name, _, text = word.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if (name == RECALL and 0 < value < 1) or (name == FALSE_ALARMS and 0 < value < 1000):
            return cls(name, value)
        raise UsageError(f"--guarantee {word}: must be recall=SHARE, such as recall=0.9, or false_alarms=NUMBER")

    @property
    def words(self) -> str:
        """The promise in words."""
        if self.name == RECALL:
            return f"at least {100 * self.value:g} % are found"
        return f"a photograph has at most {self.value:g} false alarms on average"

    @property
    def limit(self) -> float:
        """The highest risk, for losses in 0 to 1."""
        return 1 - self.value if self.name == RECALL else 1 / ALARM_CAP

    def shown(self, bounds: np.ndarray) -> np.ndarray:
        """Return what limits of the risk mean: recall, or false alarms a photograph."""
        return 1 - bounds if self.name == RECALL else bounds * ALARM_CAP * self.value

    def losses(self, results: Sequence[ImageResult], groups: Sequence[str], class_id: int) -> np.ndarray:
        """Return each group's loss at each of LEVELS, (groups, levels), in 0 to 1, from photographs and their groups."""
        names, number = np.unique(groups, return_inverse=True)
        sums = np.zeros((len(names), len(LEVELS)))
        totals = np.zeros(len(names))
        for group, result in zip(number, results, strict=True):
            rows = result.lengths[result.lengths[:, 0] == class_id]
            is_alarm = self.name == FALSE_ALARMS
            if len(rows) and not is_alarm:
                sums[group] += rows[0, 2:]
                totals[group] += rows[0, 1]
                continue
            chosen = (result.class_ids == class_id) & (result.mask_hits[:, 0] != is_alarm)
            ascending = np.sort(result.scores[chosen])
            sums[group] += len(ascending) - np.searchsorted(ascending, LEVELS)
            totals[group] += 1 if is_alarm else np.count_nonzero(result.target_class_ids == class_id)
        shares = sums[totals > 0] / totals[totals > 0, None]
        return 1 - shares if self.name == RECALL else np.minimum(shares / (ALARM_CAP * self.value), 1)


@dataclass(frozen=True)
class Assessed:
    """A promise tested for one class: its losses' means at LEVELS over `num_groups` groups, and the limits that are certain."""

    promise: Promise
    num_groups: int
    means: np.ndarray
    bounds: np.ndarray
    error: float

    @classmethod
    def of(cls, promise: Promise, losses: np.ndarray, error: float) -> Assessed:
        """Test losses (groups, levels); the guarantee may fail with a probability of at most `error`."""
        means = losses.mean(axis=0) if len(losses) else np.ones(len(LEVELS))
        return cls(promise, len(losses), means, upper_bound(means, len(losses), error), error)

    @property
    def holds(self) -> np.ndarray:
        """Whether the promise is certain at each level: up to the first, from the safe end, at which it is not.

        This fixed order is why testing many levels needs no correction (section 4 of Learn then Test).
        """
        safe_first = slice(None, None, 1 if self.promise.name == RECALL else -1)
        return np.logical_and.accumulate((self.bounds <= self.promise.limit)[safe_first])[safe_first]

    @property
    def groups_needed(self) -> int | None:
        """How many groups with the same losses would do at the safest level; None if none would."""
        if (mean := float(self.means.min())) >= self.promise.limit:
            return None
        numbers = np.arange(1, MOST_GROUPS + 1)
        is_enough = p_value(np.array(mean), numbers, self.promise.limit) <= self.error
        # Bentkus' inequality rounds up, so the p-value is not monotone: the number from which on it is low enough.
        return int(numbers[~is_enough].max(initial=0)) + 1 if is_enough[-1] else None


def choose(assessed: Sequence[Assessed]) -> float | None:
    """Return the highest confidence at which all promises are certain; None if there is none.

    Each was tested with its share of the error, so they hold together.
    """
    holds = np.logical_and.reduce([one.holds for one in assessed])
    return float(LEVELS[holds][-1]) if holds.any() else None


def report_class(name: str, assessed: Sequence[Assessed], num_objects: int, unit: str) -> dict[str, Any]:
    """Return what is guaranteed for a class, as metrics.json and thresholds.yaml have it. unit: the groups' kind, as a plural."""
    threshold = choose(assessed)
    at = np.flatnonzero(threshold == LEVELS)
    promises = [
        {
            "promise": f"{one.promise.name}={one.promise.value:g}",
            "groups": one.num_groups,
            "groups_needed": one.groups_needed,
            "measured": float(one.promise.shown(one.means[at])[0]) if len(at) else None,
            "guaranteed": one.promise.shown(one.bounds).round(4).tolist(),  # at each of LEVELS
        }
        for one in assessed
    ]
    words = f"{name}: {_in_words(threshold, assessed, num_objects, unit)}"
    return {"class": name, "threshold": threshold, "objects": num_objects, "words": words, "promises": promises}


def _in_words(threshold: float | None, assessed: Sequence[Assessed], num_objects: int, unit: str) -> str:
    if threshold is not None:
        promised = " and ".join(one.promise.words for one in assessed)
        return f"from confidence {threshold:g} on {promised} ({assessed[0].num_groups} {unit}, {num_objects} objects)"
    failed = [one for one in assessed if not one.holds.any()]
    if not failed:
        return "no threshold: no confidence keeps both promises"
    one = failed[0]
    if not one.num_groups:
        return f"no threshold: none of the {unit} has an object"
    if one.groups_needed is None:
        best = float(one.promise.shown(one.means[one.means.argmin()]))
        return f"no threshold: {one.promise.name} is {best:.3g} at best, which more {unit} do not change"
    more = one.groups_needed - one.num_groups
    objects = round(more * num_objects / one.num_groups)
    return f"no threshold: {one.num_groups} {unit} are too few; {more} more are needed, with about {objects} objects"
