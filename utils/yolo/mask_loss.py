"""The mask part of the loss: the BCE inside each positive anchor's target box, divided by the box's area.

`mask_loss` is fast and needs little memory. `mask_loss_by_autograd` is the same in plain PyTorch. How the fast one works:

1. The prototypes (B, 32, S, S) are cut into tiles of 8 x 8 pixels.
2. The positive anchors of one target share its box and its mask, so they form groups of up to 10 rows.
3. A unit is one group on one tile that its box touches; its logits are one matrix product, (10, 32) @ (32, 64).
4. Units are computed a fixed number at a time, so memory does not grow with the number of objects.
5. The forward pass also computes the gradient, so no logits are kept for the backward pass.

To add a term, such as Dice, write a function like `bce` and list it in `EXTRA_TERMS`: slower, but autograd computes its
gradient. To change the error of a pixel in the fast computation, change `pixel_error`, and `bce` with it.

Letters: B images, M targets per image (padded), A anchors, P positive anchors, G groups, U units, u units computed at
once, S side of the prototypes, N = B * (S / 8)^2 tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

TILE = 8  # side of a tile in prototype pixels; S is a multiple of 8 because the input is a multiple of 32
GROUP_SIZE = 10  # rows of a group; the assigner gives a target its 10 best anchors, seldom more
# Units computed at once: few enough for a CPU's cache, enough to fill a GPU with each kernel.
UNITS_AT_ONCE = {"cpu": 256, "cuda": 16384}
# (logits, truth, weight), float32 (P, S, S) each -> the term of each anchor (P,)
MaskTerm = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Positives:
    """The positive anchors, their groups and the units of work: int64 indices."""

    image: torch.Tensor  # (P,)
    anchor: torch.Tensor  # (P,) in 0..A-1
    target: torch.Tensor  # (P,) in 0..M-1, within the image
    slot: torch.Tensor  # (P,) the anchor's row among the G * 10 rows of all groups
    num_groups: int  # G
    unit_target: torch.Tensor  # (U,) in 0..B*M-1
    unit_group: torch.Tensor  # (U,) in 0..G-1
    unit_tile: torch.Tensor  # (U,) in 0..N-1: image by image, row by row


def find_positives(
    foreground: torch.Tensor, target_index: torch.Tensor, mask_boxes: torch.Tensor, side: int
) -> Positives:
    """List the positive anchors, their groups, and the tiles that each group's box touches.

    foreground bool and target_index int64 (B, A); mask_boxes (B, M, 4) xyxy in prototype pixels; side is S. Costs one
    host synchronisation.
    """
    num_images, most_targets = mask_boxes.shape[:2]
    # A pixel belongs to a box when x1 <= its index < x2, and likewise along y.
    low, high = mask_boxes.ceil().clamp_(0, side).long().split(2, -1)  # (B, M, 2) each: x and y
    first_tile = low // TILE
    num_tiles = ((high + (TILE - 1)) // TILE - first_tile) * (high > low)
    tiles_per_target = num_tiles.prod(-1)
    anchors_per_target = torch.zeros_like(tiles_per_target).scatter_add_(1, target_index, foreground.long())
    groups_per_target = (anchors_per_target + (GROUP_SIZE - 1)) // GROUP_SIZE
    counts = torch.stack([anchors_per_target, groups_per_target, groups_per_target * tiles_per_target]).flatten(1)
    ends = counts.cumsum(1)  # (3, B * M)
    # The step's second and last host synchronisation: from here on every size is known.
    num_positives, num_groups, num_units = ends[:, -1].tolist()
    first_anchor, first_group, first_unit = (ends - counts).unbind()  # of each target

    # Sort the anchors by target, and give each target's anchors the rows of its groups in turn.
    places = torch.nonzero_static(foreground, size=num_positives)  # (P, 2)
    image, anchor = places.unbind(1)
    number = torch.add(target_index[image, anchor], image, alpha=most_targets)  # in 0..B*M-1
    number, order = number.sort(stable=True)
    image, anchor = places[order].unbind(1)
    numbers = torch.arange(max(num_positives, num_units), device=order.device)
    slot = numbers[:num_positives] + (first_group * GROUP_SIZE - first_anchor)[number]

    # Each target's units: its groups one after another, each on all tiles, row by row.
    tiles_per_side = side // TILE
    first_x, first_y = first_tile.unbind(-1)
    image_tiles = torch.arange(0, num_images * tiles_per_side**2, tiles_per_side**2, device=order.device)[:, None]
    corner = (image_tiles + first_x).add_(first_y, alpha=tiles_per_side)  # (B, M)
    of_target = [first_unit, first_group, tiles_per_target.flatten(), num_tiles[..., 0].flatten(), corner.flatten()]
    unit_target = torch.repeat_interleave(counts[2], output_size=num_units)
    unit, group, tiles, columns, tile = torch.stack(of_target).index_select(1, unit_target).unbind()  # (U,) each
    within = numbers[:num_units] - unit
    unit_group = group + within // tiles
    within %= tiles
    unit_tile = (tile + within % columns).add_(within // columns, alpha=tiles_per_side)
    target = number % most_targets
    return Positives(image, anchor, target, slot, num_groups, unit_target, unit_group, unit_tile)


def mask_loss(
    prototypes: torch.Tensor,
    coefficients: torch.Tensor,
    masks: torch.Tensor,
    mask_boxes: torch.Tensor,
    positives: Positives,
) -> torch.Tensor:
    """Return the sum over the positive anchors of the BCE inside the target's box, divided by the box's area: ().

    prototypes (B, 32, S, S) in any precision; coefficients float32 (P, 32); masks int32 (B, S, S), k + 1 where an
    image's k-th target is; mask_boxes (B, M, 4) xyxy in prototype pixels.
    """
    mask_tiles = _cut(masks[:, None])[..., 0]
    loss: torch.Tensor = _TiledMaskError.apply(coefficients, prototypes, mask_tiles, mask_boxes, positives)
    for gain, term in EXTRA_TERMS:
        loss = loss + gain * mask_loss_by_autograd(prototypes, coefficients, masks, mask_boxes, positives, term)
    return loss


def bce(logits: torch.Tensor, truth: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the BCE over each anchor's pixels: (P,)."""
    return (F.binary_cross_entropy_with_logits(logits, truth, reduction="none") * weight).sum((1, 2))


