"""YOLOv8's segmentation loss with globally reduced normalisers: N ranks compute the gradient of one.

Task-aligned assignment (TOOD, arXiv 2108.07755, section 3.2), complete IoU (arXiv 1911.08287, eq. 8-11), distribution
focal loss (arXiv 2006.04388, eq. 6), class BCE, and mask BCE inside each target's box divided by the box's area
(YOLACT, arXiv 1904.02689). Gains and constants are those YOLOv8's released weights were trained with.

What is exact: the gradient of one batch equals that of the same images on one rank, for any split over the ranks.

Under accumulation the sums of a group of micro-batches are divided by the normalisers of the whole group: whenever a
micro-batch adds to them, the gradient so far is scaled down to match (`begin_group`, `carry`). Exact for box, class and
distribution; the mask part has a normaliser of its own (positive anchors instead of scores) and follows as far as the
mean score per anchor is alike. Two micro-batches against one batch of both: within 0.025 of the gradient's norm, where
the usual mean over micro-batches is off by up to 0.5 when their object counts differ (tests/test_loss.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from utils import distributed

PARTS = ("box", "seg", "cls", "dfl")
TOP_K, ALPHA, BETA = 10, 0.5, 6.0  # YOLOv8's settings of the task-aligned assignment
EPS = 1e-9


@dataclass(frozen=True)
class LossGains:
    """Weights of the four parts; the mask part shares the box gain."""

    box: float = 7.5
    cls: float = 0.5
    dfl: float = 1.5


@dataclass(frozen=True)
class Targets:
    """What a batch should predict: rows as in `utils.dataset.Batch`, on the model's device, size in pixels."""

    batch_index: torch.Tensor
    class_ids: torch.Tensor
    boxes: torch.Tensor
    masks: torch.Tensor
    size_px: int


@dataclass(frozen=True)
class LossSums:
    """Un-normalised parts (4,) in the order of PARTS, gains applied, and their normalisers (2,): score sum, anchors."""

    parts: torch.Tensor
    normalisers: torch.Tensor

    def normalised(self, normalisers: torch.Tensor) -> torch.Tensor:
        """Return the four parts divided by the given normalisers (each at least 1): (4,)."""
        scores, anchors = normalisers.clamp(min=1).unbind()
        return self.parts / torch.stack([scores, anchors, scores, scores])


