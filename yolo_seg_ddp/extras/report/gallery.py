"""Pictures of the evaluated photographs, drawn with labels and predictions; their number and bytes
are limited.

The worst images are drawn at the end, each twice; one picture of every photograph while it is
evaluated.
"""

import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolo_seg_ddp.data.dataset import Photo, Sample
from yolo_seg_ddp.data.images import (
    NATIVE_LONG_SIDE_PX,
    encode_jpeg,
    load_photo,
    read_image,
    upright_size,
)
from yolo_seg_ddp.evaluation.evaluate import strides_of
from yolo_seg_ddp.evaluation.metrics.matching import (
    CONFUSION_MIN_IOU,
    CONFUSION_MIN_SCORE,
    ignored_shares,
    pair_ignoring_class,
)
from yolo_seg_ddp.evaluation.native_masks import compare_boxes, outlines_in_photo, place
from yolo_seg_ddp.evaluation.tile_search import Candidate
from yolo_seg_ddp.extras.report.photographs import (
    MAX_LISTED,
    MAX_PHOTOS,
    MIN_LONG_SIDE_PX,
    RESULTS,
    FullView,
    Listed,
    Shape,
    region_outlines,
)
from yolo_seg_ddp.pages import NO_DETECTIONS, READABLE_PX, draw_instances
from yolo_seg_ddp.pages.pictures import CONFUSED, FALSE, MISSED, RIGHT, Mask
from yolo_seg_ddp.predict.detections import Detections, Letterbox, detect, photo_masks, raw_outputs
from yolo_seg_ddp.predict.prediction_files import PhotoLines
from yolo_seg_ddp.predict.regions import Region, shrunk
from yolo_seg_ddp.yolo.inputs import prepare_images

MAX_BYTES = 4_000_000  # of all JPEG files together; base64 makes them a third larger
LONG_SIDE_PX = 640
# photographs of a split whose pictures have LONG_SIDE_PX; those of more have READABLE_PX
MAX_LARGE = 1000
JPEG_QUALITY = 80
Color = tuple[int, int, int]
IGNORED = (150, 150, 150)  # a detection in a region to ignore
ERROR_OF = {RIGHT: "", MISSED: "missed", FALSE: "false", CONFUSED: "confused", IGNORED: ""}


@dataclass(frozen=True)
class Card:
    """One image of the gallery: its errors, and JPEG bytes with the labels and with each model's
    predictions.
    """

    errors: dict[str, Any]
    truth: bytes
    predictions: list[bytes]
    lines: Sequence[str] = ()  # the first model's errors, such as "12 × missed: wire"
    view: FullView | None = None  # of a large photograph, with the first model's predictions
    listed: Listed | None = None  # with the first model's predictions


def draw_cards(
    worst: Sequence[dict[str, Any]], candidates: Sequence[Candidate], max_bytes: int = MAX_BYTES
) -> list[Card]:
    """Draw the images with the predictions of each model, as many as fit into `max_bytes`."""
    cards: list[Card] = []
    num_views = 0
    for errors in worst:
        has_room = num_views < MAX_PHOTOS
        pictures = [
            draw_image(one, errors["image_id"], one is candidates[0] and has_room)
            for one in candidates
        ]
        truth, listed, view = pictures[0]
        is_error = [
            (RESULTS[row[0]], candidates[0].names[row[1]]) for row in listed.rows.tolist() if row[0]
        ]
        lines = [
            f"{number} × {error}: {name}"
            for (error, name), number in Counter(is_error).most_common()
        ]
        card = Card(errors, truth, [one.jpeg for _, one, _ in pictures], lines, view, listed)
        max_bytes -= len(card.truth) + sum(map(len, card.predictions))
        if max_bytes < 0:
            break
        cards.append(card)
        num_views += view is not None
    return cards