EXTRA_TERMS: tuple[tuple[float, MaskTerm], ...] = ()  # (gain, term), added to the BCE; none in YOLOv8


def mask_loss_by_autograd(
    prototypes: torch.Tensor,
    coefficients: torch.Tensor,
    masks: torch.Tensor,
    mask_boxes: torch.Tensor,
    positives: Positives,
    term: MaskTerm = bce,
) -> torch.Tensor:
    """Return the sum of `term` over the positive anchors: (). The arguments are those of `mask_loss`.

    With `bce` this is the reference for `mask_loss`. Slow: autograd computes and keeps several float32
    (P, S, S) tensors, also outside the boxes.
    """
    image, target = positives.image, positives.target
    x1, y1, x2, y2 = mask_boxes[image, target][..., None, None].unbind(1)  # (P, 1, 1) each
    pixel = torch.arange(prototypes.shape[-1], device=prototypes.device)
    row, column = pixel[:, None], pixel[None]
    inside = (column >= x1) & (column < x2) & (row >= y1) & (row < y2)  # (P, S, S)
    weight = inside / ((x2 - x1) * (y2 - y1)).clamp(min=1e-9)
    truth = (masks[image] == target[:, None, None] + 1).to(weight.dtype)
    maps = prototypes.to(coefficients.dtype)
    # Image by image, as the anchors are ordered: gathering each anchor's prototypes would take 32 times the memory.
    logits = torch.cat([torch.einsum("pc,chw->phw", coefficients[image == b], maps[b]) for b in range(len(maps))])
    return term(logits, truth, weight).sum()


