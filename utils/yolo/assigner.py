"""Assigns targets to anchors: the task-aligned assignment (TOOD, arXiv 2108.07755, section 3.2).

Overlap is measured by the complete IoU (arXiv 1911.08287, eq. 8-11).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

TOP_K = 10  # anchors per target; YOLOv8's setting, like the exponents of the alignment
EPS = 1e-9


@dataclass(frozen=True)
class Assignment:
    """The target of each anchor, and the class scores that the anchor should predict."""

    foreground: torch.Tensor  # bool (B, A): whether the anchor has a target
    target_index: torch.Tensor  # int64 (B, A), in 0..M-1
    strength: torch.Tensor  # (B, A): the score for the target's class; 0 for background
    scores: torch.Tensor  # (B, A, classes): the scores for all classes


@torch.no_grad()
def assign(
    probabilities: torch.Tensor,
    boxes: torch.Tensor,
    inside: torch.Tensor,
    class_ids: torch.Tensor,
    target_boxes: torch.Tensor,
) -> Assignment:
    """Assign anchors to targets by alignment = probability^0.5 * IoU^6; all boxes xyxy in pixels.

    probabilities (B, A, classes), boxes (B, A, 4), inside bool (B, M, A), class_ids (B, M), target_boxes (B, M, 4). Each
    target chooses its 10 best anchors inside its box; an anchor that several targets choose goes to the one that it
    overlaps most. Costs one host synchronisation.
    """
    num_anchors = inside.shape[-1]
    pair = inside.flatten().nonzero()[:, 0]  # a host synchronisation; (L,) flat indices of (image, target, anchor)
    target = pair // num_anchors  # in 0..B*M-1
    anchor = target // inside.shape[1] * num_anchors + pair % num_anchors  # in 0..B*A-1
    iou = complete_iou(target_boxes.flatten(0, 1).index_select(0, target), boxes.flatten(0, 1).index_select(0, anchor))
    iou.clamp_(min=0)
    class_of = class_ids.flatten().index_select(0, target)
    probability = probabilities.flatten().index_select(0, anchor * probabilities.shape[-1] + class_of)
    overlap, alignment = torch.zeros(2, *inside.shape, device=boxes.device, dtype=boxes.dtype).unbind()
    overlap.view(-1).scatter_(0, pair, iou)
    alignment.view(-1).scatter_(0, pair, probability.sqrt() * iou.square() ** 3)  # alpha 0.5, beta 6

    best = alignment.topk(min(TOP_K, alignment.shape[-1]), dim=-1).indices  # (B, M, 10)
    is_choice = inside.gather(-1, best).long()
    by_anchor = torch.zeros(2, *boxes.shape[:2], dtype=torch.int64, device=boxes.device)
    num_choosers, sum_of_choosers = by_anchor.unbind()  # (B, A) each; with one chooser the sum is its index
    num_choosers.scatter_add_(1, best.flatten(1), is_choice.flatten(1))
    target_numbers = torch.arange(inside.shape[1], device=boxes.device)[:, None]
    sum_of_choosers.scatter_add_(1, best.flatten(1), (is_choice * target_numbers).flatten(1))
    foreground = num_choosers > 0
    target_index = torch.where(num_choosers > 1, overlap.max(1).indices, sum_of_choosers)

    # The score of a target's best anchor is the target's best overlap; the others' are in proportion to their alignment.
    chosen = target_index[:, None]
    alignment = alignment.gather(1, chosen)[:, 0] * foreground  # (B, A)
    overlap = overlap.gather(1, chosen)[:, 0] * foreground
    best_of = torch.zeros(2, *class_ids.shape, device=boxes.device, dtype=boxes.dtype)  # (2, B, M)
    best_alignment, best_overlap = (
        most.scatter_reduce(1, target_index, value, "amax").gather(1, target_index)
        for most, value in zip(best_of, (alignment, overlap), strict=True)
    )
    strength = alignment * best_overlap / (best_alignment + EPS)
    scores = torch.zeros_like(probabilities)
    scores.scatter_(-1, class_ids.gather(1, target_index)[..., None], strength[..., None])
    return Assignment(foreground, target_index, strength, scores)


def inside_boxes(boxes: torch.Tensor, strides: list[float], size_px: int) -> torch.Tensor:
    """Return which anchors lie in which boxes (B, M, 4), xyxy in pixels: bool (B, M, A).

    Sides shorter than the middle stride count as that long, so that a thin wire still contains anchors.
    """
    shortest = strides[1] if len(strides) > 1 else strides[0]
    centre = (boxes[..., :2] + boxes[..., 2:]) / 2
    half = (boxes[..., 2:] - boxes[..., :2]).clamp(min=shortest) / 2
    levels = []
    for stride in strides:
        axis = (torch.arange(round(size_px / stride), device=boxes.device) + 0.5) * stride
        # An anchor lies inside if its column and its row do.
        near = half[..., None] - (axis - centre[..., None]).abs() > EPS  # (B, M, 2, side)
        levels.append((near[:, :, 1, :, None] & near[:, :, 0, None, :]).flatten(2))
    return torch.cat(levels, -1)


def complete_iou(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the complete IoU of paired xyxy boxes (N, 4): (N,), at most 1."""
    eps = 1e-7
    width_1, height_1 = first[:, 2] - first[:, 0], first[:, 3] - first[:, 1] + eps
    width_2, height_2 = second[:, 2] - second[:, 0], second[:, 3] - second[:, 1] + eps
    shared = (
        (torch.minimum(first[:, 2:], second[:, 2:]) - torch.maximum(first[:, :2], second[:, :2])).clamp(min=0).prod(-1)
    )
    iou = shared / (width_1 * height_1 + width_2 * height_2 - shared + eps)
    hull = torch.maximum(first[:, 2:], second[:, 2:]) - torch.minimum(first[:, :2], second[:, :2])
    diagonal = hull.square().sum(-1) + eps
    centre_distance = (first[:, :2] + first[:, 2:] - second[:, :2] - second[:, 2:]).square().sum(-1) / 4
    aspect = (4 / math.pi**2) * (torch.atan(width_2 / height_2) - torch.atan(width_1 / height_1)).square()
    with torch.no_grad():
        aspect_weight = aspect / (1 - iou + aspect + eps)
    return iou - centre_distance / diagonal - aspect * aspect_weight
