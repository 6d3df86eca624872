"""What a photograph shows of a wire: where it lies beside a line, and how wide it is."""

from __future__ import annotations

import cv2
import numpy as np

from utils.predict.shapes import Line

ALONG_PX, ACROSS_PX = 2.0, 0.5  # between samples
SAMPLES_AT_ONCE = 4096  # OpenCV takes pictures of at most 32767 pixels a side
BLOCK = 20  # samples along the line that are averaged: 40 pixels
REACH_WIDTHS, MIN_REACH_PX = 1.5, 12.0  # how far to both sides
OUTER = 0.2  # share of a profile, at each of its ends, that shows the ground
MIN_CONTRAST, MIN_RATIO = 12.0, 2.0  # of 255; to the ground's unevenness: less is no wire
MIN_SEEN = 0.3  # share of the blocks that must show a wire
OUTLIER = 2.5  # standard deviations
WIDEST, NARROWEST = 1.8, 0.6  # of a fitted line's width, relative to the mask's


def profiles(line: Line, photo: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what blocks of a line show in a photograph, RGB uint8 (H, W, 3): float64 (B,) each, in pixels.

    places: along the line. beside: where the wire's middle lies, to the side of `Line.samples`. widths: full width at half
    of the contrast to the ground, in the colour that differs most; the ground is linear between both sides. Only blocks
    that show a wire are returned, and none if these are few.
    """
    points, across, _ = line.samples(ALONG_PX)
    reach = max(REACH_WIDTHS * line.width_px, MIN_REACH_PX)
    offsets = np.arange(-reach, reach + ACROSS_PX / 2, ACROSS_PX)
    at = (points[:, None] + offsets[:, None] * across[:, None] - 0.5).astype(np.float32)
    parts = [at[start : start + SAMPLES_AT_ONCE] for start in range(0, len(at), SAMPLES_AT_ONCE)]
    seen = np.concatenate([_sampled(photo, part) for part in parts]).astype(np.float64)
    starts = np.arange(0, max(len(points) - BLOCK // 2, 1), BLOCK)
    lengths = np.diff(starts, append=len(points))
    profile = np.add.reduceat(seen, starts, axis=0) / lengths[:, None, None]
    outer = max(int(OUTER * len(offsets)), 1)
    left, right = profile[:, :outer].mean(axis=1), profile[:, -outer:].mean(axis=1)
    ground = left[:, None] + (right - left)[:, None] * np.linspace(0, 1, len(offsets))[:, None]
    contrast = np.abs(profile - ground).max(axis=2)
    peak, number = contrast.argmax(axis=1), np.arange(len(offsets))
    highest = contrast.max(axis=1)
    is_low = contrast <= highest[:, None] / 2
    first = np.where(is_low & (number < peak[:, None]), number, 0).max(axis=1)
    last = np.where(is_low & (number > peak[:, None]), number, len(offsets) - 1).min(axis=1)
    uneven = np.concatenate([contrast[:, :outer], contrast[:, -outer:]], axis=1).mean(axis=1)
    is_wire = (highest >= MIN_CONTRAST) & (highest >= MIN_RATIO * uneven)
    is_wire &= is_wire.sum() >= max(MIN_SEEN * len(starts), 1)
    places = (starts + lengths / 2) * (line.length_px / max(len(points) - 1, 1))
    widths, beside = (last - first - 1) * ACROSS_PX, (offsets[first] + offsets[last]) / 2
    return places[is_wire], beside[is_wire], widths[is_wire]


def _sampled(photo: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Interpolate a photograph at (n, k, 2) xy, counted from the first pixel's centre: uint8 (n, k, 3); outside: its edge."""
    size = np.array(photo.shape[1::-1])
    left, top = np.floor(at.min(axis=(0, 1))).astype(int).clip(0, size - 1).tolist()
    right, bottom = (np.ceil(at.max(axis=(0, 1))).astype(int) + 1).clip((left + 1, top + 1), size).tolist()
    x, y = np.moveaxis(at - np.array([left, top], np.float32), -1, 0)
    return cv2.remap(photo[top:bottom, left:right], x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)


def fit_to_photo(line: Line, photo: np.ndarray, gain: float, margin_px: float) -> Line:
    """Return a line moved onto the wire in a photograph, RGB uint8 (H, W, 3), and `gain` times as wide, plus `margin_px`.

    It stays within half a width of where it was, and between NARROWEST and WIDEST of its width; without a wire it stays.
    """
    places, beside, widths = profiles(line, photo)
    if not len(places):
        return line
    points, across, masks = line.samples(ALONG_PX)
    along = np.linspace(0, line.length_px, len(points))
    limit = max(line.width_px / 2, 3.0)
    shift = _smooth(places, beside, limit, along).clip(-limit, limit)
    wide = (gain * np.median(widths) + margin_px).clip(NARROWEST * masks, WIDEST * masks)
    return Line(points + shift[:, None] * across, wide, line.gaps)


def _smooth(places: np.ndarray, values: np.ndarray, limit: float, wanted: np.ndarray) -> np.ndarray:
    """Return a parabola (of few values: a line, or their median) through values without outliers, at `wanted` places."""
    median = np.median(values)
    kept = np.abs(values - median) < limit
    if kept.sum() < 4:
        return np.full(len(wanted), median)
    degree = 1 if kept.sum() < 8 else 2
    scale = max(wanted[-1], 1.0)
    for _ in range(4):
        fitted = np.polyfit(places[kept] / scale, values[kept], degree)
        errors = np.abs(values - np.polyval(fitted, places / scale))
        near = errors < max(OUTLIER * 1.4826 * float(np.median(errors[kept])), 0.7)
        if near.sum() < degree + 2:
            break
        kept = near
    return np.asarray(np.polyval(fitted, wanted / scale))
