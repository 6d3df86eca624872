"""Draws instances on photographs, arranges pictures in a grid and writes them, with OpenCV."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from yolo_seg_ddp.data.images import encode_jpeg, fit_long_side
from yolo_seg_ddp.data.polygons import elongation
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.utils.files import write_bytes_atomic
from yolo_seg_ddp.utils.text import class_color, contrast_color

# tenths of the class colour in a tinted pixel; an integer, so that no float picture is needed
_MASK_TENTHS = 4
_GRID_BACKGROUND = 255
NO_DETECTIONS = "no detections"  # text on a picture without detections
MOST_LABELS = 60  # of more the largest instance of each class has one, and masks have no boxes
READABLE_PX = 480  # long side of a picture whose labels leave its objects visible, at least
MIN_THIN = 8.0  # length over width of an object that is drawn without a box
MIN_THIN_SHARE = 0.04  # of the picture's long side that such an object measures at least
# cost of a label on a mask, in its heights of distance; three times that if masks fill its place
MASK_COST = 4.0
# Okabe and Ito's sky blue, vermillion and yellow, and a violet. In the simulations of Machado et
# al. (2009) of the three kinds of colour blindness any two of them are at least 34 apart (CIE76),
# missed and false 87.
RIGHT, MISSED, FALSE, CONFUSED = (86, 180, 233), (213, 94, 0), (128, 64, 255), (240, 228, 66)
# left, top, right, bottom in pixels; right and bottom excluded
Rectangle = tuple[int, int, int, int]


# Bool (height, width) of the picture, a polygon (k, 2) in pixels, or a mask cut to a part of the
# picture.
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
    dashed: Sequence[bool] | None = None,
    font_scale: float | None = None,
    nothing: str = "",
    min_px: int = 1,
) -> np.ndarray:
    """Return a copy of a picture with instances drawn on it: tinted mask with outline, box, and
    label of each.

    A thin object has no box, and its label lies at one of its ends. Labels do not overlap each
    other, nor masks if there is room. A line connects a label with an object that is further away.
    A crowd has one label a class (MOST_LABELS). boxes: (n, 4) xyxy in pixels. masks: bool (n,
    height, width) of the picture's size, n polygons (k, 2) in pixels, or n masks cut to a part of
    the picture.
    colors: RGB of each instance, instead of its class's colour. labels: text of each, instead of
    class and score; "" for none. dashed: whether a mask has a dashed outline and no tint. nothing:
    written on a picture without instances. min_px: a picture whose long side is shorter is enlarged
    by a whole number.
    Raises ValueError if a number of entries or a mask's size does not match.
    """
    given = {
        "boxes": boxes,
        "masks": masks,
        "scores": scores,
        "colors": colors,
        "labels": labels,
        "dashed": dashed,
    }
    for what, values in given.items():
        if values is not None and len(values) != len(class_ids):
            raise ValueError(f"{len(class_ids)} instances, but {len(values)} {what}")

    # 1. The picture, and the size of lines and letters.
    factor = -(-min_px // max(image.shape[:2]))
    if factor > 1:
        image = cv2.resize(image, None, fx=factor, fy=factor)
        boxes = None if boxes is None else boxes * factor
        masks = None if masks is None else [_enlarged(mask, factor) for mask in masks]
    canvas = np.ascontiguousarray(image).copy()
    line_px = max(1, round(max(image.shape[:2]) / 640))
    font_scale = font_scale or max(0.4, max(image.shape[:2]) / 1900)

    # 2. Where each instance lies, what is written of it, and in which order.
    places = [_instance_box(index, boxes, masks, image.shape) for index in range(len(class_ids))]
    # so that small ones stay visible
    order = sorted(range(len(class_ids)), key=lambda index: -_area(places[index]))
    shown = [f" {score:.2f}" for score in scores] if scores is not None else [""] * len(class_ids)
    texts = labels or [
        names[int(number)] + score for number, score in zip(class_ids, shown, strict=True)
    ]
    named = [index for index in order if texts[index]]
    if is_crowd := len(named) > MOST_LABELS:
        named = list({class_ids[index]: index for index in named[::-1]}.values())
    colors = [class_color(int(class_id)) for class_id in class_ids] if colors is None else colors

    # 3. Masks and boxes, the largest first.
    covered = np.zeros(canvas.shape[:2], np.uint8)  # 255 where a mask or a box lies
    anchors = {}
    for index in order:
        outlines: Sequence[np.ndarray] = ()
        if masks is not None:
            outlines = _draw_mask(
                canvas,
                masks[index],
                colors[index],
                line_px,
                bool(dashed and dashed[index]),
                covered,
            )
        left, top, right, bottom = places[index]
        ends = _ends_if_thin(outlines, MIN_THIN_SHARE * max(image.shape[:2]))
        if boxes is not None and ends is None and not (is_crowd and masks is not None):
            for line in _edged(colors[index], line_px):
                cv2.rectangle(canvas, (left, top), (right - 1, bottom - 1), *line)
            covered[top:bottom, left:right] = 255
        anchors[index] = np.array([(left, top), (left, bottom)]) if ends is None else ends

    # 4. Labels, the smallest instance first: its label has the least room.
    plates = _Plates(canvas, covered, font_scale, line_px)
    for index in order[::-1]:
        if index in named and (_area(places[index]) or boxes is not None):
            plates.write(texts[index], anchors[index], places[index], colors[index])
    if not len(class_ids):
        plates.write(nothing, np.zeros((1, 2), int), (0, 0, 0, 0), (255, 255, 255))
    plates.draw()
    return canvas


def image_grid(
    images: Sequence[np.ndarray], columns: int, cell_px: int, captions: Sequence[str] | None = None
) -> np.ndarray:
    """Arrange pictures in rows, each shrunk to fit into `cell_px` by `cell_px` and centred,
    captions below.

    Cells are as wide and high as the widest and the highest shrunk picture. Raises ValueError if
    the number of captions differs.
    """
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(images)} pictures, but {len(captions)} captions")
    small = [fit_long_side(image, cell_px) for image in images]
    gap_px = max(2, cell_px // 80)
    caption_px = max(14, cell_px // 20) if captions is not None else 0
    height_px, width_px = (
        max((image.shape[axis] for image in small), default=cell_px) for axis in (0, 1)
    )
    step_x = width_px + gap_px
    step_y = height_px + caption_px + gap_px
    rows = max(1, math.ceil(len(images) / columns))
    canvas = np.full(
        (rows * step_y + gap_px, columns * step_x + gap_px, 3), _GRID_BACKGROUND, np.uint8
    )
    for index, image in enumerate(small):
        left = gap_px + index % columns * step_x
        top = gap_px + index // columns * step_y
        x, y = left + (width_px - image.shape[1]) // 2, top + (height_px - image.shape[0]) // 2
        canvas[y : y + image.shape[0], x : x + image.shape[1]] = image
        if captions is not None:
            place = (left, top + height_px, left + width_px, top + height_px + caption_px)
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


def _enlarged(mask: Mask, factor: int) -> Mask:
    if isinstance(mask, Region):
        return Region(
            mask.left * factor, mask.top * factor, mask.mask.repeat(factor, 0).repeat(factor, 1)
        )
    return mask.repeat(factor, 0).repeat(factor, 1) if mask.dtype == np.bool_ else mask * factor


def _instance_box(
    index: int,
    boxes: np.ndarray | None,
    masks: np.ndarray | Sequence[Mask] | None,
    shape: tuple[int, ...],
) -> Rectangle:
    """Return an instance's rectangle, clipped to the picture: its box, or else the bounds of its
    mask.
    """
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
        return (
            (*polygon.min(axis=0).tolist(), *(polygon.max(axis=0) + 1).tolist())
            if len(polygon)
            else (0, 0, 0, 0)
        )
    left, top, bitmap = (
        (0, 0, mask) if isinstance(mask, np.ndarray) else (mask.left, mask.top, mask.mask)
    )
    x, y, width, height = cv2.boundingRect(bitmap.view(np.uint8))
    return (left + x, top + y, left + x + width, top + y + height) if width else (0, 0, 0, 0)


def _area(place: Rectangle) -> int:
    return (place[2] - place[0]) * (place[3] - place[1])


def _draw_mask(
    canvas: np.ndarray,
    mask: Mask,
    color: tuple[int, int, int],
    line_px: int,
    is_dashed: bool,
    covered: np.ndarray,
) -> Sequence[np.ndarray]:
    """Tint the mask's pixels, draw its outlines and mark what they cover; a polygon is filled
    first.

    Return the outlines: int32 (V, 1, 2) xy in pixels of the picture each.
    """
    left, top, right, bottom = (int(value) for value in _mask_bounds(mask))
    if isinstance(mask, np.ndarray) and mask.dtype != np.bool_:
        left = max(left, 0)
        top = max(top, 0)
        right = min(right, canvas.shape[1])
        bottom = min(bottom, canvas.shape[0])
        filled = np.zeros((max(bottom - top, 0), max(right - left, 0)), np.uint8)
        if filled.size:
            cv2.fillPoly(filled, [np.round(mask).astype(np.int32) - (left, top)], 1)
        inside = filled.astype(np.bool_)
    elif isinstance(mask, np.ndarray):
        if mask.shape != canvas.shape[:2]:
            raise ValueError(f"a mask of {mask.shape} does not fit a picture of {canvas.shape[:2]}")
        inside = mask[top:bottom, left:right]
    else:
        inside = mask.crop(left, top, right, bottom)
    if not inside.size:
        return ()
    covered[top:bottom, left:right][inside] = 255
    outlines, _ = cv2.findContours(
        inside.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE, offset=(left, top)
    )
    part = canvas[top:bottom, left:right]
    content = part[inside]
    lines = outlines
    if is_dashed:
        dash = max(6, 5 * line_px)
        line_px = max(2, line_px)
        lines = [
            line[start : start + dash]
            for line in outlines
            for start in range(0, len(line), 2 * dash)
        ]
    else:
        # + 5 rounds to the nearest.
        tint = np.array(color, np.uint16) * _MASK_TENTHS + 5
        content = (content.astype(np.uint16) * (10 - _MASK_TENTHS) + tint) // 10
    edge, line = _edged(color, line_px)
    cv2.polylines(canvas, lines, not is_dashed, *edge, cv2.LINE_AA)
    # The edge lies outside: it would hide a wire.
    part[inside] = content
    cv2.polylines(canvas, lines, not is_dashed, *line, cv2.LINE_AA)
    return outlines


def _edged(
    color: tuple[int, int, int], line_px: int
) -> tuple[tuple[tuple[int, int, int], int], ...]:
    """Return colour and width of the two lines that make an outline visible on any photograph: a
    dark or light edge first.
    """
    return (contrast_color(color), line_px + 2 * max(1, line_px // 3)), (color, line_px)


def _ends_if_thin(outlines: Sequence[np.ndarray], shortest_px: float) -> np.ndarray | None:
    """Return both ends (2, 2) xy of the longest outline if it is long and thin, else None."""
    if not len(outlines):
        return None
    points = max(outlines, key=len)[:, 0]
    if len(points) < 2 * shortest_px or elongation(points) < MIN_THIN:
        return None
    _, directions = np.linalg.eigh(np.cov(points.T))
    along = points @ directions[:, 1]
    return points[[along.argmin(), along.argmax()]]


class _Plates:
    """Writes labels on a picture.

    A grid, whose cells are a quarter of a text line, holds what masks and labels cover.
    """

    def __init__(
        self, canvas: np.ndarray, covered: np.ndarray, font_scale: float, line_px: int
    ) -> None:
        self.canvas = canvas
        self.font_scale = font_scale
        self.line_px = line_px
        self.pad = max(2, round(4 * font_scale))
        height, width = canvas.shape[:2]
        self.cell = max(1, _text_size("Ag", font_scale)[1] // 4)
        self.size = (-(-width // self.cell), -(-height // self.cell))
        below, right = self.size[1] * self.cell - height, self.size[0] * self.cell - width
        padded = cv2.copyMakeBorder(covered, 0, below, 0, right, cv2.BORDER_CONSTANT, value=0)
        self.masks = (cv2.resize(padded, self.size, interpolation=cv2.INTER_AREA) > 0).astype(
            np.uint8
        )
        self.labels = np.zeros_like(self.masks)
        # drawn first, so that no line crosses a label
        self.leaders: list[Callable[[], object]] = []
        self.plates: list[Callable[[], object]] = []

    def draw(self) -> None:
        """Draw the lines and labels."""
        for draw in (*self.leaders, *self.plates):
            draw()

    def write(
        self, text: str, anchors: np.ndarray, place: Rectangle, color: tuple[int, int, int]
    ) -> None:
        """Place a label near one of the anchors (k, 2) xy of an object in `place`; leave it out if
        there is no room.
        """
        if not text:
            return
        height, width = self.canvas.shape[:2]
        scale, pad = self.font_scale, self.pad
        text_width, text_height, below, weight = _text_size(text, scale)
        # Text that is wider than the picture gets smaller.
        if text_width + 2 * pad > width:
            scale = scale * width / (text_width + 2 * pad + 1)
            pad = 1
            text_width, text_height, below, weight = _text_size(text, scale)
        plate = min(width, text_width + 2 * pad), min(height, text_height + below + 2 * pad)
        corner, anchor, distance = self._spot(plate, anchors, place)
        if corner is None:
            return
        end = corner[0] + plate[0], corner[1] + plate[1]
        if distance > plate[1]:
            nearest = np.clip(anchor, corner, end).tolist()
            ends = anchor.tolist(), nearest
            self.leaders.append(
                partial(cv2.line, self.canvas, *ends, color, self.line_px, cv2.LINE_AA)
            )
        last_px = (end[0] - 1, end[1] - 1)
        self.plates.append(partial(cv2.rectangle, self.canvas, corner, last_px, color, cv2.FILLED))
        origin = (corner[0] + pad, corner[1] + pad + text_height)
        font = cv2.FONT_HERSHEY_SIMPLEX
        ink = contrast_color(color)
        self.plates.append(
            partial(cv2.putText, self.canvas, text, origin, font, scale, ink, weight, cv2.LINE_AA)
        )
        first = np.array(corner) // self.cell
        last = -(-np.array(end) // self.cell)
        self.labels[first[1] : last[1], first[0] : last[0]] = 1

    def _spot(
        self, plate: tuple[int, int], anchors: np.ndarray, place: Rectangle
    ) -> tuple[tuple[int, int] | None, np.ndarray, float]:
        """Return a label's upper left corner, the anchor nearest to it and their distance in
        pixels; None: no room.

        The cost of a spot is the distance in heights of the label; a label that hides masks costs
        MASK_COST more.
        """
        last = [self.canvas.shape[1 - axis] - plate[axis] for axis in (0, 1)]
        xs, ys = (np.arange(last[axis] // self.cell + 1) * self.cell for axis in (0, 1))
        span = [-(-plate[axis] // self.cell) for axis in (0, 1)]
        gaps = (_gap(xs, plate[0], anchors[:, 0]), _gap(ys, plate[1], anchors[:, 1]))
        away = np.hypot(gaps[0][:, None], gaps[1][:, :, None])  # (anchors, rows, columns)
        left, top, right, bottom = place
        middle_x, middle_y = (left + right - plate[0]) / 2, (top + bottom - plate[1]) / 2
        # Among equally near spots the one beside the object's middle is best.
        off = np.hypot(xs - middle_x, ys[:, None] - middle_y)
        hidden = _window_sums(self.masks, span)[: len(ys), : len(xs)] / (span[0] * span[1])
        cost = (away.min(axis=0) + 0.02 * off) / plate[1] + (hidden > 0) * MASK_COST * (
            1 + 2 * hidden
        )
        cost[_window_sums(self.labels, span)[: len(ys), : len(xs)] > 0] = np.inf
        row, column = np.unravel_index(cost.argmin(), cost.shape)
        nearest = int(away[:, row, column].argmin())
        corner = (int(xs[column]), int(ys[row])) if np.isfinite(cost[row, column]) else None
        return corner, anchors[nearest], float(away[nearest, row, column])


def _gap(starts: np.ndarray, length: int, points: np.ndarray) -> np.ndarray:
    """Return the distance (k, n) along an axis from points (k,) to ranges [start, start + length),
    0 inside; starts (n,).
    """
    before = starts - points[:, None]
    return np.maximum(np.maximum(before, -before - length), 0)


def _window_sums(cells: np.ndarray, span: Sequence[int]) -> np.ndarray:
    """Return the sum of each window of `span` (columns, rows) cells, at the place of its upper left
    cell.
    """
    return cv2.boxFilter(
        cells, cv2.CV_32S, span, anchor=(0, 0), normalize=False, borderType=cv2.BORDER_CONSTANT
    )


def _draw_caption(canvas: np.ndarray, text: str, place: Rectangle) -> None:
    """Write black text centred in `place`; text that is too long is cut and ends in dots."""
    left, top, right, bottom = place
    font_scale = (bottom - top) / 36
    while len(text) > 4 and _text_size(text, font_scale)[0] > right - left:
        text = text.removesuffix("...")[:-1] + "..."
    text_width, text_height, _, weight = _text_size(text, font_scale)
    origin = (max(left, (left + right - text_width) // 2), (top + bottom + text_height) // 2)
    cv2.putText(
        canvas, text, origin, cv2.FONT_HERSHEY_SIMPLEX, font_scale, (0, 0, 0), weight, cv2.LINE_AA
    )


def _text_size(text: str, font_scale: float) -> tuple[int, int, int, int]:
    """Return (width, height above the baseline, height below it, stroke) in pixels."""
    weight = max(1, round(font_scale * 1.5))
    (width, height), below = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, font_scale, weight)
    return width, height, below, weight
