"""Which operators a training step spends its time in, by torch.profiler, and the trace to look at in a browser."""

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

MOST = 10


@dataclass(frozen=True)
class Operator:
    """One operator: calls and own ms per step (what it calls itself left out), and that as a share of all operators'."""

    name: str
    calls: float
    ms: float
    share: float


def profile_operators(engine: TrainingEngine, batch: Batch, steps: int, trace: Path | None = None) -> list[Operator]:
    """Train `steps` steps under the profiler; return the most expensive operators, the first one first.

    On a GPU the time is that of the kernels which an operator launches. `trace` is written for chrome://tracing or
    ui.perfetto.dev, with the phases of the steps as ranges.
    """
    os.environ["KINETO_LOG_LEVEL"] = (
        "99"  # else the profiler's library writes its stages to stderr (at Ultralytics' 5 too)
    )
    is_gpu = engine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    ranges = _Ranges()
    run_training_steps(engine, Repeated(batch, 2), ranges)  # what only a first step does stays out
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
    """Return the MOST operators with the largest own time out of the profiler's averages over `steps`."""
    time_us = (lambda event: event.self_device_time_total) if is_gpu else (lambda event: event.self_cpu_time_total)
    # A kernel stands in the list too, beside the operator that launched it: on the device's side.
    is_operator = [
        event
        for event in averages
        if event.device_type == torch.autograd.DeviceType.CPU and _is_operator_name(event.key) and time_us(event) > 0
    ]
    total_us = sum(time_us(event) for event in is_operator)
    chosen = sorted(is_operator, key=time_us, reverse=True)[:MOST]
    return [
        Operator(event.key, event.count / steps, time_us(event) / 1000 / steps, time_us(event) / total_us)
        for event in chosen
    ]


def _is_operator_name(name: str) -> bool:
    """Tell operators, `namespace::name`, from autograd's nodes around them and from ranges."""
    return "::" in name and not name.startswith("autograd::")


class _Ranges:
    """Turns marks into ranges of the trace, one for each phase."""

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
