"""How much a line in a photograph looks like a wire: a long band that differs from what lies on both of its sides.

A network that saw few photographs takes edges of poles and crossarms for wires, and short straight things. An edge has
another brightness on each side; a wire has the same ground on both.
"""

from __future__ import annotations

import numpy as np

from utils.predict.shapes import Line

STEP_PX, BLOCK = 4.0, 5  # between samples along a line; samples that are averaged
REACH, SAMPLES = 1.5, 17  # across, to both sides, in widths; samples there
MIN_WIDTH_PX = 4.0
NOISE = 3.0  # of 255: a contrast that says nothing
SHORT = 0.1  # of the photograph's longer side: a line as long as this has 63 % of the confidence


def likeness(line: Line, grey: np.ndarray) -> float:
    """Return from 0 to 1 how much a line looks like a wire; grey: the photograph, uint8 (H, W).

    It is the share of the line's contrast to its sides in that and the contrast between the sides, times 1 - exp(-length /
    (SHORT * longer side)). Contrasts are medians along the line, of blocks of 20 pixels, so that a wire may pass from dark
    to light ground and in front of a pole. docs/wires.md tells how the constants were found.
    """
    points, across, _ = line.samples(STEP_PX)
    offsets = np.linspace(-REACH, REACH, SAMPLES)
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
