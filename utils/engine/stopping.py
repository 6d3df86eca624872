"""When the ranks agree whether to stop: every few steps, and every step where steps are slow.

A launcher or a scheduler kills what has not stopped within its grace period, at least 30 seconds.
"""

from __future__ import annotations

import time

LONGEST_S = 2.0  # between two agreements, unless a single step takes longer


class Cadence:
    """Decides when the next agreement is due, alike on all ranks: from step counts and a time which all were told."""

    def __init__(self) -> None:
        self._step_s = 0.0  # of the slowest rank; 0: not known yet
        self._last_step = 0
        self._last_s = time.perf_counter()

    def start(self, step: int) -> None:
        """Begin to count at `step`; what came before was not steps alone."""
        self._last_step, self._last_s = step, time.perf_counter()

    def is_due(self, step: int, most_steps: int) -> bool:
        """Whether to agree after `step` steps: at multiples of `most_steps`, and before LONGEST_S have passed."""
        allowed = LONGEST_S / self._step_s if self._step_s else 1  # the first step of all says how long they take
        return step % most_steps == 0 or step - self._last_step >= max(int(allowed), 1)

    def own_step_s(self, step: int) -> float:
        """Return this rank's seconds per step since the last agreement; 0 when there was none."""
        num_steps = step - self._last_step
        return (time.perf_counter() - self._last_s) / num_steps if num_steps else 0.0

    def agreed(self, step: int, slowest_step_s: float) -> None:
        """Note an agreement and the largest `own_step_s` of all ranks."""
        self._step_s = slowest_step_s or self._step_s
        self.start(step)


STOP_CHECK_STEPS = 10  # optimizer steps, at most, between two agreements of the ranks whether to stop
