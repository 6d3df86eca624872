"""Masks at the resolution of the prototypes, a quarter of the input's: their overlap."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from yolo_seg_ddp.data.dataset import Sample
from yolo_seg_ddp.data.target_masks import MASK_STRIDE, draw_truth
from yolo_seg_ddp.predict.detections import Detections, prototype_masks
from yolo_seg_ddp.utils.devices import copy_to_device, copy_to_host

# Float32 (m + regions, n): the IoU of an image's labels and detections, and the share of each
# detection in each region to ignore; and the detections' areas float64 (n,) in input pixels.
Overlap = tuple[np.ndarray, np.ndarray]


def begin_mask_overlaps(
    samples: Sequence[Sample], found: Sequence[Detections], prototypes: torch.Tensor
) -> Callable[[], list[Overlap]]:
    """Begin to compare the masks of a batch; return a function that ends it. Only that function
    waits for a GPU.

    prototypes (B, 32, h, w).
    """
    owners = [
        draw_truth(sample.polygons, sample.image.shape[0]).astype(np.int64) for sample in samples
    ]
    compare = _shared_on_host if prototypes.device.type == "cpu" else _shared_on_device
    shared_of = compare(samples, found, prototypes, owners)
    in_regions = [_begin_regions(*image) for image in zip(samples, found, prototypes, strict=True)]

    def end() -> list[Overlap]:
        overlaps = []
        for owner, sample, shared, in_region in zip(
            owners, samples, shared_of(), in_regions, strict=True
        ):
            targets = np.bincount(owner.flat, minlength=len(sample.polygons) + 1)[1:].astype(
                np.float32
            )
            union = targets[:, None] + shared[-1] - shared[:-1]
            iou = shared[:-1] / union.clip(min=np.float32(1e-7))
            shares = in_region().numpy() / shared[-1].clip(min=1)
            overlaps.append(
                (np.concatenate([iou, shares]), shared[-1].astype(np.float64) * MASK_STRIDE**2)
            )
        return overlaps

    return end


def _begin_regions(
    sample: Sample, found: Detections, prototypes: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Begin to count the pixels of each detection in each region to
    ignore: float32 (regions, n).
    """
    if not sample.ignored:
        return lambda: torch.zeros(0, len(found))
    size_px = sample.image.shape[0]
    # each: they may overlap
    drawn = np.stack([draw_truth([outline], size_px) > 0 for outline in sample.ignored])
    regions = copy_to_device(torch.from_numpy(drawn), prototypes.device).flatten(1).float()
    return copy_to_host(regions @ prototype_masks(prototypes, found, size_px).flatten(1).float().T)


def _shared_on_host(
    samples: Sequence[Sample],
    found: Sequence[Detections],
    prototypes: torch.Tensor,
    owners: Sequence[np.ndarray],
) -> Callable[[], list[np.ndarray]]:
    """Count the pixels that each detection shares with each label, and, in the last row, all it
    has: float32 (m + 1, n).

    Only the pixels inside a detection's box are looked at.
    """
    counts = []
    # All images use the same memory for their logits: fetching new memory takes longer than the
    # product.
    logits_memory = torch.empty(max(map(len, found), default=0), *prototypes.shape[2:])
    for sample, detections, maps, owner in zip(samples, found, prototypes, owners, strict=True):
        logits = logits_memory[: len(detections)]
        torch.matmul(detections.coefficients, maps.float().flatten(1), out=logits.flatten(1))
        boxes = detections.boxes * (maps.shape[-1] / sample.image.shape[0])
        corners = boxes.ceil().clamp(0, maps.shape[-1]).int().tolist()
        shared = np.zeros((len(detections), len(sample.polygons) + 1), np.float32)
        for row, values, (left, top, right, bottom) in zip(
            shared, logits.numpy(), corners, strict=True
        ):
            inside = slice(top, bottom), slice(left, right)
            row[:] = np.bincount(owner[inside][values[inside] > 0], minlength=len(row))
        counts.append(np.concatenate([shared[:, 1:], shared.sum(1, keepdims=True)], axis=1).T)
    return lambda: counts


def _shared_on_device(
    samples: Sequence[Sample],
    found: Sequence[Detections],
    prototypes: torch.Tensor,
    owners: Sequence[np.ndarray],
) -> Callable[[], list[np.ndarray]]:
    """Do what `_shared_on_host` does with matrix products, without waiting for the device."""
    sizes = [
        (len(sample.polygons) + 1, len(detections))
        for sample, detections in zip(samples, found, strict=True)
    ]
    owner_maps = copy_to_device(torch.from_numpy(np.stack(owners)), prototypes.device)
    counts = [prototypes.new_zeros(0, dtype=torch.float32)]
    for sample, detections, maps, owner in zip(samples, found, prototypes, owner_maps, strict=True):
        masks = prototype_masks(maps, detections, sample.image.shape[0]).flatten(1).float()
        labels = (
            owner.flatten()
            == torch.arange(1, len(sample.polygons) + 1, device=owner.device)[:, None]
        )
        every_pixel = masks.new_ones(1, masks.shape[1])
        # exact: they are below 2**24
        counts.append((torch.cat([labels.float(), every_pixel]) @ masks.T).flatten())
    joined = copy_to_host(torch.cat(counts))

    def split() -> list[np.ndarray]:
        parts = np.split(
            joined().numpy(), np.cumsum([rows * columns for rows, columns in sizes])[:-1]
        )
        return [part.reshape(size) for part, size in zip(parts, sizes, strict=True)]

    return split
