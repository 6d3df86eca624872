"""Which rank do the others wait for?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

SLOW_FACTOR = 1.2  # a slow rank takes so much longer than the others' median,
SLOW_SHARE = 0.05  # and its excess is at least this share of the step;
SLOW_BATCHES = 3  # laps shorter than this say nothing,
SLOW_LAPS = 2  # and one lap alone may be chance


class SlowRank:
    """Names the rank that the others wait for, once it has been slow in two laps running."""

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._laps = 0

    def update(self, own_ms: Sequence[float], step_ms: float, num_batches: int) -> int | None:
        """Return the slow rank, or None; `own_ms` are all ranks' times in a lap of `num_batches`."""
        if num_batches >= SLOW_BATCHES:
            found = _stands_out(own_ms, step_ms)
            self._laps = self._laps + 1 if found is not None and found == self._suspect else int(found is not None)
            self._suspect = found
        return self._suspect if self._laps >= SLOW_LAPS else None


def _stands_out(own_ms: Sequence[float], step_ms: float) -> int | None:
    if len(own_ms) < 2 or not all(map(math.isfinite, own_ms)):
        return None
    slowest = max(range(len(own_ms)), key=lambda rank: own_ms[rank])
    others = others_ms(own_ms, slowest)
    excess = own_ms[slowest] - others
    return slowest if excess > (SLOW_FACTOR - 1) * others and excess > SLOW_SHARE * step_ms else None


def others_ms(own_ms: Sequence[float], slow_rank: int) -> float:
    """Return the median time of all ranks but one."""
    return statistics.median([*own_ms[:slow_rank], *own_ms[slow_rank + 1 :]])
