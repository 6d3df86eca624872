"""Boxes as distances from anchors: the grid of anchors, decoding, complete IoU, and the box part of
the loss.

A box is given by four *sides*: how far its left, top, right and bottom edges lie from a point,
outward positive. Sums of opposite sides are widths and heights, and the smaller of two sides bounds
the shared area. So no edge needs a case of its own, which keeps the number of operators, and of
kernels on a GPU, small.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

SHORTEST = 1e-7  # shorter sums of sides count as this long: no division by zero
_ASPECT = 4 / math.pi**2


@dataclass(frozen=True)
class AnchorGrid:
    """The anchors of one input size, finest level first, in input pixels."""

    # (4, A): what a box's edges (-x1, -y1, x2, y2) must be reduced by to become its sides
    sides: torch.Tensor
    strides: torch.Tensor  # (A,)
    outward: torch.Tensor  # (4,): -1, -1, 1, 1; boxes xyxy times it are edges (-x1, -y1, x2, y2)
    # (N,): twice the coordinates of the columns of all levels, which are those of the rows too, and
    # their strides
    twice_axes: torch.Tensor
    axis_strides: torch.Tensor
    column: torch.Tensor  # int64 (A,) in 0..N-1
    row: torch.Tensor  # int64 (A,) in 0..N-1


def anchor_grid(strides: list[float], size_px: int, device: torch.device) -> AnchorGrid:
    """Return the anchors of an input of `size_px`."""
    points, stride_column = anchor_points(strides, size_px, device)
    pixels = (points * stride_column).T  # (2, A)
    counts = [round(size_px / stride) for stride in strides]
    numbers = [
        torch.arange(count, device=device) + sum(counts[:level])
        for level, count in enumerate(counts)
    ]
    row, column = torch.cat([torch.cartesian_prod(number, number) for number in numbers]).unbind(1)
    twice_axes = torch.cat(
        [
            (2 * torch.arange(count, device=device) + 1) * stride
            for count, stride in zip(counts, strides, strict=True)
        ]
    )
    axis_strides = torch.cat(
        [torch.full((n,), stride, device=device) for n, stride in zip(counts, strides, strict=True)]
    )
    outward = torch.tensor([-1.0, -1, 1, 1], device=device)
    sides = torch.cat([-pixels, pixels])
    return AnchorGrid(
        sides, stride_column[:, 0].contiguous(), outward, twice_axes, axis_strides, column, row
    )


def anchor_points(
    strides: list[float], size_px: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cell centres (A, 2) as xy in cells and the stride of each (A, 1) in pixels, finest
    level first.
    """
    centres, stride_column = [], []
    for stride in strides:
        side = round(size_px / stride)
        axis = torch.arange(side, device=device) + 0.5
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        centres.append(torch.stack([x, y], -1).reshape(-1, 2))
        stride_column.append(torch.full((side * side, 1), stride, device=device))
    return torch.cat(centres), torch.cat(stride_column)


