"""Wires as lines: detections of thin classes become lines, as confident as they look like a wire, cut where labels end.

A network that saw few photographs takes edges of poles and crossarms for wires, and short straight things. An edge has
another brightness on each side; a wire has the same ground on both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
import torch

from utils.predict.detections import Detections, PhotoPrediction, Placement, boxes_to_input
from utils.predict.joining import MOSTLY, WIDEN_KERNEL, Piece
from utils.predict.lines import MIN_LENGTH, STEP_PX, find_lines
from utils.predict.regions import Corners, LazyRegions, Region
from utils.predict.shapes import Line, continued_ends, fill_outline, find_routes
from utils.predict.visible import fit_to_photo

# Less confident detections keep their masks: they are most of those that AP asks for, and change it by 0.002.
MIN_SCORE = 0.05
# Of an object at which wires end: of networks that hardly know poles, objects from 0.2 on are mostly wrong.
END_SCORE = 0.5
END_VOTES = 0.37  # of a line's median votes: less is where labels end, such as at a pole that was not found

SURE, FEWEST = 0.5, 2  # a photograph's wires have the median width of at least so many lines with that confidence
WIDER = 1.5  # times that width: what is wider loses confidence, such as crossarms, edges of poles and patches of ground

PARALLEL = 0.2  # the sine of the angle between two wires at which one counts for the other with 1 / e
COUNTED = 0.2  # confidence from which a line says where wires run
ASSUMED = 0.2  # of the photograph's longer side: so much length is assumed to run as labels do, beside the lines found
CONTINUED = 0.4  # exponent of a more confident line in the confidence of a line that continues it; its own has the rest
LONGEST_GAP = 0.5  # of the photograph's longer side: the longest gap between the two
LEAST_SHARE = 0.05  # added to shares of length, so that a line that no other agrees with is not lost

# Of `likeness`:
BLOCK = 5  # samples along a line that are averaged
ACROSS_WIDTHS, SAMPLES = 1.5, 17  # how far across, to both sides; samples there
MIN_WIDTH_PX = 4.0
NOISE = 3.0  # of 255: a contrast that says nothing
SHORT = 0.1  # of the photograph's longer side: a line as long as this has 63 % of the confidence


@dataclass(frozen=True)
class WireRules:
    """Which classes become lines, and how wires are labelled in the training's photographs (`label_facts.py`).

    end_at: the classes at whose objects labels end. width: (gain, margin in pixels), labels are gain times as wide as the
    wires that a photograph shows, plus the margin; empty: not known, so lines stay where and as wide as masks are.
    parallel: of classes whose wires run side by side, the `parallel_shares` that most labels have. bent: classes of curved
    labels, whose lines do not continue each other.
    """

    classes: tuple[int, ...] = ()
    end_at: tuple[int, ...] = ()
    width: tuple[float, ...] = ()
    parallel: Mapping[int, float] = field(default_factory=dict)
    bent: tuple[int, ...] = ()


def with_lines(
    prediction: PhotoPrediction,
    rules: WireRules,
    placement: Placement,
    photo: np.ndarray,
    min_score: float = 0.0,
    votes: Mapping[int, np.ndarray] | None = None,
) -> PhotoPrediction:
    """Return a prediction for a photograph, RGB uint8 (H, W, 3), with lines in the place of the masks of some classes.

    A mask that shows several lines becomes several detections. One without a line keeps its mask. The confidence of both is
    multiplied by how much they look like a wire (`likeness`, for a mask its length alone), lowered if they are wider than
    the photograph's other wires, or lines that run otherwise, and raised for lines that continue surer ones. Below
    `min_score` they are dropped. So are lines that lie mostly in more confident ones of their class, and what lies in
    objects of `rules.end_at`. Without such classes, lines that continue each other become one. With `votes` of each class
    (`votes_of`) lines also end where the tiles hardly see them.
    """
    if not rules.classes:
        return prediction
    grey, ends = cv2.cvtColor(photo, cv2.COLOR_RGB2GRAY), _objects_at_ends(prediction, rules, placement.photo_size)
    rows: list[_Row] = []
    for number, class_id in enumerate(prediction.class_ids.tolist()):
        score = float(prediction.found.scores[number])
        if class_id not in rules.classes:
            rows.append(_Row(score, number, 0.0))
            continue
        region = prediction.masks[number]
        if lines := find_lines(region) if score >= MIN_SCORE else []:
            parts = []
            for line in lines:
                is_inside = along(line, ends)
                if votes:
                    seen = along(line, votes[class_id])
                    is_inside |= seen < END_VOTES * np.median(seen)
                parts += outside(line, is_inside)
            if rules.width:
                parts = [fit_to_photo(part, photo, *rules.width) for part in parts]
            drawn = [_Row(score * likeness(part, grey), number, part.width_px, part) for part in parts]
        else:
            left, top, right, bottom = prediction.boxes[number].tolist()
            height, width = region.mask.shape if region.mask.size else (bottom - top, right - left)
            length = float(np.hypot(height, width))
            width = float(np.count_nonzero(region.mask)) / max(length, 1.0)
            drawn = [_Row(score * length_factor(length, grey), number, width)]
        rows += drawn
    rows = _less_sure_of_wide(rows, prediction.class_ids)
    rows = _less_sure_of_crossing(rows, prediction.class_ids, rules.parallel, max(placement.photo_size))
    is_straight = ~np.isin(prediction.class_ids, rules.bent)
    rows = _surer_of_continuing(rows, prediction.class_ids, is_straight, LONGEST_GAP * max(placement.photo_size))
    rows = [row for row in rows if row.score >= min_score]
    rows = _without_copies(rows, prediction.class_ids, placement.photo_size)
    return _lined(prediction, rows if rules.end_at else _joined(rows, prediction.class_ids, is_straight), placement)


def _objects_at_ends(prediction: PhotoPrediction, rules: WireRules, size: tuple[int, int]) -> np.ndarray:
    """Return where confident objects of `rules.end_at` are in a photograph of (width, height) pixels: bool (H, W)."""
    is_end = np.isin(prediction.class_ids, rules.end_at) & (prediction.found.scores.numpy() >= END_SCORE)
    return canvas_of([prediction.masks[number] for number in np.flatnonzero(is_end).tolist()], size)


def canvas_of(regions: Iterable[Region], size: tuple[int, int]) -> np.ndarray:
    """Draw masks into a photograph of (width, height) pixels: bool (H, W)."""
    canvas = np.zeros(size[::-1], bool)
    for region in regions:
        region.add_to(canvas)
    return canvas


def along(line: Line, canvas: np.ndarray) -> np.ndarray:
    """Return a canvas (H, W) at a line's samples, STEP_PX apart: (n,)."""
    return values_at(line.samples(STEP_PX)[0], canvas)