class SegmentationLoss:
    """`criterion(outputs, targets)` for the engine: outputs are the training dictionary of a YOLOv8-seg model.

    The returned loss is `loss_scale` times the reported one. YOLOv8's optimizer settings expect gradients summed over a
    nominal batch of 64 images, hence the default. `class_weights` float32 (classes,) multiply the class part.
    """

    def __init__(
        self,
        model: Any,
        gains: LossGains | None = None,
        loss_scale: float = 64.0,
        class_weights: torch.Tensor | None = None,
    ) -> None:
        head = model.model[-1]
        self.strides = [float(stride) for stride in head.stride]
        self.num_classes = int(head.nc)
        self.num_bins = int(head.reg_max)
        self.gains = gains or LossGains()
        self.loss_scale = loss_scale
        self.class_weights = class_weights
        self.carry: torch.Tensor | None = None
        self._group: torch.Tensor | None = None  # normalisers (2,) of the micro-batches so far

    def begin_group(self) -> None:
        """Begin the micro-batches of one optimizer step.

        From here on the caller sums gradients without dividing, and multiplies those it has by `carry`, a tensor (), after
        each call and before the backward pass.
        """
        self._group = torch.zeros(2)

    def __call__(
        self, outputs: dict[str, torch.Tensor], targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (loss to differentiate, values to report). Every rank must reach this: the normalisers are reduced.

        DDP averages gradients over ranks, so the rank's own sums are multiplied by the world size.
        """
        sums = self.sums(outputs, targets)
        normalisers = distributed.all_reduce_sum(sums.normalisers)
        parts = sums.normalised(normalisers) * distributed.world_size()
        values = {"loss": parts.detach().sum(), **dict(zip(PARTS, parts.detach().unbind(), strict=True))}
        if self._group is not None:
            before = self._group.to(normalisers.device)
            self._group = before + normalisers
            self.carry = (before.clamp(min=1) / self._group.clamp(min=1))[0]
            parts = sums.normalised(self._group) * distributed.world_size()
        return parts.sum() * self.loss_scale, values

    def sums(self, outputs: dict[str, torch.Tensor], targets: Targets) -> LossSums:
        """Return this rank's share of the loss, without any communication."""
        with torch.autocast(outputs["scores"].device.type, enabled=False):
            return self._sums(
                {name: outputs[name] for name in ("boxes", "scores", "mask_coefficient", "proto")}, targets
            )

    def _sums(self, outputs: dict[str, torch.Tensor], targets: Targets) -> LossSums:
        logits = outputs["scores"].float().transpose(1, 2)  # (B, A, classes)
        bins = outputs["boxes"].float().transpose(1, 2)  # (B, A, 4 * bins): distances to left, top, right, bottom
        points, strides = anchor_points(self.strides, targets.size_px, logits.device)  # (A, 2) cells, (A, 1) pixels
        boxes = decode_boxes(bins, points)  # (B, A, 4) xyxy in cells

        class_ids, target_boxes, is_target = _pad_targets(targets, len(logits))
        assigned = assign(
            logits.detach().sigmoid(),
            boxes.detach() * strides,
            points * strides,
            class_ids,
            target_boxes,
            is_target,
            self.strides,
        )
        scores = assigned.scores  # (B, A, classes)

        if self.class_weights is not None and self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(logits.device)  # once, not at every step
        cls = F.binary_cross_entropy_with_logits(logits, scores, weight=self.class_weights, reduction="sum")
        image, anchor = assigned.foreground.nonzero(as_tuple=True)  # the step's one host synchronisation
        target = assigned.target_index[image, anchor]
        weight = scores[image, anchor].sum(-1)
        positive_boxes = target_boxes[image, target]  # (P, 4) pixels
        cell_boxes = positive_boxes / strides[anchor]
        box = ((1 - complete_iou(boxes[image, anchor], cell_boxes)) * weight).sum()
        dfl = (self._distribution_loss(bins[image, anchor], points[anchor], cell_boxes) * weight).sum()
        seg = mask_loss(outputs, targets, image, anchor, target, positive_boxes)
        # Predictions without any target must still reach every parameter, or DDP would wait for their gradients.
        nothing = (bins.sum() + outputs["proto"].float().sum() + outputs["mask_coefficient"].float().sum()) * 0
        parts = torch.stack(
            [box * self.gains.box + nothing, seg * self.gains.box, cls * self.gains.cls, dfl * self.gains.dfl]
        )
        return LossSums(parts, torch.stack([scores.sum(), scores.new_tensor(float(len(image)))]))

    def _distribution_loss(self, bins: torch.Tensor, points: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        """Cross-entropy with the two bins around each true distance, weighted by nearness: (P,)."""
        distances = torch.cat([points - boxes[:, :2], boxes[:, 2:] - points], -1).clamp(0, self.num_bins - 1 - 0.01)
        left = distances.long()
        right_weight = distances - left
        log_probability = bins.unflatten(-1, (4, self.num_bins)).log_softmax(-1)  # (P, 4, bins)
        low = log_probability.gather(-1, left[..., None])[..., 0]
        high = log_probability.gather(-1, left[..., None] + 1)[..., 0]
        return -(low * (1 - right_weight) + high * right_weight).mean(-1)


def inverse_frequency_weights(counts: np.ndarray) -> torch.Tensor | None:
    """Return class weights 1/count with mean 1, from how many objects each class has: float32 (classes,).

    Classes without objects get the mean of the others: Ultralytics' `cls_pw=1`. None when there are no objects.
    """
    is_present = counts > 0
    if not is_present.any():
        return None
    weights = 1.0 / np.maximum(counts, 1)
    weights[~is_present] = weights[is_present].mean()
    return torch.from_numpy(weights / weights.mean()).float()


def decode_boxes(bins: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Turn (B, A, 4 * bins) logits into (B, A, 4) xyxy boxes in cells: the expected distance to each side."""
    distribution = bins.unflatten(-1, (4, -1)).softmax(-1)
    distances = distribution @ torch.arange(distribution.shape[-1], dtype=bins.dtype, device=bins.device)
    return torch.cat([points - distances[..., :2], points + distances[..., 2:]], -1)


def anchor_points(strides: list[float], size_px: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cell centres (A, 2) as xy in cells and the stride of each (A, 1) in pixels, finest level first."""
    centres, stride_column = [], []
    for stride in strides:
        side = round(size_px / stride)
        axis = torch.arange(side, device=device) + 0.5
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        centres.append(torch.stack([x, y], -1).reshape(-1, 2))
        stride_column.append(torch.full((side * side, 1), stride, device=device))
    return torch.cat(centres), torch.cat(stride_column)


def _pad_targets(targets: Targets, batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return class ids (B, M), boxes (B, M, 4) and which of them are real (B, M), M the largest count (at least 1)."""
    index = targets.batch_index
    counts = torch.bincount(index, minlength=batch_size)
    slot = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts)[index]
    most = max(int(counts.max()), 1)
    class_ids = torch.zeros(batch_size, most, dtype=torch.int64, device=index.device)
    boxes = torch.zeros(batch_size, most, 4, device=index.device)
    class_ids[index, slot] = targets.class_ids
    boxes[index, slot] = targets.boxes
    return class_ids, boxes, torch.arange(most, device=index.device) < counts[:, None]


@dataclass(frozen=True)
class Assignment:
    """Which target each anchor answers for: foreground bool (B, A), target_index int64 (B, A), scores (B, A, classes)."""

    foreground: torch.Tensor
    target_index: torch.Tensor
    scores: torch.Tensor


@torch.no_grad()
def assign(
    probabilities: torch.Tensor,
    boxes: torch.Tensor,
    points: torch.Tensor,
    class_ids: torch.Tensor,
    target_boxes: torch.Tensor,
    is_target: torch.Tensor,
    strides: list[float],
) -> Assignment:
    """Assign anchors to targets by alignment = probability^0.5 * IoU^6; all boxes xyxy in pixels.

    probabilities (B, A, classes), boxes (B, A, 4), points (A, 2), class_ids (B, M), target_boxes (B, M, 4). Each target
    takes its 10 best anchors among those inside its box; an anchor wanted twice goes to the target it overlaps most.
    """
    inside = _points_inside(points, target_boxes, strides) & is_target[..., None]  # (B, M, A)
    image, target, anchor = inside.nonzero(as_tuple=True)
    iou = complete_iou(target_boxes[image, target], boxes[image, anchor]).clamp(min=0)
    overlap = torch.zeros(inside.shape, device=boxes.device, dtype=boxes.dtype)
    alignment = torch.zeros_like(overlap)
    overlap[image, target, anchor] = iou
    alignment[image, target, anchor] = probabilities[image, anchor, class_ids[image, target]].pow(ALPHA) * iou.pow(BETA)

    best = alignment.topk(min(TOP_K, alignment.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(inside).scatter_(-1, best, True) & inside
    wanted_twice = chosen.sum(1, keepdim=True) > 1
    most_overlapped = torch.zeros_like(inside).scatter_(1, overlap.argmax(1, keepdim=True), True)
    chosen = torch.where(wanted_twice, most_overlapped, chosen)

    foreground, target_index = chosen.any(1), chosen.to(torch.uint8).argmax(1)
    # A target's best anchor gets its best overlap as score, the others in proportion to their alignment.
    alignment, overlap = alignment * chosen, overlap * chosen
    strength = alignment * overlap.amax(-1, keepdim=True) / (alignment.amax(-1, keepdim=True) + EPS)
    scores = torch.zeros_like(probabilities)
    value = strength.amax(1) * foreground
    scores.scatter_(-1, class_ids.gather(1, target_index)[..., None], value[..., None])
    return Assignment(foreground, target_index, scores)


def _points_inside(points: torch.Tensor, boxes: torch.Tensor, strides: list[float]) -> torch.Tensor:
    """Return which points (A, 2) lie in which boxes (B, M, 4): bool (B, M, A).

    Sides shorter than the middle stride are taken as that long, so that a thin wire still finds anchors.
    """
    shortest = strides[1] if len(strides) > 1 else strides[0]
    centre = (boxes[..., :2] + boxes[..., 2:]) / 2
    half = (boxes[..., 2:] - boxes[..., :2]).clamp(min=shortest) / 2
    distance = (points - centre[:, :, None]).abs()  # (B, M, A, 2)
    return (half[:, :, None] - distance).amin(-1) > EPS


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


def mask_loss(
    outputs: dict[str, torch.Tensor],
    targets: Targets,
    image: torch.Tensor,
    anchor: torch.Tensor,
    target: torch.Tensor,
    boxes: torch.Tensor,
) -> torch.Tensor:
    """Sum over the P positive anchors of the mean BCE inside the target's box, over the box's share of the picture.

    image, anchor, target int64 (P,); boxes (P, 4) xyxy pixels; masks are compared at the prototypes' resolution.
    """
    prototypes = outputs["proto"].float()  # (B, 32, H, W)
    coefficients = outputs["mask_coefficient"].float().transpose(1, 2)[image, anchor]  # (P, 32)
    height, width = prototypes.shape[-2:]
    normalised = boxes / targets.size_px
    area = (normalised[:, 2:] - normalised[:, :2]).prod(-1)
    x1, y1, x2, y2 = (normalised * normalised.new_tensor([width, height, width, height])).T[..., None]
    columns, rows = torch.arange(width, device=boxes.device), torch.arange(height, device=boxes.device)
    in_columns = (columns >= x1) & (columns < x2)  # (P, W)
    in_rows = (rows >= y1) & (rows < y2)  # (P, H)
    total = prototypes.new_zeros(())
    counts = torch.bincount(image, minlength=len(prototypes)).tolist()
    start = 0
    for index, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            logits = (coefficients[part] @ prototypes[index].flatten(1)).view(count, height, width)
            truth = (targets.masks[index] == (target[part] + 1)[:, None, None]).to(logits.dtype)
            error = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
            within = torch.einsum("phw,ph,pw->p", error, in_rows[part].to(error), in_columns[part].to(error))
            total = total + (within / (height * width) / area[part]).sum()
            start += count
    return total
