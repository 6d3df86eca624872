"""YOLO26's segmentation loss, with normalisers summed over all ranks as in
`yolo_seg_ddp.yolo.loss`.

The network has two sets of outputs: *one-to-many*, trained with up to 10 anchors per object, and
*one-to-one*, trained with one anchor per object (YOLOv10, arXiv 2405.14458, section 3.1), so that
prediction needs no suppression. The second sees the features detached: the backbone learns from the
first alone. Each has the parts of `SegmentationLoss`, but boxes are plain distances with an L1
error, and anchors are chosen by the overlap of boxes and masks. Auxiliary outputs predict the class
of each pixel. Constants are those of Ultralytics 8.4.190.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from yolo_seg_ddp.data.dataset import UNKNOWN
from yolo_seg_ddp.yolo.assigner import PredictedMasks, Rule
from yolo_seg_ddp.yolo.boxes import DistanceErrors, OneToOne
from yolo_seg_ddp.yolo.inputs import Targets
from yolo_seg_ddp.yolo.loss import (
    BOX_GAIN,
    PARTS,
    LossSums,
    SegmentationLoss,
    pad_flags,
    pad_targets,
)
from yolo_seg_ddp.yolo.model import is_yolo26

ONE_TO_MANY, ONE_TO_ONE = Rule(top_k=10), Rule(top_k=7, final_top_k=1)
SURELY_NOT = -1e4  # a logit whose sigmoid is 0
# of the loss that is one-to-many: in the first and in the last epoch
FIRST_SHARE, LAST_SHARE = 0.8, 0.1


def loss_for(model: Any, **choices: Any) -> SegmentationLoss:
    """Return the loss of a model's family; `choices` are
    the constructor's of `SegmentationLoss`.
    """
    return (
        EndToEndLoss(model, **choices) if is_yolo26(model) else SegmentationLoss(model, **choices)
    )


class OutputLoss(SegmentationLoss):
    """The loss of one of YOLO26's two sets of outputs."""

    rule = ONE_TO_MANY

    def _assignment(
        self, outputs: dict[str, torch.Tensor], targets: Targets, boxed: torch.Tensor | None
    ) -> tuple[Rule, PredictedMasks | None]:
        prototypes, coefficients = outputs["proto"], outputs["mask_coefficient"]
        return self.rule, PredictedMasks(
            prototypes, coefficients, targets.masks, targets.size_px, boxed
        )

    def _box_errors(
        self,
        rows: torch.Tensor,
        true_sides: torch.Tensor,
        weight: torch.Tensor,
        strides: torch.Tensor,
        size_px: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        distance_weight = weight * (strides / size_px)
        errors: tuple[torch.Tensor, torch.Tensor] = DistanceErrors.apply(
            rows, true_sides, weight, distance_weight
        )
        return errors


@dataclass(frozen=True)
class EndToEndSums(LossSums):
    """Parts (9,): four of the one-to-many outputs, four of the one-to-one, and the pixels' classes,
    each weighted.

    normalisers (7,): those of `LossSums` of both outputs, and the number of images.
    """

    share: float  # weight of the one-to-many outputs

    def normalised(self, normalisers: torch.Tensor, factor: float = 1) -> torch.Tensor:
        """Return the parts times a factor, divided by the given normalisers: (9,).

        Without any object the last is 0.
        """
        counts = normalisers.clamp(min=1) / factor
        scores, anchors, outlines = counts[:6].view(2, 3).unbind(1)
        of_outputs = torch.stack([outlines, anchors, scores, outlines], 1).flatten()  # (8,)
        images = counts[6:] / (normalisers[1:2] > 0)  # infinite without any anchor
        return self.parts / torch.cat([of_outputs, images])


class EndToEndLoss(SegmentationLoss):
    """YOLO26's loss: `share` of it for the one-to-many outputs, falling from 0.8 to 0.1, the rest
    for the one-to-one.

    `run_done()` says how much of the run is done, from 0 to 1, and must be a function of the step
    alone. The values that are reported are those of the one-to-many outputs, which validation
    measures too, and two more: `sem` and `one2one`. For the outputs of evaluation, which are those
    of one set, `sums` returns that set's loss.

    Under accumulation the one-to-many outputs' score sums rescale all gradients, so only that set's
    box, class and distance parts are exact: two micro-batches differ from one batch of both by 0.13
    to 0.29 of the gradient's norm (untrained network, 64 px), the usual mean over micro-batches by
    0.15 to 0.51.
    """

    def __init__(self, model: Any, **choices: Any) -> None:
        super().__init__(model, **choices)
        self.many, self.one = OutputLoss(model, **choices), OutputLoss(model, **choices)
        self.one.rule = ONE_TO_ONE
        self.run_done: Callable[[], float] = lambda: 0.0

    @property
    def share(self) -> float:
        """The present weight of the one-to-many outputs."""
        return max(1 - self.run_done(), 0) * (FIRST_SHARE - LAST_SHARE) + LAST_SHARE

    def _sums(self, outputs: dict[str, Any], targets: Targets) -> LossSums:
        if "one2many" not in outputs:
            return (self.one if isinstance(outputs, OneToOne) else self.many).sums(outputs, targets)
        prototypes, pixel_classes = outputs["one2many"]["proto"]
        many, one = (
            loss.sums({**outputs[name], "proto": maps}, targets)
            for loss, name, maps in (
                (self.many, "one2many", prototypes),
                (self.one, "one2one", prototypes.detach()),
            )
        )
        pixels = pixel_class_error(pixel_classes.float(), targets) * BOX_GAIN
        share = self.share
        parts = torch.cat([many.parts * share, one.parts * (1 - share), pixels[None] * share])
        num_images = many.normalisers.new_full((1,), len(prototypes))
        return EndToEndSums(
            parts, torch.cat([many.normalisers, one.normalisers, num_images]), share
        )

    def _values(self, sums: LossSums, parts: torch.Tensor) -> dict[str, torch.Tensor]:
        assert isinstance(sums, EndToEndSums)
        many, one, pixels = parts.split([len(PARTS), len(PARTS), 1])
        many, pixels, one = many / sums.share, pixels[0] / sums.share, one.sum() / (1 - sums.share)
        return {"loss": many.sum(), **super()._values(sums, many), "sem": pixels, "one2one": one}


def pixel_class_error(logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the sum over images of the error of each pixel's classes: half BCE, half 1 - Dice: ().

    logits float32 (B, classes, h, w). Each is a mean over an image: the BCE over pixels and
    classes, Dice over classes, with 1 added above and below the fraction. Each pixel has the class
    of its object, if it is on one; in a region to ignore, the region's class gives no error without
    an object of it. An object with a rough outline, or a box alone, gives none for its class.
    UNKNOWN pixels give none at all.
    """
    reduction = targets.masks.shape[-1] // logits.shape[-1]
    number = targets.masks[:, ::reduction, ::reduction].long()  # (B, h, w)
    class_ids, _ = pad_targets(targets, len(logits))
    index = (number - 1).clamp(min=0).flatten(1)
    classes = class_ids.gather(1, index).view_as(number)
    truth = torch.zeros_like(logits).scatter_(
        1, classes[:, None], (number > 0)[:, None].to(logits.dtype)
    )
    for flags in (targets.rough, targets.boxed):
        if flags is not None:
            is_unsure = pad_flags(targets, flags, len(logits)).gather(1, index).view_as(number)
            no_error = (truth > 0) & is_unsure[:, None]
            truth, logits = truth.masked_fill(no_error, 0), logits.masked_fill(no_error, SURELY_NOT)
    if targets.boxed is not None:
        logits = logits.masked_fill((number == UNKNOWN)[:, None], SURELY_NOT)
    if targets.ignored is not None:
        at_pixels = targets.ignored[:, ::reduction, ::reduction]
        # Surely not there: the error, the gradient and the probability are 0.
        logits = logits.masked_fill(
            targets.is_ignored(at_pixels, *logits.shape[:2]) & (truth == 0), SURELY_NOT
        )
    bce = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean((1, 2, 3))
    probability = logits.sigmoid()
    shared = (probability * truth).sum((2, 3))
    dice = (2 * shared + 1) / (probability.sum((2, 3)) + truth.sum((2, 3)) + 1)  # (B, classes)
    return (0.5 * bce + 0.5 * (1 - dice.mean(1))).sum()