def values_at(points: np.ndarray, canvas: np.ndarray) -> np.ndarray:
    """Return a canvas (H, W) at points (N, 2) xy."""
    column, row = points.astype(int).clip(0, np.array(canvas.shape[::-1]) - 1).T
    return canvas[row, column]


def votes_of(
    pieces: Sequence[Piece], tiles: Sequence[Corners], size: tuple[int, int], classes: tuple[int, ...]
) -> dict[int, np.ndarray]:
    """Return how sure tiles that cover a photograph of (width, height) pixels are that objects of some classes are there.

    float32 (H, W) for each class. In each tile a pixel has the confidence of the best piece on it, 0 without one. Its votes
    are the mean over the tiles that show it; the highest within WIDEN_PX counts. Pieces under MIN_SCORE do not.
    """
    votes = {class_id: np.zeros(size[::-1], np.float32) for class_id in classes}
    views = np.zeros(size[::-1], np.uint8)
    of_tile: dict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        if piece.score >= MIN_SCORE:
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
    return {class_id: cv2.dilate(canvas / views, WIDEN_KERNEL) for class_id, canvas in votes.items()}


def outside(line: Line, is_inside: np.ndarray) -> list[Line]:
    """Return the parts of a line outside some objects that are long enough to be a line; is_inside: bool (n,), of its samples."""
    points, _, widths = line.samples(STEP_PX)
    if not is_inside.any():
        return [line]
    gap_at = np.abs(points[:, None] - line.gaps.mean(axis=1)).sum(axis=2).argmin(axis=0)
    parts = []
    for kept in np.split(np.arange(len(points)), np.flatnonzero(np.diff(is_inside)) + 1):
        if not is_inside[kept[0]] and len(kept) > 1 and len(kept) * STEP_PX >= MIN_LENGTH * widths[kept].mean():
            gaps = line.gaps[(gap_at > kept[0]) & (gap_at < kept[-1])]
            parts.append(Line(points[kept], widths[kept], gaps))
    return parts


