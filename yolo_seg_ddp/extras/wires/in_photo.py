"""What a photograph shows of a wire: where it lies beside a line, how wide it is, and how much the
line looks like one.
"""

from __future__ import annotations

import cv2
import numpy as np

from yolo_seg_ddp.extras.wires.along import samples
from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.predict.line import Line

ALONG_PX, ACROSS_PX = 2.0, 0.5  # between samples of the photograph
NUM_ACROSS = 17  # samples across a line, of `likeness`
SAMPLES_AT_ONCE = 4096  # OpenCV takes pictures of at most 32767 pixels a side


def profiles(line: Line, photo: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Measure the wire that a photograph, RGB uint8 (H, W, 3), shows near a line, block by block
    along it.

    Return for each block that shows the wire, in pixels, float64 (B,): its place along the line,
    how far beside the line the wire's middle lies, to the side of `samples`, and the wire's
    full width at half of its contrast to the ground. The colour with the highest contrast counts,
    and the ground changes evenly from one side to the other.
    """
    points, across, _ = samples(line, ALONG_PX)
    width = max(line.width_px, NUMBERS.min_width_px)
    reach = NUMBERS.reach_widths * width
    offsets = np.arange(-reach, reach + ACROSS_PX / 2, ACROSS_PX)
    at = (points[:, None] + offsets[:, None] * across[:, None] - 0.5).astype(np.float32)
    parts = [at[start : start + SAMPLES_AT_ONCE] for start in range(0, len(at), SAMPLES_AT_ONCE)]
    seen = np.concatenate([_sampled(photo, part) for part in parts]).astype(np.float64)
    block = round(NUMBERS.block_px / ALONG_PX)
    starts = np.arange(0, max(len(points) - block // 2, 1), block)
    lengths = np.diff(starts, append=len(points))
    profile = np.add.reduceat(seen, starts, axis=0) / lengths[:, None, None]
    outer = np.count_nonzero(offsets < -width)
    left = profile[:, :outer].mean(axis=1)
    right = profile[:, -outer:].mean(axis=1)
    ground = left[:, None] + (right - left)[:, None] * np.linspace(0, 1, len(offsets))[:, None]
    contrast = np.abs(profile - ground).max(axis=2)
    peak = contrast.argmax(axis=1)
    number = np.arange(len(offsets))
    highest = contrast.max(axis=1)
    is_low = contrast <= highest[:, None] / 2
    first = np.where(is_low & (number < peak[:, None]), number, 0).max(axis=1)
    last = np.where(is_low & (number > peak[:, None]), number, len(offsets) - 1).min(axis=1)
    is_wire = highest > NUMBERS.noise
    places = (starts + lengths / 2) * (line.length_px / max(len(points) - 1, 1))
    widths = (last - first - 1) * ACROSS_PX
    beside = (offsets[first] + offsets[last]) / 2
    return places[is_wire], beside[is_wire], widths[is_wire]


def _sampled(photo: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Interpolate a photograph at (n, k, 2) xy: uint8 (n, k, 3).

    The first pixel's centre is (0, 0); the edge goes on outside.
    """
    size = np.array(photo.shape[1::-1])
    left, top = np.floor(at.min(axis=(0, 1))).astype(int).clip(0, size - 1).tolist()
    right, bottom = (
        (np.ceil(at.max(axis=(0, 1))).astype(int) + 1).clip((left + 1, top + 1), size).tolist()
    )
    x, y = np.moveaxis(at - np.array([left, top], np.float32), -1, 0)
    return cv2.remap(
        photo[top:bottom, left:right], x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE
    )


def fit_to_photo(line: Line, photo: np.ndarray, gain: float, margin_px: float) -> Line:
    """Move a line onto the wire in a photograph, RGB uint8 (H, W, 3), and make it `gain` times as
    wide, plus `margin_px`.

    The line moves by at most half its width. It has one width from end to end, of at least a pixel.
    A line near which the photograph shows no wire stays as it is.
    """
    places, beside, widths = profiles(line, photo)
    if not len(places):
        return line
    points, across, _ = samples(line, ALONG_PX)
    along = np.linspace(0, line.length_px, len(points))
    limit = max(line.width_px / 2, 3.0)
    shift = _smooth(places, beside, limit, along).clip(-limit, limit)
    wide = max(gain * float(np.median(widths)) + margin_px, 1.0)
    return Line(points + shift[:, None] * across, np.full(len(points), wide), line.gaps)


def _smooth(places: np.ndarray, values: np.ndarray, limit: float, wanted: np.ndarray) -> np.ndarray:
    """Fit a parabola to values without outliers, to few values a straight line or their median;
    return it at `wanted` places.
    """
    median = np.median(values)
    kept = np.abs(values - median) < limit
    if kept.sum() < 4:
        return np.full(len(wanted), median)
    degree = 1 if kept.sum() < 8 else 2
    scale = max(wanted[-1], 1.0)
    for _ in range(4):
        fitted = np.polyfit(places[kept] / scale, values[kept], degree)
        errors = np.abs(values - np.polyval(fitted, places / scale))
        near = errors < max(2.5 * 1.4826 * float(np.median(errors[kept])), 0.7)
        if near.sum() < degree + 2:
            break
        kept = near
    return np.asarray(np.polyval(fitted, wanted / scale))


def likeness(line: Line, grey: np.ndarray) -> float:
    """Return from 0 to 1 how much a line looks like a wire; grey: the photograph, uint8 (H, W).

    A wire has the same ground on both sides, an edge has not: so the contrast of the line to its
    sides is compared with that between the sides. Contrasts are medians over blocks of the line, so
    that a wire may pass from dark to light ground and in front of a pole. The result is multiplied
    by `length_factor`.
    """
    points, across, _ = samples(line)
    offsets = np.linspace(-NUMBERS.reach_widths, NUMBERS.reach_widths, NUM_ACROSS)
    seen = (
        points[:, None]
        + (offsets * max(line.width_px, NUMBERS.min_width_px))[:, None] * across[:, None]
    )
    column, row = (seen[..., axis].astype(int).clip(0, grey.shape[1 - axis] - 1) for axis in (0, 1))
    starts = np.arange(0, len(points), round(NUMBERS.block_px / NUMBERS.step_px))
    sums = np.add.reduceat(grey[row, column].astype(np.float64), starts, axis=0)
    profiles = sums / np.diff(starts, append=len(points))[:, None]
    left, right = (profiles[:, side].mean(axis=1) for side in (offsets < -1, offsets > 1))
    between = left[:, None] + (right - left)[:, None] * np.linspace(0, 1, NUM_ACROSS)
    band = np.median(np.abs(profiles - between)[:, np.abs(offsets) <= 1].max(axis=1))
    edge = np.abs(np.median(left - right))
    return float(band / (band + edge + NUMBERS.noise)) * length_factor(line.length_px, grey)


def length_factor(length_px: float, grey: np.ndarray) -> float:
    """Return the factor by which a line of some length is less likely to be a wire in a photograph
    (H, W): from 0 to 1.
    """
    return float(1 - np.exp(-length_px / (NUMBERS.short * max(grey.shape))))
