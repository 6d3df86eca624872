"""EPRI's label CSV, the one table of class spellings, and YOLO-seg label text."""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import math
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from utils.errors import UserError, printable

# A photograph's outlines take some 30 kB. JSON needs some 20 times the text in memory; Python's parser needs 500 times
# (2 GB for four million characters of `[],`, measured), so it is given less.
MAX_LABEL_CHARACTERS = 4_000_000
MAX_LITERAL_CHARACTERS = 300_000
MAX_OBJECTS = 10_000
MAX_FIELD_CHARACTERS = 25_000_000  # of the CSV: beyond, a quote is missing and the rest of the file is one field
MAX_LABEL_FILE_BYTES = 20_000_000
OUTSIDE_TOLERANCE = 1e-3  # normalised; rounding of other tools' labels, clipped. Farther out is an error
UNREADABLE_ROW = "unreadable row"
LABEL_COLUMN, NAME_COLUMN = "Label", "External ID"

# Spellings that differ from the class name by more than case, spaces, hyphens, underscores and a plural s.
CLASS_ALIASES = {
    "guy wire": "other_wire",
    "fuse cutout": "cutouts",
    "utility pole": "pole",
    "power pole": "pole",
}


class LabelError(UserError):
    """A label that cannot be read. The message is one line; files are named as `file:line`."""


@dataclass(frozen=True)
class Problem:
    """Something in the data that was skipped or mended. `place` is like `labels.csv:17`; `kind` is for counting."""

    place: str
    text: str
    kind: str = "other"


@dataclass(frozen=True)
class LabelRow:
    """One row of the label CSV, not yet parsed. `line` is where it starts in the file.

    The text is kept compressed: the whole set's would take about a gigabyte.
    """

    image_name: str
    line: int
    packed_text: bytes

    @property
    def text(self) -> str:
        return zlib.decompress(self.packed_text).decode()

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.packed_text, digest_size=16).hexdigest()


@dataclass(frozen=True)
class LabelObject:
    """One annotated object: `points` (V, 2) float64, x and y in pixels of the original photograph."""

    value: str
    kind: Literal["polygon", "line"]
    points: np.ndarray


@dataclass(frozen=True)
class LabelFile:
    """A YOLO label file: class_ids (N,) int64 and N polygons (V, 2) float32, x and y in 0..1."""

    class_ids: np.ndarray
    polygons: list[np.ndarray]


