"""Lines in the place of masks: the lines of each detection of a thin class, cut where labels end,
and their confidences.

A network that saw few photographs takes edges of poles and crossarms for wires, and short straight
objects. So a line is as confident as it looks like a wire (`in_photo.py`) and as it fits the other
lines (`confidence.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import cv2
import numpy as np

from yolo_seg_ddp.extras.wires.along import outside, values_on
from yolo_seg_ddp.extras.wires.confidence import Row, lower_crossing, lower_wide, raise_continuing
from yolo_seg_ddp.extras.wires.from_mask import find_lines
from yolo_seg_ddp.extras.wires.in_photo import fit_to_photo, length_factor, likeness
from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.extras.wires.routes import find_routes
from yolo_seg_ddp.extras.wires.wire_labels import WireLabels
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.merge_tiles import MOSTLY, WIDEN_KERNEL, TileDetection
from yolo_seg_ddp.predict.regions import Corners, Region, canvas_of, fill_outline


def replace_masks(
    rows: Sequence[Row],
    masks: Sequence[Region],
    photo: np.ndarray,
    labels: WireLabels,
    votes: Mapping[int, np.ndarray],
    min_score: float,
) -> list[Row]:
    """Return a photograph's detections with lines in the place of the masks of some classes.

    A mask that shows several lines becomes several rows. One without a line keeps its mask. The
    confidence of both is multiplied by how much they look like a wire (`likeness`, for a mask its
    length alone), lowered if they are wider than the photograph's other wires, or lines that run in
    another direction, and raised for lines that continue surer ones. Rows below `min_score` are
    dropped. So are lines that lie mostly in more confident ones of their class, and what lies in
    objects of `labels.end_at`. Without such classes, lines that continue each other become one.

    rows, masks: of all detections, as the network found them; photo: RGB uint8 (H, W, 3). votes:
    for each class those of `votes_of`, so that lines also end where the tiles hardly see them; or
    empty.
    """
    size = (photo.shape[1], photo.shape[0])
    grey = cv2.cvtColor(photo, cv2.COLOR_RGB2GRAY)
    poles = (
        row.number for row in rows if row.class_id in labels.end_at and row.score >= NUMBERS.sure
    )
    ends = canvas_of((masks[number] for number in poles), size)
    replaced: list[Row] = []
    for row in rows:
        if row.class_id not in labels.lines:
            replaced.append(row)
            continue
        region = masks[row.number]
        if lines := find_lines(region) if row.score >= NUMBERS.min_score else []:
            parts = [part for line in lines for part in _parts(line, ends, votes.get(row.class_id))]
            if labels.width:
                parts = [fit_to_photo(part, photo, *labels.width) for part in parts]
            for part in parts:
                score = row.score * likeness(part, grey)
                replaced.append(replace(row, score=score, width_px=part.width_px, line=part))
        else:
            left, top, right, bottom = row.box.tolist()
            height, width = region.mask.shape if region.mask.size else (bottom - top, right - left)
            length = float(np.hypot(height, width))
            width = float(np.count_nonzero(region.mask)) / max(length, 1.0)
            replaced.append(
                replace(row, score=row.score * length_factor(length, grey), width_px=width)
            )
    replaced = lower_crossing(lower_wide(replaced), labels.parallel, max(size))
    replaced = [row for row in raise_continuing(replaced) if row.score >= min_score]
    replaced = _without_copies(replaced, size)
    return replaced if labels.end_at else _joined(replaced)


def _parts(line: Line, ends: np.ndarray, votes: np.ndarray | None) -> list[Line]:
    """Return what is left of a line without the objects at which labels end, and where the tiles
    see it; both (H, W).
    """
    is_end = values_on(line, ends)
    if votes is not None:
        seen = values_on(line, votes)
        is_end |= seen < NUMBERS.end_votes * np.median(seen)
    return outside(line, is_end)


def _without_copies(rows: list[Row], size: tuple[int, int]) -> list[Row]:
    """Return rows, best first, without lines of which more than MOSTLY lies in more confident ones
    of their class.
    """
    taken = {row.class_id: np.zeros(size[::-1], bool) for row in rows if row.line}
    kept = []
    for row in sorted(rows, key=lambda row: -row.score):
        if row.line is not None:
            canvas = taken[row.class_id]
            if values_on(row.line, canvas).mean() > MOSTLY:
                continue
            fill_outline(row.line.outline, size).add_to(canvas)
        kept.append(row)
    return kept


def _joined(rows: list[Row]) -> list[Row]:
    """Join lines from `min_score` on that continue each other (`find_routes`) to one row each;
    return all rows, best first.

    The confidence is the mean of the parts' confidences, weighted by length.
    """
    lines = [row.line if row.score >= NUMBERS.min_score else None for row in rows]
    joined = []
    for route in find_routes(lines, np.array([row.class_id for row in rows], int)):
        members = [rows[number] for number in route.members]
        lengths = [row.line.length_px for row in members if row.line]
        score = float(np.average([row.score for row in members], weights=lengths))
        joined.append(
            replace(members[0], score=score, width_px=route.line.width_px, line=route.line)
        )
    alone = [row for row, line in zip(rows, lines, strict=True) if line is None]
    return sorted([*joined, *alone], key=lambda row: -row.score)


def votes_of(
    pieces: Sequence[TileDetection],
    tiles: Sequence[Corners],
    size: tuple[int, int],
    classes: tuple[int, ...],
) -> dict[int, np.ndarray]:
    """Return for some classes how confident the tiles are, on average, that an object is at each
    pixel: float32 (H, W) each.

    The tiles cover a photograph of (width, height) pixels. In each tile a pixel has the confidence
    of the best piece on it, 0 without one. The mean is taken over the tiles that show the pixel,
    and the highest mean within WIDEN_PX counts. Pieces under `min_score` are left out.
    """
    votes = {class_id: np.zeros(size[::-1], np.float32) for class_id in classes}
    views = np.zeros(size[::-1], np.uint8)
    of_tile: dict[tuple[int, int], list[TileDetection]] = defaultdict(list)
    for piece in pieces:
        if piece.score >= NUMBERS.min_score:
            of_tile[piece.tile, piece.class_id].append(piece)
    for number, (left, top, right, bottom) in enumerate(tiles):
        views[top:bottom, left:right] += 1
        for class_id in classes:
            best = np.zeros((bottom - top, right - left), np.float32)
            for piece in of_tile[number, class_id]:
                x1, y1, x2, y2 = piece.mask.corners
                shown = best[y1 - top : y2 - top, x1 - left : x2 - left]
                np.maximum(shown, piece.score * piece.mask.region().mask, out=shown)
            votes[class_id][top:bottom, left:right] += best
    return {
        class_id: cv2.dilate(canvas / views, WIDEN_KERNEL) for class_id, canvas in votes.items()
    }