@dataclass(frozen=True, eq=False)
class _Row:
    """A detection: its confidence, the number of the detection that it was before, its width, and its line, if it has one."""

    score: float
    number: int
    width_px: float  # of its line, or of a mask as if it were one; 0 for objects of other classes
    line: Line | None = None


def _less_sure_of_wide(rows: list[_Row], class_ids: np.ndarray) -> list[_Row]:
    """Return rows; detections more than WIDER times as wide as the sure lines of their class have less confidence.

    Wires that hang side by side are about equally wide.
    """
    sure: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.line is not None and row.score >= SURE:
            sure[class_ids[row.number]].append(row.width_px)
    limits = {class_id: WIDER * float(np.median(widths)) for class_id, widths in sure.items() if len(widths) >= FEWEST}
    factors = [min(limits.get(class_ids[row.number], np.inf) / max(row.width_px, 1.0), 1.0) ** 2 for row in rows]
    return [replace(row, score=row.score * factor) for row, factor in zip(rows, factors, strict=True)]


def _less_sure_of_crossing(
    rows: list[_Row], class_ids: np.ndarray, parallel: Mapping[int, float], side_px: float
) -> list[_Row]:
    """Return rows; lines that run otherwise than the other lines of their class have less confidence.

    How much of their length runs alike is compared with `parallel`, what most labels have. `side_px`: the photograph's longer side.
    """
    factors = np.ones(len(rows))
    for class_id, usual in parallel.items():
        own = {n: row.line for n, row in enumerate(rows) if row.line and class_ids[row.number] == class_id}
        scores = np.array([rows[n].score for n in own])
        shares = parallel_shares([*own.values()], scores * (scores >= COUNTED), usual, ASSUMED * side_px)
        factors[[*own]] = ((shares + LEAST_SHARE) / (usual + LEAST_SHARE)).clip(max=1)
    return [replace(row, score=row.score * factor) for row, factor in zip(rows, factors.tolist(), strict=True)]


