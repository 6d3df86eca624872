"""Reads LabelMe's JSON, one file for each photograph: polygons, rectangles, circles, and lines as strips."""

import base64
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from extras.labels.mask_values import read_mask
from extras.labels.shapes import ellipse_corners
from utils.common.errors import UserError, printable
from utils.data.dataset_yaml import IMAGE_SUFFIXES
from utils.sources.parsing.json_stream import Item, JsonStream
from utils.sources.parsing.label_csv import UNREADABLE_ROW, Problem
from utils.sources.parsing.label_file import LabelFile
from utils.sources.parsing.outlines import ShapeObject, box_corners, read_points, read_size
from utils.sources.parsing.rows import BOX, MAX_NAME_CHARACTERS, POLYLINE, AnnotationRow, Found, Parsed, says_ignore

AREAS, LINES, MASK = ("polygon", "rectangle", "circle"), ("linestrip", "line"), "mask"
Size = tuple[int, int] | None


class LabelMeFile(LabelFile):
    """The labels of a LabelMe file, and the places of its shapes. A file of another program is a problem, not an error."""

    format = "labelme"
    title = "LabelMe's files"
    patterns = ("**/*.json",)
    how_to_export = "save LabelMe's files there, beside the photographs"
    by_file = sorts_names = True

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        self._labels: set[str] = set()  # in use: the files do not say which others the project has
        self._spans = bytearray()
        self._found: Found = Counter()
        self._facts: dict[str, Any] = {}  # imagePath, imageWidth and imageHeight
        try:
            with JsonStream(path) as stream:
                has_shapes = self._read(stream)
            name = self._facts.get("imagePath")
            if not has_shapes or not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
                raise ValueError("not LabelMe's: no list `shapes`, or no usable `imagePath`")
            size = read_size(self._facts.get("imageWidth"), self._facts.get("imageHeight"))
        except (UserError, ValueError, OverflowError) as error:
            self.complain(f"{error}; skipped")
            self.lose(self._found, UNREADABLE_ROW)
            return
        self.names = sorted(self._labels)
        beside = [path.stem + suffix for suffix in IMAGE_SUFFIXES]  # if it was renamed together with this file
        names, objects = (name.replace("\\", "/"), *beside), partial(_objects, size)
        self.rows = [AnnotationRow(names, path, bytes(self._spans), f"{size}", objects, self._found)]

    @classmethod
    def is_own_json(cls, key: str | None, value: Any) -> bool:
        return key in ("shapes", "imagePath")

    def _read(self, stream: JsonStream) -> bool:
        """Read the file's keys; return whether it has shapes. The picture in `imageData` is passed over."""
        has_shapes = False
        for key in stream.keys():  # noqa: SIM118 - not a dictionary
            if key == "shapes" and stream.peek() == "[":
                has_shapes = True
                for item in stream.items():
                    self._add_shape(item)
            elif key in ("imagePath", "imageWidth", "imageHeight"):
                self._facts[key] = stream.item().value()
            else:
                stream.skip()
        return has_shapes

    def _add_shape(self, item: Item) -> None:
        shape = item.value()
        shape = shape if isinstance(shape, dict) else {}
        label = shape.get("label")
        label = printable(label.strip()) if isinstance(label, str) else ""
        kind = _kind(shape)
        kind = {"rectangle": BOX, **dict.fromkeys(LINES, POLYLINE)}.get(kind, kind)
        self._spans += item.span
        self._found[label, kind] += 1
        self._labels |= {label} - {""}


def _kind(shape: dict[str, Any]) -> str:
    return printable(str(shape.get("shape_type") or AREAS[0]).lower(), 40)


def _objects(size: Size, data: bytes) -> Parsed:
    """Return the object of one shape, or the reason why there is none."""
    shape = json.loads(data)
    label = shape.get("label") if isinstance(shape, dict) else None
    if not isinstance(label, str) or not label.strip():
        return [], ["a shape has no label"]
    label = printable(label.strip())
    kind, is_region = _kind(shape), says_ignore(shape.get("flags"))
    try:
        if kind == MASK:
            return [ShapeObject(label, "shape", size, size, draw=_mask(shape), is_region=is_region)], []
        if kind not in AREAS and kind not in LINES:
            raise ValueError(f"{kind} is not read; draw a polygon or a linestrip")
        points = _outline(kind, read_points(shape.get("points"), "polygon" if kind == AREAS[0] else "line"))
    except (ValueError, OverflowError) as error:
        return [ShapeObject(label, "shape", error=str(error))], []
    group = shape.get("group_id")
    group = group if isinstance(group, int | str) else None
    is_line = kind in LINES
    return [ShapeObject(label, "shape", size, size, (points,), is_line=is_line, is_region=is_region, group=group)], []


def _mask(shape: dict[str, Any]) -> Callable[[], tuple[np.ndarray, int, int]]:
    """Return a function that draws a mask, a PNG in Base64 whose upper left corner is the first point."""
    corner, text = read_points(shape.get("points"), "line")[0], shape.get("mask")
    if not isinstance(text, str):
        raise ValueError("a mask without its picture")
    values, _ = read_mask(base64.b64decode(text), by_colour=False)
    if not values.any():
        raise ValueError("a mask without pixels")
    return lambda: (values > 0, int(corner[0]), int(corner[1]))


def _outline(kind: str, points: np.ndarray) -> np.ndarray:
    """Return the corners of a rectangle from two opposite ones, or of a circle from its centre and a point on it."""
    if len(points) != 2 or kind not in AREAS:
        return points
    if kind == "rectangle":
        return box_corners(*points.min(axis=0), *np.ptp(points, axis=0))
    radius = float(np.hypot(*(points[1] - points[0])))
    return ellipse_corners(points[0], (radius, radius))
