"""How sure masks are: the mean probability of their pixels, which multiplies the confidence of a
detection.

The classes' layers learn how well a box fits. A mask that is sure of its pixels is more often
right, so the product ranks detections better. SOLOv2 (arXiv 2003.10152), CondInst (arXiv
2003.05664) and Mask2Former (arXiv 2112.01527) compute such a product, too.
"""

from functools import partial

import numpy as np
import torch

from yolo_seg_ddp.utils.compiled import compiled

# Of a mask without pixels. All others are above it, because each of their pixels is. So its box is
# not lost, as with 0, and does not come before those that have a mask.
WITHOUT_MASK = 0.5


def mask_logits(
    prototypes: torch.Tensor, coefficients: torch.Tensor, boxes: torch.Tensor
) -> torch.Tensor:
    """Return the logits of masks, float32 (n, h, w), negative outside their boxes.

    prototypes (32, h, w); coefficients float32 (n, 32); boxes float32 (n, 4) xyxy in pixels of the
    prototypes.
    """
    _, height, width = prototypes.shape
    logits = (coefficients @ prototypes.float().flatten(1)).view(-1, height, width)
    x1, y1, x2, y2 = boxes.T[..., None]
    columns = torch.arange(width, device=boxes.device)
    rows = torch.arange(height, device=boxes.device)
    is_inside = ((columns >= x1) & (columns < x2))[:, None, :] & ((rows >= y1) & (rows < y2))[
        :, :, None
    ]
    return logits.masked_fill_(~is_inside, -1)


def mask_certainty(
    prototypes: torch.Tensor, coefficients: torch.Tensor, boxes: torch.Tensor
) -> torch.Tensor:
    """Return the mean probability of each mask's pixels, those above 0.5 in its box: float32 (n,).

    It takes what `mask_logits` takes.
    """
    # On the CPU only the pixels in boxes are computed.
    on_cpu = prototypes.device.type == "cpu"
    return (_certainty_on_host if on_cpu else _certainty_on_device)(prototypes, coefficients, boxes)


def _certainty_on_host(
    prototypes: torch.Tensor, coefficients: torch.Tensor, boxes: torch.Tensor
) -> torch.Tensor:
    corners = boxes.nan_to_num().ceil().clamp(0, prototypes.shape[-1]).int().numpy()
    channels_last = np.ascontiguousarray(prototypes.float().permute(1, 2, 0).numpy())
    return torch.from_numpy(
        _mean_probabilities(channels_last, coefficients.contiguous().numpy(), corners)
    )


def _certainty_on_device(
    prototypes: torch.Tensor, coefficients: torch.Tensor, boxes: torch.Tensor
) -> torch.Tensor:
    """Do what `_certainty_on_host` does without waiting for the device."""
    logits = mask_logits(prototypes, coefficients, boxes)
    is_mask = logits > 0
    number = is_mask.sum((1, 2))
    mean = logits.sigmoid_().masked_fill_(~is_mask, 0).sum((1, 2)) / number.clamp(min=1)
    return torch.where(number > 0, mean, WITHOUT_MASK)


# With sums in any order the processor adds eight products at a time.
@partial(compiled, fastmath={"reassoc", "contract", "nsz"})
def _mean_probabilities(
    prototypes: np.ndarray, coefficients: np.ndarray, corners: np.ndarray
) -> np.ndarray:
    means = np.empty(len(corners), np.float32)
    for detection in range(len(corners)):
        left, top, right, bottom = corners[detection]
        weights = coefficients[detection]
        total = np.float32(0)
        number = 0
        for y in range(top, bottom):
            for x in range(left, right):
                pixel = prototypes[y, x]
                logit = np.float32(0)
                for channel in range(len(weights)):
                    logit += weights[channel] * pixel[channel]
                if logit > 0:
                    total += np.float32(1) / (np.float32(1) + np.exp(-logit))
                    number += 1
        means[detection] = total / number if number else WITHOUT_MASK
    return means
