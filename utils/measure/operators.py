"""The operators of a training step: which take the most time, with torch.profiler, and how many each part has.

The profiler can also write a trace for the browser.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from utils.data.dataset import Batch
from utils.engine import TrainingEngine
from utils.engine.loading import tensors_in
from utils.engine.step_timer import Repeated, run_training_steps

MAX_OPERATORS = 10
LOSS_BACKWARD, NETWORK_BACKWARD = "loss backward", "network backward"
# report: sums of the values to report. The other parts are the phases of `utils.engine.step_timer`.
PARTS = ("input", "forward", "loss", LOSS_BACKWARD, NETWORK_BACKWARD, "report", "optimizer")
NETWORK_PARTS = ("forward", NETWORK_BACKWARD)


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
    run_training_steps(engine, Repeated(batch, 2), ranges.mark)  # warm-up: the first step does extra work
    with torch.profiler.profile(activities=activities, record_shapes=trace is not None) as profiler:
        run_training_steps(engine, Repeated(batch, steps), ranges.mark)
        ranges.close()
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
    """Return the MAX_OPERATORS operators with the largest own time, from the profiler's averages over `steps`.

    The time is the host's where the system does not let the profiler read the GPU's.
    """
    is_gpu = is_gpu and any(event.self_device_time_total > 0 for event in averages)
    time_us = (lambda event: event.self_device_time_total) if is_gpu else (lambda event: event.self_cpu_time_total)
    # The list also holds GPU kernels. Their time is already counted for the operator that launched them.
    is_operator = [
        event
        for event in averages
        if event.device_type == torch.autograd.DeviceType.CPU and time_us(event) > 0
        # Autograd's nodes and ranges have other names than `namespace::name`.
        if "::" in event.key and not event.key.startswith("autograd::")
    ]
    total_us = sum(time_us(event) for event in is_operator)
    chosen = sorted(is_operator, key=time_us, reverse=True)[:MAX_OPERATORS]
    return [
        Operator(event.key, event.count / steps, time_us(event) / 1000 / steps, time_us(event) / total_us)
        for event in chosen
    ]


class _Ranges(ExitStack):
    """Records each phase as a range of the trace; `close` ends the last one."""

    def mark(self, phase: str) -> None:
        """Begin `phase`."""
        self.close()
        self.enter_context(record_function(f"phase: {phase}"))


@dataclass(frozen=True)
class OperatorCount:
    """How many operators PyTorch was told to run, and how many of them compute: the others make views or empty tensors.

    A GPU needs at least one kernel for each operator that computes. Sorting or searching needs several.
    """

    operators: int = 0
    computing: int = 0

    def __add__(self, other: OperatorCount) -> OperatorCount:
        return OperatorCount(self.operators + other.operators, self.computing + other.computing)


def count_operators(engine: TrainingEngine, batch: Batch) -> dict[str, OperatorCount]:
    """Train three optimizer steps on `batch`; return the count of each of PARTS in the second, which logs nothing.

    Every rank must reach this when the engine is distributed.
    """
    counter = _Counter(engine.state.accumulate)
    hook = engine.state.model.register_forward_hook(counter.after_forward)
    try:
        with counter:
            run_training_steps(engine, Repeated(batch, 3 * engine.state.accumulate), counter.mark)
    finally:
        hook.remove()
    return counter.counts


def outside_network(counts: dict[str, OperatorCount]) -> OperatorCount:
    """Return the count of all parts but the network's own forward and backward pass."""
    return sum((count for part, count in counts.items() if part not in NETWORK_PARTS), OperatorCount())


class _Counter(TorchDispatchMode):
    """Counts operators by part in the second of several groups of batches. `mark` tells it the parts of the step."""

    def __init__(self, batches_per_step: int) -> None:
        super().__init__()
        self.counts = dict.fromkeys(PARTS, OperatorCount())
        self._counted_batches = range(batches_per_step, 2 * batches_per_step)
        self._batch = -1
        self._phase = ""

    def mark(self, phase: str) -> None:
        """Begin `phase`."""
        self._batch += phase == "input"
        self._phase = LOSS_BACKWARD if phase == "backward" else phase

    def after_forward(self, _module: Any, _inputs: Any, outputs: Any) -> None:
        """Watch for the end of the loss's backward pass. All of it runs before the network's."""
        for output in tensors_in(outputs):
            if output.requires_grad:
                output.register_hook(self._begin_network_backward)

    def _begin_network_backward(self, _gradient: torch.Tensor) -> None:
        self._phase = NETWORK_BACKWARD

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if self._batch in self._counted_batches and operator.namespace != "profiler":
            is_over = self._phase == NETWORK_BACKWARD and torch._C._current_autograd_node() is None
            computes = not operator.is_view and "empty" not in operator.overloadpacket.__name__
            self.counts["report" if is_over else self._phase] += OperatorCount(1, int(computes))
        return operator(*arguments, **(keywords or {}))
