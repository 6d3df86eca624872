"""Reads the JSON of the VGG Image Annotator (VIA) 1 and 2: a saved project, or exported
annotations.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from yolo_seg_ddp.data.labels import LabelError
from yolo_seg_ddp.extras.labels.shapes import ellipse_corners, several_labels
from yolo_seg_ddp.prepare.parsing.label_csv import Problem
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile, read_json
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject, box_corners, read_number, read_points
from yolo_seg_ddp.prepare.parsing.rows import (
    BOX,
    MAX_NAME_CHARACTERS,
    AnnotationRow,
    ObjectCounts,
    Parsed,
    is_ignored,
    says_ignore,
)
from yolo_seg_ddp.prepare.parsing.yolo_text import ONLY_CLASS
from yolo_seg_ddp.utils.errors import UserError, printable

IMAGES = "_via_img_metadata"
# by the texts of their attributes, and kind of shape
Regions = Counter[tuple[frozenset[tuple[str, str]], str]]
# the first of them, if there are several
CLASS_ATTRIBUTES = ("class", "label", "name", "category", "type", "object")


class ViaFile(LabelFile):
    """The regions of a VIA file. A file of VIA 3 or another program is a problem."""

    format = "via"
    title = "VGG Image Annotator's file"
    patterns = ("*.json", "**/*.json")
    how_to_export = "save the project, or export annotations as JSON"
    names_are_relative = lists_used_classes = True

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        self._values: dict[str, set[str]] = {}  # in use, by the name of the attribute
        self._worded: set[str] = set()  # attributes that hold more than numbers
        self._unread: set[str] = set()  # those with values that are neither texts nor numbers
        self._prefix = ""  # of all file names
        # name, what the file says of it, regions
        self._photographs: list[tuple[str, dict[str, Any], Regions]] = []
        content = read_json(path)
        if not isinstance(content, dict):
            raise UserError(f"{path}: is a list, not VIA's dictionary; {self.how_to_export}")
        settings = content.get("_via_settings")
        core = settings.get("core") if isinstance(settings, dict) else None
        prefix = str((core if isinstance(core, dict) else {}).get("default_filepath") or "")
        self._prefix = prefix[:MAX_NAME_CHARACTERS].replace("\\", "/")
        images = content.get(IMAGES)
        entries = {key: value for key, value in content.items() if not key.startswith("_via_")}
        for key, photograph in [
            *entries.items(),
            *(images.items() if isinstance(images, dict) else ()),
        ]:
            self._add(key, photograph)
        if not self._photographs:
            self.complain(
                "no photographs of VIA 2: no `filename` with `regions`; export annotations as JSON"
            )
        attribute = self._class_attribute()
        self.names = (
            sorted(self._values[attribute]) if attribute else [ONLY_CLASS] * bool(self._photographs)
        )
        self.named_by = f"attribute {printable(attribute, 40)}" if attribute else "no attribute"
        objects = partial(_objects, attribute)
        for name, photograph, regions in self._photographs:
            found: ObjectCounts = Counter()
            for (texts, kind), number in regions.items():
                found[
                    dict(texts).get(attribute, "") if attribute else ONLY_CLASS * bool(kind), kind
                ] += number
            self.rows.append(
                AnnotationRow(self._names(name), path, [photograph], attribute, objects, found)
            )

    @classmethod
    def is_json_of_format(cls, key: str | None, value: Any) -> bool:
        has_regions = isinstance(value, dict) and {"filename", "regions"} <= value.keys()
        return key is not None and (key.startswith("_via_") or has_regions)

    def _add(self, key: str, photograph: Any) -> None:
        name = photograph.get("filename") if isinstance(photograph, dict) else None
        if (
            not isinstance(name, str)
            or not 0 < len(name) <= MAX_NAME_CHARACTERS
            or "regions" not in photograph
        ):
            self.complain(
                f"`{printable(key)}` is no photograph: no `filename` or `regions`; skipped"
            )
            return
        regions: Regions = Counter()
        for region in _regions(photograph) or ():
            texts: dict[str, str] = {}
            for attribute, value in _attributes(region, "region").items():
                if is_ignored(attribute):
                    continue
                if found := _texts(value):
                    texts[attribute] = found[0]
                    self._values.setdefault(attribute, set()).add(found[0])
                    if not isinstance(value, int | float):
                        self._worded.add(attribute)
                elif value and not isinstance(value, dict | str):  # no field that was left empty
                    self._unread.add(attribute)
            kind = (
                str(_attributes(region, "shape").get("name") or "other").lower()
                if isinstance(region, dict)
                else ""
            )
            regions[frozenset(texts.items()), BOX if kind == "rect" else kind] += 1
        self._photographs.append((name.replace("\\", "/"), photograph, regions))

    def _names(self, name: str) -> tuple[str, ...]:
        """Return the possible paths of a photograph.

        A name without a folder gets the prefix; if that has `..`, also without it.
        """
        if not self._prefix or "/" in name:
            return (name,)
        return (f"{self._prefix}/{name}", *[name] * (".." in self._prefix))

    def _class_attribute(self) -> str:
        """Return the attribute that holds the class; an empty string if the regions have no
        attributes.

        Numbers are classes only if no attribute has texts.
        """
        found = self._worded or self._values.keys()
        if not found and self._unread:
            shown = ", ".join(printable(name) for name in sorted(self._unread)[:5])
            raise UserError(
                f"{self.path}: the attributes of its regions hold neither texts nor numbers: "
                f"{shown}; write the class"
            )
        if len(found) < 2:
            return next(iter(found), "")
        by_name = {name.lower(): name for name in found}
        chosen = next((by_name[name] for name in CLASS_ATTRIBUTES if name in by_name), "")
        if not chosen:
            shown = ", ".join(printable(name) for name in sorted(found)[:5])
            raise UserError(
                f"{self.path}: which attribute is the class? Found {shown}; call one of them "
                "`class`"
            )
        return chosen


def _regions(photograph: dict[str, Any]) -> list[Any] | None:
    """Return a photograph's regions: a list, or VIA 1's dictionary by number; None if it is
    neither.
    """
    regions = photograph["regions"]
    regions = list(regions.values()) if isinstance(regions, dict) else regions
    return regions if isinstance(regions, list) else None


def _attributes(region: Any, of: str) -> dict[str, Any]:
    """Return a region's attributes: `of` is "region" (with its class) or "shape"."""
    attributes = region.get(f"{of}_attributes") if isinstance(region, dict) else None
    return attributes if isinstance(attributes, dict) else {}


