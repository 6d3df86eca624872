"""Find the operators that take the most time of a training step, with torch.profiler; write a trace for the browser."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from utils.data.dataset import Batch
from utils.engine import TrainingEngine
from utils.measure.step_timer import Repeated, run_training_steps

MAX_OPERATORS = 10


@dataclass(frozen=True)
class Operator:
    """One operator: calls per step, own ms per step (without the operators it calls), share of all operators' ms."""

    name: str
    calls: float
    ms: float
    share: float


def profile_operators(engine: TrainingEngine, batch: Batch, steps: int, trace: Path | None = None) -> list[Operator]:
    """Train `steps` steps under the profiler; return the most expensive operators in descending order.

    On a GPU, an operator's time is that of the kernels it launches. The file `trace` is for chrome://tracing or
    ui.perfetto.dev and shows the phases of each step as ranges.
    """
    # Otherwise the profiler's library writes its stages to stderr, even at the level 5 that Ultralytics sets.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    is_gpu = engine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    ranges = _Ranges()
    run_training_steps(engine, Repeated(batch, 2), ranges)  # warm-up: the first step does extra work
    with torch.profiler.profile(activities=activities, record_shapes=trace is not None) as profiler:
        run_training_steps(engine, Repeated(batch, steps), ranges)
        ranges.end()
        if is_gpu:
            torch.cuda.synchronize(engine.device)
    if trace is not None:
        temporary = trace.with_name(f".{os.getpid()}-{trace.name}")
        try:
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(trace)
        finally:
            temporary.unlink(missing_ok=True)
    return most_expensive(profiler.key_averages(), steps, is_gpu)


def most_expensive(averages: Any, steps: int, is_gpu: bool) -> list[Operator]:
    """Return the MAX_OPERATORS operators with the largest own time, from the profiler's averages over `steps`."""
    time_us = (lambda event: event.self_device_time_total) if is_gpu else (lambda event: event.self_cpu_time_total)
    # The list also holds GPU kernels. Their time is already counted for the operator that launched them.
    is_operator = [
        event
        for event in averages
        if event.device_type == torch.autograd.DeviceType.CPU and _is_operator_name(event.key) and time_us(event) > 0
    ]
    total_us = sum(time_us(event) for event in is_operator)
    chosen = sorted(is_operator, key=time_us, reverse=True)[:MAX_OPERATORS]
    return [
        Operator(event.key, event.count / steps, time_us(event) / 1000 / steps, time_us(event) / total_us)
        for event in chosen
    ]


def _is_operator_name(name: str) -> bool:
    """Return whether a name is an operator's, `namespace::name`, and not that of an autograd node or a range."""
    return "::" in name and not name.startswith("autograd::")


class _Ranges:
    """Records each phase as a range of the trace."""

    def __init__(self) -> None:
        self._range: Any = None

    def mark(self, phase: str) -> None:
        """See `utils.measure.step_timer.Marker`."""
        self.end()
        self._range = record_function(f"phase: {phase}")
        self._range.__enter__()

    def end(self) -> None:
        """End the last range."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