def _surer_of_continuing(
    rows: list[_Row], class_ids: np.ndarray, is_straight: np.ndarray, reach_px: float
) -> list[_Row]:
    """Return rows; lines that continue a more confident one (`continued_ends`) have more confidence.

    Wires go on behind poles and where the network hardly sees them.
    """
    own = {number: row.line for number, row in enumerate(rows) if row.line and is_straight[row.number]}
    numbers, scores = [*own], np.array([row.score for row in rows])
    raised = scores.copy()
    classes = class_ids[[rows[number].number for number in numbers]]
    for first, second in continued_ends([*own.values()], classes, reach_px):
        low, high = sorted((numbers[first // 2], numbers[second // 2]), key=scores.__getitem__)
        raised[low] = max(raised[low], scores[low] ** (1 - CONTINUED) * scores[high] ** CONTINUED)
    return [replace(row, score=score) for row, score in zip(rows, raised.tolist(), strict=True)]


def _joined(rows: list[_Row], class_ids: np.ndarray, is_straight: np.ndarray) -> list[_Row]:
    """Return rows, best first; lines of at least COUNTED that continue each other (`find_routes`) are one.

    Its confidence is the mean of theirs, weighted by length.
    """
    lines = [row.line if row.score >= COUNTED and is_straight[row.number] else None for row in rows]
    joined = []
    for route in find_routes(lines, class_ids[[row.number for row in rows]]):
        members = [rows[number] for number in route.members]
        lengths = [row.line.length_px for row in members if row.line]
        score = float(np.average([row.score for row in members], weights=lengths))
        joined.append(_Row(score, members[0].number, route.line.width_px, route.line))
    alone = [row for row, line in zip(rows, lines, strict=True) if line is None]
    return sorted([*joined, *alone], key=lambda row: -row.score)


def parallel_shares(
    lines: Sequence[Line], scores: np.ndarray, assumed: float = 0.0, assumed_px: float = 0.0
) -> np.ndarray:
    """Return for each line how much of the other lines' length runs in its direction: from 0 to 1, float64 (N,).

    A line counts with its length times its score, and less the more its direction differs. Beside the lines, a length of
    `assumed_px` has the share `assumed`. A line without any other length has the share 0.
    """
    ends = np.array([line.points[-1] - line.points[0] for line in lines]).reshape(-1, 2)
    angles = np.arctan2(ends[:, 1], ends[:, 0])
    weights = scores * np.array([line.length_px for line in lines])
    alike = np.exp(-((np.sin(angles[:, None] - angles) / PARALLEL) ** 2))
    np.fill_diagonal(alike, 0)
    total: np.ndarray = weights.sum() - weights + assumed_px
    return (alike @ weights + assumed_px * assumed) / total.clip(min=1e-9)


def _without_copies(rows: list[_Row], class_ids: np.ndarray, size: tuple[int, int]) -> list[_Row]:
    """Return rows, best first, without lines of which more than MOSTLY lies in more confident ones of their class."""
    taken = {class_id: np.zeros(size[::-1], bool) for class_id in {class_ids[row.number] for row in rows if row.line}}
    kept = []
    for row in sorted(rows, key=lambda row: -row.score):
        if row.line is not None:
            canvas = taken[class_ids[row.number]]
            if along(row.line, canvas).mean() > MOSTLY:
                continue
            fill_outline(row.line.outline, size).add_to(canvas)
        kept.append(row)
    return kept


def _lined(prediction: PhotoPrediction, rows: list[_Row], placement: Placement) -> PhotoPrediction:
    """Return the prediction that consists of some rows."""
    numbers, masks, size = [row.number for row in rows], prediction.masks, placement.photo_size
    found, boxes = prediction.found, prediction.boxes[numbers]
    in_input = found.boxes[numbers]
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


def likeness(line: Line, grey: np.ndarray) -> float:
    """Return from 0 to 1 how much a line looks like a wire; grey: the photograph, uint8 (H, W).

    It is the share of the line's contrast to its sides in that and the contrast between the sides, times 1 - exp(-length /
    (SHORT * longer side)). Contrasts are medians along the line, of blocks of 20 pixels, so that a wire may pass from dark
    to light ground and in front of a pole. docs/wires.md tells how the constants were found.
    """
    points, across, _ = line.samples(STEP_PX)
    offsets = np.linspace(-ACROSS_WIDTHS, ACROSS_WIDTHS, SAMPLES)
    seen = points[:, None] + (offsets * max(line.width_px, MIN_WIDTH_PX))[:, None] * across[:, None]
    column, row = (seen[..., axis].astype(int).clip(0, grey.shape[1 - axis] - 1) for axis in (0, 1))
    starts = np.arange(0, len(points), BLOCK)
    sums = np.add.reduceat(grey[row, column].astype(np.float64), starts, axis=0)
    profiles = sums / np.diff(starts, append=len(points))[:, None]
    left, right = (profiles[:, side].mean(axis=1) for side in (offsets < -1, offsets > 1))
    between = left[:, None] + (right - left)[:, None] * np.linspace(0, 1, SAMPLES)
    band = np.median(np.abs(profiles - between)[:, np.abs(offsets) <= 1].max(axis=1))
    edge = np.abs(np.median(left - right))
    return float(band / (band + edge + NOISE)) * length_factor(line.length_px, grey)


def length_factor(length_px: float, grey: np.ndarray) -> float:
    """Return the factor of `likeness` for a length in a photograph (H, W)."""
    return float(1 - np.exp(-length_px / (SHORT * max(grey.shape))))
