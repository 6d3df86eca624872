"""Gives the detections of thin classes lines in the place of their masks (`lines/`)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from utils.predict.detections import Detections, PhotoPrediction, Placement, boxes_to_input
from utils.predict.lines.confidence import Row
from utils.predict.lines.label_facts import LabelFacts
from utils.predict.lines.replacing import replace_masks
from utils.predict.regions import LazyRegions, fill_outline


def with_lines(
    prediction: PhotoPrediction,
    labels: LabelFacts,
    placement: Placement,
    photo: np.ndarray,
    min_score: float = 0.0,
    votes: Mapping[int, np.ndarray] | None = None,
) -> PhotoPrediction:
    """Return a prediction for a photograph, RGB uint8 (H, W, 3), with lines as `replace_masks` finds them.

    `labels` names the thin classes; without any the prediction is returned as it is.
    """
    if not labels.classes:
        return prediction
    found, masks, size = prediction.found, prediction.masks, placement.photo_size
    columns = zip(found.scores.tolist(), prediction.class_ids.tolist(), prediction.boxes, strict=True)
    rows = [Row(score, class_id, number, box) for number, (score, class_id, box) in enumerate(columns)]
    rows = replace_masks(rows, masks, photo, labels, votes or {}, min_score)
    numbers = [row.number for row in rows]
    boxes, in_input = prediction.boxes[numbers], found.boxes[numbers]
    for position, row in enumerate(rows):
        if row.line is not None:
            corners = np.concatenate([row.line.outline.min(axis=0), row.line.outline.max(axis=0)])
            boxes[position] = corners.clip(0, size * 2)
            in_input[position] = boxes_to_input(torch.from_numpy(boxes[position]), placement)
    scores = torch.tensor([row.score for row in rows], dtype=torch.float32)
    return PhotoPrediction(
        Detections(in_input, scores, found.class_ids[numbers], found.coefficients[numbers]),
        LazyRegions(rows, lambda row: fill_outline(row.line.outline, size) if row.line else masks[row.number]),
        boxes,
        [row.line for row in rows],
        prediction.num_without_mask,
    )
