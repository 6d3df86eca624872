"""The mask part of the loss: cross-entropy inside each target's box, computed only there and in bounded memory.

The prototypes are cut into tiles, and a target's positive anchors, which share its box and its outline, are put into
groups. One unit of work is a group on one of the tiles that its box touches. Units are computed a fixed number at a
time, gradient included, so memory does not grow with the number of objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

TILE = 8  # side of a tile in prototype pixels; the input is a multiple of 32 pixels, so tiles fit
GROUP_SIZE = 10  # a target takes its 10 best anchors, seldom more
# Units at a time: on a CPU what they need stays in the cache, on a GPU each kernel has enough to do.
UNITS_AT_ONCE = {"cpu": 256, "cuda": 16384}


@dataclass(frozen=True)
class Positives:
    """The P anchors that answer for a target, and the mask work that follows from them; all int64.

    image, anchor, target (P,); slot (P,) is the anchor's row among those of all G groups. owner (G,) is the number of
    the group's target in 0..B * M, filled (G,) how many of its rows are used; group and tile (U,) are the units of work.
    """

    image: torch.Tensor
    anchor: torch.Tensor
    target: torch.Tensor
    slot: torch.Tensor
    owner: torch.Tensor
    filled: torch.Tensor
    group: torch.Tensor
    tile: torch.Tensor


def find_positives(
    foreground: torch.Tensor, target_index: torch.Tensor, mask_boxes: torch.Tensor, side: int
) -> Positives:
    """List the positive anchors and the tiles their masks touch.

    foreground bool and target_index int64 (B, A); mask_boxes (B, M, 4) xyxy in prototype pixels, of which there are
    side * side. Costs one host synchronisation.
    """
    device = foreground.device
    first_tile, num_tiles = _touched_tiles(mask_boxes, side)  # (B, M, 2) each: x and y
    per_target = torch.zeros(mask_boxes.shape[:2], dtype=torch.int64, device=device)
    per_target.scatter_add_(1, target_index, foreground.long())
    num_groups = (per_target + GROUP_SIZE - 1) // GROUP_SIZE  # (B, M)
    num_units = num_groups * num_tiles.prod(-1)
    # The step's second and last host synchronisation: everything from here on has a known size.
    totals = torch.stack([per_target.sum(), num_groups.sum(), num_units.sum()]).tolist()
    num_positives, total_groups, total_units = totals

    image, anchor = torch.nonzero_static(foreground, size=num_positives).unbind(1)
    target = target_index[image, anchor]
    number, order = (image * mask_boxes.shape[1] + target).sort(stable=True)
    per_target, num_groups = per_target.flatten(), num_groups.flatten()
    rank = torch.arange(num_positives, device=device) - _starts(per_target)[number]
    group = _starts(num_groups)[number] + rank // GROUP_SIZE
    slot = torch.empty_like(order).scatter_(0, order, group * GROUP_SIZE + rank % GROUP_SIZE)

    owner = torch.arange(len(num_groups), device=device).repeat_interleave(num_groups, output_size=total_groups)
    number_of_group = torch.arange(total_groups, device=device) - _starts(num_groups)[owner]
    filled = (per_target[owner] - number_of_group * GROUP_SIZE).clamp(max=GROUP_SIZE)

    first_tile, num_tiles = first_tile.flatten(0, 1)[owner], num_tiles.flatten(0, 1)[owner]  # (G, 2)
    per_group = num_tiles.prod(-1)
    unit_group = torch.arange(total_groups, device=device).repeat_interleave(per_group, output_size=total_units)
    within = torch.arange(total_units, device=device) - _starts(per_group)[unit_group]
    columns = num_tiles[unit_group, 0]
    column = first_tile[unit_group, 0] + within % columns
    row = first_tile[unit_group, 1] + within // columns
    tiles_per_side = side // TILE
    tile = (owner[unit_group] // mask_boxes.shape[1] * tiles_per_side + row) * tiles_per_side + column
    return Positives(image, anchor, target, slot, owner, filled, unit_group, tile)


def mask_loss(
    prototypes: torch.Tensor,
    coefficients: torch.Tensor,
    masks: torch.Tensor,
    mask_boxes: torch.Tensor,
    positives: Positives,
) -> torch.Tensor:
    """Sum over the positive anchors of the mean BCE inside the target's box, over the box's share of the picture: ().

    prototypes (B, 32, S, S) in any precision; coefficients float32 (P, 32); masks int32 (B, S, S), k + 1 where an image's k-th target is;
    mask_boxes (B, M, 4) xyxy in prototype pixels.
    """
    owner = positives.owner
    rows = coefficients.new_zeros(len(owner) * GROUP_SIZE, coefficients.shape[1])
    rows = rows.index_copy(0, positives.slot, coefficients).unflatten(0, (len(owner), GROUP_SIZE))
    units = _units(mask_boxes.flatten(0, 1)[owner], owner % mask_boxes.shape[1] + 1, positives, prototypes.shape[-1])
    loss: torch.Tensor = _MaskError.apply(rows, prototypes, _cut(masks[:, None])[..., 0], units)
    return loss


@dataclass(frozen=True)
class _Units:
    """The units of work: group, tile and number in the mask (U,); what each row and column counts (U, 8) each.

    A pixel's weight is row times column: one over the box's area inside the box, else 0. That is the mean over all
    pixels divided by the box's share of them. unused_factor (G, 1) is 2 to the power of a group's rows without an anchor.
    """

    group: torch.Tensor
    tile: torch.Tensor
    value: torch.Tensor
    row_weight: torch.Tensor
    column_weight: torch.Tensor
    unused_factor: torch.Tensor


def _units(boxes: torch.Tensor, values: torch.Tensor, positives: Positives, side: int) -> _Units:
    """Say where in each unit's tile the box of its group (G, 4) lies; values (G,) are the targets' numbers in the mask."""
    group, tile = positives.group, positives.tile
    per_side = side // TILE
    of_unit = boxes[group]
    within = torch.arange(TILE, device=tile.device)
    columns = (tile % per_side * TILE)[:, None] + within  # (U, 8)
    rows = (tile // per_side % per_side * TILE)[:, None] + within
    area = (of_unit[:, 2:] - of_unit[:, :2]).prod(-1, keepdim=True)
    return _Units(
        group=group,
        tile=tile,
        value=values[group],
        row_weight=((rows >= of_unit[:, 1:2]) & (rows < of_unit[:, 3:4])) / area,
        column_weight=((columns >= of_unit[:, 0:1]) & (columns < of_unit[:, 2:3])).to(boxes.dtype),
        unused_factor=(GROUP_SIZE - positives.filled)[:, None].to(boxes.dtype).exp2(),
    )


class _MaskError(torch.autograd.Function):
    """Weighted BCE summed over all units. The gradient is computed on the way, and only scaled in `backward`."""

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, prototypes: torch.Tensor, mask_tiles: torch.Tensor, units: _Units
    ) -> torch.Tensor:
        """Take rows (G, 10, 32), prototypes (B, 32, S, S) and mask_tiles int32 (N, 64).

        Where the network made its prototypes in bf16, the three products are of bf16 matrices; all else is float32.
        """
        # Not in fp16: a gradient divided by a box's area may lie below what that can hold.
        half = torch.bfloat16 if prototypes.dtype == torch.bfloat16 else rows.dtype
        tiles = _cut(prototypes).to(half)  # (N, 64, 32)
        needs_gradient = any(context.needs_input_grad)
        gradients = [torch.zeros_like(rows), torch.zeros_like(tiles, dtype=rows.dtype)] if needs_gradient else []
        total = rows.new_zeros(())
        step = UNITS_AT_ONCE[rows.device.type]
        for start in range(0, len(units.group), step):
            part = slice(start, start + step)
            group, tile = units.group[part], units.tile[part]
            weight = (units.row_weight[part, :, None] * units.column_weight[part, None]).flatten(1)  # (u, 64)
            truth = (mask_tiles.index_select(0, tile) == units.value[part, None]).to(weight.dtype)  # (u, 64)
            # On a CPU oneDNN compiles and keeps a bf16 product for every shape it meets: only whole parts have one shape.
            factor = half if len(group) == step or rows.device.type != "cpu" else rows.dtype
            unit_rows, unit_tiles = rows.index_select(0, group).to(factor), tiles.index_select(0, tile).to(factor)
            logits = (unit_rows @ unit_tiles.mT).to(rows.dtype)  # (u, 10, 64)
            slope = logits.sigmoid()
            # BCE = max(x, 0) - t x - log(max(p, 1 - p)); the rows share t, and one logarithm of their product will do.
            # A row that nobody uses has x = 0, and so one half in that product, which doubling takes out again exactly.
            certainty = torch.maximum(slope, 1 - slope).prod(1) * units.unused_factor[group]  # (u, 64)
            error = logits.clamp(min=0).sum(1) - truth * logits.sum(1) - certainty.log()
            total += (error * weight).sum()
            if needs_gradient:
                slope = slope.sub_(truth[:, None]).mul_(weight[:, None]).to(factor)
                gradients[0].index_add_(0, group, (slope @ unit_tiles).to(rows.dtype))
                gradients[1].index_add_(0, tile, (slope.mT @ unit_rows).to(rows.dtype))
        context.save_for_backward(prototypes, *gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Scale the gradients of rows and prototypes."""
        prototypes, row_gradient, tile_gradient = context.saved_tensors
        whole = torch.empty_like(prototypes)
        parts = _in_tiles(whole)
        torch.mul(tile_gradient.view(parts.shape), gradient, out=parts)  # scaled, converted and put in place at once
        return row_gradient * gradient, whole, None, None


def _in_tiles(maps: torch.Tensor) -> torch.Tensor:
    """View maps (B, C, S, S) tile by tile, pixel by pixel: (B, S / 8, S / 8, 8, 8, C)."""
    parts = maps.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))  # (B, C, rows, 8, columns, 8)
    return parts.permute(0, 2, 4, 3, 5, 1)


def _cut(maps: torch.Tensor) -> torch.Tensor:
    """Cut maps (B, C, S, S) into tiles, image by image and row by row: (B * (S / 8)^2, 64, C)."""
    return _in_tiles(maps).reshape(-1, TILE * TILE, maps.shape[1])


def _touched_tiles(boxes: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first tile and the number of tiles, along x and y, that have pixels of a box (..., 4): (..., 2) each.

    A pixel belongs to a box when x1 <= its index < x2, and likewise along y.
    """
    first = boxes[..., :2].ceil().clamp(min=0)
    end = boxes[..., 2:].ceil().clamp(max=side)
    first_tile = (first / TILE).floor().long()
    num_tiles = (end / TILE).ceil().long() - first_tile
    return first_tile, num_tiles * (end > first)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Return where each of consecutive runs of the given lengths begins."""
    return counts.cumsum(0) - counts
