"""The mask loss in blocks: plain PyTorch's loss and gradients, half precision, bounded memory."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.yolo.conftest import Operators, random_outputs, targets_of
from yolo_seg_ddp.yolo import mask_loss as module
from yolo_seg_ddp.yolo.loss import SegmentationLoss
from yolo_seg_ddp.yolo.mask_loss import MARGIN, Positives, find_positives, mask_loss

SIDE = 32  # of the prototypes, in pixels
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def boxes_of(name: str) -> torch.Tensor:
    """Return target boxes (2, 3, 4), xyxy in prototype pixels."""
    overlapping = torch.tensor([[4.0, 4, 20, 20], [10, 2, 30.5, 17.25], [12, 12, 14, 15]])
    boxes = {
        "overlapping": overlapping,
        "partly outside": torch.tensor([[-6.0, -3, 9, 40], [25.5, 20, 51, 33], [-9, -9, -1, -1]]),
        "tiny": torch.tensor([[3.2, 5.1, 3.9, 9.0], [7.9, 7.9, 8.1, 8.1], [15.0, 0, 16, 31]]),
    }[name]
    return torch.stack([boxes, overlapping.flip(0)])


# (2, 3): of the first image the last two targets have no outline, of the second the first one
BOXED = torch.tensor([[False, True, True], [True, False, False]])


def case_of(
    name: str, num_anchors: int, boxed: torch.Tensor | None = None
) -> tuple[Case, Positives]:
    """Return the tensors of a batch of two images, and its positive anchors; the later target hides
    the earlier.
    """
    generator = torch.Generator().manual_seed(0)
    boxes = boxes_of(name)
    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.int32)
    for image, its_boxes in enumerate(boxes.clamp(0, SIDE).round().int().tolist()):
        for number, (x1, y1, x2, y2) in enumerate(its_boxes, start=1):
            masks[image, y1:y2, x1 : (x1 + x2 + 1) // 2] = number  # the left half of the box
    masks[1, 10:16] = -1  # a region to ignore
    foreground = torch.zeros(2, 60, dtype=torch.bool)
    foreground.view(-1)[torch.randperm(120, generator=generator)[:num_anchors]] = True
    target_index = torch.randint(0, 3, (2, 60), generator=generator)
    prototypes = torch.randn(2, 32, SIDE, SIDE, generator=generator).requires_grad_()
    coefficients = torch.randn(num_anchors, 32, generator=generator).requires_grad_()
    found = find_positives(foreground, target_index, boxes, SIDE, boxed)
    return (prototypes, coefficients, masks, boxes), found


def mask_loss_by_autograd(
    prototypes: torch.Tensor,
    coefficients: torch.Tensor,
    masks: torch.Tensor,
    mask_boxes: torch.Tensor,
    positives: Positives,
    boxed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `mask_loss` returns, in plain PyTorch: tensors of float32 (P, S, S), also outside
    the boxes.
    """
    image, target = positives.image, positives.target
    x1, y1, x2, y2 = mask_boxes[image, target][..., None, None].unbind(1)  # (P, 1, 1) each
    pixel = torch.arange(prototypes.shape[-1])
    row, column = pixel[:, None], pixel[None]
    inside = (column >= x1) & (column < x2) & (row >= y1) & (row < y2)  # (P, S, S)
    weight = (inside & (masks[image] >= 0)) / ((x2 - x1) * (y2 - y1)).clamp(min=1e-9)
    truth = (masks[image] == target[:, None, None] + 1).to(weight.dtype)
    logits = torch.einsum("pc,pchw->phw", coefficients, prototypes[image])
    if boxed is None:
        return (F.binary_cross_entropy_with_logits(logits, truth, reduction="none") * weight).sum()
    total: torch.Tensor = logits.sum() * 0
    means = F.avg_pool2d(logits[None], 3, 1, 1, count_include_pad=False)[0]
    for number, (k, of) in enumerate(zip(image.tolist(), target.tolist(), strict=True)):
        if not boxed[k, of]:
            error = F.binary_cross_entropy_with_logits(
                logits[number], truth[number], reduction="none"
            )
            total = total + (error * weight[number]).sum()
            continue
        left, top, right, bottom = mask_boxes[k, of].ceil().clamp(0, SIDE).int().tolist()
        if left >= right or top >= bottom:
            continue
        for axis in (0, 1):
            highest = means[number, top:bottom, left:right].amax(axis)
            total = total + F.softplus(-highest).mean()
        wide, deep = (math.ceil(length * MARGIN) for length in (right - left, bottom - top))
        around = (
            slice(max(top - deep, 0), bottom + deep),
            slice(max(left - wide, 0), right + wide),
        )
        error = F.softplus(logits[number][around]) * (masks[k][around] == 0)
        total = total + error.sum() / (mask_boxes[k, of, 2:] - mask_boxes[k, of, :2]).prod()
    return total


