"""The state of a training run: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Everything the loop counts; with the weights and the optimizer it is all that a resumed run needs."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches of the current epoch already used by every rank
    global_step: int = 0  # optimizer steps taken
    best_value: float | None = None
    best_epoch: int = -1
    stopped_early: bool = False
    left_out: list[list[int]] = field(default_factory=list)  # [epoch, batch] whose steps were undone: never used again
    trained: dict[str, Any] | None = None  # the record of the current epoch while only its validation is left to do
    history: dict[str, list[float]] = field(default_factory=dict)

    def regroup(self, before: int, now: int) -> None:
        """Count batches of a run that took `before` of them per optimizer step as batches of one that takes `now`."""
        self.batch = self.batch // before * now
        groups = sorted({(epoch, batch // before) for epoch, batch in self.left_out})
        self.left_out = [[epoch, group * now + number] for epoch, group in groups for number in range(now)]
