"""Reads LabelMe's JSON, one file for each photograph: polygons, rectangles, circles, and lines as
strips.
"""

import base64
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from yolo_seg_ddp.data.dataset_yaml import IMAGE_SUFFIXES
from yolo_seg_ddp.extras.labels.mask_values import read_mask
from yolo_seg_ddp.extras.labels.shapes import ellipse_corners
from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, Problem
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile, read_json
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject, box_corners, read_points, read_size
from yolo_seg_ddp.prepare.parsing.rows import (
    BOX,
    MAX_NAME_CHARACTERS,
    POLYLINE,
    AnnotationRow,
    ObjectCounts,
    Parsed,
    says_ignore,
)
from yolo_seg_ddp.utils.errors import UserError, printable

AREAS, LINES, MASK = ("polygon", "rectangle", "circle"), ("linestrip", "line"), "mask"
Size = tuple[int, int] | None


class LabelMeFile(LabelFile):
    """The labels of a LabelMe file. A file of another program is a problem, not an error."""

    format = "labelme"
    title = "LabelMe's files"
    patterns = ("**/*.json",)
    how_to_export = "save LabelMe's files there, beside the photographs"
    names_are_relative = lists_used_classes = True

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        counts: ObjectCounts = Counter()
        try:
            content = read_json(path)
            content = content if isinstance(content, dict) else {}
            shapes, name = content.get("shapes"), content.get("imagePath")
            if isinstance(shapes, list):
                counts = Counter(map(_label_and_kind, shapes))
            if (
                not isinstance(shapes, list)
                or not isinstance(name, str)
                or not 0 < len(name) <= MAX_NAME_CHARACTERS
            ):
                raise ValueError("not LabelMe's: no list `shapes`, or no usable `imagePath`")
            size = read_size(content.get("imageWidth"), content.get("imageHeight"))
        except (UserError, ValueError, OverflowError) as error:
            self.complain(f"{error}; skipped")
            self.lose(counts, UNREADABLE_ROW)
            return
        # Those in use: the files do not say which others the project has.
        self.names = sorted({label for label, _ in counts if label})
        # if it was renamed together with this file
        beside = [path.stem + suffix for suffix in IMAGE_SUFFIXES]
        names, objects = (name.replace("\\", "/"), *beside), partial(_objects, size)
        self.rows = [AnnotationRow(names, path, shapes, f"{size}", objects, counts)]

    @classmethod
    def is_json_of_format(cls, key: str | None, value: Any) -> bool:
        return key in ("shapes", "imagePath")


def _label_and_kind(shape: Any) -> tuple[str, str]:
    shape = shape if isinstance(shape, dict) else {}
    label, kind = shape.get("label"), _kind(shape)
    kind = {"rectangle": BOX, **dict.fromkeys(LINES, POLYLINE)}.get(kind, kind)
    return printable(label.strip()) if isinstance(label, str) else "", kind


def _kind(shape: dict[str, Any]) -> str:
    return printable(str(shape.get("shape_type") or AREAS[0]).lower(), 40)


def _objects(size: Size, shape: Any) -> Parsed:
    """Return the object of one shape, or the reason why there is none."""
    label = shape.get("label") if isinstance(shape, dict) else None
    if not isinstance(label, str) or not label.strip():
        return [], ["a shape has no label"]
    label = printable(label.strip())
    kind, is_region = _kind(shape), says_ignore(shape.get("flags"))
    try:
        if kind == MASK:
            return [
                ShapeObject(label, "shape", size, size, draw=_mask(shape), is_region=is_region)
            ], []
        if kind not in AREAS and kind not in LINES:
            raise ValueError(f"{kind} is not read; draw a polygon or a linestrip")
        points = _outline(
            kind, read_points(shape.get("points"), "polygon" if kind == AREAS[0] else "line")
        )
    except (ValueError, OverflowError) as error:
        return [ShapeObject(label, "shape", error=str(error))], []
    group = shape.get("group_id")
    group = group if isinstance(group, int | str) else None
    is_line = kind in LINES
    return [
        ShapeObject(
            label,
            "shape",
            size,
            size,
            (points,),
            is_line=is_line,
            is_box=kind == "rectangle",
            is_region=is_region,
            group=group,
        )
    ], []


def _mask(shape: dict[str, Any]) -> Callable[[], tuple[np.ndarray, int, int]]:
    """Return a function that draws a mask, a PNG in Base64 whose upper left corner is the first
    point.
    """
    corner, text = read_points(shape.get("points"), "line")[0], shape.get("mask")
    if not isinstance(text, str):
        raise ValueError("a mask without its picture")
    values, _ = read_mask(base64.b64decode(text), by_colour=False)
    if not values.any():
        raise ValueError("a mask without pixels")
    return lambda: (values > 0, int(corner[0]), int(corner[1]))


def _outline(kind: str, points: np.ndarray) -> np.ndarray:
    """Return the corners of a rectangle from two opposite ones, or of a circle from its centre and
    a point on it.
    """
    if len(points) != 2 or kind not in AREAS:
        return points
    if kind == "rectangle":
        return box_corners(*points.min(axis=0), *np.ptp(points, axis=0))
    radius = float(np.hypot(*(points[1] - points[0])))
    return ellipse_corners(points[0], (radius, radius))
