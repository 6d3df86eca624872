"""Loss and AP of a model on a split, for the trainer, `evaluate_model.py` and the benchmarks, on
one rank or many.

Each rank evaluates its share of the images. The partial results are gathered and merged by image
id, so every image counts exactly once and every rank returns the same numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.data.dataset import Sample
from yolo_seg_ddp.data.polygons import size_classes
from yolo_seg_ddp.evaluation.input_masks import begin_mask_overlaps
from yolo_seg_ddp.evaluation.metrics.matching import (
    confusion_pairs,
    hit_targets,
    ignored_shares,
    sizes_of_predictions,
)
from yolo_seg_ddp.evaluation.metrics.results import (
    ImageResult,
    merge_results,
    pack_results,
    unpack_results,
)
from yolo_seg_ddp.evaluation.metrics.summary import summarise, summarise_sizes
from yolo_seg_ddp.evaluation.metrics.thin_objects import (
    ThinRule,
    found_lengths,
    measure,
    summarise_thin,
)
from yolo_seg_ddp.evaluation.native_masks import (
    OnMasks,
    compare_boxes,
    masks_in_photo,
    place,
    region_iou,
    target_areas,
    without_boxed,
)
from yolo_seg_ddp.evaluation.tables import num_judged
from yolo_seg_ddp.predict.detections import Detections, Letterbox, detect, photo_masks, raw_outputs
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.devices import Precision
from yolo_seg_ddp.yolo.inputs import prepare_batch
from yolo_seg_ddp.yolo.loss import NUM_NORMALISERS, PARTS, LossSums, SegmentationLoss
from yolo_seg_ddp.yolo.loss26 import loss_for

AP_CONFIDENCE = 0.001  # so low that the precision-recall curve is complete; Ultralytics' value
AP_IOU = 0.7  # of non-maximum suppression; Ultralytics' value
FULL_PRECISION = Precision("off", None, False)
AP_LIMITS: dict[str, Any] = {"confidence": AP_CONFIDENCE, "iou": AP_IOU, "multi_label": True}
NOTHING_THIN = ThinRule(())
NO_LENGTHS = np.zeros(0)
OnImage = Callable[[Sample, Detections, torch.Tensor], None]
# Yields each sample's detections, with boxes in pixels of the placement's input, and their masks in
# the photograph's.
Find = Callable[
    [Sequence[Sample], Sequence[Letterbox]], Iterator[tuple[Detections, Sequence[Region]]]
]


@dataclass(frozen=True)
class PhotoPixels:
    """What to measure in pixels of the photographs on disk.

    size_of: returns width and height of photograph `index`, from which follows AP by object size.
    compare: whether IoU is computed on boxes and masks enlarged to the photograph, instead of on
    the network's input. on_masks: are called with the enlarged masks of each photograph, some at a
    time. thin: with `compare`, how to judge wires. find: with `compare`, replaces the detections
    and their masks, not the loss.
    """

    size_of: Callable[[int], tuple[int, int]]
    compare: bool = False
    on_masks: Sequence[OnMasks] = ()
    thin: ThinRule = NOTHING_THIN
    find: Find | None = None


class Compared(NamedTuple):
    """One image's detections: overlap of boxes and masks (m + regions, n), see `region_iou`, masks'
    areas (n,), see `measure`.
    """

    boxes: np.ndarray
    masks: np.ndarray
    mask_areas: np.ndarray
    centrelines: np.ndarray
    lengths: np.ndarray = NO_LENGTHS  # see `found_lengths`


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
    criterion: SegmentationLoss | None,
    device: torch.device,
    *,
    precision: Precision = FULL_PRECISION,
    limits: dict[str, Any] = AP_LIMITS,
    on_image: Sequence[OnImage] = (),
    photo: PhotoPixels | None = None,
) -> Evaluation:
    """Measure loss and box and mask AP over all ranks' shares. Every rank must reach this.

    The validation loss is the sum of all images' loss terms over the sum of their normalisers, so
    it depends neither on the batch size nor on the number of ranks. `limits`: the further arguments
    of `detect`. `on_image` are called for each image: (sample, detections, prototypes (32, h, w)).
    With `photo` the metrics also contain `by_size` (see `summarise_sizes`) and, for each class,
    `native_mask_map50`, `native_mask_map50_95` and what `summarise_thin` returns. Without a
    criterion, as for exports, `val_loss` is None.
    """
    was_training = model.training
    model.eval()
    local: list[ImageResult] = []
    end_last: Callable[[], list[ImageResult]] = list  # of the batch before
    sums = torch.zeros(len(PARTS) + NUM_NORMALISERS, dtype=torch.float64, device=device)
    for batch in loader:
        images, targets = prepare_batch(batch, device)
        outputs = raw_outputs(model, images, precision.dtype)
        local += end_last()  # while a GPU runs the network
        if criterion is not None:
            loss = criterion.sums(outputs, targets)
            sums += torch.cat([loss.parts, loss.normalisers]).double()
        if photo is not None and photo.find is not None:
            found, results = find_results(batch.samples, photo.find, len(names), photo)
            local += results
        else:
            found = detect(outputs, strides_of(criterion), images.shape[-1], **limits)
            end_last = match_batch_async(batch.samples, found, outputs["proto"], len(names), photo)
        for look in on_image:
            for sample, detections, prototypes in zip(
                batch.samples, found, outputs["proto"], strict=True
            ):
                look(sample, detections, prototypes)
    local += end_last()
    model.train(was_training)
    results = merge_results(
        [unpack_results(part) for part in distributed.gather_arrays(pack_results(local))]
    )
    metrics = {
        **(_mean_loss(sums) if criterion else {"val_loss": None}),
        **summarise(results, list(names)),
    }
    if photo is not None:
        metrics["by_size"] = summarise_sizes(results, list(names))
        # What is judged in pixels of the photographs; None where it was not.
        thin = summarise_thin(results, len(names), photo.thin.classes)
        for row, of_class in zip(metrics["per_class"], thin, strict=True):
            is_judged = photo.compare and num_judged(row, "mask")
            for name in ("mask_map50", "mask_map50_95"):
                row[f"native_{name}"] = row[name] if is_judged else None
            row.update(of_class)
    return Evaluation(metrics, results)


def criterion_of(model: nn.Module) -> SegmentationLoss | None:
    """Return the loss that a model is evaluated with; None for an
    export, whose outputs have none.
    """
    return loss_for(model) if getattr(model, "has_loss", True) else None


def strides_of(criterion: SegmentationLoss | None) -> list[float]:
    """Return the strides of the model's outputs; none for an export, which decodes its boxes
    itself.
    """
    return criterion.strides if criterion else []


def match_batch_async(
    samples: Sequence[Sample],
    found: Sequence[Detections],
    prototypes: torch.Tensor,
    num_classes: int,
    photo: PhotoPixels | None = None,
) -> Callable[[], list[ImageResult]]:
    """Begin to compare a batch's detections with its labels; return a function that ends it.

    Boxes are compared in input pixels and masks at prototype resolution; with `photo.compare` both
    in the photograph's pixels. prototypes (B, 32, h, w). Until its end this waits for a GPU only
    where masks are enlarged, once per photograph.
    """
    placements = (
        [None] * len(samples)
        if photo is None
        else [place(one, photo.size_of(one.index)) for one in samples]
    )
    images = list(zip(samples, found, placements, strict=True))
    if photo is not None and (photo.compare or photo.on_masks):
        in_photo = [
            _compare_in_photo(
                sample, detections, photo_masks(maps, detections, placement), placement, photo
            )
            for (sample, detections, placement), maps in zip(images, prototypes, strict=True)
            if placement is not None
        ]
        if photo.compare:
            return lambda: [
                _result(*image, part, num_classes)
                for image, part in zip(images, in_photo, strict=True)
            ]
    end_overlaps = begin_mask_overlaps([*map(without_boxed, samples)], found, prototypes)

    def end() -> list[ImageResult]:
        results = []
        for (sample, detections, placement), (iou, areas) in zip(
            images, end_overlaps(), strict=True
        ):
            if placement is not None:  # from pixels of the input to the photograph's
                areas = areas * (np.prod(placement.photo_size) / np.prod(placement.inner_size))
            compared = Compared(compare_boxes(sample, detections), iou, areas, np.zeros(0))
            results.append(_result(sample, detections, placement, compared, num_classes))
        return results

    return end


def find_results(
    samples: Sequence[Sample], find: Find, num_classes: int, photo: PhotoPixels
) -> tuple[list[Detections], list[ImageResult]]:
    """Return what `find` finds in a batch's photographs, and compare it with the labels in the
    photographs' pixels.
    """
    placements = [place(sample, photo.size_of(sample.index)) for sample in samples]
    found, results = [], []
    for sample, placement, (detections, regions) in zip(
        samples, placements, find(samples, placements), strict=True
    ):
        compared = _compare_in_photo(sample, detections, regions, placement, photo)
        found.append(detections)
        results.append(_result(sample, detections, placement, compared, num_classes))
    return found, results


def _compare_in_photo(
    sample: Sample,
    detections: Detections,
    regions: Iterable[Region],
    placement: Letterbox,
    photo: PhotoPixels,
) -> Compared:
    """Compare boxes, masks and the centrelines of thin objects in the photograph's pixels."""
    overlaps = []
    thin: list[Region] = []
    is_thin = np.isin(detections.class_ids.numpy(), photo.thin.classes)
    is_thin &= detections.scores.numpy() >= (0 if photo.thin.at_levels else photo.thin.min_score)
    outlined = without_boxed(sample)
    # Of a class that nobody looked for, or that has boxes alone, no prediction is an alarm.
    is_thin &= ~np.isin(detections.class_ids.numpy(), outlined.ignored_ids[outlined.unsearched])
    start = 0
    for masks in masks_in_photo(outlined, detections, regions, placement):
        overlaps.append(region_iou(masks))
        thin += [
            one
            for one, kept in zip(
                masks.found, is_thin[start : start + len(masks.found)], strict=True
            )
            if kept
        ]
        start += len(masks.found)
        for look in photo.on_masks:
            look(sample, placement, masks.detections, masks.found)
    iou, areas = (np.concatenate(parts, axis=-1) for parts in zip(*overlaps, strict=True))
    chosen = (detections.class_ids.numpy()[is_thin], detections.scores.numpy()[is_thin])
    compared = (masks.truth, masks.truth_class_ids, thin, *chosen, photo.thin)
    lengths = found_lengths(*compared) if photo.thin.at_levels else NO_LENGTHS
    ignored = [*zip(outlined.ignored_ids.tolist(), masks.ignored, strict=True)]
    return Compared(
        compare_boxes(sample, detections, placement),
        iou,
        areas,
        measure(*compared, ignored),
        lengths,
    )


