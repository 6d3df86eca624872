"""Reads COCO instance files, as CVAT, Label Studio and COCO itself write them, in memory that does not grow with the masks."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from utils.common.errors import UserError, printable
from utils.sources.parsing.json_stream import Item, JsonStream
from utils.sources.parsing.label_csv import UNREADABLE_ROW, Problem
from utils.sources.parsing.photograph import UNUSABLE_OBJECT
from utils.sources.parsing.rows import DIGEST_BYTES, AnnotationRow, Span, digest_of
from utils.sources.parsing.run_lengths import decode_coco
from utils.sources.parsing.shapes import ShapeObject, box_corners, read_number, read_points, read_size

DUPLICATE_ID = "duplicate id"
MAX_CATEGORIES = 10_000
MAX_NAME_CHARACTERS = 4096


@dataclass
class _Image:
    name: str
    size: tuple[int, int] | None


@dataclass
class _Annotations:
    """Where each annotation lies in the file: 40 bytes each."""

    image: array[int] = field(default_factory=lambda: array("q"))  # the image's place in `numbers`
    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    digests: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class _Spans:
    """The places of some annotations, without exact copies; made when they are asked for."""

    annotations: _Annotations
    positions: np.ndarray  # int64

    def __len__(self) -> int:
        """Count the annotations, with copies."""
        return len(self.positions)

    def __iter__(self) -> Iterator[Span]:
        seen = set()
        for position in self.positions.tolist():
            digest = bytes(self.annotations.digests[position * DIGEST_BYTES : (position + 1) * DIGEST_BYTES])
            if digest not in seen:
                seen.add(digest)
                yield self.annotations.start[position], self.annotations.end[position], digest


class CocoFile:
    """The images and categories of a COCO file, and where the annotations of each image lie.

    Construction reads the file once. The arrays may come in any order. What cannot be used is added to `problems`.
    Raises UserError when the file is not COCO's.
    """

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.path = path
        self.problems = problems
        self.categories: dict[int, str] = {}
        self._numbers: dict[Any, int] = {}  # of the image ids, in the order of their first appearance
        self._images: dict[int, _Image | None] = {}  # by number; None: the id stands for two images
        self._annotations = _Annotations()
        readers = {"categories": self._add_category, "images": self._add_image, "annotations": self._add_annotation}
        found = set()
        with JsonStream(path) as stream:
            for key in stream.keys():  # noqa: SIM118 - not a dictionary
                if key in readers and stream.peek() == "[":
                    found.add(key)
                    for item in stream.items():
                        readers[key](item)
                else:
                    stream.skip()
        missing = [f"`{key}`" for key in readers if key not in found]
        if missing:
            raise UserError(f"{path}: not COCO's instances: no list {' and '.join(missing)}; export as COCO 1.0")

    def names(self) -> list[str]:
        """Return the names of the categories in the order of their ids."""
        return list(dict.fromkeys(name for _, name in sorted(self.categories.items())))

    def rows(self) -> Iterator[AnnotationRow]:
        """Yield a row for each image, in the order of the file. Adds annotations without an image to the problems."""
        numbers = np.frombuffer(self._annotations.image, np.int64)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self._numbers) + 1))
        context = json.dumps(sorted(self.categories.items()))
        for image_id, number in self._numbers.items():
            spans = _Spans(self._annotations, order[bounds[number] : bounds[number + 1]])
            num_copies = len(spans) - sum(1 for _ in spans)
            image = self._images.get(number)
            if image:
                if num_copies:
                    text = f"{printable(image.name)}: {num_copies} annotations are exact copies of others; ignored"
                    self._complain(text, DUPLICATE_ID)
                to_objects = partial(_objects, self.categories, image.size)
                yield AnnotationRow((image.name,), self.path, spans, f"{image.size} {context}", to_objects)
            elif number not in self._images:
                text = f"no image has the id {printable(str(image_id))}; its {len(spans)} annotations are skipped"
                self._complain(text, UNUSABLE_OBJECT)

    def _add_category(self, item: Item) -> None:
        category = _dictionary(item)
        number, name = category.get("id"), category.get("name")
        if type(number) is not int or not isinstance(name, str) or not name.strip():
            self._complain(
                f"category {printable(str(number))}: needs a whole `id` and a `name`; skipped", UNREADABLE_ROW
            )
        elif number in self.categories:
            text = f"category {number} twice: `{self.categories[number]}` and `{printable(name)}`; the first is used"
            self._complain(text, DUPLICATE_ID)
        elif len(self.categories) == MAX_CATEGORIES:
            raise UserError(f"{self.path}: more than {MAX_CATEGORIES:,} categories")
        else:
            self.categories[number] = printable(name.strip())

    def _add_image(self, item: Item) -> None:
        image = _dictionary(item)
        shown = f"image {printable(str(image.get('id')))}"
        try:
            name = image.get("file_name")
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
                raise ValueError("has no usable `file_name`")
            number = self._number(item.value.get("id"))
            found = _Image(name, read_size(image.get("width"), image.get("height")))
        except (ValueError, OverflowError) as error:
            self._complain(f"{shown}: {error}; skipped", UNREADABLE_ROW)
            return
        known = self._images.setdefault(number, found)
        if known is None or known.name != name:
            self._images[number] = None
            text = f"{shown} twice, also as {printable(name)}: their annotations cannot be told apart; both are skipped"
            self._complain(text, UNREADABLE_ROW)

    def _add_annotation(self, item: Item) -> None:
        try:
            if not isinstance(item.value, dict):
                raise ValueError("is not a dictionary")
            number = self._number(item.value.get("image_id"))
        except ValueError as error:
            shown = item.value.get("id") if isinstance(item.value, dict) else "?"
            self._complain(
                f"annotation {printable(str(shown))} at byte {item.start:,}: {error}; skipped", UNUSABLE_OBJECT
            )
            return
        self._annotations.image.append(number)
        self._annotations.start.append(item.start)
        self._annotations.end.append(item.end)
        self._annotations.digests += digest_of(item.data)

    def _number(self, image_id: Any) -> int:
        if not isinstance(image_id, int | str) or (isinstance(image_id, str) and len(image_id) > MAX_NAME_CHARACTERS):
            raise ValueError("its image has no id")
        return self._numbers.setdefault(image_id, len(self._numbers))

    def _complain(self, text: str, kind: str) -> None:
        self.problems.append(Problem(self.path.name, text, kind))


def _dictionary(item: Item) -> dict[str, Any]:
    """Return an item with its texts decoded; an empty dictionary if it is none."""
    value = json.loads(item.data.decode("utf-8", "replace"))
    return value if isinstance(value, dict) else {}


def _objects(
    categories: dict[int, str], size: tuple[int, int] | None, annotation: dict[str, Any]
) -> tuple[list[ShapeObject], list[str]]:
    """Return the object of one annotation, or why there is none."""
    name = f"annotation {printable(str(annotation.get('id')))}"
    try:
        return [_object(name, categories, size, annotation)], []
    except (ValueError, OverflowError) as error:
        return [], [f"{name}: {error}"]


def _object(
    name: str, categories: dict[int, str], size: tuple[int, int] | None, annotation: dict[str, Any]
) -> ShapeObject:
    category, segmentation = annotation.get("category_id"), annotation.get("segmentation")
    value = categories.get(category) if type(category) is int else None
    value = value or f"category {printable(str(category))}"
    if segmentation and isinstance(segmentation, dict):
        if size is None:
            declared = segmentation.get("size")
            size = read_size(*declared[::-1]) if isinstance(declared, list) and len(declared) == 2 else None
        return ShapeObject(value, name, size, size, draw=partial(decode_coco, segmentation, size))
    if segmentation:
        if not isinstance(segmentation, list):
            raise ValueError("`segmentation` is neither a list of polygons nor run lengths")
        polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
        whole = [polygon for polygon in polygons if not isinstance(polygon, list) or len(polygon) >= 6]
        return ShapeObject(value, name, size, size, tuple(map(read_points, whole or polygons)))
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4:
        raise ValueError("has neither `segmentation` nor `bbox`")
    left, top, width, height = map(read_number, box)
    return ShapeObject(value, name, size, size, (box_corners(left, top, width, height),))
