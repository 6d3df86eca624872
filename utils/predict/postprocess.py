"""What becomes of a photograph's joined objects: lines in the place of masks, and the mean with the whole photograph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from utils.predict.detections import Detections, Letterbox, PhotoPrediction, boxes_to_input
from utils.predict.lines.confidence import Row
from utils.predict.lines.from_mask import band_line
from utils.predict.lines.label_facts import LabelFacts
from utils.predict.lines.numbers import NUMBERS
from utils.predict.lines.replacing import replace_masks
from utils.predict.merge_tiles import MIN_AGREEMENT, MergedInstance
from utils.predict.overview import box_overlap
from utils.predict.regions import LazyRegions, fill_outline

SHOWN_PX = 24  # longer side of a box in the network's input from which the whole photograph decides, too (rule 8)
EXACT_PX = 8  # of the input, by which boxes of the whole photograph may be wrong: a cell of the finest grid


def with_lines(
    prediction: PhotoPrediction,
    labels: LabelFacts,
    placement: Letterbox,
    photo: np.ndarray,
    min_score: float = 0.0,
    votes: Mapping[int, np.ndarray] | None = None,
) -> PhotoPrediction:
    """Return a prediction for a photograph, RGB uint8 (H, W, 3), with lines as `replace_masks` finds them.

    `labels` names the thin classes; without any the prediction is returned as it is. Objects of curved classes keep their masks:
    where a mask is one band, its centreline is added.
    """
    if not labels.classes:
        return prediction
    found, masks, size = prediction.found, prediction.masks, placement.photo_size
    columns = zip(found.scores.tolist(), prediction.class_ids.tolist(), prediction.boxes, strict=True)
    rows = [Row(score, class_id, number, box) for number, (score, class_id, box) in enumerate(columns)]
    rows = replace_masks(rows, masks, photo, labels, votes or {}, min_score)
    numbers = [row.number for row in rows]
    boxes, in_input = prediction.boxes[numbers], found.boxes[numbers]
    lines = [row.line for row in rows]
    for position, row in enumerate(rows):
        if row.line is not None:
            corners = np.concatenate([row.line.outline.min(axis=0), row.line.outline.max(axis=0)])
            boxes[position] = corners.clip(0, size * 2)
            in_input[position] = boxes_to_input(torch.from_numpy(boxes[position]), placement)
        elif row.class_id in labels.curved and row.score >= NUMBERS.min_score:
            lines[position] = band_line(masks[row.number])
    scores = torch.tensor([row.score for row in rows], dtype=torch.float32)
    return PhotoPrediction(
        Detections(in_input, scores, found.class_ids[numbers], found.coefficients[numbers]),
        LazyRegions(rows, lambda row: fill_outline(row.line.outline, size) if row.line else masks[row.number]),
        boxes,
        lines,
        prediction.num_without_mask,
    )


def average_with_whole(
    found: PhotoPrediction,
    whole: Sequence[MergedInstance],
    placement: Letterbox,
    lines: Collection[int],
    least: float,
    most: int,
) -> PhotoPrediction:
    """Average a prediction with what the pass over the whole photograph finds (docs/research/tiles.md, rule 8).

    Return at most `most` detections, best first. Two detections are one object if their boxes have an IoU of MIN_AGREEMENT. It has
    the mean confidence, and the mask and the box of `found`; sides of both boxes that differ by more than EXACT_PX are averaged.
    What one of both misses has half of its confidence, and is dropped under `least`. Detections stay as they are if the longer
    side of their box is under SHOWN_PX, or if they are of the classes `lines`.
    """
    first = len(found.boxes)
    boxes = np.concatenate([found.boxes, np.array([thing.box for thing in whole], np.float32).reshape(-1, 4)])
    scores = np.concatenate([found.found.scores.numpy(), np.array([thing.score for thing in whole], np.float32)])
    classes = np.concatenate([found.class_ids, np.array([thing.class_id for thing in whole], int)])
    px = max(placement.photo_size) / placement.size_px  # of the input, in pixels of the photograph
    is_kept = ((boxes[:, 2:] - boxes[:, :2]).max(axis=1) >= SHOWN_PX * px) & ~np.isin(classes, list(lines))
    is_alone = is_kept.copy()
    is_kept[:first] = True
    for number in (first + np.argsort(-scores[first:], kind="stable")).tolist():
        same = is_alone[:first] & (classes[:first] == classes[number]) & is_kept[number]
        iou = np.where(same, box_overlap(boxes[number], boxes[:first])[0], 0)
        if iou.max(initial=0) >= MIN_AGREEMENT:
            best = int(iou.argmax())
            mean = (boxes[best] + boxes[number]) / 2
            boxes[best] = np.where(np.abs(mean - boxes[best]) > EXACT_PX * px / 2, mean, boxes[best])
            scores[best] = (scores[best] + scores[number]) / 2
            is_alone[[best, number]] = is_kept[number] = False
    scores[is_alone] /= 2
    is_kept[is_alone] &= scores[is_alone] >= least
    chosen = np.flatnonzero(is_kept)
    order = chosen[np.argsort(-scores[chosen], kind="stable")][:most].tolist()
    in_input = boxes_to_input(torch.from_numpy(boxes[order]), placement)
    detections = Detections(
        in_input, torch.from_numpy(scores[order]), torch.from_numpy(classes[order]), torch.zeros(len(order), 0)
    )
    masks = LazyRegions(order, lambda number: found.masks[number] if number < first else whole[number - first].region())
    lines_of = [found.lines[number] if number < first else None for number in order] if found.lines else ()
    return replace(found, found=detections, masks=masks, boxes=boxes[order], lines=lines_of)
