"""What profile_gpu.py knows of a step beside its duration: memory by kind, operations, the device's limits, operators."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from utils.common import nvml
from utils.common.devices import choose_precision
from utils.measure.operators import MAX_OPERATORS, most_expensive
from utils.measure.profiling import observe_step
from utils.measure.roofline import DeviceLimits, compare_with_limits, measure_limits, roofline_lines
from utils.measure.step_timer import build_training
from utils.measure.synthetic import synthetic_batch
from utils.measure.tensor_memory import TensorMemory, _by_kind
from utils.yolo.model import build_model

CPU = torch.device("cpu")
KIB = 1024

pytestmark = pytest.mark.usefixtures("one_thread")


def live(memory: TensorMemory) -> dict[str, int]:
    """Return the bytes of the tensors that are alive now, by kind."""
    return _by_kind(memory._blocks.values())


def test_memory_is_counted_while_it_lives() -> None:
    with TensorMemory(CPU, {}) as memory:
        first = torch.zeros(KIB)  # 4 KiB
        second = first + 1
        del first
        third = second.reshape(32, 32)[:16]  # the same storage
        assert sum(live(memory).values()) == 4 * KIB
        del second
        assert sum(live(memory).values()) == 4 * KIB
        del third
        assert sum(live(memory).values()) == 0
    assert memory.peak["temporary"] == 8 * KIB


def test_each_kind_is_told_from_the_others() -> None:
    layer = nn.Linear(256, 256, bias=False)  # 256 KiB of weights
    with TensorMemory(CPU, {"weights": layer.parameters()}) as memory:
        hooks = memory.watch_gradients(layer.parameters())
        memory.mark("input")
        inputs = torch.ones(64, 256)  # 64 KiB
        memory.mark("forward")
        outputs = layer(inputs).exp()  # saves its result: 64 KiB; the product before it is let go
        at_forward = dict(live(memory))
        outputs.sum().backward()
        del outputs
        assert live(memory)["gradients"] == 256 * KIB
        layer.zero_grad(set_to_none=True)
        assert live(memory)["gradients"] == 0
    for hook in hooks:
        hook.remove()
    assert at_forward == {
        **dict.fromkeys(at_forward, 0),
        "weights": 256 * KIB,
        "input": 64 * KIB,
        "activations": 64 * KIB,
    }
    assert memory.peak["gradients"] == 256 * KIB  # at the end of the backward pass, when the gradient is complete


def test_bytes_moved_are_those_read_and_written() -> None:
    first, second = torch.ones(KIB), torch.ones(KIB)
    with TensorMemory(CPU, {}) as memory:
        _ = first + second
        assert memory.bytes_moved == 3 * 4 * KIB
        _ = first.view(32, 32)  # nothing moves
        assert memory.bytes_moved == 3 * 4 * KIB


def test_a_training_steps_memory_and_operations() -> None:
    training = build_training(build_model("yolov8n-seg.yaml", ("a", "b")), CPU, choose_precision("off", CPU), "adamw")
    batch = synthetic_batch(2, 64, 2, objects_per_image=3)
    observe_step(training, batch)  # the optimizer's state comes to be
    memory, flop = observe_step(training, batch)
    weights = sum(weight.numel() * 4 for weight in training.state.model.parameters())
    assert memory.peak["weights"] == pytest.approx(weights, rel=0.02)  # and the running statistics
    assert memory.peak["averaged weights"] == memory.peak["weights"]
    assert memory.peak["optimizer"] == pytest.approx(2 * weights, rel=0.02)
    largest, _ = observe_step(training, synthetic_batch(8, 160, 2, objects_per_image=3))
    assert largest.peak["activations"] > 8 * memory.peak["activations"]
    # YOLOv8n-seg is given as 12.6 GFLOP (two to a multiply-add) forward at 640 pixels, and the backward pass does twice that.
    assert flop == pytest.approx(3 * 12.6e9 * 2 * (64 / 640) ** 2, rel=0.15)


def test_the_roofline_names_the_nearer_limit() -> None:
    limits = DeviceLimits(100e12, 80e12, bytes_per_s=1e12, matmul_side=8192, dtype="bfloat16")
    fast = compare_with_limits(flop=10**13, bytes_moved=10**9, step_s=0.2, limits=limits)
    assert (fast["limited_by"], fast["of_peak"], fast["shortest_s"]) == (
        "arithmetic",
        pytest.approx(0.5),
        pytest.approx(0.1),
    )
    slow = compare_with_limits(flop=10**12, bytes_moved=10**11, step_s=0.2, limits=limits)
    assert (slow["limited_by"], slow["shortest_s"]) == ("memory traffic", pytest.approx(0.1))
    line = roofline_lines(slow, limits, 16)[0]
    assert "5 TFLOP/s, 5% of the 100" in line
    assert "6% of the 80 in a 3 x 3 convolution" in line


def test_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.measure.roofline._MATMUL_SIDE", {"cpu": 128})
    monkeypatch.setattr("utils.measure.roofline._CONVOLUTION", {"cpu": (1, 16, 16)})
    monkeypatch.setattr("utils.measure.roofline._COPY_BYTES", {"cpu": 2**20})
    monkeypatch.setattr("utils.measure.roofline._SECONDS", 0.01)
    limits = measure_limits(CPU, choose_precision("off", CPU))
    assert 1e8 < limits.flop_per_s < 1e14
    assert 1e7 < limits.bytes_per_s < 1e13
    assert limits.dtype == "float32"


def event(key: str, us: float, *, device_us: float = 0.0, on_gpu: bool = False) -> Any:
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    return SimpleNamespace(key=key, count=4, self_cpu_time_total=us, self_device_time_total=device_us, device_type=kind)


def test_operators_are_ranked_by_their_own_time() -> None:
    operators = [event(f"aten::op{number}", 100.0 * number) for number in range(1, 15)]
    noise = [event("phase: forward", 9e9), event("autograd::engine::evaluate_function: X", 9e9)]
    found = most_expensive([*operators, *noise], 2, is_gpu=False)
    assert [operator.name for operator in found] == [
        f"aten::op{number}" for number in range(14, 14 - MAX_OPERATORS, -1)
    ]
    assert found[0].ms == pytest.approx(0.7)  # 1400 us in two steps
    assert found[0].calls == 2
    assert found[0].share == pytest.approx(14 / 105)


def test_on_a_gpu_the_kernels_of_an_operator_count_once() -> None:
    averages = [
        event("aten::convolution", 900.0, device_us=100.0),
        event("aten::relu", 50.0, device_us=300.0),
        event("sm90_xmma::gemm", 0.0, device_us=300.0, on_gpu=True),
    ]
    found = most_expensive(averages, 1, is_gpu=True)
    assert [(operator.name, operator.share) for operator in found] == [
        ("aten::relu", 0.75),
        ("aten::convolution", 0.25),
    ]


class FakeGpu:
    """Stands for NVML's view of a GPU."""

    def __init__(self, index: int) -> None:
        self.index = index

    def read(self) -> dict[str, float]:
        return {"gpu_util": 0.9, "gpu_power_w": 400.0, "gpu_temperature_c": 60.0}


def test_a_gpus_readings_are_taken_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    profiling = sys.modules["utils.measure.profiling"]
    monkeypatch.setattr(nvml, "Gpu", FakeGpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with profiling._Utilisation(torch.device("cuda", 1)) as utilisation:
        watch = utilisation._watch
        assert watch is not None
        while not watch._count:  # the thread's first reading
            pass
    assert utilisation.readings == {"gpu_util": 0.9, "gpu_power_w": 400.0, "gpu_temperature_c": 60.0}
