"""YOLOv8's segmentation loss, with normalisers summed over all ranks: N ranks compute the gradient of one.

Task-aligned assignment (TOOD, arXiv 2108.07755, section 3.2), complete IoU (arXiv 1911.08287, eq. 8-11), distribution
focal loss (arXiv 2006.04388, eq. 6), class BCE, and mask BCE inside each target's box divided by the box's area
(YOLACT, arXiv 1904.02689). Gains and constants are those YOLOv8's released weights were trained with.

The gradient of a batch equals that of the same images on one rank, however they are split over the ranks.

Under accumulation the sums of a group of micro-batches are divided by the normalisers of the whole group: whenever a
micro-batch adds to them, the gradient so far is scaled down to match (`begin_group`, `carry`). Exact for box, class and
distribution. The mask part is normalised by positive anchors instead of scores, so it is exact only if the mean score per
anchor is equal in all micro-batches. Two micro-batches differ from one batch of both by at most 0.025 of the gradient's
norm; the usual mean over micro-batches differs by up to 0.5 when object counts differ (tests/yolo/test_loss.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from utils import distributed
from utils.yolo.assigner import assign, complete_iou, inside_boxes
from utils.yolo.inputs import Targets
from utils.yolo.mask_loss import find_positives, mask_loss

PARTS = ("box", "seg", "cls", "dfl")


@dataclass(frozen=True)
class LossGains:
    """Weights of the four parts; the mask part shares the box gain."""

    box: float = 7.5
    cls: float = 0.5
    dfl: float = 1.5


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
    """The engine's `criterion(outputs, targets)`; outputs is the dictionary that a YOLOv8-seg model returns in training.

    The returned loss is `loss_scale` times the reported one. YOLOv8's optimizer settings expect gradients summed over a
    nominal batch of 64 images, hence the default of 64. `class_weights` float32 (classes,) multiply the class part.
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
        self.gradient_rescale = torch.ones(())
        self._group: torch.Tensor | None = None  # normalisers (2,) of the micro-batches so far
        self._is_in_group = False
        self._points: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}  # by input size

    def begin_group(self) -> None:
        """Begin the micro-batches of one optimizer step.

        From here on the caller sums gradients without dividing, and multiplies those it has by `gradient_rescale`, a
        tensor (), after each call and before the backward pass.
        """
        self._group = None
        self._is_in_group = True

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
        if self._is_in_group:
            before = torch.zeros_like(normalisers) if self._group is None else self._group
            self._group = before + normalisers
            self.gradient_rescale = (before.clamp(min=1) / self._group.clamp(min=1))[0]
            parts = sums.normalised(self._group) * distributed.world_size()
        return parts.sum() * self.loss_scale, values

    def sums(self, outputs: dict[str, torch.Tensor], targets: Targets) -> LossSums:
        """Return this rank's share of the loss, without any communication."""
        with torch.autocast(outputs["scores"].device.type, enabled=False):
            return self._sums(outputs, targets)

    def _sums(self, outputs: dict[str, torch.Tensor], targets: Targets) -> LossSums:
        logits = outputs["scores"].float().transpose(1, 2)  # (B, A, classes)
        bins = outputs["boxes"]  # (B, 4 * bins, A): distances to left, top, right, bottom
        points, strides = self._anchor_points(targets.size_px, logits.device)  # (A, 2) cells, (A, 1) pixels

        class_ids, target_boxes, is_target = _pad_targets(targets, len(logits))
        with torch.no_grad():
            assigned = assign(
                logits.sigmoid(),
                _decode_all(bins.float(), points) * strides,
                inside_boxes(target_boxes, self.strides, targets.size_px) & is_target[..., None],
                class_ids,
                target_boxes,
            )
            mask_boxes = target_boxes / targets.size_px * outputs["proto"].shape[-1]
            found = find_positives(assigned.foreground, assigned.target_index, mask_boxes, outputs["proto"].shape[-1])
        image, anchor = found.image, found.anchor

        if self.class_weights is not None and self.class_weights.device != logits.device:
            self.class_weights = self.class_weights.to(logits.device)  # once, not at every step
        cls = F.binary_cross_entropy_with_logits(logits, assigned.scores, weight=self.class_weights, reduction="sum")
        # Without positives the rows below are empty, but every output stays in the graph: each parameter then gets a
        # gradient of zero, for which DDP would otherwise wait.
        positive_bins = bins.transpose(1, 2)[image, anchor].float()  # (P, 4 * bins)
        weight = assigned.strength[image, anchor]
        cell_boxes = target_boxes[image, found.target] / strides[anchor]
        box = ((1 - complete_iou(decode_boxes(positive_bins, points[anchor]), cell_boxes)) * weight).sum()
        dfl = (self._distribution_loss(positive_bins, points[anchor], cell_boxes) * weight).sum()
        coefficients = outputs["mask_coefficient"].transpose(1, 2)[image, anchor].float()  # (P, 32)
        seg = mask_loss(outputs["proto"], coefficients, targets.masks, mask_boxes, found)
        parts = torch.stack([box * self.gains.box, seg * self.gains.box, cls * self.gains.cls, dfl * self.gains.dfl])
        return LossSums(parts, torch.stack([assigned.strength.sum(), assigned.foreground.sum().float()]))

    def _anchor_points(self, size_px: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = (size_px, device)
        if key not in self._points:
            self._points[key] = anchor_points(self.strides, size_px, device)
        return self._points[key]

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

    Classes without objects get the mean of the others, as with Ultralytics' `cls_pw=1`. None if there are no objects.
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


def _decode_all(bins: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Decode boxes as `decode_boxes` does, from bins in the network's layout (B, 4 * bins, A): (B, A, 4)."""
    distribution = bins.unflatten(1, (4, -1)).softmax(2)  # (B, 4, bins, A)
    distances = torch.arange(distribution.shape[2], dtype=bins.dtype, device=bins.device) @ distribution  # (B, 4, A)
    low, high = distances.transpose(1, 2).split(2, -1)
    return torch.cat([points - low, points + high], -1)


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
    """Return class ids (B, M), boxes (B, M, 4) and which of them are real (B, M). M is the largest count, at least 1."""
    index = targets.batch_index
    counts = torch.zeros(batch_size, dtype=torch.int64, device=index.device)
    counts.scatter_add_(0, index, torch.ones_like(index))
    slot = torch.arange(len(index), device=index.device) - (counts.cumsum(0) - counts)[index]
    most = targets.most_objects
    if most is None:
        most = int(counts.max())  # a host synchronisation, unless the loader has counted
    most = max(most, 1)
    class_ids = torch.zeros(batch_size, most, dtype=torch.int64, device=index.device)
    boxes = torch.zeros(batch_size, most, 4, device=index.device)
    class_ids[index, slot] = targets.class_ids
    boxes[index, slot] = targets.boxes
    return class_ids, boxes, torch.arange(most, device=index.device) < counts[:, None]
