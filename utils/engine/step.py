"""One training step: forward, loss and backward of each batch, then the optimizer's update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.common.devices import Precision
from utils.distributed import average_tensors
from utils.engine.loading import Upload
from utils.engine.meters import RankMeter
from utils.engine.nonfinite import NonFiniteGuard
from utils.engine.options import EngineOptions
from utils.engine.state import TrainState
from utils.engine.task import Batch, Task, batch_length, named_values

Mark = Callable[[str], object]  # is called where a phase of a step begins: input, forward, loss, backward, optimizer


@dataclass(eq=False)
class Step:
    """The steps of one rank. `model` is what is called: the module of `state`, or its DDP wrapper."""

    model: nn.Module
    state: TrainState
    task: Task
    options: EngineOptions
    precision: Precision
    rank_meter: RankMeter

    def __post_init__(self) -> None:
        self.device = self.rank_meter.device
        self.is_distributed = isinstance(self.model, DistributedDataParallel)
        self.syncs_batchnorm = self.is_distributed and self.options.sync_batchnorm
        self.clip_norm = math.inf if self.options.clip_norm is None else self.options.clip_norm
        self.upload = Upload(self.device)
        self.guard = NonFiniteGuard(self.device)
        self.mark: Mark = lambda phase: None

    def forward_backward(
        self, batch: Batch, group_size: int = 1, *, is_first: bool = True, is_last: bool = True
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Add a batch's gradients; return its values to report and its number of samples.

        The batch is one of `group_size` of an optimizer step. The last one sends the gradients over the network.
        """
        criterion = self.task.criterion
        grouped: Any = criterion if self.state.accumulate > 1 and hasattr(criterion, "begin_group") else None
        if grouped is not None and is_first:
            grouped.begin_group()
        self.mark("input")
        inputs, targets = self.upload(self.task.prepare, batch)
        hold = not is_last and self.is_distributed
        with self.model.no_sync() if hold else contextlib.nullcontext():  # type: ignore[operator]
            if self.syncs_batchnorm:
                self.rank_meter.meet()  # the first BatchNorm waits for the other ranks
            with self.precision.autocast(self.device):
                self.mark("forward")
                outputs = self.model(inputs)
                self.rank_meter.meet()  # the loss may wait for the other ranks
                self.mark("loss")
                loss, values = named_values(self.task.loss(outputs, targets))
            self.mark("backward")
            if grouped is None:
                loss = loss / group_size if group_size > 1 else loss
            elif gradients := [weight.grad for weight in self.state.model.parameters() if weight.grad is not None]:
                torch._foreach_mul_(gradients, grouped.gradient_rescale)
            self.state.scaler.scale(loss).backward()
        return values, batch_length(inputs)

    def update(self) -> None:
        """Take the optimizer's step with the gradients so far, then update statistics and moving average."""
        state = self.state
        self.mark("optimizer")
        if hasattr(state.scheduler, "step_update"):
            state.scheduler.step_update(state.progress.global_step)
        state.scaler.unscale_(state.optimizer)
        norm = nn.utils.clip_grad_norm_(state.model.parameters(), self.clip_norm, foreach=True)
        self.guard.step(state.optimizer, norm)
        state.scaler.update()  # lowers its scale after a non-finite gradient; without fp16 it does nothing
        state.optimizer.zero_grad(set_to_none=True)
        if self.is_distributed and not self.syncs_batchnorm:
            # Statistics of frozen layers are equal on all ranks and stay bitwise as they are.
            training = (module for module in state.model.modules() if module.training)
            average_tensors(buffer for module in training for buffer in module.buffers(recurse=False))
        if state.ema is not None:
            state.ema.update(state.model)
        state.progress.global_step += 1
