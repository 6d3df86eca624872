"""Reads Label Studio's JSON export: polygons, boxes and brush masks of
each task's best annotation.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from yolo_seg_ddp.data.dataset_yaml import is_photograph
from yolo_seg_ddp.data.images import MAX_IMAGE_PIXELS
from yolo_seg_ddp.extras.labels.shapes import several_labels, turned
from yolo_seg_ddp.prepare.parsing.coco import RunLengthError, cut_out
from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, Problem
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile, read_json
from yolo_seg_ddp.prepare.parsing.outlines import (
    ShapeObject,
    box_corners,
    read_number,
    read_points,
    read_size,
)
from yolo_seg_ddp.prepare.parsing.rows import (
    BOX,
    MAX_NAME_CHARACTERS,
    POLYGON,
    AnnotationRow,
    ObjectCounts,
    Parsed,
    is_ignored,
)
from yolo_seg_ddp.utils.errors import UserError, printable

PERCENT = (100.0, 100.0)
# the last three: JSON-MIN
TASK_KEYS = ("data", "completions", "annotation_id", "annotator", "lead_time")
OTHER_ANNOTATION = "another annotation of the task"
LOCAL_FILES = "/data/local-files/"
# Of a result's `type`, with or without `labels` at the end. `labels` belongs to the tag <Labels>
# beside <Polygon>.
READ_TYPES = ("polygon", "brush", "rectangle", "")
OTHER_SHAPES = ("ellipse", "keypoint", "vector", "bitmask", "cuboid", "videorectangle")
INSTEAD = {
    "predictions": "only predictions",
    "drafts": "only drafts",
    "annotations": "only skipped annotations",
}
Regions = list[dict[str, Any]]


class LabelStudioFile(LabelFile):
    """The labels of a Label Studio export. Raises UserError for other exports."""

    format = "labelstudio"
    title = "Label Studio export"
    patterns = ("*.json", "**/*.json")
    how_to_export = "export as JSON and put the file beside the photographs"
    several_files = has_lines = False

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        # tasks by what they have instead of an annotation
        self._unannotated: Counter[str] = Counter()
        # in use: the export does not say which others the project has
        self._labels: set[str] = set()
        tasks = read_json(path)
        if not isinstance(tasks, list):
            raise UserError(f"{path}: is no list of tasks; {self.how_to_export}")
        for number, task in enumerate(tasks, start=1):
            self._add_task(number, task)
        if not self.rows and self._unannotated:
            kinds = " and ".join(
                f"{number:,} with {kind}" for kind, number in self._unannotated.items()
            )
            raise UserError(
                f"{path}: no task has an annotation, {kinds}: submit them in Label Studio and "
                "export again"
            )
        self.names = sorted(self._labels)

    @classmethod
    def is_json_of_format(cls, key: str | None, value: Any) -> bool:
        return key is None and not value.keys().isdisjoint(TASK_KEYS)

    def _add_task(self, number: int, task: Any) -> None:
        if not isinstance(task, dict):
            self.complain(f"item {number:,} of the list is not a task; skipped")
            return
        if "data" not in task and "annotations" not in task and "completions" not in task:
            raise UserError(
                f"{self.path}: its tasks have no `data`; export as JSON, not as JSON-MIN or CSV"
            )
        chosen, num_others = _best_annotation(task)
        for other in _annotations(task):
            if other is not chosen:
                self.lose(_found(_regions(other)), OTHER_ANNOTATION)
        if chosen is None:
            self._unannotated[
                next((kind for key, kind in INSTEAD.items() if task.get(key)), "nothing")
            ] += 1
            return
        if num_others:
            self.complain(
                f"{_task_name(task)}: {num_others} more annotations; only the latest is used",
                "annotation",
            )
        try:
            pictures = _by_picture(task, _regions(chosen))
        except ValueError as error:
            self.lose(_found(_regions(chosen)), UNREADABLE_ROW)
            self.complain(f"{_task_name(task)}: {error}; skipped")
            return
        for number, (names, regions) in enumerate(pictures):
            found = _found(regions)
            self._labels |= {label for label, _ in found if label}
            read_objects = partial(_objects, number)
            self.rows.append(
                AnnotationRow(names, self.path, [task], f"{number or ''}", read_objects, found)
            )


def _task_name(task: dict[str, Any]) -> str:
    return f"task {printable(str(task.get('id')))}"


def _annotations(task: dict[str, Any]) -> list[dict[str, Any]]:
    found = task.get("annotations", task.get("completions"))
    usable = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [one for one in usable if isinstance(one.get("result"), list)]


def _best_annotation(task: dict[str, Any]) -> tuple[dict[str, Any] | None, int]:
    """Return the ground truth, else the latest annotation that was not skipped, and how many others
    there are.
    """
    usable = [one for one in _annotations(task) if not one.get("was_cancelled")]
    best = max(
        usable,
        key=lambda one: (
            bool(one.get("ground_truth")),
            str(one.get("updated_at") or one.get("created_at") or ""),
        ),
        default=None,
    )
    return best, max(0, len(usable) - 1)


def _by_picture(task: dict[str, Any], regions: Regions) -> list[tuple[tuple[str, ...], Regions]]:
    """Return for each picture its possible paths, the likeliest first, and its regions.

    If there are several pictures, the region's `to_name` is the picture's key in `data`. One
    unknown `to_name` is matched with the one key that no region names. In a list of pictures
    `item_index` decides. Raises ValueError if the picture of a region remains unknown, and if there
    is no picture.
    """
    data = task.get("data")
    listed: dict[str, list[tuple[str, ...]]] = {}
    for key, value in data.items() if isinstance(data, dict) else ():
        values = value if isinstance(value, list) else [value]
        paths = [_photographs_of(address) for address in values]
        if any(paths):
            listed[key] = paths
    different = {paths for many in listed.values() for paths in many}
    if len(different) < 2:
        upload = [task["file_upload"]] if isinstance(task.get("file_upload"), str) else []
        if not (
            names := tuple(
                dict.fromkeys([*(path for paths in different for path in paths), *upload])
            )
        ):
            raise ValueError("`data` names no photograph")
        return [(names, regions)]
    named = {str(region.get("to_name")) for region in regions}
    key_of, left = {name: name for name in named & listed.keys()}, listed.keys() - named
    unknown = named - listed.keys()
    if len(listed) == 1:
        key_of = dict.fromkeys(named or listed, next(iter(listed)))
    elif len(unknown) == len(left) == 1:
        key_of[unknown.pop()] = left.pop()
    elif unknown or not named:
        raise ValueError(
            f"shows {len(different)} pictures, and `to_name` of its regions is no key of `data`"
        )
    found = []
    for key in dict.fromkeys(key_of.values()):
        for index, names in enumerate(listed[key]):
            own = [
                region
                for region in regions
                if key_of[str(region.get("to_name"))] == key
                and (
                    len(listed[key]) == 1
                    or (type(region.get("item_index")) is int and region["item_index"] == index)
                )
            ]
            if own and not names:
                raise ValueError(f"picture {index + 1} of `{printable(key)}` is no photograph")
            found += [(names, own)] * bool(names)
    if sum(len(own) for _, own in found) != len(regions):
        raise ValueError(
            f"shows {len(different)} pictures, and not all regions have the `item_index` of one"
        )
    return found


def _photographs_of(address: Any) -> tuple[str, ...]:
    paths = _paths_of(address) if isinstance(address, str) else ()
    return tuple(
        path for path in paths if is_photograph(path.replace("\\", "/").rpartition("/")[2])
    )


def _paths_of(address: str) -> tuple[str, ...]:
    """Return the file's path in an address of a cloud storage, a web
    server or Label Studio itself.
    """
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


def _kind(result: dict[str, Any]) -> str:
    return str(result.get("type", "")).lower().removesuffix("labels")


def _regions(annotation: dict[str, Any]) -> Regions:
    """Return the results that are shapes.

    Bad ones, no dictionary or without a value, are kept: a message reports them.
    """
    results = [one if isinstance(one, dict) else {"type": "labels"} for one in annotation["result"]]
    kinds = (*READ_TYPES, *OTHER_SHAPES)
    return [
        one
        for one in results
        if _kind(one) in kinds and (one.get("type") or isinstance(one.get("value"), dict))
    ]


def _labels(result: dict[str, Any], ending: str = "labels") -> list[str]:
    """Return a region's labels: the list in `polygonlabels`, `brushlabels`,
    `labels` and the like.
    """
    value = result.get("value")
    for key, labels in value.items() if isinstance(value, dict) else ():
        if key.lower().endswith(ending) and isinstance(labels, list):
            return [
                text
                for label in labels
                if isinstance(label, str) and (text := printable(label.strip()))
            ]
    return []


def _found(regions: Regions) -> ObjectCounts:
    """Count regions by their first label and what they are.

    One without a label counts unless another of its id has one.
    """
    labelled = {str(region.get("id")) for region in regions if _labels(region)}
    found: ObjectCounts = Counter()
    for region in regions:
        value, labels = region.get("value"), _labels(region)
        if labels or str(region.get("id")) not in labelled:
            keys = value.keys() if isinstance(value, dict) else ()
            kind = (
                "brush"
                if "rle" in keys
                else POLYGON
                if "points" in keys
                else BOX
                if "width" in keys
                else _kind(region)
            )
            found[labels[0] if labels else "", kind] += 1
    return found


def _objects(number: int, task: dict[str, Any]) -> Parsed:
    """Return the objects of a picture of a task's best annotation, and messages about what was left
    out.
    """
    annotation, _ = _best_annotation(task)
    assert annotation is not None  # checked when the file was read
    _, results = _by_picture(task, _regions(annotation))[number]
    labelled = {str(result.get("id")) for result in results if _labels(result)}
    ignored = {
        str(one.get("id"))
        for one in annotation["result"]
        if isinstance(one, dict) and any(map(is_ignored, _labels(one, "choices")))
    }
    objects, complaints = [], []
    for result in results:
        kind, labels = _kind(result), _labels(result)
        name = f"{_task_name(task)} region {printable(str(result.get('id')))}"
        if labels:
            try:
                if kind in OTHER_SHAPES:
                    raise ValueError(f"{kind} is not read; draw a polygon or use the brush")
                is_region, note = str(result.get("id")) in ignored, several_labels(labels)
                objects.append(
                    replace(_object(name, labels[0], result), is_region=is_region, note=note)
                )
            except (ValueError, OverflowError) as error:
                objects.append(ShapeObject(labels[0], name, error=str(error)))
        elif str(result.get("id")) not in labelled:
            complaints.append(f"{name}: has no label")
    return objects, complaints


def _object(name: str, label: str, result: dict[str, Any]) -> ShapeObject:
    value = result["value"]
    size = read_size(result.get("original_width"), result.get("original_height"))
    if result.get("image_rotation"):
        raise ValueError(
            f"drawn on an image turned by {result['image_rotation']}; turn it back and export again"
        )
    if "rle" in value:
        if size is None:
            raise ValueError("a brush mask without original_width and original_height")
        return ShapeObject(label, name, size, size, draw=partial(decode_brush, value["rle"], size))
    if "points" in value:
        return ShapeObject(label, name, PERCENT, size, (read_points(value["points"]),))
    if not {"x", "y", "width", "height"} <= value.keys():
        raise ValueError("has neither points, a box nor a brush mask")
    x, y, width, height = (read_number(value[key]) for key in ("x", "y", "width", "height"))
    corners = box_corners(x, y, width, height)
    turn = read_number(value.get("rotation") or 0)
    if turn:
        corners = _turned(corners, turn, size)
    return ShapeObject(label, name, PERCENT, size, (corners,), is_box=not turn)


def _turned(corners: np.ndarray, degrees: float, size: tuple[int, int] | None) -> np.ndarray:
    """Turn a box, in percent, clockwise about its first corner, as Label Studio draws it."""
    if size is None:
        raise ValueError("a turned box without original_width and original_height")
    scale = np.divide(size, PERCENT)
    return turned(corners * scale, corners[0] * scale, math.radians(degrees)) / scale


def decode_brush(codes: Any, size: tuple[int, int]) -> tuple[np.ndarray, int, int]:
    """Decode Label Studio's `rle`: the bytes of a packed RGBA image of `size` (width, height), row
    by row.

    A pixel belongs to the mask if its alpha is above 0. The format is that of the npm package
    @thi.ng/rle-pack: 32 bits for the number of values, 5 for the bits per value minus 1, four times
    4 for the bits per run length minus 1. Then follow blocks: 1 bit (one repeated value, or
    different ones), 2 bits (which of the four sizes of length), the length minus 1, the values.
    Returns like `decode_coco`. Raises RunLengthError.
    """
    width, height = size
    if not isinstance(codes, list) or not all(
        type(code) is int and 0 <= code <= 255 for code in codes
    ):
        raise RunLengthError("`rle` is not a list of numbers from 0 to 255")
    if width * height > MAX_IMAGE_PIXELS:
        raise RunLengthError(
            f"{width}x{height} is more than {MAX_IMAGE_PIXELS // 1_000_000} megapixels"
        )
    bits = _Bits(bytes(codes))
    num_values = bits.read(32)
    if num_values != 4 * width * height:
        raise RunLengthError(
            f"`rle` holds {num_values:,} values, not 4 for each of {width}x{height} pixels"
        )
    value_bits = bits.read(5) + 1
    length_bits = [bits.read(4) + 1 for _ in range(4)]
    alpha = np.zeros(width * height, bool)
    done = 0
    while done < num_values:
        is_repeated = bits.read(1)
        end = done + 1 + bits.read(length_bits[bits.read(2)])
        if end > num_values:
            raise RunLengthError("`rle` has runs beyond the image")
        if is_repeated:
            # those whose fourth value lies in the run
            alpha[done // 4 : end // 4] = bits.read(value_bits) > 0
        else:
            values = bits.read_many(end - done, value_bits)
            alpha[done // 4 : end // 4] = values[3 - done % 4 :: 4]
        done = end
    return cut_out(alpha.reshape(height, width))


class _Bits:
    """Reads numbers of any bits, highest bit first. Raises RunLengthError at the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def read(self, num_bits: int) -> int:
        first, last = self.position // 8, (self.position + num_bits + 7) // 8
        self._advance(num_bits)
        number = int.from_bytes(self.data[first:last], "big") >> (last * 8 - self.position)
        return number & ((1 << num_bits) - 1)

    def read_many(self, num_numbers: int, num_bits: int) -> np.ndarray:
        """Return whether each of the next numbers is above 0, bool (num_numbers,)."""
        first, offset = divmod(self.position, 8)
        self._advance(num_numbers * num_bits)
        octets = np.frombuffer(self.data, np.uint8, (self.position + 7) // 8 - first, first)
        bits = np.unpackbits(octets)[offset : offset + num_numbers * num_bits]
        is_above_0: np.ndarray = bits.reshape(num_numbers, num_bits).max(axis=1) > 0
        return is_above_0

    def _advance(self, num_bits: int) -> None:
        self.position += num_bits
        if self.position > 8 * len(self.data):
            raise RunLengthError("`rle` ends too early")
