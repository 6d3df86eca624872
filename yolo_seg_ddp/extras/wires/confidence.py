"""How confident lines are beside the other lines of their photograph: as wide, in the same
direction, or in one wire.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.extras.wires.routes import continued_ends
from yolo_seg_ddp.predict.line import Line


@dataclass(frozen=True, eq=False)
class Row:
    """A detection of a photograph: one of thin classes has a width, and a line if its mask shows
    one.
    """

    score: float
    class_id: int
    number: int  # of the detection that it was before
    box: np.ndarray  # float32 (4,) xyxy, of the detection that it was before
    # of the line, or of the mask as if it were one; 0 for objects of other classes
    width_px: float = 0.0
    line: Line | None = None


def lower_wide(rows: list[Row]) -> list[Row]:
    """Return rows; what is much wider than the sure lines of its class has less confidence.

    Wires that hang side by side are about equally wide; crossarms, edges of poles and patches of
    ground are wider.
    """
    sure: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.line is not None and row.score >= NUMBERS.sure:
            sure[row.class_id].append(row.width_px)
    limits = {
        class_id: NUMBERS.wider * float(np.median(widths))
        for class_id, widths in sure.items()
        if len(widths) > 1
    }
    factors = [
        min(limits.get(row.class_id, np.inf) / max(row.width_px, 1.0), 1.0) ** 2 for row in rows
    ]
    return [
        replace(row, score=row.score * factor) for row, factor in zip(rows, factors, strict=True)
    ]


def lower_crossing(rows: list[Row], parallel: Mapping[int, float], side_px: float) -> list[Row]:
    """Return rows; lines that run in another direction than the other lines of their class have
    less confidence.

    parallel: the `parallel_shares` that most labels of a class reach. side_px: the photograph's
    longer side.
    """
    factors = np.ones(len(rows))
    for class_id, usual in parallel.items():
        lines = {n: row.line for n, row in enumerate(rows) if row.line and row.class_id == class_id}
        scores = np.array([rows[n].score for n in lines])
        shares = parallel_shares([*lines.values()], scores, usual, NUMBERS.assumed * side_px)
        factors[[*lines]] = (shares / usual).clip(max=1)
    return [
        replace(row, score=row.score * factor)
        for row, factor in zip(rows, factors.tolist(), strict=True)
    ]


def parallel_shares(
    lines: Sequence[Line], scores: np.ndarray, assumed: float = 0.0, assumed_px: float = 0.0
) -> np.ndarray:
    """Return which share of the other lines' length runs in the direction of each line, from 0 to
    1: float64 (N,).

    A line counts with its length times its score, and less the more its direction differs. Beside
    the lines, a length of `assumed_px` has the share `assumed`. A line without any other length has
    the share 0.
    """
    ends = np.array([line.points[-1] - line.points[0] for line in lines]).reshape(-1, 2)
    angles = np.arctan2(ends[:, 1], ends[:, 0])
    weights = scores * np.array([line.length_px for line in lines])
    alike = np.exp(-((np.sin(angles[:, None] - angles) / NUMBERS.parallel) ** 2))
    np.fill_diagonal(alike, 0)
    total: np.ndarray = weights.sum() - weights + assumed_px
    return (alike @ weights + assumed_px * assumed) / total.clip(min=1e-9)


def raise_continuing(rows: list[Row]) -> list[Row]:
    """Return rows; lines that continue a more confident one (`continued_ends`) have more
    confidence.

    Wires go on behind poles and where the network hardly sees them.
    """
    lines = {number: row.line for number, row in enumerate(rows) if row.line}
    numbers = [*lines]
    scores = np.array([row.score for row in rows])
    raised = scores.copy()
    classes = np.array([rows[number].class_id for number in numbers])
    for first, second in continued_ends([*lines.values()], classes):
        low, high = sorted((numbers[first // 2], numbers[second // 2]), key=scores.__getitem__)
        mixed = scores[low] ** (1 - NUMBERS.continued) * scores[high] ** NUMBERS.continued
        raised[low] = max(raised[low], mixed)
    return [replace(row, score=score) for row, score in zip(rows, raised.tolist(), strict=True)]
