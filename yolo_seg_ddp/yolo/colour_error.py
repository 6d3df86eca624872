"""What colours say of the masks of objects that have a box and no outline: neighbours of like
colour are both on the object or both beside it.

The pairwise term of BoxInst (arXiv 2012.02310), with two differences: the anchors of a
target share one mask, that of the mean of their coefficients, and each target has its own mean.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from yolo_seg_ddp.yolo.mask_loss import Positives

DISTANCE = 2  # prototype pixels between two neighbours: BoxInst's dilation
# down, to the right
NEIGHBOURS = ((0, DISTANCE), (DISTANCE, 0), (DISTANCE, DISTANCE), (DISTANCE, -DISTANCE))
# In CIE Lab. BoxInst's likeness is exp(-distance / 2), and enough from 0.3 on.
ALIKE = -2 * math.log(0.3)
LEAST = 1e-30  # of a probability, so that its logarithm is finite
WHITE = (0.950456, 1.0, 1.088754)  # D65
# of linear sRGB, from IEC 61966-2-1
XYZ = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)


def lab_colours(images: torch.Tensor, side: int) -> torch.Tensor:
    """Shrink sRGB images (B, 3, S, S) in 0..1 and return CIE Lab (B, 3, side, side)."""
    rgb = F.interpolate(images.float(), (side, side), mode="area").clamp(0, 1)
    linear = torch.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    # Numbers and not a matrix, which would be copied to the device.
    red, green, blue = linear.unbind(1)
    of_white = [
        (of_red * red + of_green * green + of_blue * blue) / white
        for (of_red, of_green, of_blue), white in zip(XYZ, WHITE, strict=True)
    ]
    xyz = torch.stack(of_white)
    x, y, z = torch.where(xyz > 0.008856, xyz ** (1 / 3), 7.787 * xyz + 16 / 116)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], 1)


def colour_error(
    prototypes: torch.Tensor,
    coefficients: torch.Tensor,
    positives: Positives,
    mask_boxes: torch.Tensor,
    colours: torch.Tensor,
) -> torch.Tensor:
    """Return the error of the pairs of like colour that touch a target's box, averaged over them,
    times the target's positive anchors and weight, summed over the targets without an outline: ().

    prototypes (B, 32, S, S) in any precision; coefficients float32 (P, 32); mask_boxes (B, M, 4)
    xyxy in prototype pixels; colours from `lab_colours`. positives has peaks.
    """
    assert positives.peaks is not None
    targets = positives.peaks.targets
    number = positives.image * mask_boxes.shape[1] + positives.target  # (P,)
    num_anchors = coefficients.new_zeros(mask_boxes.shape[0] * mask_boxes.shape[1])
    sums = coefficients.new_zeros(len(num_anchors), coefficients.shape[1])
    num_anchors = num_anchors.index_add(0, number, torch.ones_like(coefficients[:, 0]))[targets]
    rows = sums.index_add(0, number, coefficients)[targets] / num_anchors[:, None]  # (T, 32)
    if positives.target_weights is not None:
        num_anchors = num_anchors * positives.target_weights[targets]
    bounds = mask_boxes.flatten(0, 1)[targets].ceil().clamp(0, prototypes.shape[-1])
    error: torch.Tensor = _ColourError.apply(
        rows, prototypes, bounds, num_anchors, colours, positives.peaks.per_image
    )
    return error


class _ColourError(torch.autograd.Function):
    """Sum the errors of all images.

    `forward` computes the gradient too, so that the masks of one image exist at a time.
    """

    @staticmethod
    def forward(
        context: Any,
        rows: torch.Tensor,
        prototypes: torch.Tensor,
        bounds: torch.Tensor,
        num_anchors: torch.Tensor,
        colours: torch.Tensor,
        per_image: list[int],
    ) -> torch.Tensor:
        """Take rows (T, 32), prototypes (B, 32, S, S), bounds (T, 4), num_anchors (T,) and colours
        (B, 3, S, S).
        """
        total = rows.new_zeros(())
        of_rows = []
        of_prototypes = torch.zeros_like(prototypes, dtype=rows.dtype)
        parts = (values.split(per_image) for values in (rows, bounds, num_anchors))
        for image, (own_rows, own_bounds, own_anchors) in enumerate(zip(*parts, strict=True)):
            maps = prototypes[image].flatten(1).to(rows.dtype)  # (32, S * S)
            logits = (own_rows @ maps).view(-1, *prototypes.shape[2:])
            error, slope = _pair_errors(logits, own_bounds, own_anchors, colours[image])
            total += error
            of_rows.append(slope.flatten(1) @ maps.T)
            of_prototypes[image] = (own_rows.T @ slope.flatten(1)).view_as(prototypes[image])
        context.save_for_backward(prototypes, torch.cat(of_rows), of_prototypes)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        prototypes, of_rows, of_prototypes = context.saved_tensors
        maps = (of_prototypes * gradient).to(prototypes.dtype)
        return of_rows * gradient, maps, None, None, None, None


def _pair_errors(
    logits: torch.Tensor, bounds: torch.Tensor, num_anchors: torch.Tensor, colours: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error () of an image's n targets, and its derivative by their logits (n, S, S).

    Two pixels with the probabilities p and q are on one side with pq + (1 - p)(1 - q), of which the
    error is the negative logarithm. bounds (n, 4), num_anchors (n,), colours (3, S, S).
    """
    on, off = logits.sigmoid(), (-logits).sigmoid()
    x1, y1, x2, y2 = bounds.T[..., None]
    pixel = torch.arange(logits.shape[-1], device=logits.device)
    column, row = (pixel >= x1) & (pixel < x2), (pixel >= y1) & (pixel < y2)  # (n, S) each
    inside = column[:, None] & row[..., None]
    error, number = torch.zeros_like(num_anchors), torch.zeros_like(num_anchors)
    slope = torch.zeros_like(logits)
    for offset in NEIGHBOURS:
        (p, q), (not_p, not_q), (one, other), (first, second), slopes = (
            _neighbours(values, *offset) for values in (on, off, inside, colours, slope)
        )
        is_counted = (one | other) & ((first - second).norm(dim=0) <= ALIKE)
        same = (p * q + not_p * not_q).clamp(min=LEAST)
        error -= (same.log() * is_counted).sum((1, 2))
        number += is_counted.sum((1, 2))
        slopes[0].sub_(is_counted * p * not_p * (q - not_q) / same)
        slopes[1].sub_(is_counted * q * not_q * (p - not_p) / same)
    weight = num_anchors / number.clamp(min=1)
    return (error * weight).sum(), slope * weight[:, None, None]


def _neighbours(values: torch.Tensor, down: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of maps (..., S, S): pixels, and their neighbours so far down and right."""
    height, width = values.shape[-2:]
    first = values[..., : height - down, max(0, -right) : width - max(0, right)]
    return first, values[..., down:, max(0, right) : width - max(0, -right)]
