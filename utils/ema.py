"""Exponential moving average of a model's weights."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn


class ModelEMA:
    """Keeps `ema = decay * ema + (1 - decay) * model` over all floating-point weights and buffers.

    The decay ramps up, `decay * (1 - exp(-updates / ramp_updates))`, so that early, useless weights are soon forgotten
    (YOLOv5's recipe, ramp 2000). Every rank updates its own copy from equal weights, so all copies stay equal.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, ramp_updates: float = 2000.0) -> None:
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay
        self.ramp_updates = ramp_updates
        self.updates = 0

    def decay_at(self, updates: int) -> float:
        """Return the decay used by update number `updates` (counted from 1)."""
        return self.decay * (1 - math.exp(-updates / self.ramp_updates)) if self.ramp_updates > 0 else self.decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards `model` (the raw module, not its DDP wrapper)."""
        self.updates += 1
        weight = 1 - self.decay_at(self.updates)
        source = model.state_dict()
        averaged, current = [], []
        for name, value in self.module.state_dict().items():
            if value.dtype.is_floating_point:
                averaged.append(value)
                current.append(source[name].detach())
            else:
                value.copy_(source[name])
        torch._foreach_lerp_(averaged, current, weight)
