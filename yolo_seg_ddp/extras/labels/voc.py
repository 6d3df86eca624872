"""Reads Pascal VOC's XML, one file for each photograph: boxes."""

import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from xml.parsers import expat

from yolo_seg_ddp.data.dataset_yaml import IMAGE_SUFFIXES
from yolo_seg_ddp.extras.labels.cvat import MAX_DEPTH, bounded_parser
from yolo_seg_ddp.prepare.parsing.label_csv import Problem
from yolo_seg_ddp.prepare.parsing.label_file import HEAD_BYTES, LabelFile, first_element
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject, box_corners, read_number, read_size
from yolo_seg_ddp.prepare.parsing.rows import (
    BOX,
    MAX_NAME_CHARACTERS,
    AnnotationRow,
    Parsed,
    says_ignore,
)
from yolo_seg_ddp.utils.errors import UserError, one_line, printable
from yolo_seg_ddp.utils.files import read_bytes

MAX_BYTES = 32_000_000
_POLYGONS = re.compile(rb"<polygon|<segm>")
OBJECT, PART = "annotation/object", "annotation/object/part"
SIZE = ("width", "height")
SIDES = ("xmin", "ymin", "xmax", "ymax")
Size = tuple[int, int] | None


class VocFile(LabelFile):
    """The boxes in one photograph. A file that cannot be read is a problem, not an error."""

    format = "voc"
    title = "Pascal VOC's files"
    patterns = ("**/*.xml",)
    how_to_export = "put the XML files beside the photographs, or into Annotations/"
    has_lines = False
    lists_used_classes = True

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        if not self.is_of_format(path):
            self.is_other = True
            return
        try:
            texts, objects = read_elements(read_bytes(path, MAX_BYTES))
            sides = [float(texts.get(f"annotation/size/{side}") or 0) for side in SIZE]
            # Some tools write 0 x 0.
            size = read_size(*sides) if any(sides) else None
        except (expat.ExpatError, ValueError, OverflowError, UserError, OSError) as error:
            self.complain(f"{one_line(error, 200)}; skipped")
            return
        labels = [_label(one) for one in objects]
        self.names = sorted(filter(None, labels))

        # The name in the file, or that of the file if both were renamed together.
        name = texts.get("annotation/filename", "").replace("\\", "/")[:MAX_NAME_CHARACTERS]
        names = (*filter(None, [name]), *(path.stem + suffix for suffix in IMAGE_SUFFIXES))
        counts = Counter((label, BOX) for label in labels)
        self.rows = [AnnotationRow(names, path, objects, f"{size}", partial(_object, size), counts)]

    @classmethod
    def is_of_format(cls, file: Path) -> bool:
        # Of the same element, but with polygons, are LabelMe's XML files.
        return (
            file.suffix.lower() == ".xml"
            and first_element(file) == "annotation"
            and not _POLYGONS.search(file.read_bytes()[:HEAD_BYTES])
        )


def read_elements(data: bytes) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the texts of a file's elements, and those of each object, by their path.

    Raises ExpatError and ValueError.
    """
    texts: dict[str, str] = {}
    objects: list[dict[str, str]] = []
    tags: list[str] = []

    def start(tag: str, _: Any) -> None:
        tags.append(tag.lower())
        if len(tags) > MAX_DEPTH or tags[0] != "annotation":
            raise ValueError("it begins with another element, or is nested too deeply")
        if "/".join(tags) == OBJECT:
            objects.append({})

    def end(_: str) -> None:
        tags.pop()

    def add_text(text: str) -> None:
        place = "/".join(tags)
        # Parts of a person have boxes, too.
        if not place.startswith(PART):
            owner = objects[-1] if place.startswith(OBJECT) else texts
            owner[place] = owner.get(place, "") + text

    bounded_parser(start, end, add_text).Parse(data, True)
    strip = [{key: text.strip() for key, text in one.items()} for one in (texts, *objects)]
    return strip[0], strip[1:]


def _label(texts: dict[str, str]) -> str:
    return printable(texts.get(f"{OBJECT}/name", ""))


def _object(size: Size, texts: dict[str, str]) -> Parsed:
    """Return the object of one box, or the reason why there is none."""
    label = _label(texts)
    if not label:
        return [], ["an object has no name"]
    try:
        left, top, right, bottom = (
            read_number(float(texts[f"{OBJECT}/bndbox/{side}"])) for side in SIDES
        )
        corners = box_corners(left, top, right - left, bottom - top)
    except KeyError as error:
        return [ShapeObject(label, "object", error=f"has no {error}")], []
    except ValueError as error:
        return [ShapeObject(label, "object", error=str(error))], []
    is_region = says_ignore({"difficult": texts.get(f"{OBJECT}/difficult")})
    return [
        ShapeObject(label, "object", size, size, (corners,), is_box=True, is_region=is_region)
    ], []
