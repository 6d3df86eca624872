"""Learning rate and momentum as pure functions of the optimizer step: a checkpoint need not hold
them.
"""

import math
from dataclasses import dataclass

import torch

# ours: after fewer, trained weights know less (docs/research/recipe.md); Ultralytics: 100
LEAST_WARMUP_STEPS = 200


@dataclass(frozen=True)
class ScheduleSpec:
    """Linear warm-up, then one half cosine down to `final_lr_fraction` of the peak, over
    `total_steps` optimizer steps.

    During warm-up momentum starts at `warmup_momentum` (YOLOv5's recipe, which YOLOv8 kept).
    """

    lr: float
    total_steps: int
    warmup_steps: int = 0
    final_lr_fraction: float = 0.01
    momentum: float = 0.937
    warmup_momentum: float = 0.8

    def lr_at(self, step: int) -> float:
        """Return the learning rate used by optimizer step `step` (counted from 0)."""
        progress = min(max(step / max(self.total_steps, 1), 0.0), 1.0)
        fraction = (
            self.final_lr_fraction
            + (1 - self.final_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2
        )
        return self.lr * fraction * min((step + 1) / max(self.warmup_steps, 1), 1.0)

    def momentum_at(self, step: int) -> float:
        """Return SGD's momentum (Adam's beta1) for optimizer step `step`."""
        if step >= self.warmup_steps:
            return self.momentum
        return (
            self.warmup_momentum
            + (self.momentum - self.warmup_momentum) * (step + 1) / self.warmup_steps
        )


class StepSchedule:
    """Sets an optimizer's learning rate and momentum from a `ScheduleSpec` before each step.

    A group may carry `lr_multiplier`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, spec: ScheduleSpec) -> None:
        self.optimizer = optimizer
        self.spec = spec

    def step_update(self, num_updates: int) -> None:
        """Prepare the optimizer for its step number `num_updates` (counted from 0)."""
        lr = self.spec.lr_at(num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_multiplier", 1.0)
            if "momentum" in group:
                group["momentum"] = self.spec.momentum_at(num_updates)
            elif "betas" in group:
                group["betas"] = (self.spec.momentum_at(num_updates), group["betas"][1])


def warmup_steps(warmup_epochs: float, steps_per_epoch: int, num_epochs: int) -> int:
    """Return the length of the warm-up in optimizer steps: `warmup_epochs`, but at most a tenth of
    the run.

    YOLOv8 warms up for 3 of 300 epochs; without the bound a 10-epoch run would spend a third of its
    steps on it. A warm-up has at least LEAST_WARMUP_STEPS, or a quarter of a shorter run.
    """
    total = steps_per_epoch * num_epochs
    steps = min(round(warmup_epochs * steps_per_epoch), max(total // 10, 1))
    return max(steps, min(LEAST_WARMUP_STEPS, total // 4)) if steps else 0
