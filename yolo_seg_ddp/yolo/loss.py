"""The segmentation loss of YOLOv8, YOLO11 and YOLO12, with normalisers summed over all ranks: N
ranks compute the gradient of one.

Task-aligned assignment (TOOD, arXiv 2108.07755, section 3.2), complete IoU (arXiv 1911.08287, eq.
8-11), distribution focal loss (arXiv 2006.04388, eq. 6), class BCE, and mask BCE inside each
target's box divided by the box's area (YOLACT, arXiv 1904.02689). Gains and constants are those
YOLOv8's released weights were trained with.

The gradient of a batch equals that of the same images on one rank, however they are split over the
ranks.

Under accumulation the sums of a group of micro-batches are divided by the normalisers of the whole
group: whenever a micro-batch adds to them, the gradient so far is scaled down to match
(`begin_group`, `carry`). Exact for box, class and distribution if no outline is rough. The mask
part is normalised by positive anchors instead of scores, so it is exact only if the mean score per
anchor is equal in all micro-batches. Two micro-batches differ from one batch of both by at most
0.025 of the gradient's norm; the usual mean over micro-batches differs by up to 0.5 when object
counts differ (tests/yolo/test_loss.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.yolo.assigner import (
    YOLOV8_RULE,
    PredictedMasks,
    Rule,
    TrueObjects,
    assign,
    inside_boxes,
)
from yolo_seg_ddp.yolo.boxes import AnchorGrid, BoxErrors, anchor_grid, predicted_sides
from yolo_seg_ddp.yolo.colour_error import colour_error
from yolo_seg_ddp.yolo.inputs import Targets
from yolo_seg_ddp.yolo.mask_loss import find_positives, mask_loss

PARTS = ("box", "seg", "cls", "dfl")
NUM_NORMALISERS = 3
# weights of the parts; the mask part shares the box gain
BOX_GAIN, CLASS_GAIN, DFL_GAIN = 7.5, 0.5, 1.5
FAR_PX = 1e5  # beyond every image


@dataclass(frozen=True)
class LossSums:
    """Un-normalised parts (4,) in the order of PARTS, gains applied, and their normalisers (3,).

    These are the score sum, and the anchors and the score sum of objects without a rough outline.
    """

    parts: torch.Tensor
    normalisers: torch.Tensor

    def normalised(self, normalisers: torch.Tensor, factor: float = 1) -> torch.Tensor:
        """Return the four parts times a factor, divided by the given normalisers (each at least 1):
        (4,).
        """
        scores, anchors, outlines = (normalisers.clamp(min=1) / factor).unbind()
        return self.parts / torch.stack([outlines, anchors, scores, outlines])


class SegmentationLoss:
    """The engine's `criterion(outputs, targets)`; outputs is the dictionary that the model returns
    in training.

    The returned loss is `loss_scale` times the reported one. YOLOv8's optimizer settings expect
    gradients summed over a nominal batch of 64 images, hence the default of 64. `class_weights`
    float32 (classes,) multiply all errors of a class and its objects. `within_reach`: objects are
    assigned only to anchors that can predict the whole box, unlike in YOLOv8.
    """

    def __init__(
        self,
        model: Any,
        loss_scale: float = 64.0,
        class_weights: torch.Tensor | None = None,
        *,
        within_reach: bool = False,
    ) -> None:
        head = model.model[-1]
        self.strides = [float(stride) for stride in head.stride]
        self.num_classes = int(head.nc)
        # With one bin an anchor predicts any distance.
        self.reach_cells = int(head.reg_max) - 1 if within_reach and head.reg_max > 1 else None
        self.loss_scale = loss_scale
        self.class_weights = class_weights
        self.gradient_rescale = torch.ones(())
        self._group: torch.Tensor | None = None  # normalisers (3,) of the micro-batches so far
        self._is_in_group = False
        self._constants: dict[tuple[int, torch.device], _Constants] = {}

    def begin_group(self) -> None:
        """Begin the micro-batches of one optimizer step.

        From here on the caller sums gradients without dividing, and multiplies those it has by
        `gradient_rescale`, a tensor (), after each call and before the backward pass.
        """
        self._group = None
        self._is_in_group = True

    def __call__(
        self, outputs: dict[str, torch.Tensor], targets: Targets
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (loss to differentiate, values to report). Every rank must reach this: the
        normalisers are reduced.

        DDP averages gradients over ranks, so the rank's own sums are multiplied by the world size.
        """
        sums = self.sums(outputs, targets)
        normalisers = distributed.all_reduce_sum(sums.normalisers)
        parts = sums.normalised(normalisers, distributed.world_size())
        loss = parts.sum()
        values = {"loss": loss.detach(), **self._values(sums, parts.detach())}
        if self._is_in_group:
            before = torch.zeros_like(normalisers) if self._group is None else self._group
            self._group = before + normalisers
            self.gradient_rescale = (before.clamp(min=1) / self._group.clamp(min=1))[0]
            loss = sums.normalised(self._group, distributed.world_size()).sum()
        return loss * self.loss_scale, values

    def _values(self, sums: LossSums, parts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what to report, by name, from the normalised parts."""
        return dict(zip(PARTS, parts.unbind(), strict=True))

    def sums(self, outputs: dict[str, torch.Tensor], targets: Targets) -> LossSums:
        """Return this rank's share of the loss, without any communication."""
        with torch.autocast(targets.masks.device.type, enabled=False):
            return self._sums(outputs, targets)

    def _sums(self, outputs: dict[str, torch.Tensor], targets: Targets) -> LossSums:
        logits = outputs["scores"].float()  # (B, classes, A)
        bins = outputs["boxes"]  # (B, 4 * bins, A): distances to left, top, right, bottom
        constants = self._constants_of(targets.size_px, logits.device)
        grid = constants.grid
        class_ids, target_boxes = pad_targets(targets, len(logits))
        boxed = None
        if targets.boxed is not None:
            boxed = pad_flags(targets, targets.boxed, len(logits))
        object_weights = None
        if constants.class_weights is not None:
            object_weights = constants.class_weights[:, 0][class_ids]  # (B, M)
        with torch.no_grad():
            target_edges = (target_boxes * grid.outward).permute(2, 0, 1)  # (4, B, M)
            probabilities = logits.sigmoid()
            assigned = assign(
                probabilities,
                predicted_sides(bins.float(), grid.strides),
                TrueObjects(
                    class_ids,
                    target_edges,
                    inside_boxes(target_boxes, self.strides, grid, self.reach_cells),
                ),
                grid,
                *self._assignment(outputs, targets, boxed),
            )
            mask_boxes = target_boxes * (outputs["proto"].shape[-1] / targets.size_px)
            has_outline = assigned.foreground
            if targets.rough is not None:
                rough = pad_flags(targets, targets.rough, len(logits))
                has_outline = has_outline & ~rough.gather(1, assigned.target_index)
            positives = find_positives(
                has_outline,
                assigned.target_index,
                mask_boxes,
                outputs["proto"].shape[-1],
                boxed,
                object_weights,
            )
            image, anchor = positives.image, positives.anchor
            true_sides = target_edges[:, image, positives.target] - grid.sides.index_select(
                1, anchor
            )
            strides = grid.strides[anchor]
            true_sides /= strides  # (4, P) in cells
            normalisers = torch.stack(
                [assigned.strength, has_outline, assigned.strength * has_outline]
            ).sum((1, 2))
        # Without positives the rows below are empty, but every output stays in the graph: each
        # parameter then gets a gradient of zero, for which DDP would otherwise wait.
        weight = assigned.strength[image, anchor]
        if object_weights is not None:
            weight = weight * object_weights[image, positives.target]
        box, dfl = self._box_errors(
            _AnchorRows.apply(bins, image, anchor), true_sides, weight, strides, targets.size_px
        )
        weights = constants.class_weights
        if targets.ignored is not None:
            # An anchor whose centre lies in a region does not learn that the region's class is not
            # there. (A,) each
            column, row = (grid.sides[2:] * (targets.ignored.shape[-1] / targets.size_px)).long()
            # (B, classes, A)
            is_ignored = targets.is_ignored(targets.ignored[:, row, column], *logits.shape[:2])
            counts = (~is_ignored | (assigned.scores > 0)).float()
            weights = counts if weights is None else counts * weights
        cls = _ClassError.apply(logits, probabilities, assigned.scores, weights)
        coefficients = _AnchorRows.apply(outputs["mask_coefficient"], image, anchor)  # (P, 32)
        seg = mask_loss(outputs["proto"], coefficients, targets.masks, mask_boxes, positives)
        if positives.peaks is not None and targets.colours is not None:
            seg = seg + colour_error(
                outputs["proto"], coefficients, positives, mask_boxes, targets.colours
            )
        return LossSums(torch.stack([box, seg, cls, dfl]) * constants.gains, normalisers)

    def _assignment(
        self, outputs: dict[str, torch.Tensor], targets: Targets, boxed: torch.Tensor | None
    ) -> tuple[Rule, PredictedMasks | None]:
        """Return how targets get their anchors. boxed: bool (B, M)."""
        return YOLOV8_RULE, None

    def _box_errors(
        self,
        rows: torch.Tensor,
        true_sides: torch.Tensor,
        weight: torch.Tensor,
        strides: torch.Tensor,
        size_px: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums () of the box and the distribution part; `strides` (P,): sides of the
        anchors' cells in pixels.
        """
        errors: tuple[torch.Tensor, torch.Tensor] = BoxErrors.apply(rows, true_sides, weight)
        return errors

    def _constants_of(self, size_px: int, device: torch.device) -> _Constants:
        """Return the constants for an input size, which are made once: making one on a GPU may wait
        for it.
        """
        key = (size_px, device)
        if key not in self._constants:
            gains = torch.tensor([BOX_GAIN, BOX_GAIN, CLASS_GAIN, DFL_GAIN], device=device)
            weights = None if self.class_weights is None else self.class_weights.to(device)[:, None]
            self._constants[key] = _Constants(
                anchor_grid(self.strides, size_px, device), gains, weights
            )
        return self._constants[key]


@dataclass(frozen=True)
class _Constants:
    """What is the same in all steps of one input size."""

    grid: AnchorGrid
    gains: torch.Tensor  # (4,) in the order of PARTS
    class_weights: torch.Tensor | None  # (classes, 1)


class _AnchorRows(torch.autograd.Function):
    """Take the columns of (B, C, A) maps at P different (image, anchor): float32 (P, C).

    Indexing would do the same. Its gradient allows for repeated anchors, and sorts them for it.
    """

    @staticmethod
    def forward(
        context: Any, maps: torch.Tensor, image: torch.Tensor, anchor: torch.Tensor
    ) -> torch.Tensor:
        context.save_for_backward(maps, image, anchor)
        return maps.transpose(1, 2)[image, anchor].float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Put the rows in place, among zeros."""
        maps, image, anchor = context.saved_tensors
        whole = torch.zeros_like(maps)
        whole.transpose(1, 2)[image, anchor] = gradient.to(whole.dtype)
        return whole, None, None


class _ClassError(torch.autograd.Function):
    """The sum of the BCE of logits with scores in 0..1, (B, classes, A), times class weights or
    None: ().

    `forward` computes the gradient too, from the logits' sigmoid; `backward` only scales it.
    """

    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,
        probabilities: torch.Tensor,
        scores: torch.Tensor,
        class_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        error = F.softplus(logits).addcmul_(logits, scores, value=-1)
        gradient = probabilities - scores
        if class_weights is not None:
            error *= class_weights
            gradient *= class_weights
        context.save_for_backward(gradient)
        return error.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (of_logits,) = context.saved_tensors
        return of_logits * gradient, None, None, None


def balancing_weights(counts: np.ndarray) -> torch.Tensor | None:
    """Return class weights 1/sqrt(count), from how many objects each class has, with the mean 1
    over the objects: float32 (classes,).

    The root is that of LVIS' repeat factors (arXiv 1908.03195). A class without objects
    gets 1. None if all classes with objects have equally many.
    """
    is_present = counts > 0
    if len(np.unique(counts[is_present])) < 2:
        return None
    weights = np.maximum(counts, 1) ** -0.5
    weights *= counts.sum() / (weights * counts).sum()
    weights[~is_present] = 1
    return torch.from_numpy(weights).float()


def pad_flags(targets: Targets, flags: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Return flags of the targets, bool (N,), as `pad_targets` does: bool (B, M)."""
    return pad_targets(replace(targets, class_ids=flags.long()), batch_size)[0] > 0


def pad_targets(targets: Targets, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return class ids (B, M) and boxes (B, M, 4). M is the largest count, at least 1.

    Targets that are not there have a box far outside, without area, in which no anchor lies.
    """
    index = targets.batch_index  # ascending
    slot = torch.arange(len(index), device=index.device) - torch.searchsorted(index, index)
    most = targets.most_objects
    if most is None:
        # A host synchronisation, unless the loader has counted.
        most = int(slot.max()) + 1 if len(slot) else 0
    most = max(most, 1)
    class_ids = torch.zeros(batch_size, most, dtype=torch.int64, device=index.device)
    boxes = torch.full((batch_size, most, 4), -FAR_PX, device=index.device)
    class_ids[index, slot] = targets.class_ids
    boxes[index, slot] = targets.boxes
    return class_ids, boxes