def draw_image(
    candidate: Candidate, index: int, at_full_size: bool = False
) -> tuple[bytes, Listed, FullView | None]:
    """Draw an image's labels and the predictions that the confusion matrix counts; return both.

    Only errors are named; a wrong prediction also shows its confidence. With `at_full_size` the
    photograph with all outlines is returned too, if it is larger than the pictures.
    """
    sample = candidate.dataset[(0, index)]
    file = candidate.dataset.photos[index].file
    photo = load_photo(file, LONG_SIDE_PX)
    placement = place(sample, (photo.shape[1], photo.shape[0]))
    full = place(sample, upright_size(file.read_bytes()))
    at_full_size &= MIN_LONG_SIDE_PX <= max(full.photo_size) <= NATIVE_LONG_SIDE_PX
    detections, masks, full_masks = _predict(
        candidate, sample, placement, full if at_full_size else None
    )
    true_colors, predicted_colors, rows = judge(sample, detections, full, candidate.in_photo)
    scores, class_ids = detections.scores.tolist(), detections.class_ids.numpy()
    true_names, predicted_names = (
        [candidate.names[one] for one in ids] for ids in (sample.class_ids, class_ids)
    )
    for number in sample.boxed:
        true_names[number] += " (box)"
    texts = [f"{name} {score:.2f}" for name, score in zip(predicted_names, scores, strict=True)]
    drawn = []
    for ids, shapes, colors, words, nothing in (
        (
            sample.class_ids,
            outlines_in_photo(sample, placement),
            true_colors,
            true_names,
            "no labels",
        ),
        (class_ids, masks, predicted_colors, texts, NO_DETECTIONS),
    ):
        labels = [
            text if ERROR_OF[color] else "" for color, text in zip(colors, words, strict=True)
        ]
        look: dict[str, Any] = {
            "colors": colors,
            "labels": labels,
            "dashed": [color == MISSED for color in colors],
        }
        look |= {"nothing": nothing, "min_px": READABLE_PX}
        picture = draw_instances(photo, ids, None, shapes, None, candidate.names, **look)
        drawn.append(encode_jpeg(picture, JPEG_QUALITY))
    view = None
    if full_masks is not None:
        outlines = [[outline] for outline in outlines_in_photo(sample, full)]
        truth = _shapes(outlines, true_names, true_colors, [None] * len(true_names))
        predicted = _shapes(
            [region_outlines(region) for region in full_masks],
            predicted_names,
            predicted_colors,
            scores,
        )
        view = FullView(
            full.photo_size, encode_jpeg(read_image(file), JPEG_QUALITY), truth, predicted
        )
    return drawn[0], Listed(file, full.photo_size, drawn[1], rows), view


def judge(
    sample: Sample, detections: Detections, placement: Letterbox, in_photo: bool
) -> tuple[list[Color], list[Color], np.ndarray]:
    """Return the colour of each label and of each detection by its kind of error, as the confusion
    matrix pairs them, and `Listed.rows`, in which a confused object is one error, that of the
    label.

    placement: where the photograph lies. in_photo: whether boxes are compared in its pixels.
    """
    inputs = torch.from_numpy(sample.boxes), detections.boxes
    truth, boxes = (placement.boxes_to_photo(one).numpy() for one in inputs)
    overlap = compare_boxes(sample, detections, placement if in_photo else None)
    true, predicted = sample.class_ids.tolist(), detections.class_ids.tolist()
    partner = pair_ignoring_class(
        overlap[: len(true)], len(true), detections.scores.numpy()
    ).tolist()
    ignored = (
        ignored_shares(overlap[len(true) :], sample.ignored_ids, detections.class_ids.numpy())
        > CONFUSION_MIN_IOU
    )
    percent = (100 * detections.scores).round().int().tolist()
    of_label = [MISSED] * len(true)
    of_detection = [IGNORED if one else FALSE for one in ignored]
    rows = []
    for label, detection in enumerate(partner):
        seen = (-1, -1)
        if detection >= 0:
            color = RIGHT if true[label] == predicted[detection] else CONFUSED
            of_label[label] = of_detection[detection] = color
            seen = (predicted[detection], percent[detection])
        rows.append(
            (
                RESULTS.index(ERROR_OF[of_label[label]] or "correct"),
                true[label],
                *seen,
                *truth[label],
            )
        )
    rows += [
        (
            RESULTS.index("false"),
            predicted[detection],
            predicted[detection],
            percent[detection],
            *boxes[detection],
        )
        for detection in range(len(predicted))
        if of_detection[detection] == FALSE
    ]
    return (
        of_label,
        of_detection,
        np.array(rows, np.float64).reshape(-1, 8).round().astype(np.int64),
    )


