"""From which confidence on detections are sure: the share of wrong ones is bounded with the labelled validation photographs.

The levels are tested one after the other from above, each with the exact upper bound of Clopper and Pearson (1934) on the share of
wrong detections, and the first that fails ends it: this fixed order is why many levels need no correction (Learn then Test,
arXiv 2110.01052, section 4). Where it begins depends on the number of detections alone, not on which of them are wrong.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from scipy.stats import beta

from utils.common.text import counted
from utils.evaluation.metrics.matching import LEVELS

LEAST = 0.05  # confidence below which a detection is background
MOST_NEEDED = 1_000_000  # detections that are worth naming
MISTAKES_AT_START = (2, 1, 0)  # that the first level may have: as many as a third of all detections allow


def upper_bound(num_wrong: np.ndarray, num: np.ndarray, certainty: float) -> np.ndarray:
    """Return what the share of wrong detections exceeds with a probability of at most 1 - certainty."""
    return np.where(num_wrong < num, beta.ppf(certainty, num_wrong + 1, np.maximum(num - num_wrong, 1)), 1.0)


def num_needed(limit: float, certainty: float, num_wrong: int = 0, share_wrong: float = 0.0) -> int:
    """Return how many detections keep the limit if so many, or such a share, of them are wrong; MOST_NEEDED: no number does."""

    def is_enough(num: int) -> bool:
        wrong = np.array(max(num_wrong, round(share_wrong * num)))
        return bool(upper_bound(wrong, np.array(num), certainty) <= limit)

    return bisect_left(range(MOST_NEEDED), True, lo=1, key=is_enough)


@dataclass(frozen=True)
class Judged:
    """A class's detections on validation photographs: how many have at least each level, from above, and are wrong: int64 (levels,)."""

    num: np.ndarray
    num_wrong: np.ndarray
    levels: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray, is_wrong: np.ndarray) -> "Judged":
        """Count detections (n,)."""
        levels = LEVELS[LEVELS >= LEAST][::-1]
        return cls(*((rows[:, None] >= levels).sum(axis=0) for rows in (scores, scores[is_wrong])), levels)

    def last_level(self, limit: float, certainty: float) -> int | None:
        """Return the position of the lowest level down to which at most the share `limit` is wrong; None: there is none."""
        needed = [num_needed(limit, certainty, mistakes) for mistakes in MISTAKES_AT_START]
        first = next((each for each in needed if each <= self.num[-1] / 3), needed[-1])
        is_tested = self.num >= first
        fails = np.flatnonzero(is_tested & (upper_bound(self.num_wrong, self.num, certainty) > limit))
        last = int(fails[0]) - 1 if len(fails) else len(self.levels) - 1
        return last if last >= 0 and is_tested[last] else None

    def sure(self, limit: float, certainty: float) -> tuple[float | None, str]:
        """Return the confidence from which detections are sure, None if none is, and in words why."""
        bounds, last = upper_bound(self.num_wrong, self.num, certainty), self.last_level(limit, certainty)
        if last is not None:
            of_them = f"{self.num_wrong[last]} of {counted(int(self.num[last]), 'validation detection')} wrong"
            promise = f"at most {100 * bounds[last]:.1f} % with a certainty of {100 * certainty:g} %"
            return round(
                float(self.levels[last]), 3
            ), f"sure from confidence {self.levels[last]:.2f} on: {of_them}, {promise}"
        best = int(bounds.argmin())
        words = f"none is sure, so all are regions to ignore: from confidence {self.levels[best]:.2f} on {self.num_wrong[best]} of "
        words += f"{counted(int(self.num[best]), 'validation detection')} wrong"
        enough = num_needed(limit, certainty, share_wrong=self.num_wrong[best] / max(self.num[best], 1))
        words += f"; {enough:,} such detections are needed" if self.num[best] < enough < MOST_NEEDED else ""
        reached = (share / 100 for share in range(int(100 * limit) + 1, 51))
        share = next((each for each in reached if self.last_level(each, certainty) is not None), None)
        return None, words + (f"; --wrong {share:g} is reached" if share else "")
