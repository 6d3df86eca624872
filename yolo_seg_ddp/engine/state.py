"""The state of a training run, with the moving average of the weights:
all that a checkpoint holds.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn


class ModelEMA:
    """Keeps `ema = decay * ema + (1 - decay) * model` over all floating-point weights and buffers.

    The decay ramps up, `decay * (1 - exp(-updates / ramp_updates))`, so that the average soon
    forgets the first weights (YOLOv5's recipe, ramp 2000). Every rank updates its own copy from
    equal weights, so all copies stay equal.
    """

    def __init__(
        self, model: nn.Module, decay: float = 0.9999, ramp_updates: float = 2000.0
    ) -> None:
        self.module = copy.deepcopy(model).eval()
        self.module.requires_grad_(False)
        self.decay = decay
        self.ramp_updates = ramp_updates
        self.updates = 0
        self._source: nn.Module | None = None
        # For each tensor of the state: the dictionaries that hold it here and in `_source`, and its
        # name in them.
        self._places: list[tuple[dict[str, Any], dict[str, Any], str]] = []

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards `model` (the raw module, not its DDP wrapper)."""
        self.updates += 1
        share = 1 - math.exp(-self.updates / self.ramp_updates) if self.ramp_updates > 0 else 1.0
        weight = 1 - self.decay * share
        if model is not self._source:
            # Walking the modules takes longer than the arithmetic, so it is done once. The
            # dictionaries are kept instead of the tensors, because a move to another device or
            # `load_state_dict` may replace the tensors.
            pairs = zip(_state_places(self.module), _state_places(model), strict=True)
            self._source = model
            self._places = [(averages, others, name) for (averages, name), (others, _) in pairs]
        averaged: list[torch.Tensor] = []
        current: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        counted: list[torch.Tensor] = []
        for averages, others, name in self._places:
            value = averages[name]
            is_averaged = value.dtype.is_floating_point
            (averaged if is_averaged else kept).append(value)
            (current if is_averaged else counted).append(others[name])
        torch._foreach_lerp_(averaged, current, weight)
        if kept:
            torch._foreach_copy_(kept, counted)


def _state_places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dictionary and the name of every parameter and persistent buffer, in the order of
    the modules.
    """
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield part._parameters, name
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield part._buffers, name


@dataclass
class Progress:
    """What the loop counts."""

    epoch: int = 0  # epochs completed
    batch: int = 0  # batches of the current epoch that every rank has used
    global_step: int = 0  # optimizer steps taken
    best_value: float | None = None
    best_epoch: int = -1
    stopped_early: bool = False
    # [epoch, batch] after a roll-back: never used again
    left_out: list[list[int]] = field(default_factory=list)
    # of the current epoch when only its validation remains
    record_awaiting_validation: dict[str, Any] | None = None
    history: dict[str, list[float]] = field(default_factory=dict)

    def regroup(self, before: int, now: int) -> None:
        """Convert counts of a run with `before` batches per optimizer step to one with `now`."""
        self.batch = self.batch // before * now
        groups = sorted({(epoch, batch // before) for epoch, batch in self.left_out})
        self.left_out = [
            [epoch, group * now + number] for epoch, group in groups for number in range(now)
        ]


@dataclass
class TrainState:
    """Weights, moving average, optimizer, scheduler, gradient scaler and progress.

    Checkpoints hold nothing else.
    """

    model: nn.Module  # the raw module, not its DDP wrapper
    ema: ModelEMA | None
    scaler: torch.amp.GradScaler
    accumulate: int  # batches per optimizer step: the unit in which `progress.batch` moves
    progress: Progress = field(default_factory=Progress)
    optimizer: torch.optim.Optimizer = field(init=False)  # set when training begins
    scheduler: Any = None

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules by the names of their parts of a checkpoint."""
        return {"model": self.model, **({"ema": self.ema.module} if self.ema else {})}

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values; the tensors are those in use, not copies."""
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
            "ema_updates": self.ema.updates if self.ema else 0,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict()
            if hasattr(self.scheduler, "state_dict")
            else None,
            "scaler": self.scaler.state_dict(),
            "progress": asdict(self.progress),
            "accumulation_steps": self.accumulate,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, also by an earlier version or with another
        `accumulate`.
        """
        groups = (one["param_groups"][0] for one in (state["optimizer"], vars(self.optimizer)))
        saved, current = (
            "AdamW" if "betas" in group else "MuSGD" if "use_muon" in group else "SGD"
            for group in groups
        )
        # PyTorch would accept it and fail at the first step.
        if saved != current:
            raise ValueError(f"it holds the state of {saved}")
        self.model.load_state_dict(state["model"])
        if self.ema is not None and state["ema"] is not None:
            self.ema.module.load_state_dict(state["ema"])
            self.ema.updates = state["ema_updates"]
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scheduler"] is not None and hasattr(self.scheduler, "load_state_dict"):
            self.scheduler.load_state_dict(state["scheduler"])
        # It is empty from a run without a scaler; this device may need one.
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        progress = dict(state["progress"])
        # This was the field's name in checkpoints of versions before 0.2.
        if "trained" in progress:
            progress["record_awaiting_validation"] = progress.pop("trained")
        self.progress = Progress(**progress)
        self.progress.regroup(state.get("accumulation_steps", self.accumulate), self.accumulate)