class Thumbnails:
    """Pictures of the photographs with labels and detections for their list, drawn during the
    evaluation.

    `see_masks` is called by the evaluation as OnMasks. Of a large split only every
    second, third, ... photograph is drawn.
    """

    def __init__(self, photos: Sequence[Photo], in_photo: bool, folder: Path) -> None:
        self.photos = photos
        self.in_photo = in_photo
        self.wanted = set(range(0, len(photos), max(1, -(-len(photos) // MAX_LISTED))))
        self.long_side_px = LONG_SIDE_PX if len(photos) <= MAX_LARGE else READABLE_PX
        self._drawn = PhotoLines(folder)

    def see_masks(
        self, sample: Sample, placement: Letterbox, detections: Detections, masks: list[Region]
    ) -> None:
        """Draw a photograph when its first masks arrive, those of the most confident detections;
        later ones are ignored.
        """
        if sample.index not in self.wanted:
            return
        self.wanted.remove(sample.index)
        number = int((detections.scores > CONFUSION_MIN_SCORE).sum())
        sure = detections[:number]
        photo = load_photo(self.photos[sample.index].file, self.long_side_px)
        shown = place(sample, (photo.shape[1], photo.shape[0]))
        small = [shrunk(mask, placement.photo_size, shown.photo_size) for mask in masks[:number]]
        true_colors, predicted_colors, rows = judge(sample, sure, placement, self.in_photo)
        colors = list(predicted_colors)
        shapes = list[Mask](small)
        for outline, color in zip(outlines_in_photo(sample, shown), true_colors, strict=True):
            if color == MISSED:
                colors.append(color)
                shapes.append(outline)
        look: dict[str, Any] = {"colors": colors, "dashed": [color == MISSED for color in colors]}
        look |= {"labels": [""] * len(colors), "min_px": READABLE_PX}
        jpeg = encode_jpeg(
            draw_instances(photo, [0] * len(colors), None, shapes, None, [""], **look), JPEG_QUALITY
        )
        picture = base64.b64encode(jpeg).decode("ascii")
        self._drawn.add(sample.index, [sample.index, placement.photo_size, picture, rows.tolist()])

    def gather(self) -> dict[int, Listed]:
        """Return on rank 0 all ranks' photographs by their position in the split.

        Every rank must reach this.
        """
        self._drawn.gather()
        listed = {}
        for index, (width, height), picture, rows in map(json.loads, self._drawn):
            table = np.array(rows, np.int64).reshape(-1, 8)
            listed[index] = Listed(
                self.photos[index].file, (width, height), base64.b64decode(picture), table
            )
        return listed


def _shapes(
    outlines: Sequence[list[np.ndarray]],
    names: Sequence[str],
    colors: Sequence[Color],
    scores: Sequence[float | None],
) -> list[Shape]:
    rows = zip(outlines, names, colors, scores, strict=True)
    return [Shape(parts, name, color, ERROR_OF[color], score) for parts, name, color, score in rows]


@torch.no_grad()
def _predict(
    candidate: Candidate, sample: Sample, shown: Letterbox, full: Letterbox | None
) -> tuple[Detections, list[Region], list[Region] | None]:
    """Return an image's detections that the confusion matrix counts, their masks in the shown
    picture, and in the photograph.

    The last are None without `full`.
    """
    candidate.model.eval()
    if candidate.find is not None:
        in_photo = full or place(
            sample, upright_size(candidate.dataset.photos[sample.index].file.read_bytes())
        )
        ((detections, masks),) = candidate.find([sample], [in_photo])
        number = int((detections.scores > CONFUSION_MIN_SCORE).sum())
        small = [shrunk(mask, in_photo.photo_size, shown.photo_size) for mask in masks[:number]]
        return detections[:number], small, list(masks[:number]) if full else None
    images = prepare_images(torch.from_numpy(sample.image[None]), candidate.device)
    outputs = raw_outputs(candidate.model, images, candidate.precision.dtype)
    limits = {**candidate.limits, "confidence": CONFUSION_MIN_SCORE}
    (detections,) = detect(outputs, strides_of(candidate.criterion), images.shape[-1], **limits)
    large = list(photo_masks(outputs["proto"][0], detections, full)) if full else None
    return detections, list(photo_masks(outputs["proto"][0], detections, shown)), large
