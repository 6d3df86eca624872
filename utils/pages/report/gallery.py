"""The images with the most errors, drawn with labels and predictions; their number and bytes are limited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.common.devices import Precision
from utils.data.cache import load_photo
from utils.data.dataset import Sample, SegmentationDataset
from utils.data.images import NATIVE_LONG_SIDE_PX, encode_jpeg, read_image, upright_size
from utils.evaluation.evaluate import AP_IOU, Find
from utils.evaluation.metrics import CONFUSION_MIN_SCORE, ImageResult, box_iou, pair_ignoring_class
from utils.evaluation.native_masks import outlines_in_photo, place
from utils.pages import draw_instances
from utils.pages.report.photographs import JPEG_QUALITY as FULL_QUALITY
from utils.pages.report.photographs import MAX_PHOTOS, MIN_LONG_SIDE_PX, FullView, Shape, region_outlines
from utils.predict.detections import Detections, Placement, detect, photo_masks, raw_outputs
from utils.predict.regions import Region, shrunk
from utils.yolo.inputs import prepare_images

MAX_IMAGES = 12
MAX_BYTES = 4_000_000  # of all JPEG files together; base64 makes them a third larger
LONG_SIDE_PX = 640
JPEG_QUALITY = 80
KINDS_OF_ERROR = ("missed", "false", "confused")
# Okabe and Ito's sky blue, vermillion and yellow, which colour-blind people can distinguish.
RIGHT, WRONG, CONFUSED = (86, 180, 233), (213, 94, 0), (240, 228, 66)


@dataclass(frozen=True)
class Viewer:
    """A model and its inputs, to run single images again as in the evaluation."""

    model: nn.Module
    strides: list[float]
    dataset: SegmentationDataset
    names: tuple[str, ...]
    device: torch.device
    precision: Precision
    in_photo: bool  # whether boxes are compared in the photographs' pixels
    find: Find | None = None  # what finds the detections instead of the model on whole photographs


@dataclass(frozen=True)
class Card:
    """One image of the gallery: its errors, and JPEG bytes with the labels and with each model's predictions."""

    errors: dict[str, Any]
    truth: bytes
    predictions: list[bytes]
    view: FullView | None = None  # of a large photograph, with the first model's predictions
    full_size: int | None = None  # the number of `view` among those of all cards


def count_errors(results: Sequence[ImageResult], num_classes: int) -> list[dict[str, int]]:
    """Count each image's errors as in the confusion matrix: `image_id`, `num_targets`, `missed`, `false`, `confused`."""
    counted = []
    for result in results:
        predicted, true = result.box_confusion.T
        is_missed, is_false = predicted == num_classes, true == num_classes
        is_confused = (predicted != true) & ~is_missed & ~is_false
        kinds = zip(KINDS_OF_ERROR, (is_missed, is_false, is_confused), strict=True)
        counts = {kind: int(found.sum()) for kind, found in kinds}
        counted.append({"image_id": result.image_id, "num_targets": len(result.target_class_ids), **counts})
    return counted


def choose_worst(errors: Sequence[dict[str, int]], most: int = MAX_IMAGES) -> list[dict[str, int]]:
    """Choose images in turn from four rankings: most errors, most missed, most false, most confused."""
    rankings = [
        sorted((row for row in errors if _sum(row, kinds)), key=lambda row: (-_sum(row, kinds), row["image_id"]))
        for kinds in (KINDS_OF_ERROR, *((kind,) for kind in KINDS_OF_ERROR))
    ]
    chosen: dict[int, dict[str, int]] = {}
    for place_in_ranking in range(most):
        for ranking in rankings:
            if place_in_ranking < len(ranking) and len(chosen) < most:
                row = ranking[place_in_ranking]
                chosen.setdefault(row["image_id"], row)
    return sorted(chosen.values(), key=lambda row: (-_sum(row, KINDS_OF_ERROR), row["image_id"]))


def draw_cards(worst: Sequence[dict[str, Any]], viewers: Sequence[Viewer], max_bytes: int = MAX_BYTES) -> list[Card]:
    """Draw the images with the predictions of each model, as many as fit into `max_bytes`."""
    cards: list[Card] = []
    num_views = 0
    for errors in worst:
        pictures = [
            draw_image(viewer, errors["image_id"], viewer is viewers[0] and num_views < MAX_PHOTOS)
            for viewer in viewers
        ]
        truth, _, view = pictures[0]
        card = Card(errors, truth, [one[1] for one in pictures], view, None if view is None else num_views)
        max_bytes -= len(card.truth) + sum(map(len, card.predictions))
        if max_bytes < 0:
            break
        cards.append(card)
        num_views += view is not None
    return cards