def decode_boxes(bins: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Turn (B, A, 4 * bins) logits into (B, A, 4) xyxy boxes in cells: the expected distance to
    each side.

    With one bin, as in YOLO26, the four values are the distances themselves.
    """
    distances = bins
    if bins.shape[-1] != 4:
        distribution = bins.unflatten(-1, (4, -1)).softmax(-1)
        distances = distribution @ torch.arange(
            distribution.shape[-1], dtype=bins.dtype, device=bins.device
        )
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], -1)


def predicted_sides(bins: torch.Tensor, strides: torch.Tensor) -> torch.Tensor:
    """Return the sides of the boxes that (B, 4 * bins, A) logits predict, in pixels, from strides
    (A,): (4, B, A).

    With one bin the four values are the distances themselves.
    """
    batch_size, channels, num_anchors = bins.shape
    if channels == 4:
        return bins.transpose(0, 1) * strides
    distribution = bins.reshape(batch_size * 4, channels // 4, num_anchors).softmax(1)
    numbers = torch.arange(channels // 4, dtype=bins.dtype, device=bins.device)
    # (B * 4, 1, A) in cells
    distances = torch.bmm(numbers.expand(batch_size * 4, 1, -1), distribution)
    sides = bins.new_empty(4, batch_size, num_anchors)
    return torch.mul(distances.view(batch_size, 4, num_anchors).transpose(0, 1), strides, out=sides)


def complete_iou(
    first: torch.Tensor, second: torch.Tensor, *, with_slope: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the complete IoU of paired boxes, (N,), at most 1, and its derivative by the first
    boxes or None.

    Boxes and derivative are sides (4, N), both boxes of a pair from the same point. arXiv
    1911.08287, eq. 8-11; as there, the weight of the aspect ratio has no derivative.
    """
    boxes = torch.stack([first, second, torch.minimum(first, second), torch.maximum(first, second)])
    # (4, 2, N): of both, shared, of the hull
    lengths = (boxes[:, :2] + boxes[:, 2:]).clamp_(min=SHORTEST)
    area, other_area, shared = lengths[:3].prod(1).unbind()
    union = area + other_area - shared
    iou = shared / union
    gap = first - second
    offset = gap[2:] - gap[:2]  # (2, N): twice the distance between the centres
    spans = torch.stack([offset, lengths[3]])
    # squared; the distance is four times what eq. 8 has
    distance, diagonal = spans.square().sum(1).unbind()
    slant, other_slant = torch.atan2(*lengths[:2].unbind(1)).unbind()
    turn = other_slant - slant
    aspect = turn.square()
    divisor = torch.add((1 + SHORTEST) - iou, aspect, alpha=_ASPECT)
    complete = torch.addcdiv(iou, distance, diagonal, value=-0.25)
    complete = complete.addcdiv_(aspect.square(), divisor, value=-(_ASPECT**2))
    if not with_slope:
        return complete, None
    across, shared_across = lengths[::2].flip(1).unbind()  # (2, N): height and width
    offset, hull = (spans / (2 * diagonal)).unbind()
    grows_hull = hull * (distance / diagonal)
    grows_shared = shared_across * (lengths[2] > SHORTEST) * ((1 + iou) / union)
    turned = turn * aspect / (divisor * lengths[0].square().sum(0)) * (2 * _ASPECT**2)
    grows_box = across * (torch.stack([turned, -turned]) - iou / union)
    slope = torch.where((first > second).view(2, 2, -1), grows_hull, grows_shared) + grows_box
    outward_low, outward_high = slope.unbind()
    outward_low += offset
    outward_high -= offset
    return complete, slope.flatten(0, 1)


class BoxErrors(torch.autograd.Function):
    """The box and the distribution part of the loss. `forward` computes the gradients too,
    `backward` only scales them.

    `apply(rows, sides, weight)`: logits (P, 4 * bins), true sides (4, P) in cells, weight (P,).
    Returns the weighted sums () of 1 - complete IoU, and of the distribution focal loss (arXiv
    2006.04388, eq. 6): the cross-entropy with the two bins around each true distance, by nearness,
    as a mean over the four sides.
    """

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, sides: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probability = rows.unflatten(-1, (4, -1)).log_softmax(-1)  # (P, 4, bins)
        probability = log_probability.exp()
        bins = torch.arange(probability.shape[-1], dtype=rows.dtype, device=rows.device)
        distances = probability @ bins  # (P, 4)
        iou, slope = complete_iou(distances.T, sides, with_slope=True)
        assert slope is not None
        box = torch.dot(weight, 1 - iou)
        true = sides.T.clamp(0, len(bins) - 1 - 0.01)[..., None]
        nearness = (1 - (bins - true).abs()).clamp_(min=0)
        share = weight / -4
        dfl = torch.dot(share, (nearness * log_probability).sum((1, 2)))
        box_gradient = (probability * (distances[..., None] - bins)).mul_(
            (slope * weight).T[..., None]
        )
        dfl_gradient = (nearness - probability).mul_(share[:, None, None])
        context.save_for_backward(box_gradient, dfl_gradient)
        return box, dfl

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        context: Any, box: torch.Tensor, dfl: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        box_gradient, dfl_gradient = context.saved_tensors
        return (box_gradient * box).addcmul_(dfl_gradient, dfl).flatten(1), None, None


class DistanceErrors(torch.autograd.Function):
    """The box and the distance part of YOLO26's loss. `forward` computes the gradients too,
    `backward` only scales them.

    `apply(distances, sides, weight, distance_weight)`: predicted distances (P, 4) and true sides
    (4, P) in cells, weights (P,). Returns the weighted sums () of 1 - complete IoU, and of the mean
    absolute error of the four distances. A predicted box without area has no derivative of the IoU:
    the distances alone move it.
    """

    @staticmethod
    def forward(
        context: Any,
        distances: torch.Tensor,
        sides: torch.Tensor,
        weight: torch.Tensor,
        distance_weight: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        predicted = distances.T
        iou, slope = complete_iou(predicted, sides, with_slope=True)
        assert slope is not None
        has_area = (predicted[:2] + predicted[2:] > SHORTEST).all(0)
        gap = predicted - sides
        share = distance_weight / 4
        context.save_for_backward(-(slope * (weight * has_area)).T, (gap.sign() * share).T)
        return torch.dot(weight, 1 - iou), torch.dot(share, gap.abs().sum(0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        context: Any, box: torch.Tensor, distance: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        box_gradient, distance_gradient = context.saved_tensors
        return (box_gradient * box).addcmul_(distance_gradient, distance), None, None, None


class OneToOne(dict[str, torch.Tensor]):
    """Raw outputs in which each object has one anchor, so that nothing is to be suppressed
    (YOLO26).
    """
