"""Parameter groups and the scaled learning rate."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.yolo.conftest import Operators
from yolo_seg_ddp.engine.recovery import NonFiniteGuard
from yolo_seg_ddp.measure.step_timer import build_training
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.run.checkpoint import load_latest, save_checkpoint
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.plan import plan_optimizer
from yolo_seg_ddp.utils.devices import choose_precision
from yolo_seg_ddp.yolo.model import build_model
from yolo_seg_ddp.yolo.optimizer import (
    MUON_GAIN,
    MuSGD,
    OptimizerPlan,
    build_optimizer,
    parameter_groups,
    scaled_lr,
)
from yolo_seg_ddp.yolo.orthogonal import Orthogonaliser

NAMES = ("conductor", "other_wire", "pole")


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.01), ("linear", 0.04), ("sqrt", 0.02)])
def test_the_rate_scales_with_the_global_batch(rule: str, expected: float) -> None:
    assert scaled_lr(0.01, rule, 256) == pytest.approx(expected)
    assert scaled_lr(0.01, rule, 64) == pytest.approx(0.01)


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = build_model("yolov8n-seg.yaml", NAMES)
    groups = parameter_groups(model, 0.01)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trainable = [id(parameter) for parameter in model.parameters() if parameter.requires_grad]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(trainable)
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0, 0.0]
    assert all(parameter.ndim == 1 for group in groups[1:] for parameter in group["params"])


def plan_of(name: str) -> OptimizerPlan:
    return plan_optimizer(TrainConfig(optimizer=name, weight_decay=0.0), 1, 1000)


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # in the parameter's memory format, like a real one
            parameter.grad = torch.randn_like(parameter)


def take_steps(sides: dict[torch.nn.Module, torch.optim.Optimizer], seed: int) -> None:
    for model, optimizer in sides.items():
        set_gradients(model, seed)
        optimizer.step()


def test_musgd_adds_an_orthogonal_update_to_that_of_sgd() -> None:
    model = build_model("yolov8n-seg.yaml", NAMES).to(memory_format=torch.channels_last)
    by_sgd, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    plan = plan_of("musgd")
    sides = {model: build_optimizer(model, plan), by_sgd: build_optimizer(by_sgd, plan_of("sgd"))}
    take_steps(sides, seed=0)
    after = copy.deepcopy(by_sgd.state_dict())
    for name in ("model.0.conv.weight", "model.4.m.0.cv1.conv.weight", "model.22.cv4.0.2.weight"):
        assert not torch.equal(after[name], before[name])
        added = (model.state_dict()[name] - after[name]).double().flatten(1)
        rows, columns = added.shape
        values = torch.linalg.svdvals(added) / (plan.lr * MUON_GAIN * max(1, rows / columns) ** 0.5)
        # five Newton-Schulz iterations bring them near one
        assert 0.6 < values.median() <= values.max() < 1.4, name
    take_steps(sides, seed=1)
    for (name, value), other in zip(model.named_parameters(), by_sgd.parameters(), strict=True):
        assert value.ndim == 4 or torch.equal(value, other), name  # biases and normalisation
        if value.requires_grad:
            momentum, wanted = (
                sides[side].state[key]["momentum_buffer"]
                for side, key in ((model, value), (by_sgd, other))
            )
            assert torch.equal(momentum, wanted), name  # of all


@pytest.mark.parametrize("name", ["sgd", "musgd", "adamw"])
def test_an_optimizer_continues_bit_for_bit_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    model = build_model("yolov8n-seg.yaml", NAMES).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, plan_of(name))
    set_gradients(model, 0)
    optimizer.step()
    save_checkpoint(tmp_path, 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = build_model("yolov8n-seg.yaml", NAMES).to(memory_format=torch.channels_last)
    continued = build_optimizer(resumed, plan_of(name))
    found = load_latest(tmp_path)
    assert found is not None
    state = found[1]
    resumed.load_state_dict(state["model"])
    continued.load_state_dict(state["optimizer"])
    for one, its_optimizer in ((model, optimizer), (resumed, continued)):
        set_gradients(one, 1)
        its_optimizer.step()
    ours = resumed.state_dict()
    assert all(torch.equal(value, ours[key]) for key, value in model.state_dict().items())


def orthogonalise(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    return Orthogonaliser(matrices).sum_of(matrices, matrices, 0.0)


def test_the_shortcut_over_the_gram_matrix_equals_muons_iteration() -> None:
    torch.manual_seed(0)
    large = [(96, 864)] * 3  # so that the small ones are padded to each other's sizes
    shapes = [(16, 27), (64, 16), (16, 144), (8, 8), (1, 5), (64, 9), (9, 9), *large]
    matrices = [torch.randn(shape) for shape in shapes]
    # nearly of rank 2
    matrices[2] = torch.randn(16, 2) @ torch.randn(2, 144) + 1e-3 * torch.randn(16, 144)
    for matrix, found in zip(matrices, orthogonalise(matrices), strict=True):
        x = matrix.double() / matrix.double().norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        wanted = x * max(1.0, len(x) / x.shape[1]) ** 0.5
        assert found.shape == matrix.shape
        assert (found - wanted).norm() < 1e-3 * wanted.norm()
    assert not orthogonalise([torch.zeros(3, 4)])[0].any()


@pytest.mark.parametrize(("name", "most"), [("yolov8n-seg.yaml", 94), ("yolo26n-seg.yaml", 136)])
def test_a_step_of_musgd_needs_few_launches(name: str, most: int) -> None:
    """Operators that compute are at least one launch on a GPU. Forward and backward pass and loss
    of YOLOv8n have some 870, for any batch.
    """
    counted: list[str] = []

    def note(operator: Any, arguments: Any, result: Any) -> None:
        named = operator.overloadpacket.__name__
        if not operator.is_view and "empty" not in named and operator.namespace != "profiler":
            counted.append(named)

    model = build_model(name, NAMES).to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, plan_of("musgd"))
    set_gradients(model, 0)
    optimizer.step()
    with Operators(note):
        optimizer.step()
    assert len(counted) <= most


@pytest.mark.parametrize("fused", [True, False])
def test_musgd_skips_a_step_with_a_nan(fused: bool) -> None:
    # the last ones are padded
    shapes = [(64, 64, 3, 3), (64, 48, 3, 3), (16, 3, 3, 3), (8, 16, 1, 1)]
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = MuSGD(
        [{"params": weights, "use_muon": True}], lr=0.1, momentum=0.9, nesterov=True, fused=fused
    )
    guard = NonFiniteGuard(torch.device("cpu"))
    for value, is_bad in ((1.0, False), (torch.nan, True), (torch.inf, True), (1.0, False)):
        before = [weight.detach().clone() for weight in weights]
        for weight in weights:
            weight.grad = torch.randn_like(weight) * value
        if guard.should_step(optimizer, torch.tensor(value)):
            optimizer.step()
        for weight, its_before in zip(weights, before, strict=True):
            assert weight.isfinite().all()
            assert torch.equal(weight, its_before) == is_bad


def test_steps_on_one_batch_learn_it() -> None:
    batch, device = synthetic_batch(2, 64, len(NAMES), objects_per_image=3), torch.device("cpu")
    engine = build_training(
        build_model("yolov8n-seg.yaml", NAMES), device, choose_precision("off", device)
    )
    first, second = ((engine.train_one_epoch([batch] * 8) or {})["train_loss"] for _ in range(2))
    assert second < 0.9 * first
