"""Parts that look closely at one training step. Each of them runs alone."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu.plan import Finding, Json, NeedsGpu, Setting
from benchmarks.gpu.trainings import precisions_of
from yolo_seg_ddp.engine import TrainingEngine
from yolo_seg_ddp.measure.profiling import profile_operators
from yolo_seg_ddp.measure.step_timer import (
    Repeated,
    build_training,
    run_training_steps,
    time_training_steps,
)
from yolo_seg_ddp.measure.synthetic import synthetic_batch, training_colours
from yolo_seg_ddp.utils.devices import Precision, choose_device, choose_precision, tune_device
from yolo_seg_ddp.yolo.model import build_model

CLASSES = tuple("abcdefgh")


def look_at_steps(setting: Setting) -> Finding:
    """Count kernels and host waits of one training step of both models."""
    device = choose_device(setting.device, 0)
    tune_device(device, deterministic=False, fixed_shapes=True)
    figures = {}
    for name, model in (("n", setting.sizes.small_model), ("m", setting.sizes.large_model)):
        engine = new_training(model, device, choose_precision("auto", device))
        batch = new_batch(setting, device)
        run_training_steps(engine, Repeated(batch, 3))
        engine.model.train()

        def step(engine: TrainingEngine = engine, batch: Any = batch) -> None:
            engine.forward_backward(batch)
            engine.update()

        waits = host_waits_of(step) if setting.is_gpu else {}
        figures[name] = {
            **kernels_of(step, device),
            **traced(setting, engine, batch, name),
            "host_waits": sum(waits.values()),
            "host_waits_by_place": waits,
        }
    said = "; ".join(
        f"{name}: {counts['kernels']} kernels, {counts['host_waits']} host waits"
        for name, counts in figures.items()
    )
    return Finding(said if setting.is_gpu else "a CPU launches no kernels", dict(figures))


def traced(setting: Setting, engine: TrainingEngine, batch: Any, name: str) -> Json:
    """Return the most expensive operators; of the small model also write a trace of two steps, for
    ui.perfetto.dev.
    """
    trace = setting.folder / "operators" / "trace.json" if name == "n" else None
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
    return {"most_expensive": profile_operators(engine, batch, 2, trace).splitlines()}


def host_waits_of(step: Callable[[], None]) -> dict[str, int]:
    """Return how often the host waits for the GPU in a step, by line of code, as PyTorch itself
    reports it.
    """
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    waits = [entry for entry in caught if "synchronizing CUDA operation" in str(entry.message)]
    return dict(Counter(f"{entry.filename}:{entry.lineno}" for entry in waits))


def kernels_of(step: Callable[[], None], device: torch.device) -> Json:
    """Return how many kernels a step launches on a GPU, and the most frequent ones by name."""
    kernels: Counter[str] = Counter()
    if device.type == "cuda":
        # otherwise the profiler's library writes its stages to stderr
        os.environ["KINETO_LOG_LEVEL"] = "99"
        with torch.profiler.profile(
            activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
        ) as profiler:
            step()
            torch.cuda.synchronize(device)
        on_gpu = [
            one
            for one in profiler.key_averages()
            if one.device_type != torch.autograd.DeviceType.CPU
        ]
        # The optimizer marks its step by a range, which is no kernel.
        kernels = Counter(
            {one.key[:80]: one.count for one in on_gpu if not one.key.startswith("Optimizer.")}
        )
    return {"kernels": kernels.total(), "kernels_by_name": dict(kernels.most_common(15))}


def cost_of_options(setting: Setting) -> Finding:
    """Time a step in each precision, with --deterministic, without cuDNN's search (as in
    multi-scale), and of other models.
    """
    sizes = setting.sizes
    device = choose_device(setting.device, 0)
    half = precisions_of(setting)[1]
    small = sizes.small_model
    variants = {  # model, precision, deterministic, fixed shapes
        **{
            "fp32" if amp == "off" else amp: (small, amp, False, True)
            for amp in precisions_of(setting)
        },
        f"{half} deterministic": (small, half, True, True),
        f"{half} without cuDNN's search": (small, half, False, False),
        **{
            f"{half} {name}": (f"{name}n-seg.yaml", half, False, True)
            for name in ("yolo11", "yolo26")
        },
    }
    batch = new_batch(setting, device)
    engines = {
        name: new_training(one[0], device, choose_precision(one[1], device))
        for name, one in variants.items()
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(sizes.rounds):
        for name, (_, _, deterministic, fixed) in variants.items():
            tune_device(device, deterministic=deterministic, fixed_shapes=fixed)
            times[name] += (
                time_training_steps(engines[name], batch, sizes.rounds, sizes.steps).sum(1).tolist()
            )
    medians = {name: statistics.median(values) for name, values in times.items()}
    return Finding(
        ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items()), {"step_ms": medians}
    )


def cost_of_compiling(setting: Setting) -> Finding:
    """Time a step of the small model with torch.compile and without, and the start that compiling
    takes.
    """
    if not setting.is_gpu:
        raise NeedsGpu("compiling takes minutes on a CPU")
    sizes = setting.sizes
    device = choose_device(setting.device, 0)
    tune_device(device, deterministic=False, fixed_shapes=True)
    batch = new_batch(setting, device)
    precision = choose_precision("auto", device)
    plain, compiled = (new_training(sizes.small_model, device, precision) for _ in range(2))
    compiled.state.model.compile()
    start_s = time.perf_counter()
    time_training_steps(compiled, batch, 1, 1)
    figures = {"start_s": time.perf_counter() - start_s}
    for name, engine in {"plain_ms": plain, "compiled_ms": compiled}.items():
        steps_ms = time_training_steps(
            engine, batch, 2 * sizes.rounds, sizes.rounds * sizes.steps
        ).sum(1)
        figures[name] = statistics.median(steps_ms.tolist())
    return Finding(
        f"{figures['compiled_ms']:.1f} ms, without {figures['plain_ms']:.1f} ms; start "
        f"{figures['start_s']:.0f} s",
        figures,
    )


def new_training(model: str, device: torch.device, precision: Precision) -> TrainingEngine:
    """Return the engine of a fresh training, ready for steps."""
    torch.manual_seed(0)
    engine = build_training(build_model(model, CLASSES), device, precision)
    engine.model.train()
    return engine


def new_batch(setting: Setting, device: torch.device) -> Any:
    """Return a synthetic batch in the training's form, page-locked for a GPU."""
    sizes = setting.sizes
    colours = training_colours(device)
    batch = synthetic_batch(sizes.batch_size, sizes.full_px, len(CLASSES), colours=colours)
    return batch.pin_memory() if device.type == "cuda" else batch
