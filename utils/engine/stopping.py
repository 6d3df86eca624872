"""When all ranks agree whether to stop: every few steps, and after every step where steps are slow.

A launcher or a scheduler kills what has not stopped within its grace period, which is at least 30 seconds.
"""

from __future__ import annotations

import time

from utils.distributed import max_over_ranks

STOP_CHECK_STEPS = 10  # optimizer steps, at most, between two agreements
LONGEST_S = 2.0  # between two agreements, unless a single step takes longer


class StopAgreement:
    """Decides when the next agreement is due, alike on all ranks: from the step and a time that all ranks share."""

    def __init__(self) -> None:
        self._step_s = 0.0  # of the slowest rank; 0: not known yet
        self._last_step = 0
        self._last_s = time.perf_counter()

    def start(self, step: int) -> None:
        """Count from `step` on: the time before it was not spent on steps alone."""
        self._last_step, self._last_s = step, time.perf_counter()

    @staticmethod
    def is_regular(step: int) -> bool:
        """Whether `step` is a multiple of STOP_CHECK_STEPS, after which every run agrees."""
        return step % STOP_CHECK_STEPS == 0

    def is_due(self, step: int) -> bool:
        """Whether to agree after `step` steps: at regular ones, and before LONGEST_S have passed."""
        allowed = LONGEST_S / self._step_s if self._step_s else 1  # the very first step shows how long steps take
        return self.is_regular(step) or step - self._last_step >= max(int(allowed), 1)

    def agree(self, step: int, wants_stop: bool, save_is_due: bool) -> tuple[bool, bool]:
        """Return whether any rank wants to stop, and whether any wants to save. Every rank must reach this."""
        num_steps = step - self._last_step
        own_step_s = (time.perf_counter() - self._last_s) / num_steps if num_steps else 0.0
        stops, saves, slowest_step_s = max_over_ranks([wants_stop, save_is_due, own_step_s])
        self._step_s = slowest_step_s or self._step_s
        self.start(step)
        return bool(stops), bool(saves)
