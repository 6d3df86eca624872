"""`make gpu` compares the GPU with the CPU: what differs by rounding passes, what is wrong does
not.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu import against_cpu
from benchmarks.gpu.against_cpu import CPU, StepResult, beyond, errors, limits_of, one_step
from benchmarks.gpu.plan import Json
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.dataset import Batch
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.yolo.model import YoloModel, build_model


@pytest.fixture(scope="module")
def compared() -> tuple[YoloModel, Batch, StepResult, Json]:
    """A network, its batch, what float64 gives, and the CPU's errors."""
    torch.manual_seed(0)
    model = build_model("yolov8n-seg.yaml", against_cpu.CLASSES).train()
    batch = synthetic_batch(2, 96, len(against_cpu.CLASSES), colours=Augmentation())
    exact = one_step(model, batch, CPU, "float64")
    return (
        model,
        batch,
        exact,
        {name: errors(one_step(model, batch, CPU, name), exact) for name in ("off", "bf16")},
    )


def tf32(model: YoloModel, result: StepResult) -> StepResult:
    rounded = copy.deepcopy(model)
    for weight in rounded.parameters():
        # 10 bits of the mantissa
        weight.data = (weight.data.view(torch.int32) & ~0x1FFF).view(torch.float32)
    return one_step(rounded, synthetic_batch(2, 96, 8, colours=Augmentation()), CPU, "off")


def changed(**changes: Any) -> Callable[[YoloModel, StepResult], StepResult]:
    return lambda model, result: dataclasses.replace(result, **changes)


def one_gradient(factor: float) -> Callable[[YoloModel, StepResult], StepResult]:
    def change(model: YoloModel, result: StepResult) -> StepResult:
        name = max(
            result.tensors,
            key=lambda name: float(result.tensors[name].norm()) * ("gradient" in name),
        )
        return dataclasses.replace(
            result, tensors={**result.tensors, name: result.tensors[name] * factor}
        )

    return change


def other_prototypes(model: YoloModel, result: StepResult) -> StepResult:
    outputs = {**result.outputs, "proto": result.outputs["proto"].flip(0)}
    return dataclasses.replace(result, outputs=outputs)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (lambda model, result: result, None),
        (tf32, "median error of outputs"),
        (one_gradient(1.1), "largest error of gradients"),
        (one_gradient(math.nan), "largest error of gradients"),
        (other_prototypes, "of masks found again"),
        (changed(loss=dict.fromkeys(("loss", "box", "seg", "cls", "dfl"), 1.0)), "loss off by"),
    ],
    ids=[
        "none",
        "TensorFloat-32 left on",
        "a wrong gradient",
        "not a number",
        "wrong masks",
        "a wrong loss",
    ],
)
def test_a_gpu_that_computes_something_else_is_noticed(
    compared: tuple[YoloModel, Batch, StepResult, Json], fault: Any, problem: str | None
) -> None:
    model, batch, exact, on_cpu = compared
    found = errors(fault(model, one_step(model, batch, CPU, "off")), exact)
    lines = beyond(found, limits_of(on_cpu, is_exact=True))
    assert problem is None or any(problem in line for line in lines), lines
    assert bool(lines) == (problem is not None), lines


def test_16_bits_may_err_as_much_as_the_cpus_and_no_more(
    compared: tuple[YoloModel, Batch, StepResult, Json],
) -> None:
    _, _, _, on_cpu = compared
    limits = limits_of(on_cpu, is_exact=False)
    assert beyond(on_cpu["bf16"], limits) == []
    doubled = {
        kind: {name: 2.1 * error for name, error in on_cpu["bf16"][kind].items()}
        for kind in against_cpu.KINDS
    }
    assert len(beyond({**on_cpu["bf16"], **doubled}, limits)) == 4
