"""Loss and AP of a model on a split, for the trainer, `evaluate_model.py` and the benchmarks, on one rank or many.

Each rank evaluates its share of the images. The partial results are gathered and merged by image id, so every image
counts exactly once and every rank returns the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

from utils import distributed
from utils.common.devices import Precision
from utils.data.dataset import Sample
from utils.data.target_masks import MASK_STRIDE
from utils.evaluation.metrics import (
    ImageResult,
    box_iou,
    confusion_pairs,
    hit_targets,
    merge_results,
    pack_results,
    size_classes,
    sizes_of_predictions,
    summarise,
    summarise_sizes,
    unpack_results,
)
from utils.evaluation.native_masks import OnMasks, compare_in_photo, photo_mask_parts, place, target_areas
from utils.yolo.inputs import prepare_batch
from utils.yolo.loss import PARTS, SegmentationLoss
from utils.yolo.predict import Detections, Placement, detect, prototype_masks, raw_outputs

AP_CONFIDENCE = 0.001  # so low that the precision-recall curve is complete; Ultralytics' value
AP_IOU = 0.7  # of non-maximum suppression; Ultralytics' value
OUTLINE_POINTS = 1000  # per target; Ultralytics' value, which matters because points are cut to whole pixels
FULL_PRECISION = Precision("off", None, False)
OnImage = Callable[[Sample, Detections, torch.Tensor], None]


@dataclass(frozen=True)
class PhotoPixels:
    """What to measure in pixels of the photographs on disk.

    size_of: returns width and height of photograph `index`, from which follows AP by object size. compare: whether IoU
    is computed on boxes and masks enlarged to the photograph, instead of on the network's input. on_masks: is called
    with all enlarged masks, a few at a time.
    """

    size_of: Callable[[int], tuple[int, int]]
    compare: bool = False
    on_masks: OnMasks | None = None


@dataclass(frozen=True)
class Evaluation:
    """The result of a pass over a split: metrics by name, and the partial result of every image."""

    metrics: dict[str, Any]
    results: list[ImageResult]


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: Any,
    names: tuple[str, ...],
    criterion: SegmentationLoss,
    device: torch.device,
    *,
    precision: Precision = FULL_PRECISION,
    on_image: OnImage | None = None,
    photo: PhotoPixels | None = None,
) -> Evaluation:
    """Measure loss and box and mask AP over all ranks' shares. Every rank must reach this.

    The validation loss is the sum of all images' loss terms over the sum of their normalisers, so it depends neither on
    the batch size nor on the number of ranks. `on_image(sample, detections, prototypes (32, h, w))` is called for each
    image. With `photo` the metrics also contain `by_size` (see `summarise_sizes`).
    """
    was_training = model.training
    model.eval()
    local: list[ImageResult] = []
    sums = torch.zeros(len(PARTS) + 2, dtype=torch.float64, device=device)
    for batch in loader:
        images, targets = prepare_batch(batch, device)
        outputs = raw_outputs(model, images, precision.dtype)
        loss = criterion.sums(outputs, targets)
        sums += torch.cat([loss.parts, loss.normalisers]).double()
        found = detect(
            outputs, criterion.strides, images.shape[-1], confidence=AP_CONFIDENCE, iou=AP_IOU, multi_label=True
        )
        for sample, detections, prototypes in zip(batch.samples, found, outputs["proto"], strict=True):
            local.append(compute_image_result(sample, detections, prototypes, len(names), photo))
            if on_image is not None:
                on_image(sample, detections, prototypes)
    model.train(was_training)
    results = merge_results([unpack_results(part) for part in distributed.gather_arrays(pack_results(local))])
    metrics = {**_mean_loss(sums), **summarise(results, list(names))}
    if photo is not None:
        metrics["by_size"] = summarise_sizes(results, list(names))
    return Evaluation(metrics, results)


def headline(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are single numbers, for the training log."""
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def compute_image_result(
    sample: Sample, detections: Detections, prototypes: torch.Tensor, num_classes: int, photo: PhotoPixels | None = None
) -> ImageResult:
    """Compare one image's detections with its labels.

    Boxes are compared in input pixels and masks at prototype resolution; with `photo.compare` both in the photograph's
    pixels.
    """
    scores, class_ids = detections.scores.cpu().numpy(), detections.class_ids.cpu().numpy()
    sizes: dict[str, np.ndarray] = {}
    if photo is None:
        overlap, mask_overlap, _ = _compare_at_input(sample, detections, prototypes)
    else:
        placement = place(sample, photo.size_of(sample.index))
        overlap, mask_overlap, mask_areas = _compare(sample, detections, prototypes, placement, photo)
    box_hits = hit_targets(overlap, sample.class_ids, class_ids)
    mask_hits = hit_targets(mask_overlap, sample.class_ids, class_ids)
    if photo is not None:
        in_photo = placement.boxes_to_photo(detections.boxes).cpu().numpy()
        box_areas = (in_photo[:, 2:] - in_photo[:, :2]).prod(axis=1)
        target_sizes = size_classes(target_areas(sample, placement))
        sizes = {
            "box_sizes": sizes_of_predictions(box_hits, target_sizes, size_classes(box_areas)),
            "mask_sizes": sizes_of_predictions(mask_hits, target_sizes, size_classes(mask_areas)),
            "target_sizes": target_sizes,
        }
    return ImageResult(
        image_id=sample.index,
        scores=scores,
        class_ids=class_ids,
        box_hits=box_hits >= 0,
        mask_hits=mask_hits >= 0,
        target_class_ids=sample.class_ids,
        box_confusion=confusion_pairs(overlap, sample.class_ids, class_ids, scores, num_classes),
        **sizes,
    )


