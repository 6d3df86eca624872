"""Parameter groups and the scaled learning rate."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from utils.engine.nonfinite import NonFiniteGuard
from utils.run.checkpoint import load_latest, save_checkpoint
from utils.train_config import TrainConfig
from utils.train_plan import plan_optimizer
from utils.yolo.model import build_model
from utils.yolo.optimizer import (
    MUON_GAIN,
    MuSGD,
    OptimizerPlan,
    build_optimizer,
    orthogonalise,
    parameter_groups,
    scaled_lr,
)


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.01), ("linear", 0.04), ("sqrt", 0.02)])
def test_the_rate_scales_with_the_global_batch(rule: str, expected: float) -> None:
    assert scaled_lr(0.01, rule, 256) == pytest.approx(expected)
    assert scaled_lr(0.01, rule, 64) == pytest.approx(0.01)


NAMES = ("conductor", "other_wire", "pole")


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
    return plan_optimizer(TrainConfig(optimizer=name, weight_decay=0.0), 1, 1000, len(NAMES))


def set_gradients(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)  # in the parameter's memory format, like a real one


def test_musgd_adds_an_orthogonal_update_to_that_of_sgd() -> None:
    model = build_model("yolov8n-seg.yaml", NAMES).to(memory_format=torch.channels_last)
    by_sgd, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    set_gradients(model, 0)
    set_gradients(by_sgd, 0)
    plan = plan_of("musgd")
    build_optimizer(model, plan).step()
    build_optimizer(by_sgd, plan_of("sgd")).step()
    after = by_sgd.state_dict()
    for name, value in model.state_dict().items():
        assert value.ndim == 4 or torch.equal(value, after[name])  # biases and normalisation
    for name in ("model.0.conv.weight", "model.4.m.0.cv1.conv.weight", "model.22.cv4.0.2.weight"):
        assert not torch.equal(after[name], before[name])
        added = (model.state_dict()[name] - after[name]).double().flatten(1)
        rows, columns = added.shape
        values = torch.linalg.svdvals(added) / (plan.lr * MUON_GAIN * max(1, rows / columns) ** 0.5)
        assert 0.6 < values.median() <= values.max() < 1.4, name  # five Newton-Schulz iterations bring them near one


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


def test_the_shortcut_over_the_gram_matrix_equals_muons_iteration() -> None:
    torch.manual_seed(0)
    shapes = [(16, 27), (64, 16), (16, 144), (8, 8), (1, 5)]
    matrices = [torch.randn(shape) for shape in shapes]
    matrices[2] = torch.randn(16, 2) @ torch.randn(2, 144) + 1e-3 * torch.randn(16, 144)  # nearly of rank 2
    for matrix, found in zip(matrices, orthogonalise(matrices), strict=True):
        x = matrix.double() / matrix.double().norm()
        for _ in range(5):
            x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
        wanted = x * max(1.0, len(x) / x.shape[1]) ** 0.5
        assert found.shape == matrix.shape
        assert (found - wanted).norm() < 1e-3 * wanted.norm()
    assert not orthogonalise([torch.zeros(3, 4)])[0].any()


@pytest.mark.parametrize("fused", [True, False])
def test_musgd_skips_a_step_with_a_nan(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = MuSGD([{"params": [weight], "use_muon": True}], lr=0.1, momentum=0.9, nesterov=True, fused=fused)
    guard = NonFiniteGuard(torch.device("cpu"))
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, torch.nan)
    guard.step(optimizer, weight.grad.norm())
    assert torch.equal(weight, before)
    weight.grad = torch.randn_like(weight)
    guard.step(optimizer, weight.grad.norm())
    assert weight.isfinite().all()
    assert not torch.equal(weight, before)
