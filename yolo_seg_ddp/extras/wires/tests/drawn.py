"""Wires that are drawn into masks, and lines."""

import numpy as np

from tests.predict.tile_scenes import stroke
from yolo_seg_ddp.predict.line import Line

SIZE = (900, 600)
Points = list[tuple[float, float]]


def parabola(start: float, end: float, sag: float) -> Points:
    x = np.linspace(start, end, 60)
    share = (x - 40) / 800
    return list(
        zip(x.tolist(), (150 + 200 * share + 4 * sag * share * (1 - share)).tolist(), strict=True)
    )


STRAIGHT, SAGGING = parabola(40, 840, 0), parabola(40, 840, 40)
CROSSARM = [(300.0, 420.0), (420.0, 30.0)]


def drawn(*strokes: Points, width_px: int = 9) -> np.ndarray:
    mask = np.zeros(SIZE[::-1], bool)
    for points in strokes:
        mask |= stroke(SIZE, points, width_px)
    return mask


def straight(*ends: tuple[float, float], width: float = 8) -> Line:
    return Line(np.array(ends, np.float64), np.full(len(ends), width), np.zeros((0, 2, 2)))
