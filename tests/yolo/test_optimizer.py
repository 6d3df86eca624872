"""Parameter groups and the scaled learning rate."""

from __future__ import annotations

import pytest

from utils.yolo.model import build_model
from utils.yolo.optimizer import parameter_groups, scaled_lr


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
