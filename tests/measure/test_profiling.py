"""profile_gpu.py: the sweep over batch sizes and the best of them, operators, and the GPU's readings."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from utils.common import nvml
from utils.common.devices import choose_precision
from utils.data.synthetic import synthetic_batch
from utils.engine.step_timer import PHASES, Repeated, run_training_steps
from utils.measure import profiling
from utils.measure.operators import MAX_OPERATORS, most_expensive
from utils.measure.profiling import (
    BatchProfile,
    TooLarge,
    best_profile,
    forecast_on_cpu,
    profile_table,
    profile_until_full,
    state_bytes,
    verdict_lines,
)
from utils.yolo.model import build_model
from utils.yolo.training_step import build_training

# --- the sweep -------------------------------------------------------------------------------------------------------


def profile(batch_size: int, images_per_s: float, reserved_bytes: int | None = None) -> BatchProfile:
    step_ms = batch_size / images_per_s * 1000
    shares = dict(zip(PHASES, (0.0, 0.3, 0.1, 0.5, 0.1), strict=True))
    phase_ms = {phase: share * step_ms for phase, share in shares.items()}
    return BatchProfile(batch_size, 3, phase_ms, 0.5, batch_size * 2**20, reserved_bytes)


def test_the_sweep_ascends_and_stops_where_memory_ends() -> None:
    tried, announced = list[int](), list[int]()

    def measure(batch_size: int) -> BatchProfile:
        tried.append(batch_size)
        if batch_size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return profile(batch_size, 10.0 * batch_size)

    profiles, too_large = profile_until_full((32, 8, 4, 16, 8), measure, lambda done: announced.append(done.batch_size))
    assert tried == [4, 8, 16]
    assert announced == [found.batch_size for found in profiles] == [4, 8]
    assert too_large == TooLarge(16, "ran out of memory")
    assert verdict_lines(profiles, too_large)[1] == "Largest that fits: 8 (batch 16 ran out of memory)"


@pytest.mark.parametrize(
    "words", ["GET was unable to find an engine to execute this computation", "illegal memory access"]
)
def test_libraries_that_lack_memory_end_the_sweep_and_nothing_else_does(words: str) -> None:
    def measure(batch_size: int) -> BatchProfile:
        if batch_size > 4:
            raise RuntimeError(f"cuDNN error: {words}")
        return profile(batch_size, 10.0)

    if words == "illegal memory access":
        with pytest.raises(RuntimeError, match=words):
            profile_until_full((4, 8), measure, lambda _: None)
        return
    profiles, too_large = profile_until_full((4, 8), measure, lambda _: None)
    assert (len(profiles), too_large) == (1, TooLarge(8, "ran out of memory"))


def test_a_batch_beyond_the_machines_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def measure(batch_size: int) -> BatchProfile:
        tried.append(batch_size)
        return replace(profile(batch_size, 10.0), allocated_bytes=batch_size * 2**30, fixed_bytes=2**30)

    monkeypatch.setattr("utils.measure.profiling.available_memory_bytes", lambda: 10 * 2**30)
    profiles, too_large = profile_until_full((4, 8, 32), measure, lambda _: None, forecast_on_cpu)
    assert tried == [4, 8]  # 8 takes 3 GiB more than 4, 32 would take 21 more than 8
    assert too_large is not None
    assert verdict_lines(profiles, too_large)[1] == (
        "Largest that fits: 8 (batch 32 was not tried: about 21.0 GiB more than batch 8, 10.0 GiB available)"
    )


FASTER_IF_LARGER = {4: (60.0, 40), 8: (97.0, 80), 16: (120.0, 95)}  # images/s and bytes


@pytest.mark.parametrize(
    ("speeds", "capacity_bytes", "best"),
    [
        (FASTER_IF_LARGER, None, 16),
        (FASTER_IF_LARGER, 100, 8),  # 16 leaves less than a tenth
        (FASTER_IF_LARGER, 42, 4),  # none leaves a tenth: the smallest
        ({4: (60.0, 1), 8: (97.5, 1), 16: (100.0, 1), 32: (98.0, 1)}, None, 8),  # the smallest near the fastest
        ({4: (60.0, 1)}, None, 4),
    ],
)
def test_the_best_batch_is_the_smallest_near_the_fastest_that_leaves_headroom(
    speeds: dict[int, tuple[float, int]], capacity_bytes: int | None, best: int
) -> None:
    profiles = [profile(size, speed, reserved) for size, (speed, reserved) in speeds.items()]
    assert best_profile(profiles, capacity_bytes).batch_size == best
    line = verdict_lines(profiles, None, capacity_bytes)[0]
    assert line.startswith(f"Best: --batch-size {best} ({speeds[best][0]:.1f} images/s")
    assert ("none leaves 10% of the memory free" in line) == (capacity_bytes == 42)


def test_the_table_shows_reserved_memory_only_where_there_is_any() -> None:
    assert "peak RSS" in profile_table([profile(4, 60.0)])
    table = profile_table([profile(4, 60.0, reserved_bytes=3 * 2**30)])
    assert "3.0 GiB" in table
    assert "peak RSS" not in table


# --- what is known of a step beside its duration ---------------------------------------------------------------------

CPU = torch.device("cpu")


def test_what_a_batch_does_not_change_is_weights_average_and_optimizer() -> None:
    training = build_training(build_model("yolov8n-seg.yaml", ("a", "b")), CPU, choose_precision("off", CPU), "adamw")
    run_training_steps(training, Repeated(synthetic_batch(1, 64, 2, objects_per_image=3), 1), training.mark)
    weights = sum(weight.numel() * 4 for weight in training.state.model.parameters())
    assert state_bytes(training) == pytest.approx(4 * weights, rel=0.02)  # AdamW holds two values for each


def event(key: str, us: float, *, device_us: float = 0.0, on_gpu: bool = False) -> Any:
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return SimpleNamespace(key=key, count=4, self_cpu_time_total=us, self_device_time_total=device_us, device_type=kind)


def test_operators_are_ranked_by_their_own_time() -> None:
    operators = [event(f"aten::op{number}", 100.0 * number) for number in range(1, 15)]
    noise = [event("phase: forward", 9e9), event("autograd::engine::evaluate_function: X", 9e9)]
    found = most_expensive([*operators, *noise], 2, is_gpu=False)
    numbers = range(14, 14 - MAX_OPERATORS, -1)
    assert [operator.name for operator in found] == [f"aten::op{number}" for number in numbers]
    assert found[0].ms == pytest.approx(0.7)  # 1400 us in two steps
    assert found[0].calls == 2
    assert found[0].share == pytest.approx(14 / 105)


def test_on_a_gpu_the_kernels_of_an_operator_count_once() -> None:
    averages = [
        event("aten::convolution", 900.0, device_us=100.0),
        event("aten::relu", 50.0, device_us=300.0),
        event("sm90_xmma::gemm", 0.0, device_us=300.0, on_gpu=True),
    ]
    first, second = most_expensive(averages, 1, is_gpu=True)
    assert (first.name, first.share, second.name, second.share) == ("aten::relu", 0.75, "aten::convolution", 0.25)


class FakeGpu:
    """Stands for NVML's view of a GPU."""

    def __init__(self, index: int) -> None:
        self.index = index

    def read(self) -> dict[str, float]:
        return {"gpu_util": 0.9, "gpu_power_w": 400.0, "gpu_temperature_c": 60.0}


def test_a_gpus_readings_are_taken_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "Gpu", FakeGpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    watch = nvml.GpuWatch(1, print, 0.1)
    monkeypatch.setattr(profiling, "GpuWatch", lambda index, *_: watch if index == watch.device_index else None)
    with profiling._utilisation(torch.device("cuda", 1)) as readings:
        while not watch._count:  # the thread's first reading
            pass
    assert readings == {"gpu_util": 0.9, "gpu_power_w": 400.0, "gpu_temperature_c": 60.0}
