"""Steps after a photograph's tiles were merged: what a step is, and the mean with the whole
photograph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from yolo_seg_ddp.predict.detections import Detections, Letterbox, PhotoPrediction, boxes_to_input
from yolo_seg_ddp.predict.merge_tiles import MIN_AGREEMENT, MergedInstance, TileDetection
from yolo_seg_ddp.predict.overview import box_overlap
from yolo_seg_ddp.predict.regions import Corners, LazyRegions
from yolo_seg_ddp.utils.extras import find_extra
from yolo_seg_ddp.yolo.model import YoloModel

# longer side of a box in the network's input from which the whole photograph decides, too (rule 8)
SHOWN_PX = 24
# of the input, by which boxes of the whole photograph may be wrong: a cell of the finest grid
EXACT_PX = 8


@dataclass(frozen=True)
class Context:
    """What a step may look at beside the prediction: the photograph, RGB uint8 (H, W, 3), and what
    was found on the way.

    placement: of the whole photograph in the input. min_score, max_detections: of the predictor.
    tiles, pieces: the smallest tiles and the detections in all; empty for a photograph without
    tiles. whole: the detections of the pass over the whole photograph.
    """

    photo: np.ndarray
    placement: Letterbox
    min_score: float
    max_detections: int
    tiles: Sequence[Corners] = ()
    pieces: Sequence[TileDetection] = ()
    whole: Sequence[MergedInstance] = ()


class Step(Protocol):
    """A change of each photograph's prediction, after its tiles were merged.

    `Predictor` applies its steps in their order.
    """

    def see(self, prototypes: torch.Tensor, canvas: np.ndarray, placement: Letterbox) -> Any:
        """Return what the step needs of the network's view of the whole photograph: prototypes (32,
        S/4, S/4), RGB (S, S, 3).
        """
        return None

    def __call__(self, prediction: PhotoPrediction, context: Context, seen: Any) -> PhotoPrediction:
        """Return the changed prediction; `seen` is what `see` returned."""


@dataclass(frozen=True)
class MeanWithWhole(Step):
    """The mean of what tiles and what the whole photograph show, but for the classes `lines`: see
    `average_with_whole`.
    """

    lines: tuple[int, ...] = ()

    def __call__(
        self, prediction: PhotoPrediction, context: Context, seen: None
    ) -> PhotoPrediction:
        """Return the mean; a photograph without tiles has none."""
        if not context.tiles:
            return prediction
        limits = (context.min_score, context.max_detections)
        return average_with_whole(prediction, context.whole, context.placement, self.lines, *limits)


def steps_for(model: YoloModel, thin: tuple[int, ...]) -> tuple[Step, ...]:
    """Return the steps of a model. The extra `wires` puts lines in the place of the masks of
    classes `thin`; without it they keep their masks.
    """
    wires = find_extra("wires") if thin else None
    return wires.steps_for(model, thin) if wires else (MeanWithWhole(),)


def average_with_whole(
    prediction: PhotoPrediction,
    whole: Sequence[MergedInstance],
    placement: Letterbox,
    lines: Collection[int],
    least: float,
    most: int,
) -> PhotoPrediction:
    """Average a prediction with what the pass over the whole photograph finds
    (docs/research/tiles.md, rule 8).

    Return at most `most` detections, best first. Two detections are one object if their boxes have
    an IoU of MIN_AGREEMENT. It has the mean confidence, and the mask and the box of `prediction`;
    sides of both boxes that differ by more than EXACT_PX are averaged. What one of both misses has
    half of its confidence, and is dropped under `least`. Detections stay as they are if the longer
    side of their box is under SHOWN_PX, or if they are of the classes `lines`.
    """
    first = len(prediction.boxes)
    boxes = np.concatenate(
        [
            prediction.boxes,
            np.array([instance.box for instance in whole], np.float32).reshape(-1, 4),
        ]
    )
    scores = np.concatenate(
        [
            prediction.detections.scores.numpy(),
            np.array([instance.score for instance in whole], np.float32),
        ]
    )
    classes = np.concatenate(
        [prediction.class_ids, np.array([instance.class_id for instance in whole], int)]
    )
    # A pixel of the input, in pixels of the photograph.
    px = max(placement.photo_size) / placement.size_px
    is_kept = ((boxes[:, 2:] - boxes[:, :2]).max(axis=1) >= SHOWN_PX * px) & ~np.isin(
        classes, list(lines)
    )
    is_alone = is_kept.copy()
    is_kept[:first] = True
    for number in (first + np.argsort(-scores[first:], kind="stable")).tolist():
        same = is_alone[:first] & (classes[:first] == classes[number]) & is_kept[number]
        iou = np.where(same, box_overlap(boxes[number], boxes[:first])[0], 0)
        if iou.max(initial=0) >= MIN_AGREEMENT:
            best = int(iou.argmax())
            mean = (boxes[best] + boxes[number]) / 2
            boxes[best] = np.where(
                np.abs(mean - boxes[best]) > EXACT_PX * px / 2, mean, boxes[best]
            )
            scores[best] = (scores[best] + scores[number]) / 2
            is_alone[[best, number]] = is_kept[number] = False
    scores[is_alone] /= 2
    is_kept[is_alone] &= scores[is_alone] >= least
    chosen = np.flatnonzero(is_kept)
    order = chosen[np.argsort(-scores[chosen], kind="stable")][:most].tolist()
    in_input = boxes_to_input(torch.from_numpy(boxes[order]), placement)
    detections = Detections(
        in_input,
        torch.from_numpy(scores[order]),
        torch.from_numpy(classes[order]),
        torch.zeros(len(order), 0),
    )
    masks = LazyRegions(
        order,
        lambda number: (
            prediction.masks[number] if number < first else whole[number - first].region()
        ),
    )
    lines_of = (
        [prediction.lines[number] if number < first else None for number in order]
        if prediction.lines
        else ()
    )
    return replace(
        prediction, detections=detections, masks=masks, boxes=boxes[order], lines=lines_of
    )
