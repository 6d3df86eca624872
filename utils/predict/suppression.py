"""Greedy non-maximum suppression of all images of a batch at once, without waiting for the device.

torchvision's `nms` takes one image and waits for the device. Joining a batch to one call needs an offset between the
images, and float32 coordinates so far from zero are too coarse: near the IoU limit other boxes would stay.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256  # candidates decided at once: few enough that the IoU of all pairs is small, enough to fill a GPU
ROUNDS = 12  # longest chain in a block of candidates that each decide the next


def suppress(
    boxes: torch.Tensor, is_candidate: torch.Tensor, iou: float, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return which candidates of each image stay: positions int64 (B, most), their numbers (B,), and bool ().

    boxes float32 (B, n, 4) xyxy, the most confident first; is_candidate bool (B, n) is False where an image has fewer.
    An image's positions beyond its number mean nothing. The last value is False if a chain of overlaps was longer than
    ROUNDS; then the positions may be wrong. The arithmetic is that of torchvision's `nms` on a CPU, bit by bit.
    """
    num_images, num_boxes = is_candidate.shape
    # One row more, for those that are too many.
    kept = torch.zeros(num_images, most + 1, dtype=torch.int64, device=boxes.device)
    kept_boxes = boxes.new_zeros(num_images, most + 1, 4)
    number = torch.zeros(num_images, dtype=torch.int64, device=boxes.device)
    is_settled = torch.ones((), dtype=torch.bool, device=boxes.device)
    for start in range(0, num_boxes, BLOCK):
        block = boxes[:, start : start + BLOCK]
        is_free = is_candidate[:, start : start + BLOCK] & ~_overlap(kept_boxes[:, :most], block, iou).any(1)
        suppresses = _overlap(block, block, iou).triu(1)  # (B, k, k): a candidate and the less confident ones
        stays = before = is_free
        for _ in range(ROUNDS):
            before, stays = stays, is_free & ~(suppresses & stays[..., None]).any(1)
        is_settled &= (before == stays).all()
        rank = number[:, None] + stays.cumsum(1) - 1
        slot = torch.where(stays, rank, most).clamp(max=most)
        kept.scatter_(1, slot, torch.arange(start, start + block.shape[1], device=boxes.device).expand_as(slot))
        kept_boxes.scatter_(1, slot[..., None].expand_as(block), block)
        number = (number + stays.sum(1)).clamp(max=most)
    return kept[:, :most], number, is_settled


def _overlap(first: torch.Tensor, second: torch.Tensor, iou: float) -> torch.Tensor:
    """Return which boxes (B, m, 4) and (B, n, 4) have an IoU above `iou`: bool (B, m, n)."""
    limit = np.float32(iou)  # rounded down: a float32 exceeds it if it exceeds `iou` itself
    limit = limit if float(limit) <= iou else np.nextafter(limit, np.float32(-1))
    low_x, low_y, high_x, high_y = (
        choose(first[:, :, None, side], second[:, None, :, side])
        for choose, side in ((torch.maximum, 0), (torch.maximum, 1), (torch.minimum, 2), (torch.minimum, 3))
    )
    shared = (high_x - low_x).clamp_(min=0).mul_((high_y - low_y).clamp_(min=0))
    areas = [(boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]) for boxes in (first, second)]
    return shared / (areas[0][:, :, None] + areas[1][:, None] - shared) > float(limit)
