"""Exponential moving average of a model's weights."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class ModelEMA:
    """Keeps `ema = decay * ema + (1 - decay) * model` over all floating-point weights and buffers.

    The decay ramps up, `decay * (1 - exp(-updates / ramp_updates))`, so that the average soon forgets the first
    weights (YOLOv5's recipe, ramp 2000). Every rank updates its own copy from equal weights, so all copies stay equal.
    """

    def __init__(self, model: nn.Module, decay: float = 0.9999, ramp_updates: float = 2000.0) -> None:
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay
        self.ramp_updates = ramp_updates
        self.updates = 0
        self._source: nn.Module | None = None
        self._places: list[tuple[dict[str, Any], dict[str, Any], str]] = []

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards `model` (the raw module, not its DDP wrapper)."""
        self.updates += 1
        share = 1 - math.exp(-self.updates / self.ramp_updates) if self.ramp_updates > 0 else 1.0
        weight = 1 - self.decay * share
        if model is not self._source:
            self._source, self._places = model, self._pair_up(model)
        averaged: list[torch.Tensor] = []
        current: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        counted: list[torch.Tensor] = []
        for own, others, name in self._places:
            value = own[name]
            is_averaged = value.dtype.is_floating_point
            (averaged if is_averaged else kept).append(value)
            (current if is_averaged else counted).append(others[name])
        torch._foreach_lerp_(averaged, current, weight)
        if kept:
            torch._foreach_copy_(kept, counted)

    def _pair_up(self, model: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
        """Return, for each tensor of the state, the dictionaries that hold it here and in `model`, and its name in them.

        Walking the modules takes longer than the arithmetic, so it is done once. The dictionaries are kept instead of the
        tensors, because a move to another device or `load_state_dict` may replace the tensors.
        """
        own, others = list(_state_places(self.module)), list(_state_places(model))
        return [(mine, theirs, name) for (mine, name), (theirs, _) in zip(own, others, strict=True)]


def _state_places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dictionary and the name of every parameter and persistent buffer, in the order of the modules."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield part._parameters, name
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield part._buffers, name
