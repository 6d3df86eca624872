"""The step that puts lines in the place of the masks of thin objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from yolo_seg_ddp.extras.wires.confidence import Row
from yolo_seg_ddp.extras.wires.from_mask import band_line
from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.extras.wires.replacing import replace_masks, votes_of
from yolo_seg_ddp.extras.wires.wire_labels import WireLabels
from yolo_seg_ddp.predict.detections import Detections, Letterbox, PhotoPrediction, boxes_to_input
from yolo_seg_ddp.predict.postprocess import Context, MeanWithWhole, Step
from yolo_seg_ddp.predict.regions import LazyRegions, fill_outline
from yolo_seg_ddp.yolo.model import YoloModel, trained_wire_labels


def steps_for(model: YoloModel, thin: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the steps of a model whose classes `thin` become lines, or keep their masks if they
    are curved.
    """
    labels = WireLabels.of_model(thin, trained_wire_labels(model))
    return Lines(labels), MeanWithWhole(labels.lines)


@dataclass(frozen=True)
class Lines(Step):
    """Lines in the place of masks, as `with_lines` finds them; where labels end at other objects,
    tiles vote on it.
    """

    labels: WireLabels

    def __call__(
        self, prediction: PhotoPrediction, context: Context, seen: None
    ) -> PhotoPrediction:
        """Return the prediction with lines."""
        votes: dict[int, np.ndarray] = {}
        if self.labels.end_at and context.tiles:
            votes = votes_of(
                context.pieces, context.tiles, context.placement.photo_size, self.labels.classes
            )
        return with_lines(
            prediction, self.labels, context.placement, context.photo, context.min_score, votes
        )


def with_lines(
    prediction: PhotoPrediction,
    labels: WireLabels,
    placement: Letterbox,
    photo: np.ndarray,
    min_score: float = 0.0,
    votes: Mapping[int, np.ndarray] | None = None,
) -> PhotoPrediction:
    """Return a prediction for a photograph, RGB uint8 (H, W, 3), with lines as `replace_masks`
    finds them.

    `labels` names the thin classes; without any the prediction is returned as it is. Objects of
    curved classes keep their masks: where a mask is one band, its centreline is added.
    """
    if not labels.classes:
        return prediction
    detections = prediction.detections
    masks = prediction.masks
    size = placement.photo_size
    columns = zip(
        detections.scores.tolist(), prediction.class_ids.tolist(), prediction.boxes, strict=True
    )
    rows = [
        Row(score, class_id, number, box) for number, (score, class_id, box) in enumerate(columns)
    ]
    rows = replace_masks(rows, masks, photo, labels, votes or {}, min_score)
    numbers = [row.number for row in rows]
    boxes, in_input = prediction.boxes[numbers], detections.boxes[numbers]
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
        Detections(
            in_input, scores, detections.class_ids[numbers], detections.coefficients[numbers]
        ),
        LazyRegions(
            rows,
            lambda row: fill_outline(row.line.outline, size) if row.line else masks[row.number],
        ),
        boxes,
        lines,
        prediction.num_without_mask,
    )
