"""Time the phases of real training steps: the engine's own loop runs, and what it calls tells where
each phase begins.

On a GPU the times are CUDA events on the compute stream, so timing does not synchronise; on a CPU
they are `perf_counter`.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.engine.state import Progress
from yolo_seg_ddp.utils.devices import Precision
from yolo_seg_ddp.yolo.loss26 import loss_for
from yolo_seg_ddp.yolo.model import YoloModel
from yolo_seg_ddp.yolo.optimizer import GRADIENT_CLIP_NORM, OptimizerPlan, build_optimizer
from yolo_seg_ddp.yolo.options import NOMINAL_BATCH_SIZE
from yolo_seg_ddp.yolo.training_step import SegmentationStep

# input: upload and conversion to float, on a GPU only the part for which the arithmetic waits;
# optimizer: gradient clip, update, moving average of the weights.
PHASES = ("input", "forward", "loss", "backward", "optimizer")
Mark = Callable[[str], object]  # is called where a phase begins
LEARNING_RATE = 1e-5  # small, so that training on noise does not diverge
WEIGHT_DECAY = 5e-4
MOMENTUM = 0.9


class StepTimer:
    """Records when phases begin; a phase lasts until the next mark."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Begin `phase`, one of PHASES; on a GPU, after the work that is queued now."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            # On the compute stream: when "input" begins, the upload stream is the current one.
            event.record(torch.cuda.default_stream(self.device))
            self._marks.append((phase, event))
        else:
            self._marks.append((phase, time.perf_counter()))

    def phases_ms(self) -> np.ndarray:
        """Return the ms of the phases of every complete step, float64 (steps, 5). Waits for the
        GPU.

        A step is complete when the next one has begun. Raises ValueError when a step lacks a phase.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        moments = [moment for _, moment in self._marks]
        durations = [
            self._between_ms(first, second) for first, second in itertools.pairwise(moments)
        ]
        num_steps = len(durations) // len(PHASES)
        marked = [phase for phase, _ in self._marks[: num_steps * len(PHASES)]]
        if marked != [*PHASES] * num_steps:
            raise ValueError(
                f"the phases of a step are {', '.join(PHASES)}, but {', '.join(marked)} were marked"
            )
        return np.array(durations[: len(marked)], np.float64).reshape(num_steps, len(PHASES))

    def _between_ms(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) if self.device.type == "cuda" else (second - first) * 1000


def build_training(
    model: YoloModel, device: torch.device, precision: Precision, optimizer: str = "musgd"
) -> TrainingEngine:
    """Set up the trainer's engine with the defaults of `train_yolo_ddp.py`: channels last, clip,
    EMA, DDP.

    One difference: each rank keeps its own BatchNorm statistics. `optimizer` is one of
    OPTIMIZER_NAMES.
    """
    model = model.to(device, memory_format=torch.channels_last)
    options = EngineOptions(
        precision=precision.name, clip_norm=GRADIENT_CLIP_NORM, static_graph=True, quiet=True
    )
    engine = TrainingEngine(model, device, options, task=SegmentationStep())
    plan = OptimizerPlan(optimizer, LEARNING_RATE, WEIGHT_DECAY, MOMENTUM, NOMINAL_BATCH_SIZE, ())
    engine.begin(build_optimizer(model, plan), loss_for(model))
    return engine


def time_training_steps(
    engine: TrainingEngine, batch: Any, warmup_steps: int, steps: int
) -> np.ndarray:
    """Train `steps` steps on `batch` after `warmup_steps` (at least 1); return their phases in ms:
    (steps, 5).

    The engine logs its first and last step, which costs a collective; neither is timed. Every rank
    must reach this when the engine is distributed.
    """
    timer = StepTimer(engine.device)
    run_training_steps(engine, Repeated(batch, max(warmup_steps, 1) + steps + 1), timer.mark)
    return timer.phases_ms()[-steps:]


def run_training_steps(
    engine: TrainingEngine, loader: Any, mark: Mark = lambda phase: None
) -> None:
    """Train one epoch of `loader` with the engine's own loop, which calls `mark` where each phase
    begins.

    Every rank must reach this when the engine is distributed.
    """
    engine.state.progress = Progress()
    engine.options = replace(engine.options, epochs=1, log_interval=len(loader))
    # What the loop calls in each step, and the phases that begin before and after the call.
    called: list[tuple[object, str, list[str]]] = [
        (engine, "upload", ["input"]),
        (engine, "network", ["forward"]),
        (engine.task, "loss", ["loss", "backward"]),
        (engine, "update", ["optimizer"]),
    ]
    before = [getattr(owner, name) for owner, name, _ in called]
    try:
        for (owner, name, phases), call in zip(called, before, strict=True):
            setattr(owner, name, _marked(call, mark, *phases))
        engine.train_one_epoch(loader)
    finally:
        for (owner, name, _), call in zip(called, before, strict=True):
            setattr(owner, name, call)


def _marked(call: Callable[..., Any], mark: Mark, first: str, then: str = "") -> Callable[..., Any]:
    """Return a function that marks one phase, calls `call`, and then marks another, if there is
    one.
    """

    def marked(*arguments: Any) -> Any:
        mark(first)
        result = call(*arguments)
        if then:
            mark(then)
        return result

    return marked


def middle_half(phases_ms: np.ndarray) -> np.ndarray:
    """Return the mean phases (5,) of the middle half of all steps (steps, 5), ordered by duration.

    This is as robust against single slow steps as a median, and the phases still add up to the
    step.
    """
    order = np.argsort(phases_ms.sum(1), kind="stable")
    cut = len(order) // 4 if len(order) != 3 else 1
    return phases_ms[order[cut : len(order) - cut]].mean(0)


class Repeated:
    """A loader that yields one batch `times` times, so that loading takes no time.

    For a GPU it pins the batch's memory.
    """

    def __init__(self, batch: Any, times: int) -> None:
        self.batch = batch.pin_memory() if torch.cuda.is_available() else batch
        self.times = times

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[Any]:
        return iter([self.batch] * self.times)