class ClassTable:
    """Finds the class number of a spelling; the numbering is always the one of dataset.yaml."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        ids = {_spelling_key(name): number for number, name in reversed(list(enumerate(names)))}
        for spelling, name in CLASS_ALIASES.items():
            if name in self.names:
                ids.setdefault(_spelling_key(spelling), self.names.index(name))
        self._ids = ids

    def find(self, value: str) -> int | None:
        """Return the class number, or None for a spelling that no class has."""
        return self.names.index(value) if value in self.names else self._ids.get(_spelling_key(value))


def read_label_csv(path: Path, problems: list[Problem]) -> Iterator[LabelRow]:
    """Yield the rows of EPRI's label CSV in the order of the file.

    Columns are found by name. Rows without a file name are added to `problems`.
    Raises UserError when the file or one of its columns is missing.
    """
    try:
        # Undecodable bytes become U+FFFD: the row they are in is then reported, not the whole file refused.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
            csv.field_size_limit(MAX_FIELD_CHARACTERS)  # the default, 128 kB, is less than a busy photograph's outlines
            yield from _rows(path, csv.reader(stream), problems)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; run python download_data.py") from error


def parse_label_text(text: str) -> tuple[list[LabelObject], list[str]]:
    """Parse one `Label` field, JSON or a Python literal, without running it.

    Returns (objects, complaints about single objects that were left out).
    Raises LabelError when the field as a whole is unreadable.
    """
    if len(text) > MAX_LABEL_CHARACTERS:
        raise LabelError(
            f"label of {len(text)} characters, at most {MAX_LABEL_CHARACTERS} are read; is a quote missing?"
        )
    content = _parse_literal(text)
    if not isinstance(content, dict) or not isinstance(content.get("objects"), list):
        raise LabelError(f"label holds no `objects` list: {text[:40]!r}")
    if len(content["objects"]) > MAX_OBJECTS:
        raise LabelError(f"label of {len(content['objects']):,} objects, at most {MAX_OBJECTS:,} are read")
    objects: list[LabelObject] = []
    complaints: list[str] = []
    for number, item in enumerate(content["objects"], start=1):
        try:
            objects.append(_parse_object(item))
        except (ValueError, OverflowError) as error:
            complaints.append(f"object {number}: {error}")
        except RecursionError:  # while it is put into words
            complaints.append(f"object {number}: nested too deeply")
    return objects, complaints


def format_yolo_label(instances: Iterable[tuple[int, np.ndarray]]) -> str:
    """Write (class id, polygon (V, 2) normalised) pairs as YOLO-seg text, `class x1 y1 x2 y2 …`, one object a line."""
    lines = []
    for class_id, polygon in instances:
        values = np.clip(np.asarray(polygon, dtype=np.float64), 0.0, 1.0).ravel()
        lines.append(f"{class_id} " + " ".join(f"{value:.6f}" for value in values) + "\n")
    return "".join(lines)


def read_yolo_label(path: Path, num_classes: int, text: str | None = None) -> LabelFile:
    """Read a YOLO-seg label file, or `text` in its place; a box row `class cx cy w h` becomes its four corners.

    An empty file is a picture without objects. Raises LabelError naming file and line.
    """
    if text is None:
        text = _read_label_text(path)
    class_ids: list[int] = []
    polygons: list[np.ndarray] = []
    for line_number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        try:
            class_id, polygon = _parse_yolo_row(fields, num_classes)
        except ValueError as error:
            raise LabelError(f"{path}:{line_number}: {error}") from error
        class_ids.append(class_id)
        polygons.append(polygon)
    return LabelFile(np.array(class_ids, dtype=np.int64), polygons)


def _spelling_key(value: str) -> str:
    return re.sub(r"[^a-z0-9]", "", value.lower()).removesuffix("s")


def _rows(path: Path, reader: Any, problems: list[Problem]) -> Iterator[LabelRow]:
    line = 1
    try:
        label_index, name_index = _find_columns(path, next(reader, []))
        line = reader.line_num + 1
        for fields in reader:
            name = fields[name_index] if len(fields) > name_index else ""
            name = re.split(r"[\\/]", name)[-1].strip()
            if fields and (not name or len(fields) <= label_index):
                text = f"no `{NAME_COLUMN}` or no `{LABEL_COLUMN}`"
                problems.append(Problem(f"{path.name}:{line}", text, UNREADABLE_ROW))
            elif fields:
                yield LabelRow(name, line, zlib.compress(fields[label_index].encode(), level=1))
            line = reader.line_num + 1  # a quoted field may span lines: this is where the next row starts
    except csv.Error as error:
        raise UserError(f"{path}:{line}: not a CSV row ({error}); download the file again") from error


def _find_columns(path: Path, header: list[str]) -> tuple[int, int]:
    columns = [column.strip() for column in header]
    for column in (LABEL_COLUMN, NAME_COLUMN):
        if column not in columns:
            raise UserError(f"{path}:1: no column `{column}`; found {', '.join(columns)[:200] or 'an empty file'}")
    return columns.index(LABEL_COLUMN), columns.index(NAME_COLUMN)


def _parse_literal(text: str) -> Any:
    try:
        try:
            return json.loads(text)
        except ValueError:
            if len(text) > MAX_LITERAL_CHARACTERS:
                raise ValueError(f"no JSON, and too long for the other: {len(text):,} characters") from None
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError | MemoryError) else str(error)
        reason = re.sub(r" object at 0x\w+", "", " ".join(reason.split()))  # an address would differ in every run
        raise LabelError(f"label is neither JSON nor a Python literal ({reason[:120]})") from error


def _parse_object(item: Any) -> LabelObject:
    if not isinstance(item, dict):
        raise ValueError(f"expected a dictionary, found {str(item)[:40]!r}")
    value = item.get("value") or item.get("title")
    if not isinstance(value, str):
        raise ValueError("has no `value`, the class")
    value = printable(value)
    if isinstance(item.get("polygon"), list):
        return LabelObject(value, "polygon", _parse_points(value, item["polygon"]))
    if isinstance(item.get("line"), list):
        return LabelObject(value, "line", _parse_points(value, item["line"]))
    raise ValueError(f"({value}) has neither `polygon` nor `line`")


def _parse_points(value: str, points: list[Any]) -> np.ndarray:
    numbers = []
    for point in points:
        if not isinstance(point, dict):
            raise ValueError(f"({value}) has a point that is not {{'x': …, 'y': …}}: {str(point)[:40]!r}")
        for axis in ("x", "y"):
            number = point.get(axis)
            if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
                raise ValueError(f"({value}) has the coordinate {axis}={str(number)[:40]}, not a finite number")
            numbers.append(float(number))
    return np.array(numbers, dtype=np.float64).reshape(-1, 2)


def _read_label_text(path: Path) -> str:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # reading a pipe would wait for ever
            raise LabelError(f"{path}: not a regular file")
        if facts.st_size > MAX_LABEL_FILE_BYTES:
            raise LabelError(f"{path}: larger than {MAX_LABEL_FILE_BYTES // 1_000_000} MB, not a label file")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}; run python parse_labels.py again") from error
    except UnicodeDecodeError as error:
        raise LabelError(f"{path}: not a text file") from error


def _parse_yolo_row(fields: list[str], num_classes: int) -> tuple[int, np.ndarray]:
    try:
        values = np.array(fields, dtype=np.float64)
    except ValueError:
        raise ValueError(f"not a number in {' '.join(fields)[:60]!r}") from None
    class_id, coordinates = values[0], values[1:]
    if not (0 <= class_id < num_classes and class_id == int(class_id)):
        raise ValueError(f"class {fields[0]} is not one of 0..{num_classes - 1}")
    if len(coordinates) % 2 or len(coordinates) < 4:
        raise ValueError(f"{len(coordinates)} coordinates; expected 4 for a box or an even count from 6 for a polygon")
    outside = ~((coordinates >= -OUTSIDE_TOLERANCE) & (coordinates <= 1 + OUTSIDE_TOLERANCE))  # true for NaN as well
    if outside.any():
        raise ValueError(
            f"coordinate {fields[1 + int(outside.argmax())]} is outside 0..1; normalise by the picture's size"
        )
    if len(coordinates) == 4:
        center, half = coordinates[:2], coordinates[2:] / 2
        if not (half > 0).all():
            raise ValueError(f"box of width {fields[3]} and height {fields[4]}; both must be above 0")
        polygon = center + half * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    else:
        polygon = coordinates.reshape(-1, 2)
    return int(class_id), np.clip(polygon, 0.0, 1.0).astype(np.float32)
