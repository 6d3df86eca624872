"""The masks' part of the loss: in parts, in half precision, and in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.yolo.made_up import random_outputs, targets_of
from utils.yolo import mask_loss
from utils.yolo.loss import SegmentationLoss

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("units_at_once", [1, 7, 10**6])
def test_masks_computed_in_parts_give_the_same_gradient(
    model: Any, units_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = targets_of([8, 0, 5], 128, seed=3)
    outputs = random_outputs(model, 3, 128, 3)
    leaves = [outputs[name] for name in ("mask_coefficient", "proto")]
    whole = SegmentationLoss(model)(outputs, targets)
    expected = torch.autograd.grad(whole[0], leaves)
    monkeypatch.setitem(mask_loss.UNITS_AT_ONCE, "cpu", units_at_once)
    parts = SegmentationLoss(model)(outputs, targets)
    assert float(parts[1]["seg"]) == pytest.approx(float(whole[1]["seg"]), rel=1e-6)
    for gradient, wanted in zip(torch.autograd.grad(parts[0], leaves), expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_no_tensor_of_the_loss_holds_a_mask_for_each_anchor(model: Any) -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
            result = operator(*arguments, **(keywords or {}))
            sizes = [part.untyped_storage().nbytes() // part.element_size() for part in tensors_in(result)]
            self.numel = max(self.numel, *sizes, 0)
            return result

    targets = targets_of([250, 200], 256)
    outputs = random_outputs(model, 2, 256, 0)
    with Largest() as largest:
        loss, _ = SegmentationLoss(model)(outputs, targets)
        loss.backward()
        num_anchors = int(SegmentationLoss(model).sums(outputs, targets).normalisers[1])
    assert num_anchors > 400
    assert largest.numel < num_anchors * 64 * 64 / 3


def tensors_in(result: Any) -> list[torch.Tensor]:
    parts = result if isinstance(result, list | tuple) else [result]
    return [part for part in parts if isinstance(part, torch.Tensor)]


@pytest.mark.parametrize(
    ("dtype", "of_value", "of_gradient"), [(torch.bfloat16, 1e-3, 1e-2), (torch.float16, 1e-6, 1e-3)]
)
def test_masks_of_a_network_in_half_precision_lose_no_more_than_its_rounding(
    model: Any, dtype: torch.dtype, of_value: float, of_gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mask_loss.UNITS_AT_ONCE, "cpu", 16)  # whole parts, and a rest
    targets = targets_of([20, 3, 9], 128, seed=5)
    rounded = random_outputs(model, 3, 128, 5)
    names = ("mask_coefficient", "proto")
    halves = {**rounded, **{name: rounded[name].detach().to(dtype).requires_grad_() for name in names}}
    wholes = {**rounded, **{name: halves[name].detach().float().requires_grad_() for name in names}}
    (loss, values), (expected_loss, expected) = (
        SegmentationLoss(model)(outputs, targets) for outputs in (halves, wholes)
    )
    assert float(values["seg"]) == pytest.approx(float(expected["seg"]), rel=of_value)
    gradients = torch.autograd.grad(loss, [halves[name] for name in names])
    for gradient, wanted in zip(
        gradients, torch.autograd.grad(expected_loss, [wholes[name] for name in names]), strict=True
    ):
        assert gradient.dtype == dtype
        assert (gradient.float() - wanted).norm() <= of_gradient * wanted.norm()


class Bf16Products(TorchDispatchMode):
    """Notes the shapes of all products of bf16 matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default and args[0].dtype == torch.bfloat16:
            self.shapes.append((tuple(args[0].shape), tuple(args[1].shape)))
        return func(*args, **(kwargs or {}))


def test_bf16_products_on_a_cpu_have_few_shapes_however_many_objects_there_are(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mask_loss.UNITS_AT_ONCE, "cpu", 16)
    with Bf16Products() as products:
        for seed, counts in enumerate([[3, 1], [20, 7], [11, 0], [5, 30]]):
            outputs = random_outputs(model, 2, 128, seed)
            outputs["proto"] = outputs["proto"].detach().bfloat16().requires_grad_()
            SegmentationLoss(model)(outputs, targets_of(counts, 128, seed))
    assert len(products.shapes) >= 20
    assert len(set(products.shapes)) <= 3