def _result(
    sample: Sample,
    detections: Detections,
    placement: Letterbox | None,
    compared: Compared,
    num_classes: int,
) -> ImageResult:
    """Match one image's detections and labels by the overlap of their boxes and masks."""
    scores, class_ids, num_targets = (
        detections.scores.numpy(),
        detections.class_ids.numpy(),
        len(sample.class_ids),
    )
    outlined = without_boxed(sample)
    num_outlined = len(outlined.class_ids)
    for overlap, one in ((compared.boxes, sample), (compared.masks, outlined)):
        # Nobody looked for the class, so a detection counts nowhere, also beyond the photograph.
        overlap[len(one.class_ids) + one.unsearched] = 1
    iou = compared.boxes[:num_targets]
    box_hits = hit_targets(iou, sample.class_ids, class_ids)
    mask_hits = hit_targets(compared.masks[:num_outlined], outlined.class_ids, class_ids)
    ignored = ignored_shares(compared.boxes[num_targets:], sample.ignored_ids, class_ids)
    sizes: dict[str, np.ndarray] = {}
    if placement is not None:
        in_photo = placement.boxes_to_photo(detections.boxes).numpy()
        box_areas = (in_photo[:, 2:] - in_photo[:, :2]).prod(axis=1)
        target_sizes = size_classes(target_areas(sample, placement))
        sizes = {
            "box_sizes": sizes_of_predictions(box_hits, target_sizes, size_classes(box_areas)),
            "mask_sizes": sizes_of_predictions(
                mask_hits,
                np.delete(target_sizes, sample.boxed),
                size_classes(compared.mask_areas),
            ),
            "target_sizes": target_sizes,
        }
    return ImageResult(
        image_id=sample.index,
        scores=scores,
        class_ids=class_ids,
        box_hits=box_hits >= 0,
        mask_hits=mask_hits >= 0,
        target_class_ids=sample.class_ids,
        box_confusion=confusion_pairs(
            iou, sample.class_ids, class_ids, scores, num_classes, ignored
        ),
        centrelines=compared.centrelines,
        lengths=compared.lengths,
        box_ignored=ignored,
        mask_ignored=ignored_shares(compared.masks[num_outlined:], outlined.ignored_ids, class_ids),
        boxed=np.isin(np.arange(num_targets), sample.boxed),
        **sizes,
    )


def _mean_loss(sums: torch.Tensor) -> dict[str, float]:
    parts, normalisers = distributed.all_reduce_sum(sums).split([len(PARTS), NUM_NORMALISERS])
    means = dict(
        zip(PARTS, LossSums(parts, normalisers).normalised(normalisers).tolist(), strict=True)
    )
    return {
        "val_loss": sum(means.values()),
        **{f"val_{name}": value for name, value in means.items()},
    }
