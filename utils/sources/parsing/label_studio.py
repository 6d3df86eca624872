"""Reads Label Studio's JSON export: polygons, boxes and brush masks of each task's best annotation."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from utils.common.errors import UserError, printable
from utils.data.dataset_yaml import is_photograph
from utils.sources.parsing.json_stream import Item, JsonStream
from utils.sources.parsing.label_csv import UNREADABLE_ROW, Problem
from utils.sources.parsing.outlines import ShapeObject, box_corners, read_number, read_points, read_size, turned
from utils.sources.parsing.rows import MAX_NAME_CHARACTERS, AnnotationRow, LabelFile
from utils.sources.parsing.run_lengths import decode_label_studio

PERCENT = (100.0, 100.0)
LOCAL_FILES = "/data/local-files/"
# Of a result's `type`, with or without `labels` at the end. `labels` belongs to the tag <Labels> beside <Polygon>.
READ_TYPES = ("polygon", "brush", "rectangle", "")
OTHER_SHAPES = ("ellipse", "keypoint", "vector", "bitmask", "cuboid")


class LabelStudioFile(LabelFile):
    """The labels of a Label Studio export, and where its annotated tasks lie in it. Raises UserError for other exports."""

    title = "Label Studio export"
    patterns = ("*.json", "**/*.json")
    how_to_export = "export as JSON and put the file beside the photographs"
    several = False

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        self._labels: set[str] = set()  # in use: the export does not say which others the project has
        with JsonStream(path) as stream:
            for item in stream.items():
                self._add_task(item)
        self.names = sorted(self._labels)

    def _add_task(self, item: Item) -> None:
        task = item.value()
        if not isinstance(task, dict):
            self._complain(f"the item at byte {item.start:,} is not a task; skipped")
            return
        if "data" not in task and "annotations" not in task and "completions" not in task:
            raise UserError(f"{self.path}: its tasks have no `data`; export as JSON, not as JSON-MIN or CSV")
        chosen, _ = _best_annotation(task)
        if chosen is None:
            return
        names = _photograph_names(task)
        if not names:
            self._complain(f"{_task_name(task)}: `data` names no photograph; skipped")
            return
        labelled = [(label, result) for result in _results(chosen) if (label := _label(result))]
        self._labels |= {label for label, _ in labelled}
        num_boxes = sum(str(result.get("type")).startswith("rectangle") for _, result in labelled)
        self.rows.append(AnnotationRow(names, self.path, item.span, "", _objects, len(labelled), num_boxes))

    def _complain(self, text: str) -> None:
        self.problems.append(Problem(self.path.name, text, UNREADABLE_ROW))


def _task_name(task: dict[str, Any]) -> str:
    return f"task {printable(str(task.get('id')))}"


def _best_annotation(task: dict[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """Return the ground truth, else the latest annotation that was not skipped, and how many others there are."""
    found = task.get("annotations", task.get("completions"))
    usable = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    usable = [one for one in usable if not one.get("was_cancelled") and isinstance(one.get("result"), list)]
    best = max(
        usable,
        key=lambda one: (bool(one.get("ground_truth")), str(one.get("updated_at") or one.get("created_at") or "")),
        default=None,
    )
    return best, max(0, len(usable) - 1)


def _photograph_names(task: dict[str, Any]) -> tuple[str, ...]:
    """Return the paths that may be the photograph's, the likeliest first."""
    data = task.get("data")
    data = data if isinstance(data, dict) else {}
    texts = [text for text in [data.get("image"), *data.values()] if isinstance(text, str)]
    paths = [path for text in texts for path in _paths_of(text)]
    paths = [path for path in paths if is_photograph(path.replace("\\", "/").rpartition("/")[2])]
    if isinstance(task.get("file_upload"), str):
        paths.append(task["file_upload"])
    return tuple(dict.fromkeys(paths))


def _paths_of(address: str) -> tuple[str, ...]:
    """Return the path inside an address of a storage, a web server or Label Studio itself."""
    if address.startswith("data:") or len(address) > MAX_NAME_CHARACTERS:
        return ()
    try:
        parts = urlsplit(address)
    except ValueError:
        return (address,)
    if parts.path.endswith(LOCAL_FILES) or parts.path == LOCAL_FILES.rstrip("/"):
        return tuple(parse_qs(parts.query).get("d", ()))
    if parts.scheme in ("http", "https"):
        return (unquote(parts.path),)
    if "://" in address:  # s3://bucket/key, gs://bucket/key
        return (address.partition("://")[2].partition("/")[2],)
    return (unquote(parts.path), address)


def _results(annotation: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in annotation["result"] if isinstance(one, dict) and isinstance(one.get("value"), dict)]


def _label(result: dict[str, Any]) -> str | None:
    """Return a region's first label: the list in `polygonlabels`, `brushlabels`, `labels` and the like."""
    for key, labels in result["value"].items():
        if key.endswith("labels") and isinstance(labels, list) and labels and isinstance(labels[0], str):
            return printable(labels[0].strip()) or None
    return None


def _objects(data: bytes) -> tuple[list[ShapeObject], list[str]]:
    """Return the objects of a task's best annotation, and messages about what was left out."""
    task = json.loads(data)
    annotation, num_others = _best_annotation(task)
    assert annotation is not None  # checked when the file was indexed
    complaints = [f"{_task_name(task)}: {num_others} more annotations; only the latest is used"] if num_others else []
    results = _results(annotation)
    labelled = {str(result.get("id")) for result in results if _label(result)}
    objects = []
    for result in results:
        kind = str(result.get("type", "")).lower().removesuffix("labels")
        name = f"{_task_name(task)} region {printable(str(result.get('id')))}"
        label = _label(result)
        if kind in OTHER_SHAPES:
            complaints.append(f"{name}: {kind} is not read; draw a polygon or use the brush")
        elif kind in READ_TYPES and label:
            try:
                objects.append(_object(name, label, result))
            except (ValueError, OverflowError) as error:
                complaints.append(f"{name} ({label}): {error}")
        elif kind in READ_TYPES and str(result.get("id")) not in labelled:
            complaints.append(f"{name}: has no label")
    return objects, complaints


def _object(name: str, label: str, result: dict[str, Any]) -> ShapeObject:
    value = result["value"]
    size = read_size(result.get("original_width"), result.get("original_height"))
    if result.get("image_rotation"):
        raise ValueError(f"drawn on an image turned by {result['image_rotation']}; turn it back and export again")
    if "rle" in value:
        if size is None:
            raise ValueError("a brush mask without original_width and original_height")
        return ShapeObject(label, name, size, size, draw=partial(decode_label_studio, value["rle"], size))
    if "points" in value:
        return ShapeObject(label, name, PERCENT, size, (read_points(value["points"]),))
    if not {"x", "y", "width", "height"} <= value.keys():
        raise ValueError("has neither points, a box nor a brush mask")
    x, y, width, height = (read_number(value[key]) for key in ("x", "y", "width", "height"))
    corners = box_corners(x, y, width, height)
    turn = read_number(value.get("rotation") or 0)
    if turn:
        corners = _turned(corners, turn, size)
    return ShapeObject(label, name, PERCENT, size, (corners,))


def _turned(corners: np.ndarray, degrees: float, size: tuple[int, int] | None) -> np.ndarray:
    """Turn a box, in percent, clockwise about its first corner, as Label Studio draws it."""
    if size is None:
        raise ValueError("a turned box without original_width and original_height")
    scale = np.divide(size, PERCENT)
    return turned(corners * scale, corners[0] * scale, math.radians(degrees)) / scale