def draw_image(viewer: Viewer, index: int, at_full_size: bool = False) -> tuple[bytes, bytes, FullView | None]:
    """Draw an image's labels and the predictions that the confusion matrix counts; return both as JPEG.

    Only errors have a name on them; a wrong prediction's name is followed by its confidence. `at_full_size` also returns
    the photograph itself with all outlines, if it is larger than the pictures.
    """
    sample = viewer.dataset[(0, index)]
    file = viewer.dataset.photos[index].file
    photo = load_photo(file, LONG_SIDE_PX)
    placement = place(sample, (photo.shape[1], photo.shape[0]))
    full = place(sample, upright_size(file.read_bytes()))
    at_full_size &= MIN_LONG_SIDE_PX <= max(full.photo_size) <= NATIVE_LONG_SIDE_PX
    found, masks, full_masks = _predict(viewer, sample, placement, full if at_full_size else None)
    truth, boxes = torch.from_numpy(sample.boxes), found.boxes
    if viewer.in_photo:
        truth, boxes = placement.boxes_to_photo(truth), placement.boxes_to_photo(boxes)
    scores, class_ids = found.scores.numpy(), found.class_ids.numpy()
    partner = pair_ignoring_class(box_iou(truth.numpy(), boxes.numpy()), len(sample.class_ids), scores)
    of_prediction = np.full(len(found), -1)
    of_prediction[partner[partner >= 0]] = np.flatnonzero(partner >= 0)

    names = [viewer.names[one] for one in sample.class_ids]
    colors, labels = _marks(sample.class_ids, partner, class_ids, names)
    outlines = outlines_in_photo(sample, placement)
    drawn_truth = draw_instances(
        photo, sample.class_ids, None, outlines, None, viewer.names, colors=colors, labels=labels
    )
    texts = [f"{viewer.names[class_id]} {score:.2f}" for class_id, score in zip(class_ids, scores, strict=True)]
    found_colors, labels = _marks(class_ids, of_prediction, sample.class_ids, texts)
    drawn = draw_instances(photo, class_ids, None, masks, None, viewer.names, colors=found_colors, labels=labels)
    view = None
    if full_masks is not None:
        true_outlines = [[outline] for outline in outlines_in_photo(sample, full)]
        found_outlines = [region_outlines(region) for region in full_masks]
        view = FullView(
            file.name,
            full.photo_size,
            encode_jpeg(read_image(file), FULL_QUALITY),
            _shapes(true_outlines, names, colors, "missed"),
            _shapes(found_outlines, texts, found_colors, "false"),
        )
    return encode_jpeg(drawn_truth, JPEG_QUALITY), encode_jpeg(drawn, JPEG_QUALITY), view


def _shapes(
    outlines: Sequence[list[np.ndarray]], names: Sequence[str], colors: Sequence[tuple[int, int, int]], wrong: str
) -> list[Shape]:
    words = {RIGHT: "", WRONG: wrong, CONFUSED: "confused"}
    return [Shape(parts, name, color, words[color]) for parts, name, color in zip(outlines, names, colors, strict=True)]


def _marks(
    class_ids: np.ndarray, partner: np.ndarray, their_class_ids: np.ndarray, texts: Sequence[str]
) -> tuple[list[tuple[int, int, int]], list[str]]:
    """Return each instance's colour by its kind of error, and its text if it is an error, else ""."""
    colors, labels = [], []
    for class_id, other, text in zip(class_ids.tolist(), partner.tolist(), texts, strict=True):
        is_right = other >= 0 and their_class_ids[other] == class_id
        colors.append(RIGHT if is_right else WRONG if other < 0 else CONFUSED)
        labels.append("" if is_right else text)
    return colors, labels


@torch.no_grad()
def _predict(
    viewer: Viewer, sample: Sample, shown: Placement, full: Placement | None
) -> tuple[Detections, list[Region], list[Region] | None]:
    """Return the detections of an image that the confusion matrix counts, and their masks in the picture shown.

    With `full` also their masks in the whole photograph, else None.
    """
    viewer.model.eval()
    if viewer.find is not None:
        in_photo = full or place(sample, upright_size(viewer.dataset.photos[sample.index].file.read_bytes()))
        ((found, masks),) = viewer.find([sample], [in_photo])
        number = int((found.scores > CONFUSION_MIN_SCORE).sum())
        small = [shrunk(mask, in_photo.photo_size, shown.photo_size) for mask in masks[:number]]
        return found[:number], small, list(masks[:number]) if full else None
    images = prepare_images(torch.from_numpy(sample.image[None]), viewer.device)
    outputs = raw_outputs(viewer.model, images, viewer.precision.dtype)
    limits: dict[str, Any] = {"confidence": CONFUSION_MIN_SCORE, "iou": AP_IOU, "multi_label": True}
    (found,) = detect(outputs, viewer.strides, images.shape[-1], **limits)
    large = list(photo_masks(outputs["proto"][0], found, full)) if full else None
    return found, list(photo_masks(outputs["proto"][0], found, shown)), large


def _sum(row: dict[str, int], kinds: Sequence[str]) -> int:
    return sum(row[kind] for kind in kinds)
