"""Assigns targets to anchors: the task-aligned assignment (TOOD, arXiv 2108.07755, section 3.2).

Overlap is measured by the complete IoU of the boxes (arXiv 1911.08287, eq. 8-11), in YOLO26 by the
mean of it and the IoU of the masks.
"""

from dataclasses import dataclass

import torch

from yolo_seg_ddp.yolo.boxes import AnchorGrid, complete_iou

# YOLO26 compares the masks of so many times the anchors that a target may choose
MASKS_PER_CHOICE = 3
PIXELS_AT_ONCE = 2**24  # of predicted masks, computed together: bounds the memory
EPS = 1e-9
# more than a target's number: a sum over choices holds their count above it, and numbers below
_ONE_CHOICE = 2**32


@dataclass(frozen=True)
class Rule:
    """How many anchors a target gets; the defaults are those of YOLOv8, like the exponents of the
    alignment.

    Each target chooses its `top_k` best anchors. With `final_top_k`, it keeps the best so many of
    those that it got.
    """

    top_k: int = 10
    final_top_k: int | None = None


YOLOV8_RULE = Rule()


@dataclass(frozen=True)
class TrueObjects:
    """The targets of a batch, padded to M per image."""

    class_ids: torch.Tensor  # int64 (B, M)
    edges: torch.Tensor  # (4, B, M): -x1, -y1, x2, y2 in pixels
    inside: torch.Tensor  # bool (B, M, A): which anchors lie in which boxes


@dataclass(frozen=True)
class Assignment:
    """The target of each anchor, and the class scores that the anchor should predict."""

    foreground: torch.Tensor  # bool (B, A): whether the anchor has a target
    target_index: torch.Tensor  # int64 (B, A), in 0..M-1
    strength: torch.Tensor  # (B, A): the score for the target's class; 0 for background
    scores: torch.Tensor  # (B, classes, A): the scores for all classes


