"""Draws instances on photographs, arranges pictures in a grid and writes them, with OpenCV."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from utils.common.colors import class_color, luminance
from utils.common.files import write_bytes_atomic
from utils.data.images import encode_jpeg, fit_long_side
from utils.predict.regions import Region

_MASK_TENTHS = 4  # tenths of the class colour in a tinted pixel; an integer, so that no float picture is needed
_GRID_BACKGROUND = 255
Rectangle = tuple[int, int, int, int]  # left, top, right, bottom in pixels; right and bottom excluded


# Bool (height, width) of the picture, a polygon (k, 2) in pixels, or a mask cut to a part of the picture.
Mask = np.ndarray | Region


def draw_instances(
    image: np.ndarray,
    class_ids: Sequence[int] | np.ndarray,
    boxes: np.ndarray | None,
    masks: np.ndarray | Sequence[Mask] | None,
    scores: Sequence[float] | np.ndarray | None,
    names: Sequence[str],
    *,
    colors: Sequence[tuple[int, int, int]] | None = None,
    labels: Sequence[str] | None = None,
) -> np.ndarray:
    """Return a copy of a picture with instances drawn on it: tinted mask with outline, box, and label of each.

    boxes: (n, 4) xyxy in pixels. masks: bool (n, height, width) of the picture's size, n polygons (k, 2) in pixels,
    or n masks cut to a part of the picture.
    colors: RGB of each instance, instead of its class's colour. labels: text of each, instead of class and score; "" for
    none. Raises ValueError if a number of entries or a mask's size does not match.
    """
    canvas = np.ascontiguousarray(image).copy()
    for what, given in (("boxes", boxes), ("masks", masks), ("scores", scores), ("colors", colors), ("labels", labels)):
        if given is not None and len(given) != len(class_ids):
            raise ValueError(f"{len(class_ids)} instances, but {len(given)} {what}")
    line_px = max(1, round(max(image.shape[:2]) / 640))
    places = [_instance_box(index, boxes, masks, image.shape) for index in range(len(class_ids))]
    # Large instances first, so that small ones stay visible.
    order = sorted(range(len(class_ids)), key=lambda index: -_area(places[index]))
    colors = [class_color(int(class_id)) for class_id in class_ids] if colors is None else colors
    for index in order:
        if masks is not None:
            _draw_mask(canvas, masks[index], colors[index], line_px)
        if boxes is not None:
            left, top, right, bottom = places[index]
            cv2.rectangle(canvas, (left, top), (right - 1, bottom - 1), colors[index], line_px)
    taken = np.zeros(canvas.shape[:2], bool)  # pixels under labels
    for index in order[::-1]:
        if _area(places[index]) or boxes is not None:
            text = names[int(class_ids[index])] + (f" {scores[index]:.2f}" if scores is not None else "")
            text = text if labels is None else labels[index]
            if text:
                left, top, right, bottom = _draw_label(canvas, text, places[index], colors[index], taken)
                taken[top:bottom, left:right] = True
    return canvas


def image_grid(
    images: Sequence[np.ndarray], columns: int, cell_px: int, captions: Sequence[str] | None = None
) -> np.ndarray:
    """Arrange pictures in rows, each shrunk to fit into `cell_px` by `cell_px` and centred, captions below.

    Cells are as high as the highest shrunk picture. Raises ValueError if the number of captions differs.
    """
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(images)} pictures, but {len(captions)} captions")
    small = [fit_long_side(image, cell_px) for image in images]
    gap_px = max(2, cell_px // 80)
    caption_px = max(14, cell_px // 16) if captions is not None else 0
    step_x = cell_px + gap_px
    height_px = max((image.shape[0] for image in small), default=cell_px)
    step_y = height_px + caption_px + gap_px
    rows = max(1, math.ceil(len(images) / columns))
    canvas = np.full((rows * step_y + gap_px, columns * step_x + gap_px, 3), _GRID_BACKGROUND, np.uint8)
    for index, image in enumerate(small):
        left, top = gap_px + index % columns * step_x, gap_px + index // columns * step_y
        x, y = left + (cell_px - image.shape[1]) // 2, top + (height_px - image.shape[0]) // 2
        canvas[y : y + image.shape[0], x : x + image.shape[1]] = image
        if captions is not None:
            place = (left, top + height_px, left + cell_px, top + height_px + caption_px)
            _draw_caption(canvas, captions[index], place)
    return canvas


def save_image(path: Path, image: np.ndarray) -> None:
    """Write a picture as PNG or JPEG, by the file's ending. Raises ValueError for other endings."""
    suffix = path.suffix.lower()
    if suffix in (".jpg", ".jpeg"):
        data = encode_jpeg(image)
    elif suffix == ".png":
        data = cv2.imencode(".png", cv2.cvtColor(image, cv2.COLOR_RGB2BGR))[1].tobytes()
    else:
        raise ValueError(f"{path}: pictures are written as .png or .jpg")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, data)


def _instance_box(
    index: int, boxes: np.ndarray | None, masks: np.ndarray | Sequence[Mask] | None, shape: tuple[int, ...]
) -> Rectangle:
    """Return an instance's rectangle, clipped to the picture: its box, or else the bounds of its mask."""
    height, width = shape[:2]
    if boxes is not None:
        left, top, right, bottom = (float(value) for value in boxes[index])
    elif masks is not None:
        left, top, right, bottom = _mask_bounds(masks[index])
    else:
        return 0, 0, 0, 0
    left, right = (min(max(value, 0), width) for value in (left, right))
    top, bottom = (min(max(value, 0), height) for value in (top, bottom))
    return math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)


