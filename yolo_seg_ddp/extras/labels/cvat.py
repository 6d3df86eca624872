"""Reads the XML of CVAT for images 1.1: polygons, polylines, boxes, ellipses and masks of each
photograph.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from xml.parsers import expat

import numpy as np

from yolo_seg_ddp.data.images import MAX_IMAGE_PIXELS
from yolo_seg_ddp.extras.labels.shapes import ellipse_corners, turned
from yolo_seg_ddp.prepare.parsing.coco import RunLengthError, Size, cut_out
from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, Problem
from yolo_seg_ddp.prepare.parsing.label_file import MAX_LABEL_BYTES, LabelFile, first_element
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject, box_corners, read_points, read_size
from yolo_seg_ddp.prepare.parsing.rows import (
    MAX_NAME_CHARACTERS,
    AnnotationRow,
    ObjectCounts,
    Parsed,
    says_ignore,
)
from yolo_seg_ddp.utils.errors import UserError, one_line, printable
from yolo_seg_ddp.utils.files import read_bytes

IMAGE, LABEL_NAME = ["annotations", "image"], ["labels", "label", "name"]
READ, NO_SHAPES = ("polygon", "polyline", "box", "ellipse", "mask"), ("image", "attribute", "tag")
MAX_DEPTH = 32  # CVAT's files have 7 levels
Attributes = dict[str, str]


class CvatFile(LabelFile):
    """The labels of a CVAT file. Raises UserError for a file of another program."""

    format = "cvat"
    title = "CVAT for images"
    patterns = ("annotations.xml", "*.xml", "**/annotations.xml")
    how_to_export = "export as CVAT for images 1.1 and unzip it there"
    names_subsets = True

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        # those of the task, in its order; then others that shapes use
        self.names: dict[str, None] = {}
        # first byte, last, attributes, shapes
        self._images: list[tuple[int, int, Attributes, ObjectCounts]] = []
        self._tags: list[str] = []
        self._open: tuple[int, Attributes] = (0, {})
        self._found: ObjectCounts = Counter()
        self._text = ""
        self._parser = bounded_parser(self._start, self._end, self._add_text)
        try:
            data = read_bytes(path, MAX_LABEL_BYTES)
            self._parser.Parse(data, True)
        except (expat.ExpatError, ValueError) as error:
            raise UserError(
                f"{path}: not CVAT's XML: {one_line(error, 200)}; export as CVAT for images 1.1"
            ) from error
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from error
        self.rows = list(self._rows(data))

    @classmethod
    def is_of_format(cls, file: Path) -> bool:
        return file.suffix.lower() == ".xml" and first_element(file) == "annotations"

    def _rows(self, data: bytes) -> Iterator[AnnotationRow]:
        for start, end, attributes, counts in self._images:
            name = attributes.get("name", "")
            try:
                if not 0 < len(name) <= MAX_NAME_CHARACTERS:
                    raise ValueError("has no usable `name`")
                size = read_size(
                    *(
                        _number(attributes[side])
                        for side in ("width", "height")
                        if side in attributes
                    )
                )
            except (ValueError, TypeError, OverflowError) as error:
                self.lose(counts, UNREADABLE_ROW)
                self.complain(f"image {printable(attributes.get('id', '?'))}: {error}; skipped")
                continue
            items, subset = [data[start:end]] * bool(counts), attributes.get("subset", "")
            yield AnnotationRow(
                (name,), self.path, items, f"{size}", partial(_objects, size), counts, subset
            )

    def _start(self, tag: str, attributes: Attributes) -> None:
        self._tags.append(tag)
        if len(self._tags) > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        if self._tags == [tag] and tag != "annotations":
            raise ValueError(f"it begins with <{printable(tag)}>, not with <annotations>")
        if self._tags == ["annotations", "track"]:
            raise ValueError("it holds tracks of a video")
        self._text = ""
        if self._tags == IMAGE:
            self._open = (self._parser.CurrentByteIndex, attributes)
            self._found = Counter()
        elif self._tags[:-1] == IMAGE and tag.lower() not in NO_SHAPES:
            label = _label(attributes)
            self._found[label, tag.lower()] += 1
            if label:
                self.names.setdefault(label)

    def _end(self, tag: str) -> None:
        if self._tags == IMAGE:
            self._images.append(
                (self._open[0], self._parser.CurrentByteIndex, self._open[1], self._found)
            )
        elif self._tags[-3:] == LABEL_NAME and self._text.strip():
            self.names.setdefault(printable(self._text.strip()))
        self._tags.pop()

    def _add_text(self, text: str) -> None:
        if self._tags[-3:] == LABEL_NAME and len(self._text) < 200:
            self._text += text


def bounded_parser(
    start: Callable[..., None], end: Callable[..., None], text: Callable[..., None]
) -> Any:
    """Return an XML parser that refuses a document type, so that no entity expands and nothing is
    read from elsewhere.
    """

    def refuse(*_: object) -> NoReturn:
        raise ValueError("it declares a document type (DOCTYPE)")

    parser = expat.ParserCreate("utf-8")  # whatever the file declares
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = (
        start,
        end,
        text,
    )
    return parser


def _objects(size: Size, data: bytes) -> Parsed:
    """Return the objects of one image, from `<image` to before its end, and messages about what was
    left out.
    """
    objects: list[ShapeObject] = []
    complaints: list[str] = []
    numbers = itertools.count(1)

    depth = num_before = 0  # objects before the shape
    flags = defaultdict[str, str](str)  # its attributes by name
    flag = ""

    def end(_: str) -> None:
        nonlocal depth
        depth -= 1
        if depth == 1 and says_ignore(flags):
            objects[num_before:] = [
                replace(shape, is_region=True) for shape in objects[num_before:]
            ]

    def add_text(text: str) -> None:
        flags[flag] += text

    def add(tag: str, attributes: Attributes) -> None:
        nonlocal depth, num_before, flag
        depth, tag = depth + 1, tag.lower()
        flag = attributes.get("name", "") if tag == "attribute" else ""
        if depth == 2:
            flags.clear()
            num_before = len(objects)
        if depth != 2 or tag in NO_SHAPES:
            return
        name, label = f"{tag} {next(numbers)}", _label(attributes)
        if not label:
            complaints.append(f"{name}: has no label")
            return
        try:
            if tag not in READ:
                raise ValueError("is not read; draw a polygon, a polyline or a mask")
            objects.append(_object(tag, f"shape {name}", label, size, attributes))
        except (KeyError, ValueError, OverflowError) as error:
            what = f"no attribute {error}" if isinstance(error, KeyError) else error
            objects.append(ShapeObject(label, name, error=str(what)))

    bounded_parser(add, end, add_text).Parse(data + b"</image>", True)
    return objects, complaints


def _object(tag: str, name: str, label: str, size: Size, given: Attributes) -> ShapeObject:
    turn = math.radians(_number(given.get("rotation", "0")))
    if tag == "mask":
        box = [int(_number(given[key])) for key in ("left", "top", "width", "height")]
        if (
            size is None
            or min(box[:2]) < 0
            or box[0] + box[2] > size[0]
            or box[1] + box[3] > size[1]
        ):
            raise ValueError(
                f"a box of {box[2]}x{box[3]} pixels at ({box[0]}, {box[1]}) that the image does "
                "not hold"
            )
        return ShapeObject(label, name, size, size, draw=partial(decode_rows, given["rle"], box))
    if tag == "box":
        left, top, right, bottom = (_number(given[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        centre = np.array([left + right, top + bottom]) / 2
        points = turned(box_corners(left, top, right - left, bottom - top), centre, turn)
    elif tag == "ellipse":
        x, y, *radii = (_number(given[key]) for key in ("cx", "cy", "rx", "ry"))
        points = ellipse_corners(np.array([x, y]), radii, turn)
    else:
        numbers = [_number(text) for pair in given["points"].split(";") for text in pair.split(",")]
        points = read_points(numbers, "line" if tag == "polyline" else "polygon")
    group = given.get("group_id", "0") != "0" and given["group_id"]
    return ShapeObject(
        label,
        name,
        size,
        size,
        (points,),
        is_line=tag == "polyline",
        is_box=tag == "box" and not turn,
        group=group or None,
    )


def decode_rows(text: str, box: Sequence[int]) -> tuple[np.ndarray, int, int]:
    """Decode CVAT's `rle` of a box (left, top, width, height): lengths of runs outside and inside,
    alternating, row by row.

    Returns like `decode_coco`. Raises RunLengthError.
    """
    left, top, width, height = box
    if min(width, height) < 1 or width * height > MAX_IMAGE_PIXELS:
        raise RunLengthError(f"a mask of {width}x{height} pixels")
    try:
        runs = np.array([int(run) for run in text.split(",")], np.int64)
    except (ValueError, OverflowError) as error:
        raise RunLengthError("`rle` is not a list of whole numbers") from error
    if (runs < 0).any() or (runs > width * height).any() or int(runs.sum()) != width * height:
        raise RunLengthError(f"its runs do not add up to the {width}x{height} pixels of its box")
    mask, first_column, first_row = cut_out(
        np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(height, width)
    )
    return mask, left + first_column, top + first_row


def _label(attributes: Attributes) -> str:
    return printable(attributes.get("label", "").strip())


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number