def pixel_error(
    logits: torch.Tensor, truth: torch.Tensor, weight: torch.Tensor, unused_factor: torch.Tensor, with_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weighted BCE summed over u units: (), and its derivative by the logits (u, 10, 64) or None.

    logits (u, 10, 64); truth (u, 64), 1 where the target's mask is, else 0; weight (u, 64); unused_factor (u, 1), 2 to
    the power of the unit's unused rows.
    The derivative of an unused row is not 0, but reaches nothing: its coefficients are 0 and belong to no anchor.
    """
    probability = logits.sigmoid()
    # BCE = max(x, 0) - t x - log(max(p, 1 - p)). The rows share t, so one logarithm of their product is enough. An
    # unused row has x = 0 and multiplies the product by one half, which unused_factor undoes exactly.
    certainty = torch.maximum(probability, 1 - probability).prod(1) * unused_factor  # (u, 64)
    error = torch.addcmul(logits.clamp(min=0).sum(1), truth, logits.sum(1), value=-1).sub_(certainty.log_())
    total = (error * weight).sum()
    if not with_gradient:
        return total, None
    return total, probability.sub_(truth[:, None]).mul_(weight[:, None])  # in place: (p - t) * weight


def _box_weights(boxes: torch.Tensor, tile: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights of the rows and columns of each unit's tile, from boxes (U, 4) and tile (U,): (U, 8) each.

    A row's weight times a column's is the pixel's: one over the box's area inside the box, else 0. The columns' weights
    are bool.
    """
    tiles_per_side = side // TILE
    place = torch.stack([tile % tiles_per_side, tile // tiles_per_side % tiles_per_side], 1)  # (U, 2): x and y
    # (U, 2, 8), in prototype pixels
    pixel = torch.add(torch.arange(TILE, device=tile.device), place[..., None], alpha=TILE)
    low, high = boxes[..., None].split(2, 1)
    column, row = ((pixel >= low) & (pixel < high)).unbind(1)
    return row / (high - low).prod(1), column


class _TiledMaskError(torch.autograd.Function):
    """Sum `pixel_error` over all units. `forward` computes the gradient too, `backward` only scales it."""

    @staticmethod
    def forward(
        context: Any,
        coefficients: torch.Tensor,
        prototypes: torch.Tensor,
        mask_tiles: torch.Tensor,
        mask_boxes: torch.Tensor,
        positives: Positives,
    ) -> torch.Tensor:
        """Take coefficients (P, 32), prototypes (B, 32, S, S), mask_tiles int32 (N, 64) and mask_boxes (B, M, 4).

        If the prototypes are bf16, the three matrix products are of bf16 matrices; everything else is float32.
        """
        rows = coefficients.new_zeros(positives.num_groups * GROUP_SIZE, coefficients.shape[1])
        rows = rows.index_copy_(0, positives.slot, coefficients).unflatten(0, (positives.num_groups, GROUP_SIZE))
        # Never fp16: a gradient divided by a box's area may be too small for it.
        half = torch.bfloat16 if prototypes.dtype == torch.bfloat16 else rows.dtype
        tiles = _cut(prototypes).to(half)  # (N, 64, 32)
        with_gradient = any(context.needs_input_grad)
        gradients = [torch.zeros_like(rows), torch.zeros_like(tiles, dtype=rows.dtype)] if with_gradient else []
        unit_target = positives.unit_target
        unit_boxes = mask_boxes.flatten(0, 1).index_select(0, unit_target)  # (U, 4)
        row_weight, column_weight = _box_weights(unit_boxes, positives.unit_tile, prototypes.shape[-1])
        unit_value = unit_target % mask_boxes.shape[1] + 1  # (U,): the target's value in the mask
        used_rows = rows.new_full((positives.num_groups * GROUP_SIZE,), 2.0).index_fill_(0, positives.slot, 1)
        unused_factor = used_rows.view(-1, GROUP_SIZE).prod(1, keepdim=True)  # (G, 1)
        total = rows.new_zeros(())
        step = UNITS_AT_ONCE[rows.device.type]
        for start in range(0, len(unit_target), step):
            part = slice(start, start + step)
            group, tile = positives.unit_group[part], positives.unit_tile[part]  # (u,)
            weight = (row_weight[part, :, None] * column_weight[part, None]).flatten(1)  # (u, 64)
            truth = (mask_tiles.index_select(0, tile) == unit_value[part, None]).to(weight.dtype)  # (u, 64)
            # On a CPU oneDNN compiles and keeps a bf16 product for each new shape, so only full parts use bf16.
            factor = half if len(group) == step or rows.device.type != "cpu" else rows.dtype
            unit_rows, unit_tiles = rows.index_select(0, group).to(factor), tiles.index_select(0, tile).to(factor)
            logits = torch.bmm(unit_rows, unit_tiles.mT).to(rows.dtype)  # (u, 10, 64)
            error, slope = pixel_error(logits, truth, weight, unused_factor[group], with_gradient)
            total += error
            if slope is not None:
                slope = slope.to(factor)
                gradients[0].index_add_(0, group, torch.bmm(slope, unit_tiles).to(rows.dtype))
                gradients[1].index_add_(0, tile, torch.bmm(slope.mT, unit_rows).to(rows.dtype))
        if with_gradient:
            gradients[0] = gradients[0].flatten(0, 1).index_select(0, positives.slot)  # (P, 32)
        context.save_for_backward(prototypes, *gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """Scale the gradients of coefficients and prototypes."""
        prototypes, coefficient_gradient, tile_gradient = context.saved_tensors
        whole = torch.empty_like(prototypes)
        parts = _in_tiles(whole)
        torch.mul(tile_gradient.view(parts.shape), gradient, out=parts)  # scaled, converted and put in place at once
        return coefficient_gradient * gradient, whole, None, None, None


def _in_tiles(maps: torch.Tensor) -> torch.Tensor:
    """View maps (B, C, S, S) tile by tile, pixel by pixel: (B, S / 8, S / 8, 8, 8, C)."""
    parts = maps.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))  # (B, C, rows, 8, columns, 8)
    return parts.permute(0, 2, 4, 3, 5, 1)


def _cut(maps: torch.Tensor) -> torch.Tensor:
    """Cut maps (B, C, S, S) into tiles, image by image and row by row: (N, 64, C)."""
    return _in_tiles(maps).reshape(-1, TILE * TILE, maps.shape[1])