def _mask_bounds(mask: Mask) -> tuple[float, float, float, float]:
    """Return the smallest rectangle around a mask; zeros for an empty one."""
    if isinstance(mask, np.ndarray) and mask.dtype != np.bool_:
        polygon = np.round(mask.reshape(-1, 2))
        return (*polygon.min(axis=0).tolist(), *(polygon.max(axis=0) + 1).tolist()) if len(polygon) else (0, 0, 0, 0)
    left, top, bitmap = (0, 0, mask) if isinstance(mask, np.ndarray) else (mask.left, mask.top, mask.mask)
    rows, columns = np.flatnonzero(bitmap.any(axis=1)), np.flatnonzero(bitmap.any(axis=0))
    if not len(rows):
        return 0, 0, 0, 0
    return left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1


def _area(place: Rectangle) -> int:
    return (place[2] - place[0]) * (place[3] - place[1])


def _draw_mask(canvas: np.ndarray, mask: Mask, color: tuple[int, int, int], line_px: int) -> None:
    """Tint the mask's pixels and draw its outline; a polygon is filled first."""
    left, top, right, bottom = (int(value) for value in _mask_bounds(mask))
    if isinstance(mask, np.ndarray) and mask.dtype != np.bool_:
        left, top, right, bottom = max(left, 0), max(top, 0), min(right, canvas.shape[1]), min(bottom, canvas.shape[0])
        filled = np.zeros((max(bottom - top, 0), max(right - left, 0)), np.uint8)
        if filled.size:
            cv2.fillPoly(filled, [np.round(mask).astype(np.int32) - (left, top)], 1)
        inside = filled.astype(np.bool_)
    elif isinstance(mask, np.ndarray):
        if mask.shape != canvas.shape[:2]:
            raise ValueError(f"a mask of {mask.shape} does not fit a picture of {canvas.shape[:2]}")
        inside = mask[top:bottom, left:right]
    else:
        inside = mask.mask[top - mask.top : bottom - mask.top, left - mask.left : right - mask.left]
    if not inside.size:
        return
    part = canvas[top:bottom, left:right]
    tint = np.array(color, np.uint16) * _MASK_TENTHS + 5  # + 5 rounds to nearest
    part[inside] = (part[inside].astype(np.uint16) * (10 - _MASK_TENTHS) + tint) // 10
    outlines, _ = cv2.findContours(inside.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(canvas, outlines, -1, color, line_px, cv2.LINE_AA, offset=(left, top))


def _draw_label(
    canvas: np.ndarray, text: str, place: Rectangle, color: tuple[int, int, int], taken: np.ndarray
) -> Rectangle:
    """Write a label next to `place`, inside the picture and, if possible, not over pixels in `taken`, bool (H, W)."""
    height, width = canvas.shape[:2]
    font_scale = max(0.4, max(height, width) / 1900)
    text_width, text_height, below, weight = _text_size(text, font_scale)
    pad = max(2, round(4 * font_scale))
    if text_width + 2 * pad > width:  # the text is wider than the picture
        font_scale *= width / (text_width + 2 * pad + 1)
        text_width, text_height, below, weight = _text_size(text, font_scale)
        pad = 1
    box_width, box_height = min(width, text_width + 2 * pad), min(height, text_height + below + 2 * pad)
    left, top, right, bottom = place
    corners = (
        (left, top - box_height),
        (left, bottom),
        (right - box_width, top - box_height),
        (left, top),
        (right, top),
        (left, (top + bottom) // 2),
    )
    inside = [(min(max(x, 0), width - box_width), min(max(y, 0), height - box_height)) for x, y in corners]
    spots = [(x, y, x + box_width, y + box_height) for x, y in inside]
    spot = next((spot for spot in spots if not taken[spot[1] : spot[3], spot[0] : spot[2]].any()), spots[0])
    cv2.rectangle(canvas, spot[:2], (spot[2] - 1, spot[3] - 1), color, cv2.FILLED)
    ink = (0, 0, 0) if luminance(color) > 110 else (255, 255, 255)
    origin = (spot[0] + pad, spot[1] + pad + text_height)
    cv2.putText(canvas, text, origin, cv2.FONT_HERSHEY_SIMPLEX, font_scale, ink, weight, cv2.LINE_AA)
    return spot


def _draw_caption(canvas: np.ndarray, text: str, place: Rectangle) -> None:
    """Write black text centred in `place`; text that is too long is cut and ends in dots."""
    left, top, right, bottom = place
    font_scale = (bottom - top) / 36
    while len(text) > 4 and _text_size(text, font_scale)[0] > right - left:
        text = text.removesuffix("...")[:-1] + "..."
    text_width, text_height, _, weight = _text_size(text, font_scale)
    origin = (max(left, (left + right - text_width) // 2), (top + bottom + text_height) // 2)
    cv2.putText(canvas, text, origin, cv2.FONT_HERSHEY_SIMPLEX, font_scale, (0, 0, 0), weight, cv2.LINE_AA)


def _text_size(text: str, font_scale: float) -> tuple[int, int, int, int]:
    """Return (width, height above the baseline, height below it, stroke) in pixels."""
    weight = max(1, round(font_scale * 1.5))
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, font_scale, weight)
    return width, height, below, weight