@dataclass(frozen=True)
class PredictedMasks:
    """What a network predicts for masks, and the true masks.

    Letters as in `yolo_seg_ddp.yolo.mask_loss`.
    """

    prototypes: torch.Tensor  # (B, 32, S, S)
    coefficients: torch.Tensor  # (B, 32, A)
    # int32 (B, S, S): k + 1 where an image's k-th target is, below 0 where pixels are not compared
    masks: torch.Tensor
    size_px: int  # side of the input
    boxed: torch.Tensor | None = None  # bool (B, M), targets that have a box and no mask

    @torch.no_grad()
    def overlap(
        self, chosen: torch.Tensor, inside: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        """Return the masks' IoU of the chosen anchors (B, M, K) with each target, 0 for the others:
        (B, M, A).

        Of the chosen anchors only those inside the target's box are compared, see `inside` bool (B,
        M, A). boxes (4, B, A): the predicted xyxy in input pixels; a predicted mask is cut to them,
        as in prediction. Costs one host synchronisation.
        """
        is_chosen = torch.zeros_like(inside).scatter_(-1, chosen, True) & inside
        counts = is_chosen.sum((1, 2)).tolist()
        places = torch.nonzero_static(is_chosen, size=sum(counts))  # (N, 3): image, target, anchor
        found = boxes.new_zeros(inside.shape)
        step = max(PIXELS_AT_ONCE // self.masks[0].numel(), 1)
        for image, of_image in enumerate(places.split(counts)):
            for part in of_image.split(step) if len(of_image) else ():
                _, target, anchor = part.unbind(1)
                found[image, target, anchor] = self._overlap_in(
                    image, target, anchor, boxes[:, image, anchor]
                )
        return found

    def _overlap_in(
        self, image: int, target: torch.Tensor, anchor: torch.Tensor, boxes: torch.Tensor
    ) -> torch.Tensor:
        """Return the IoU of paired targets and anchors (n,) of an image, whose predicted boxes are
        (4, n): (n,).
        """
        prototypes, truth = self.prototypes[image].float(), self.masks[image]
        side = truth.shape[-1]
        rows = self.coefficients[image].float().T[anchor]  # (n, 32)
        # (n, 1) each, in prototype pixels
        x1, y1, x2, y2 = (boxes * (side / self.size_px))[..., None]
        pixel = torch.arange(side, device=boxes.device)
        column, row = (pixel >= x1) & (pixel < x2), (pixel >= y1) & (pixel < y2)  # (n, S) each
        predicted = (rows @ prototypes.flatten(1)).view(-1, side, side) > 0
        predicted &= column[:, None] & row[..., None]
        predicted &= truth >= 0
        true = truth == target[:, None, None] + 1  # (n, S, S)
        shared = (predicted & true).sum((1, 2))
        return shared / (predicted | true).sum((1, 2)).clamp(min=1)


@torch.no_grad()
def assign(
    probabilities: torch.Tensor,
    sides: torch.Tensor,
    objects: TrueObjects,
    grid: AnchorGrid,
    rule: Rule = YOLOV8_RULE,
    masks: PredictedMasks | None = None,
) -> Assignment:
    """Assign anchors to targets by alignment = probability^0.5 * overlap^6.

    probabilities (B, classes, A); the predicted boxes as sides (4, B, A) in pixels. Each target
    chooses its best anchors inside its box; an anchor that several targets choose goes to the one
    that it overlaps most. The overlap is that of the boxes, with `masks` the mean of boxes and
    masks. Costs one host synchronisation, with masks two.
    """
    inside, class_ids = objects.inside, objects.class_ids
    # a host synchronisation; (L,) flat indices of (image, target, anchor)
    pair = inside.flatten().nonzero()[:, 0]
    iou, weight = _iou_and_weight(pair, probabilities, sides, objects, grid)
    dense = torch.zeros(2, *inside.shape, device=sides.device, dtype=sides.dtype)
    if masks is not None:
        dense[1].view(-1).scatter_(0, pair, weight * iou.pow(6) + EPS)  # EPS: unlike other anchors
        best = dense[1].topk(min(MASKS_PER_CHOICE * rule.top_k, inside.shape[-1])).indices
        boxes = (sides + grid.sides[:, None]) * grid.outward[:, None, None]  # (4, B, A) xyxy
        of_masks = masks.overlap(best, inside, boxes).flatten().index_select(0, pair)
        if masks.boxed is not None:
            is_boxed = masks.boxed.flatten().index_select(0, pair // inside.shape[-1])
            of_masks = torch.where(is_boxed, iou, of_masks)
        iou = (iou + of_masks) / 2
    dense.view(2, -1)[0].scatter_(0, pair, iou)
    dense.view(2, -1)[1].scatter_(0, pair, weight * iou.pow(6))  # alpha 0.5, beta 6
    overlap, alignment = dense.unbind()  # (B, M, A) each

    best = alignment.topk(min(rule.top_k, alignment.shape[-1]), dim=-1).indices  # (B, M, 10)
    first = _ONE_CHOICE
    choices = torch.arange(first, first + inside.shape[1], device=inside.device)[
        :, None
    ] * inside.gather(-1, best)
    chosen_by = torch.zeros(sides.shape[1:], dtype=torch.int64, device=inside.device)  # (B, A)
    chosen_by.scatter_add_(1, best.flatten(1), choices.flatten(1))
    foreground = chosen_by > 0
    target_index = torch.where(
        chosen_by >= 2 * first, overlap.max(1).indices, chosen_by & (first - 1)
    )
    if rule.final_top_k is not None:
        number = torch.arange(inside.shape[1], device=inside.device)[:, None]
        held = (target_index[:, None] == number) & foreground[:, None]  # (B, M, A)
        best = (alignment * held).topk(rule.final_top_k).indices
        foreground = (torch.zeros_like(held).scatter_(-1, best, True) & held).any(1)

    # The score of a target's best anchor is the target's best overlap; the others' are in
    # proportion to their alignment.
    chosen = target_index.expand(2, -1, -1)
    values = dense.gather(2, chosen[:, :, None])[:, :, 0] * foreground  # (2, B, A)
    best_of = torch.zeros(2, *class_ids.shape, device=sides.device, dtype=sides.dtype)  # (2, B, M)
    best_overlap, best_alignment = (
        best_of.scatter_reduce_(2, chosen, values, "amax").gather(2, chosen).unbind()
    )
    strength = values[1] * best_overlap / (best_alignment + EPS)
    scores = torch.zeros_like(probabilities)
    scores.scatter_(1, class_ids.gather(1, target_index)[:, None], strength[:, None])
    return Assignment(foreground, target_index, strength, scores)


def _iou_and_weight(
    pair: torch.Tensor,
    probabilities: torch.Tensor,
    sides: torch.Tensor,
    objects: TrueObjects,
    grid: AnchorGrid,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the boxes' IoU and probability^0.5 of the given pairs, (L,) in 0..B*M*A-1: (L,) each.

    The pairs are those of an anchor inside a target's box, since on a CPU all pairs would be slow.
    """
    class_ids, target_edges = objects.class_ids, objects.edges
    num_targets, num_anchors = class_ids.shape[1], sides.shape[2]
    target = pair // num_anchors  # in 0..B*M-1
    cell = pair % num_anchors  # the anchor within the image
    anchor = torch.add(cell, target // num_targets, alpha=num_anchors)  # in 0..B*A-1
    true_sides = target_edges.flatten(1).index_select(1, target) - grid.sides.index_select(1, cell)
    iou = complete_iou(sides.flatten(1).index_select(1, anchor), true_sides)[0].clamp_(min=0)
    batch_size, num_classes = probabilities.shape[:2]
    class_row = (
        class_ids
        + torch.arange(0, batch_size * num_classes, num_classes, device=pair.device)[:, None]
    )
    # in 0..B*classes*A-1
    score = torch.add(cell, class_row.flatten().index_select(0, target), alpha=num_anchors)
    probability = probabilities.flatten().index_select(0, score)
    return iou, probability.sqrt_()


def inside_boxes(
    boxes: torch.Tensor, strides: list[float], grid: AnchorGrid, reach_cells: int | None = None
) -> torch.Tensor:
    """Return which anchors lie in which boxes (B, M, 4), xyxy in pixels: bool (B, M, A).

    Sides shorter than the middle stride count as that long, so that a thin wire still contains
    anchors. With `reach_cells`, the largest distance that a level predicts, an anchor from which
    the box reaches farther is left out, except on the coarsest level. Otherwise a level wire would
    have anchors of the finest level alone, whose boxes end after 240 pixels.
    """
    low, high = boxes.split(2, -1)
    true_length = high - low
    shortest = strides[1] if len(strides) > 1 else strides[0]
    length = true_length.clamp(min=shortest)
    # a box too long for the middle level still contains anchors of the coarsest
    if reach_cells is not None:
        is_long = true_length.amax(-1, keepdim=True) > 2 * reach_cells * shortest
        length = torch.where(is_long, true_length.clamp(min=strides[-1]), length)
    # Twice each distance from the centre. An anchor lies inside if its column and its row do.
    distance = (grid.twice_axes - (low + high)[..., None]).abs_()  # (B, M, 2, N)
    is_inside = length[..., None] - distance > 2 * EPS
    if reach_cells is not None:
        farthest = (2 * reach_cells * grid.axis_strides).masked_fill(
            grid.axis_strides == strides[-1], torch.inf
        )
        is_inside &= true_length[..., None] + distance <= farthest
    column, row = is_inside.unbind(2)
    return column.index_select(2, grid.column) & row.index_select(2, grid.row)