def _compare(
    sample: Sample, detections: Detections, prototypes: torch.Tensor, placement: Placement, photo: PhotoPixels
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return IoU of boxes and masks (m, n), compared as `photo` says, and masks' areas (n,) in photograph pixels."""
    if photo.compare:
        truth = placement.boxes_to_photo(torch.from_numpy(sample.boxes)).numpy()
        box_overlap = box_iou(truth, placement.boxes_to_photo(detections.boxes).cpu().numpy())
        return box_overlap, *compare_in_photo(sample, detections, prototypes, placement, photo.on_masks)
    if photo.on_masks is not None:
        for _, chosen, masks in photo_mask_parts(prototypes, detections, placement):
            photo.on_masks(sample, placement, chosen, masks)
    box_overlap, mask_overlap, areas = _compare_at_input(sample, detections, prototypes)
    return box_overlap, mask_overlap, areas * (np.prod(placement.photo_size) / np.prod(placement.inner_size))


def _compare_at_input(
    sample: Sample, detections: Detections, prototypes: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return IoU of boxes and masks (m, n), and the masks' areas (n,) in input pixels; masks at prototype resolution."""
    masks = prototype_masks(prototypes, detections, sample.image.shape[0])
    overlap = mask_iou(torch.from_numpy(truth_masks(sample)).to(masks.device), masks).cpu().numpy()
    areas = masks.flatten(1).sum(1).cpu().numpy().astype(np.float64) * MASK_STRIDE**2
    return box_iou(sample.boxes, detections.boxes.cpu().numpy()), overlap, areas


def truth_masks(sample: Sample) -> np.ndarray:
    """Draw a sample's masks as Ultralytics' validator does, so that scores are comparable: bool (m, S/4, S/4).

    An outline becomes 1000 points cut to whole pixels, which moves edges by half a pixel: enough to matter for thin
    wires. It is filled at full size and shrunk by linear interpolation. A pixel of several masks is the smallest's.
    """
    size_px = sample.image.shape[0]
    side = size_px // MASK_STRIDE
    owner = np.full((side, side), -1)
    areas = []
    drawn = []
    for polygon in sample.polygons:
        full = np.zeros((size_px, size_px), np.uint8)
        cv2.fillPoly(full, [_add_points(polygon, OUTLINE_POINTS).astype(np.int32)], 1)
        drawn.append(cv2.resize(full, (side, side)) > 0)
        areas.append(drawn[-1].sum())
    for position in np.argsort(-np.array(areas), kind="stable"):
        owner[drawn[position]] = position
    return owner[None] == np.arange(len(drawn))[:, None, None]


def _add_points(polygon: np.ndarray, num_points: int) -> np.ndarray:
    """Return a closed outline's vertices and points spread evenly between them, `num_points` in all: (P, 2)."""
    closed = np.concatenate([polygon, polygon[:1]])
    numbers = np.arange(len(closed), dtype=np.float64)
    position = np.sort(np.append(np.linspace(0, len(closed) - 1, max(num_points - len(closed), 0)), numbers))
    return np.stack([np.interp(position, numbers, closed[:, axis]) for axis in (0, 1)], axis=1)


def mask_iou(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the IoU of boolean masks (m, h, w) and (n, h, w) on one device: float32 (m, n)."""
    a, b = first.flatten(1).float(), second.flatten(1).float()
    shared = a @ b.T  # exact: pixel counts are below 2**24
    return shared / (a.sum(1)[:, None] + b.sum(1)[None] - shared).clamp(min=1e-7)


def _mean_loss(sums: torch.Tensor) -> dict[str, float]:
    total = distributed.all_reduce_sum(sums)
    scores, anchors = total[-2:].clamp(min=1).tolist()
    parts = dict(zip(PARTS, total[:-2].tolist(), strict=True))
    means = {name: value / (anchors if name == "seg" else scores) for name, value in parts.items()}
    return {"val_loss": sum(means.values()), **{f"val_{name}": value for name, value in means.items()}}