def _texts(value: Any) -> list[str]:
    """Return the value of a text field, a choice or a number, or all ticked options of check boxes,
    `{"wire": true}`.
    """
    values = (
        [option for option, is_ticked in value.items() if is_ticked]
        if isinstance(value, dict)
        else value
    )
    values = [
        one
        for one in (values if isinstance(values, list) else [values])
        if not isinstance(one, bool)
    ]
    values = [
        str(one) if isinstance(one, int) else f"{one:.15g}" if isinstance(one, float) else one
        for one in values
    ]
    return [text for one in values if isinstance(one, str) and (text := printable(one.strip()))]


def _objects(attribute: str, photograph: dict[str, Any]) -> Parsed:
    """Return the objects of one photograph, and messages about what was left out."""
    objects, complaints = [], []
    regions = _regions(photograph)
    if regions is None:
        raise LabelError(
            "`regions` is neither a list nor a dictionary; export annotations as JSON again"
        )
    for number, region in enumerate(regions, start=1):
        name = f"region {number}"
        if not isinstance(region, dict):
            complaints.append(f"{name}: is no dictionary")
            continue
        labels = _texts(_attributes(region, "region").get(attribute)) if attribute else [ONLY_CLASS]
        if not labels:
            complaints.append(f"{name}: has no `{printable(attribute)}`")
            continue
        try:
            points, is_line = _outline(_attributes(region, "shape"))
            note = several_labels(labels)
            is_region = says_ignore(_attributes(region, "region"))
            shape = ShapeObject(
                labels[0],
                name,
                parts=(points,),
                is_line=is_line,
                is_box=str(_attributes(region, "shape").get("name")).lower() == "rect",
                is_region=is_region,
                note=note,
            )
            objects.append(shape)
        except (KeyError, ValueError, OverflowError) as error:
            text = f"no {error}" if isinstance(error, KeyError) else str(error)
            objects.append(ShapeObject(labels[0], name, error=text))
    return objects, complaints


def _outline(shape: dict[str, Any]) -> tuple[np.ndarray, bool]:
    """Return the outline of a shape in pixels (V, 2), and whether it is a line.

    Raises KeyError and ValueError.
    """
    if not shape:
        raise ValueError("has no `shape_attributes`")
    kind = str(shape.get("name")).lower()
    if kind in ("polygon", "polyline"):
        x, y = shape["all_points_x"], shape["all_points_y"]
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
            raise ValueError("`all_points_x` and `all_points_y` are not lists of the same length")
        return read_points(
            [list(pair) for pair in zip(x, y, strict=True)],
            "line" if kind == "polyline" else "polygon",
        ), (kind == "polyline")
    if kind == "rect":
        return box_corners(
            *(read_number(shape[key]) for key in ("x", "y", "width", "height"))
        ), False
    if kind not in ("circle", "ellipse"):
        raise ValueError(f"{printable(kind, 40)} is not read; draw a polygon or a polyline")
    centre = np.array([read_number(shape["cx"]), read_number(shape["cy"])])
    radii = [read_number(shape[key]) for key in (("r", "r") if kind == "circle" else ("rx", "ry"))]
    return ellipse_corners(centre, radii, read_number(shape.get("theta", 0))), False
