"""Confidences with a guarantee that assumes no distribution: Learn then Test (Angelopoulos et al.
2021, arXiv 2110.01052).

The unit is a group, such as a flight: objects of one group are alike, so they are no independent
trials. A group's loss is its own share of missed objects (of missed length, for thin classes), and
the risk is the mean loss over all groups that could be flown. With the certainty asked for, over
the draw of the judged groups, the risk at the chosen confidence is at most the limit. This assumes
that all groups, the later ones too, are independent draws of one kind. It says nothing of a single
flight, and each class has its own guarantee. Groups without an object of the class have no recall
and do not count for it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from yolo_seg_ddp.evaluation.metrics.matching import LEVELS
from yolo_seg_ddp.evaluation.metrics.results import ImageResult
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.text import counted

RECALL, FALSE_ALARMS = "recall", "false_alarms"
# times the number asked for: a group with more false alarms a photograph counts as if it had so
# many
ALARM_CAP = 5.0
MOST_GROUPS = 100_000  # that are worth naming
# share of the wealth that a group may take; chosen on made-up losses
MOST_STAKE, PRIOR_GROUPS = 0.99, 40


def upper_bound(losses: np.ndarray, limit: float, error: float) -> np.ndarray:
    """Return what the expectation of losses in 0 to 1, (groups, n), exceeds with a probability of
    at most `error`: (n,), within 1e-6.

    For each value above it, a gambler who bets on group after group that its loss is below the
    value got rich: 1 / error times as much as at the start. If the expectation were above the
    value, that would happen with a probability of at most `error`. Stakes may depend on earlier
    groups: these are those of Waudby-Smith and Ramdas (2024, arXiv 2010.09686, section 4.2), but
    begin with the variance of a coin whose expectation is the `limit` of interest, worth
    PRIOR_GROUPS. The wealth rises with the value, so bisection finds it. The order is shuffled,
    because names often follow the time.
    """
    losses = losses[np.random.default_rng(0).permutation(len(losses))]
    num_seen = PRIOR_GROUPS + np.arange(1, len(losses) + 1)[:, None]
    variance = limit * (1 - limit)
    means = (PRIOR_GROUPS * limit + losses.cumsum(axis=0)) / num_seen
    variances = (PRIOR_GROUPS * variance + ((losses - means) ** 2).cumsum(axis=0)) / num_seen
    known = np.concatenate([np.full_like(losses[:1], variance), variances[:-1]])
    stakes = np.sqrt(-2 * np.log(error) / (len(losses) * known))
    low, high = np.zeros(losses.shape[1]), np.ones(losses.shape[1])
    for _ in range(20):
        middle = (low + high) / 2
        gains = np.log1p(np.minimum(stakes, MOST_STAKE / (1 - middle)) * (middle - losses))
        holds = gains.cumsum(axis=0).max(axis=0, initial=0) >= -np.log(error)
        low, high = np.where(holds, low, middle), np.where(holds, middle, high)
    # no less than what was seen
    return np.maximum(high, losses.mean(axis=0)) if len(losses) else high


@dataclass(frozen=True)
class Guarantee:
    """What is asked for: a share of the objects to be found, or most false alarms of a class in a
    photograph.
    """

    name: str
    value: float

    @classmethod
    def parse(cls, word: str) -> Guarantee:
        """Read `recall=0.9` or `false_alarms=2`. Raises UsageError for anything else."""
        name, _, text = word.partition("=")
        value = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
        if 0 < value < {RECALL: 1, FALSE_ALARMS: 1000}.get(name, 0):
            return cls(name, value)
        raise UsageError(
            f"--guarantee {word}: must be recall=SHARE, such as recall=0.9, or false_alarms=NUMBER"
        )

    @property
    def words(self) -> str:
        """The guarantee in words."""
        if self.name == RECALL:
            return f"at least {100 * self.value:g} % are found"
        return f"a photograph has at most {self.value:g} false alarms on average"

    @property
    def limit(self) -> float:
        """The highest risk, for losses in 0 to 1."""
        return 1 - self.value if self.name == RECALL else 1 / ALARM_CAP

    def shown(self, risk: np.ndarray) -> np.ndarray:
        """Return what a risk means: recall, or false alarms a photograph."""
        return 1 - risk if self.name == RECALL else risk * ALARM_CAP * self.value

    def losses(
        self, results: Sequence[ImageResult], groups: Sequence[str] | np.ndarray, class_id: int
    ) -> np.ndarray:
        """Return each group's loss at each of LEVELS, (groups, levels), in 0 to 1, from photographs
        and their groups.
        """
        names, number = np.unique(groups, return_inverse=True)
        sums = np.zeros((len(names), len(LEVELS)))
        totals = np.zeros(len(names))
        is_alarm = self.name == FALSE_ALARMS
        # What has no outline has no length, so it does not count for a thin class.
        is_thin = any(class_id in result.lengths[:, 0] for result in results)
        for group, result in zip(number, results, strict=True):
            if is_thin and not is_alarm:
                lengths = result.lengths[result.lengths[:, 0] == class_id].sum(axis=0)
                totals[group] += lengths[1]
                sums[group] += lengths[2:]
                continue
            is_right, is_counted = result.judged()
            chosen = (result.class_ids == class_id) & is_counted & (is_right != is_alarm)
            totals[group] += (
                1 if is_alarm else np.count_nonzero(result.target_class_ids == class_id)
            )
            sums[group] += (result.scores[chosen][:, None] >= LEVELS).sum(axis=0)
        shares = sums[totals > 0] / totals[totals > 0, None]
        return np.minimum(shares / (ALARM_CAP * self.value), 1) if is_alarm else 1 - shares


@dataclass(frozen=True)
class Assessed:
    """A guarantee for one class: its losses (groups, levels), their means, and the limits of the
    risk that are certain.
    """

    guarantee: Guarantee
    num_groups: int
    losses: np.ndarray
    means: np.ndarray
    bounds: np.ndarray
    error: float

    @classmethod
    def of(cls, guarantee: Guarantee, losses: np.ndarray, error: float) -> Assessed:
        """Judge losses (groups, levels); the guarantee may fail with a probability of at most
        `error`.
        """
        means = losses.mean(axis=0) if len(losses) else np.ones(len(LEVELS))
        return cls(
            guarantee,
            len(losses),
            losses,
            means,
            upper_bound(losses, guarantee.limit, error),
            error,
        )

    @property
    def holds(self) -> np.ndarray:
        """Whether the guarantee is certain at each level: from the safe end up to the first at
        which it is not.

        This fixed order is why many levels need no correction (Learn then Test, section 4).
        """
        safe_first = slice(None, None, 1 if self.guarantee.name == RECALL else -1)
        return np.logical_and.accumulate((self.bounds <= self.guarantee.limit)[safe_first])[
            safe_first
        ]

    @property
    def groups_needed(self) -> int | None:
        """About how many groups with the same losses, repeated, would do at the safest level; None
        if none would.
        """
        losses = self.losses[:, [self.means.argmin()]]
        limit = self.guarantee.limit

        def is_enough(number: int) -> bool:
            return bool(upper_bound(np.resize(losses, (number, 1)), limit, self.error)[0] <= limit)

        enough = bisect_left(range(MOST_GROUPS), True, lo=self.num_groups + 1, key=is_enough)
        return enough if enough < MOST_GROUPS else None


def report_class(
    name: str,
    assessed: Sequence[Assessed],
    num_objects: int,
    unit: str,
    num_boxed: int = 0,
) -> dict[str, Any]:
    """Return the highest confidence that keeps all guarantees (None if none does), why, and the
    curves of what is certain.

    Each guarantee has its share of the error, so they hold together. unit: what groups are, as a
    plural. num_boxed: how many of the objects have no outline.
    """
    holds = np.logical_and.reduce([one.holds for one in assessed])
    threshold = round(float(LEVELS[holds][-1]), 3) if holds.any() else None
    failed = [one for one in assessed if not one.holds.any()]
    if threshold is not None:
        words = (
            f"confidence {threshold:g} and above ({assessed[0].num_groups} {unit}, "
            f"{counted(num_objects, 'object')})"
        )
    elif not failed:
        words = "no threshold: no confidence keeps both guarantees"
    elif not failed[0].num_groups:
        words = f"no threshold: none of the {unit} has an object"
    elif (needed := failed[0].groups_needed) is None:
        best = failed[0].guarantee.shown(failed[0].means[failed[0].means.argmin()])
        words = (
            f"no threshold: {failed[0].guarantee.name} is {best:.3g} at best; more {unit} would "
            "not help"
        )
    else:
        more = needed - failed[0].num_groups
        objects = round(more * num_objects / failed[0].num_groups)
        words = (
            f"no threshold: {failed[0].num_groups} {unit} are too few; {more} more are needed, "
            f"with about {objects} objects"
        )
    boxed = f"; {counted(num_boxed, 'object')} without an outline" if num_boxed else ""
    certain = {
        one.guarantee.name: one.guarantee.shown(one.bounds).round(4).tolist() for one in assessed
    }  # at each of LEVELS
    return {
        "class": name,
        "threshold": threshold,
        "objects": num_objects,
        "words": f"{name}: {words}{boxed}",
        "certain": certain,
    }