@pytest.mark.parametrize("units_at_once", [1, 7, 256])
@pytest.mark.parametrize("num_anchors", [1, 20, 90])  # 90: a target has more than one group
@pytest.mark.parametrize("boxed", [None, BOXED], ids=["outlines", "boxes"])
@pytest.mark.parametrize("name", ["overlapping", "partly outside", "tiny"])
def test_loss_and_gradients_equal_those_of_autograd(
    name: str,
    boxed: torch.Tensor | None,
    num_anchors: int,
    units_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(module.UNITS_AT_ONCE, "cpu", units_at_once)
    case, found = case_of(name, num_anchors, boxed)
    loss, expected = mask_loss(*case, found), mask_loss_by_autograd(*case, found, boxed)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    gradients = torch.autograd.grad(loss * 3, case[:2])
    assert boxed is not None or not gradients[0][1, :, 10:16].any()
    for gradient, wanted in zip(
        gradients, torch.autograd.grad(expected * 3, case[:2]), strict=True
    ):
        torch.testing.assert_close(
            gradient, wanted, rtol=1e-4, atol=1e-5 * (1 + float(wanted.abs().max()))
        )


def test_a_batch_without_positives_has_a_loss_and_gradients_of_zero() -> None:
    case, found = case_of("overlapping", 0)
    for loss in (mask_loss(*case, found), mask_loss_by_autograd(*case, found)):
        assert loss.item() == 0
        assert [float(part.abs().sum()) for part in torch.autograd.grad(loss, case[:2])] == [0, 0]


def test_no_tensor_of_the_loss_holds_a_mask_for_each_anchor(model: Any) -> None:
    sizes: list[int] = []

    def note(operator: Any, arguments: Any, result: Any) -> None:
        parts = result if isinstance(result, list | tuple) else [result]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        sizes.extend(part.untyped_storage().nbytes() // part.element_size() for part in tensors)

    targets = targets_of([250, 200], 256)
    outputs = random_outputs(model, 2, 256, 0)
    with Operators(note):
        loss, _ = SegmentationLoss(model)(outputs, targets)
        loss.backward()
        num_anchors = int(SegmentationLoss(model).sums(outputs, targets).normalisers[1])
    assert num_anchors > 400
    assert max(sizes) < num_anchors * 64 * 64 / 3


@pytest.mark.parametrize(
    ("dtype", "of_value", "of_gradient"),
    [(torch.bfloat16, 1e-3, 1e-2), (torch.float16, 1e-6, 1e-3)],
)
def test_masks_of_a_network_in_half_precision_lose_no_more_than_its_rounding(
    model: Any,
    dtype: torch.dtype,
    of_value: float,
    of_gradient: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(module.UNITS_AT_ONCE, "cpu", 16)  # whole parts, and a rest
    targets = targets_of([20, 3, 9], 128, seed=5)
    rounded = random_outputs(model, 3, 128, 5)
    names = ("mask_coefficient", "proto")
    halves = {
        **rounded,
        **{name: rounded[name].detach().to(dtype).requires_grad_() for name in names},
    }
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


def test_bf16_products_on_a_cpu_have_few_shapes_however_many_objects_there_are(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.UNITS_AT_ONCE, "cpu", 16)
    shapes: list[Any] = []

    def note(operator: Any, arguments: Any, result: Any) -> None:
        if operator is torch.ops.aten.bmm.default and result.dtype == torch.bfloat16:
            shapes.append(tuple(tuple(part.shape) for part in arguments))

    with Operators(note):
        for seed, counts in enumerate([[3, 1], [20, 7], [11, 0], [5, 30]]):
            outputs = random_outputs(model, 2, 128, seed)
            outputs["proto"] = outputs["proto"].detach().bfloat16().requires_grad_()
            SegmentationLoss(model)(outputs, targets_of(counts, 128, seed))
    assert len(shapes) >= 20
    assert len(set(shapes)) <= 3
