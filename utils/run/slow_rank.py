"""Finds the rank that the others wait for."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

SLOW_FACTOR = 1.2  # a slow rank takes longer than this factor of the others' median,
SLOW_SHARE = 0.05  # and the difference is more than this share of the step
SLOW_BATCHES = 3  # shorter laps are ignored
SLOW_LAPS = 2  # consecutive laps in which a rank must be slow


class SlowRank:
    """Reports a rank that was slow in SLOW_LAPS consecutive laps (a lap: the batches between two log lines)."""

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._laps = 0

    def update(self, own_ms: Sequence[float], step_ms: float, num_batches: int) -> int | None:
        """Add a lap of `num_batches` with all ranks' own times; return the slow rank, or None."""
        if num_batches >= SLOW_BATCHES:
            found = _slowest(own_ms, step_ms)
            self._laps = self._laps + 1 if found is not None and found == self._suspect else int(found is not None)
            self._suspect = found
        return self._suspect if self._laps >= SLOW_LAPS else None


def _slowest(own_ms: Sequence[float], step_ms: float) -> int | None:
    if len(own_ms) < 2 or not all(map(math.isfinite, own_ms)):
        return None
    slowest = max(range(len(own_ms)), key=lambda rank: own_ms[rank])
    others = others_ms(own_ms, slowest)
    excess = own_ms[slowest] - others
    return slowest if excess > (SLOW_FACTOR - 1) * others and excess > SLOW_SHARE * step_ms else None


def others_ms(own_ms: Sequence[float], slow_rank: int) -> float:
    """Return the median time of all ranks but `slow_rank`."""
    return statistics.median([*own_ms[:slow_rank], *own_ms[slow_rank + 1 :]])
