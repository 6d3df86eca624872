"""Draws the pictures of findings: a part of a photograph with its outlines, as JPEG."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from utils.data.cache import load_photo
from utils.data.images import ImageError, encode_jpeg, fit_long_side, read_image, resize_area, scaled_size
from utils.pages import draw_instances
from utils.pages.report.gallery import CONFUSED, MISSED, RIGHT
from utils.sources.checks.findings import View
from utils.sources.checks.reading import Entry

SHOWN_PX = 400
JPEG_QUALITY = 80
AROUND = 1.5  # the part shown, relative to the subjects
MIN_SHARE = 0.12  # of the photograph's long side that is shown at least


def draw_labels(entry: Entry, names: Sequence[str], size_px: int) -> bytes | None:
    """Return a picture of a photograph, `size_px` at most, with its outlines in their classes' colours; None if it cannot be read."""
    try:
        photo = load_photo(entry.file, size_px)
    except ImageError:
        return None
    class_ids, size = [row.class_id for row in entry.rows], photo.shape[1::-1]
    outlines = [row.polygon * size for row in entry.rows]
    nameless = [""] * len(outlines)
    return encode_jpeg(draw_instances(photo, class_ids, None, outlines, None, names, labels=nameless), JPEG_QUALITY)


def draw_view(view: View) -> bytes | None:
    """Return a view as JPEG, at most SHOWN_PX wide and high; None if its photograph cannot be read."""
    subjects = [mark.outline for mark in view.marks if mark.is_subject and len(mark.outline)]
    low, high = np.zeros(2), np.ones(2)
    if subjects:
        points = np.concatenate(subjects).astype(np.float64)
        low, high = points.min(axis=0), points.max(axis=0)
    share = min(1.0, max(AROUND * float((high - low).max()), MIN_SHARE))
    long_side_px = round(SHOWN_PX / share)
    try:
        photo = fit_long_side(read_image(view.photo, long_side_px), long_side_px)
    except ImageError:
        return None
    size = np.array(photo.shape[1::-1])
    left, top, right, bottom = _window(low * size, high * size, size)
    scale = SHOWN_PX / max(bottom - top, right - left)  # a small part is enlarged, so that its outlines are thin
    part = resize_area(photo[top:bottom, left:right], *scaled_size(right - left, bottom - top, scale))
    drawn = [mark for mark in view.marks if mark.is_drawn and len(mark.outline)]
    if drawn:
        colors = [RIGHT if not mark.is_subject else CONFUSED if mark.is_prediction else MISSED for mark in drawn]
        outlines = [(mark.outline * size - (left, top)) * scale for mark in drawn]
        texts = [mark.text for mark in drawn]
        part = draw_instances(part, [0] * len(drawn), None, outlines, None, [""], colors=colors, labels=texts)
    return encode_jpeg(part, JPEG_QUALITY)


def _window(low: np.ndarray, high: np.ndarray, size: np.ndarray) -> tuple[int, int, int, int]:
    """Return the part of a photograph of `size` (w, h) around a box, all in pixels: left, top, right, bottom."""
    side = max(AROUND * float((high - low).max()), MIN_SHARE * float(size.max()), 2.0)
    sides = np.minimum(side, size)
    corner = np.clip((low + high) / 2 - sides / 2, 0, size - sides)
    left, top = np.floor(corner).astype(int).tolist()
    right, bottom = np.ceil(corner + sides).astype(int).clip(None, size).tolist()
    return left, top, right, bottom
