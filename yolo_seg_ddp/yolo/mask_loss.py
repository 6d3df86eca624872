"""The mask part of the loss: the BCE inside each positive anchor's target box, divided by the box's
area.

Of a target without an outline the mask is not known, but its box says two things. In each column
and row of the box there is a pixel of the object: the BCE of the highest logit of each, as 1, is
averaged over the columns, and over the rows (the projections of BoxInst, arXiv 2012.02310, eq. 1-3,
with the error of BBTP, Hsu et al. 2019). A logit here is the mean over 3 x 3 pixels. Around the
box the object is not: pixels that no label covers are 0, up to MARGIN. What colours say of such a
mask is in `yolo_seg_ddp/yolo/colour_error.py`.

`mask_loss_by_autograd` of tests/yolo/test_mask_loss.py is the same in plain PyTorch: easy to read,
slow, and large. This one is fast:

1. The pixels of a target's box, row by row, are cut into blocks of 32. Only the last block has
   unused places.
2. The positive anchors of one target share its box and its mask, so they form groups of up to 10
   rows.
3. A unit is one group on one block; its logits are one matrix product, (10, 32) @ (32, 32).
4. Units are computed a fixed number at a time, so memory does not grow with the number of objects.
5. The forward pass also computes the gradient, so no logits are kept for the backward pass.

To change the error of a pixel, change `pixel_error`.

Letters: B images, M targets per image (padded), A anchors, P positive anchors, G groups, U units, u
units computed at once, S side of the prototypes, N = B * S^2 pixels.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BLOCK = 32  # pixels of a unit: few, so that small boxes leave few places unused
GROUP_SIZE = 10  # rows of a group; the assigner gives a target its 10 best anchors, seldom more
# Units computed at once: few enough for a CPU's cache, enough to fill a GPU with each kernel.
UNITS_AT_ONCE = {"cpu": 1024, "cuda": 32768}
# Around the box of an object without an outline, a share of its sides: there the object is not.
MARGIN = 0.25
NO_PIXEL = -(2**63)  # below all numbers of a pixel


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
    unit_block: torch.Tensor  # (U,) the number of the block in the box
    unit_corner: torch.Tensor  # (U,) in 0..N-1: the first pixel of the box
    unit_columns: torch.Tensor  # (U,) of the box
    unit_last: torch.Tensor  # (U,) the number of the last pixel in the box, from 0
    target_weights: torch.Tensor | None  # float32 (B*M,)
    peaks: "Peaks | None" = None  # of the targets without an outline, if there are any


@dataclass(frozen=True)
class Peaks:
    """Where the highest logits are wanted: in L lines, the columns and rows of the box of each
    positive anchor whose target has no outline. T of these targets have positive anchors.
    """

    bounds: torch.Tensor  # int64 (B*M, 4): xyxy of the boxes; empty for targets with an outline
    # (L,) in 0..G*10*2S-1: for each row of the groups the S columns of the map, then its S rows
    line: torch.Tensor
    weight: torch.Tensor  # (L,): one over the number of columns, or rows, of the box
    targets: torch.Tensor  # int64 (T,) in 0..B*M-1
    per_image: list[int]  # (B,): how many of the T are in each image

    def raise_to(
        self,
        highest: torch.Tensor,
        logits: torch.Tensor,
        place: torch.Tensor,
        group: torch.Tensor,
        target: torch.Tensor,
        side: int,
    ) -> None:
        """Raise `highest`, int64 (G*10*2S,), to what u units have in each line.

        A number is a logit, in the order of int32, above the place of its pixel: the highest of
        them is the same in whatever order they come. logits (u, 10, 32); place (u, 32); group and
        target (u,); side is S.
        """
        column, row = place % side, place // side % side
        x1, y1, x2, y2 = self.bounds.index_select(0, target).T[..., None]
        is_inside = (column >= x1) & (column < x2) & (row >= y1) & (row < y2)
        value = _in_order(logits.view(torch.int32)).long() << 32 | place[:, None]
        value.masked_fill_(~is_inside[:, None], NO_PIXEL)
        anchor = torch.arange(GROUP_SIZE, device=group.device) + group[:, None] * GROUP_SIZE
        for line in (column, row + side):
            at = anchor[..., None] * (2 * side) + line[:, None]
            highest.scatter_reduce_(0, at.flatten(), value.flatten(), "amax")


def find_positives(
    foreground: torch.Tensor,
    target_index: torch.Tensor,
    mask_boxes: torch.Tensor,
    side: int,
    boxed: torch.Tensor | None = None,
    target_weights: torch.Tensor | None = None,
) -> Positives:
    """List the positive anchors, their groups, and the blocks of pixels of each group's box.

    foreground bool and target_index int64 (B, A); mask_boxes (B, M, 4) xyxy in prototype pixels;
    side is S; boxed bool (B, M), the targets without an outline, whose blocks reach MARGIN beyond
    the box; target_weights (B, M) multiply the targets' errors. Costs one host synchronisation.
    """
    num_images, most_targets = mask_boxes.shape[:2]

    # 1. Each target's pixels, and how many anchors, groups and blocks it has.
    # A pixel belongs to a box when x1 <= its index < x2, and likewise along y.
    bounds = mask_boxes.ceil().clamp_(0, side).long()
    low, high = bounds.split(2, -1)  # (B, M, 2) each: x and y
    if boxed is not None:
        lengths = (high - low) * (high > low).all(-1, keepdim=True) * boxed[..., None]
        margin = (lengths * MARGIN).ceil().long()
        bounds = bounds * (lengths > 0).repeat(1, 1, 2)
        low, high = (low - margin).clamp_(min=0), (high + margin).clamp_(max=side)

    columns, rows = (high - low).clamp_(min=0).unbind(-1)
    num_pixels = columns * rows
    blocks_per_target = (num_pixels + (BLOCK - 1)) // BLOCK
    anchors_per_target = torch.zeros_like(blocks_per_target).scatter_add_(
        1, target_index, foreground.long()
    )
    groups_per_target = (anchors_per_target + (GROUP_SIZE - 1)) // GROUP_SIZE
    counted = [anchors_per_target, groups_per_target, groups_per_target * blocks_per_target]
    if boxed is not None:
        counted.append(anchors_per_target * lengths.sum(-1))
        is_taught = boxed & (anchors_per_target > 0)  # (B, M)
    counts = torch.stack(counted).flatten(1)
    ends = counts.cumsum(1)  # (3 or 4, B * M)
    sizes = ends[:, -1] if boxed is None else torch.cat([ends[:, -1], is_taught.sum(1)])
    # The step's second and last host synchronisation: from here on every size is known.
    num_positives, num_groups, num_units, *of_boxed = sizes.tolist()
    first_anchor, first_group, first_unit, *first_line = (ends - counts).unbind()  # of each target

    # 2. Sort the anchors by target, and give each target's anchors the rows of its groups in turn.
    places = torch.nonzero_static(foreground, size=num_positives)  # (P, 2)
    image, anchor = places.unbind(1)
    number = torch.add(target_index[image, anchor], image, alpha=most_targets)  # in 0..B*M-1
    number, order = number.sort(stable=True)
    image, anchor = places[order].unbind(1)
    numbers = torch.arange(max(num_positives, num_units), device=order.device)
    slot = numbers[:num_positives] + (first_group * GROUP_SIZE - first_anchor)[number]

    # 3. Each target's units: its groups one after another, each on all blocks.
    # of each image
    first_row = torch.arange(0, num_images * side, side, device=order.device)[:, None]
    corner = torch.add(low[..., 0], first_row + low[..., 1], alpha=side)  # (B, M)
    of_boxes = (value.flatten() for value in (blocks_per_target, corner, columns, num_pixels))
    of_target = torch.stack([first_unit, first_group, *of_boxes])  # (6, B * M)
    unit_target = torch.repeat_interleave(counts[2], output_size=num_units)
    # (U,) each
    unit, group, blocks, corner, columns, num_pixels = of_target.index_select(
        1, unit_target
    ).unbind()
    within = numbers[:num_units] - unit
    unit_group = group + within // blocks
    target = number % most_targets
    units = (unit_target, unit_group, within % blocks, corner, columns, num_pixels - 1)
    weights = None if target_weights is None else target_weights.flatten()

    peaks = None
    if boxed is not None:
        # 4. Of each anchor of a boxed target first the columns, then the rows.
        num_lines, *per_image = of_boxed
        owner = torch.repeat_interleave(counts[3], output_size=num_lines)
        width, height = lengths.flatten(0, 1)[owner].unbind(1)  # (L,) each
        left, top, *_ = bounds.flatten(0, 1)[owner].unbind(1)
        within = torch.arange(num_lines, device=order.device) - first_line[0][owner]
        anchor_row = first_group[owner] * GROUP_SIZE + within // (width + height)
        within %= width + height
        is_column = within < width
        line = torch.where(is_column, left + within, side + top + within - width)
        weight = 1 / torch.where(is_column, width, height)
        if weights is not None:
            weight = weight * weights[owner]
        taught = torch.nonzero_static(is_taught.flatten(), size=sum(per_image))[:, 0]
        line = anchor_row * (2 * side) + line
        peaks = Peaks(bounds.flatten(0, 1), line, weight, taught, per_image)
    return Positives(image, anchor, target, slot, num_groups, *units, weights, peaks)


def _in_order(bits: torch.Tensor) -> torch.Tensor:
    """Turn the bits of float32 into int32 of the same order; or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def mask_loss(
    prototypes: torch.Tensor,
    coefficients: torch.Tensor,
    masks: torch.Tensor,
    mask_boxes: torch.Tensor,
    positives: Positives,
) -> torch.Tensor:
    """Return the sum over the positive anchors of the BCE inside the target's box, divided by the
    box's area: ().

    prototypes (B, 32, S, S) in any precision; coefficients float32 (P, 32); masks int32 (B, S, S),
    k + 1 where an image's k-th target is, below 0 where a pixel has no error; mask_boxes (B, M, 4)
    xyxy in prototype pixels.
    """
    # The highest pixel alone would be taught in a pattern of dots.
    neighbour_means = (
        F.avg_pool2d(prototypes, 3, stride=1, padding=1, count_include_pad=False)
        if positives.peaks
        else None
    )
    loss: torch.Tensor = _BlockedMaskError.apply(
        coefficients, prototypes, masks, mask_boxes, positives, neighbour_means
    )
    return loss


def pixel_error(
    logits: torch.Tensor,
    truth: torch.Tensor,
    weight: torch.Tensor,
    unused_factor: torch.Tensor,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weighted BCE summed over u units: (), and its derivative by the logits (u, 10, 32)
    or None.

    logits (u, 10, 32); truth (u, 32), 1 where the target's mask is, else 0; weight (u, 32);
    unused_factor (u, 1), 2 to the power of the unit's unused rows.
    The derivative of an unused row is not 0, but reaches nothing: its coefficients are 0 and belong
    to no anchor.
    """
    probability = logits.sigmoid()
    # BCE = max(x, 0) - t x - log(max(p, 1 - p)). The rows share t, so one logarithm of their
    # product is enough. An unused row has x = 0 and multiplies the product by one half, which
    # unused_factor undoes exactly.
    certainty = torch.maximum(probability, 1 - probability).prod(1) * unused_factor  # (u, 32)
    error = torch.addcmul(logits.clamp(min=0).sum(1), truth, logits.sum(1), value=-1).sub_(
        certainty.log_()
    )
    total = (error * weight).sum()
    if not with_gradient:
        return total, None
    # in place: (p - t) * weight
    return total, probability.sub_(truth[:, None]).mul_(weight[:, None])


def _pixels_of(positives: Positives, part: slice, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the pixels of some units are, int64 (u, 32) in 0..N-1, and which are used, bool
    (u, 32).

    The unused places after a box's last pixel repeat it.
    """
    of_units = (
        positives.unit_block,
        positives.unit_last,
        positives.unit_columns,
        positives.unit_corner,
    )
    block, last, columns, corner = (values[part, None] for values in of_units)
    pixel = torch.add(torch.arange(BLOCK, device=block.device), block, alpha=BLOCK)
    is_used = pixel <= last
    pixel = torch.minimum(pixel, last)
    # exact in float32, and faster than a division of integers
    row = ((pixel + 0.5) / columns).long()
    return corner + pixel + row * (side - columns), is_used


class _BlockedMaskError(torch.autograd.Function):
    """Sum `pixel_error` over all units.

    `forward` computes the gradient too, `backward` only scales it.
    """

    @staticmethod
    def forward(
        context: Any,
        coefficients: torch.Tensor,
        prototypes: torch.Tensor,
        masks: torch.Tensor,
        mask_boxes: torch.Tensor,
        positives: Positives,
        neighbour_means: torch.Tensor | None,
    ) -> torch.Tensor:
        """Take coefficients (P, 32), prototypes (B, 32, S, S), masks int32 (B, S, S), mask_boxes
        (B, M, 4), and the prototypes' means over 3 x 3 pixels if there are peaks.

        If the prototypes are bf16, the three matrix products are of bf16 matrices; everything else
        is float32.
        """
        # 1. The coefficients in rows of whole groups, the prototypes as pixels.
        rows = coefficients.new_zeros(positives.num_groups * GROUP_SIZE, coefficients.shape[1])
        rows = rows.index_copy_(0, positives.slot, coefficients).unflatten(
            0, (positives.num_groups, GROUP_SIZE)
        )
        # Never fp16: a gradient divided by a box's area may be too small for it.
        half = torch.bfloat16 if prototypes.dtype == torch.bfloat16 else rows.dtype
        pixels = prototypes.permute(0, 2, 3, 1).flatten(0, 2).to(half)  # (N, 32)
        with_gradient = any(context.needs_input_grad)
        gradients = (
            [torch.zeros_like(rows), torch.zeros_like(pixels, dtype=rows.dtype)]
            if with_gradient
            else []
        )

        # 2. What each unit needs.
        used_rows = rows.new_full((positives.num_groups * GROUP_SIZE,), 2.0).index_fill_(
            0, positives.slot, 1
        )
        unused_factor = used_rows.view(-1, GROUP_SIZE).prod(1, keepdim=True)  # (G, 1)
        unit_target = positives.unit_target
        low, high = mask_boxes.flatten(0, 1).index_select(0, unit_target).split(2, 1)
        unit_weight = 1 / (high - low).prod(1)  # (U,): one over the box's area
        if positives.target_weights is not None:
            unit_weight *= positives.target_weights[unit_target]
        unit_value = unit_target % mask_boxes.shape[1] + 1  # (U,): the target's value in the mask
        values = masks.flatten()
        peaks = positives.peaks
        if peaks is not None:
            side = masks.shape[-1]
            is_boxed = (peaks.bounds[:, 2] > peaks.bounds[:, 0]).index_select(0, unit_target)
            highest = peaks.line.new_full((len(rows) * GROUP_SIZE * 2 * side,), NO_PIXEL)
            assert neighbour_means is not None
            means = neighbour_means.permute(0, 2, 3, 1).flatten(0, 2).to(half)

        # 3. The pixels' errors, and the slopes that are the gradients, some units at a time.
        total = rows.new_zeros(())
        step = UNITS_AT_ONCE[rows.device.type]
        for start in range(0, len(unit_target), step):
            part = slice(start, start + step)
            group = positives.unit_group[part]  # (u,)
            place, is_used = _pixels_of(positives, part, masks.shape[-1])  # (u, 32) each
            place = place.flatten()
            value = values.index_select(0, place).view(-1, BLOCK)
            is_known = is_used & (value >= 0)
            if peaks is not None:
                is_known &= (value == 0) | ~is_boxed[part, None]
            weight = is_known * unit_weight[part, None]

            truth = (value == unit_value[part, None]).to(rows.dtype)
            # On a CPU oneDNN compiles and keeps a bf16 product for each new shape, so only full
            # parts use bf16.
            factor = half if len(group) == step or rows.device.type != "cpu" else rows.dtype
            unit_rows = rows.index_select(0, group).to(factor)  # (u, 10, 32)
            # (u, 32, 32)
            unit_pixels = pixels.index_select(0, place).to(factor).view(-1, BLOCK, rows.shape[-1])
            logits = torch.bmm(unit_rows, unit_pixels.mT).to(rows.dtype)  # (u, 10, 32)
            if peaks is not None:
                of_means = torch.bmm(unit_rows, means[place].to(factor).view_as(unit_pixels).mT)
                peaks.raise_to(
                    highest,
                    of_means.to(rows.dtype),
                    place.view(-1, BLOCK),
                    group,
                    unit_target[part],
                    side,
                )
            error, slope = pixel_error(logits, truth, weight, unused_factor[group], with_gradient)
            total += error
            if slope is not None:
                slope = slope.to(factor)
                gradients[0].index_add_(0, group, torch.bmm(slope, unit_pixels).to(rows.dtype))
                gradients[1].index_add_(
                    0, place, torch.bmm(slope.mT, unit_rows).to(rows.dtype).flatten(0, 1)
                )

        # 4. Boxed targets: the highest logit of each column and row is taught to be on the object.
        if peaks is not None:
            value = highest.index_select(0, peaks.line)
            logits = _in_order((value >> 32).int()).view(torch.float32)
            total += (F.softplus(-logits) * peaks.weight).sum()
            if with_gradient:
                # The pixels and the rows of the groups to which the logits belong.
                place, row = value & 0xFFFFFFFF, peaks.line // (2 * side)
                slope = ((logits.sigmoid() - 1) * peaks.weight)[:, None]
                gradients[0].flatten(0, 1).index_add_(0, row, slope * means[place])
                of_means = torch.zeros_like(means, dtype=rows.dtype)
                gradients.append(of_means.index_add_(0, place, slope * rows.flatten(0, 1)[row]))
        if with_gradient:
            gradients[0] = gradients[0].flatten(0, 1).index_select(0, positives.slot)  # (P, 32)
        context.save_for_backward(prototypes, *gradients)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        prototypes, coefficient_gradient, *pixel_gradients = context.saved_tensors
        maps: list[torch.Tensor | None] = []
        for of_pixels in pixel_gradients:
            whole = torch.empty_like(prototypes)
            parts = whole.permute(0, 2, 3, 1)
            # scaled, converted and put in place at once
            torch.mul(of_pixels.view(parts.shape), gradient, out=parts)
            maps.append(whole)
        return coefficient_gradient * gradient, maps[0], None, None, None, *[*maps, None][1:2]
