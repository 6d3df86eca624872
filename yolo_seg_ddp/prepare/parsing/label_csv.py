"""Reads EPRI's label CSV (a Labelbox export): rows, objects, class spellings.

Never evaluates it as code.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from yolo_seg_ddp.data.labels import LabelError
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.files import looks_like_utf_16, other_encoding

# A photograph's outlines have about 30 kB. Parsing JSON needs about 20 times the text in memory,
# Python's parser 500 times (measured: 2 GB for four million characters of `[],`), so its limit is
# lower.
MAX_LABEL_CHARACTERS = 4_000_000
MAX_LITERAL_CHARACTERS = 300_000
MAX_OBJECTS = 10_000
# a longer CSV field is the rest of the file after a missing quote
MAX_FIELD_CHARACTERS = 25_000_000
LABEL_CSV = "Overhead-Distribution-Labels.csv"
UNREADABLE_ROW = "unreadable row"
LABEL_COLUMN, NAME_COLUMN = "Label", "External ID"
_SHAPE_KEY, _KINDS = (
    re.compile(r"""["'](polygon|line)["']\s*:\s*\["""),
    {"polygon": "polygon", "line": "polyline"},
)

# Spellings that differ from the class name by more than case, spaces, hyphens, underscores and a
# plural s.
CLASS_ALIASES = {
    "guy wire": "other_wire",
    "fuse cutout": "cutouts",
    "utility pole": "pole",
    "power pole": "pole",
}


@dataclass(frozen=True)
class Problem:
    """Something in the data that was skipped or repaired.

    `place` is like `labels.csv:17`; `kind` is for counting.
    """

    place: str
    text: str
    kind: str = "other"


@dataclass(frozen=True)
class LabelRow:
    """One unparsed row of the label CSV. `line` is its first line in the file.

    The text is compressed, because all texts of the data set take about a gigabyte.
    """

    image_name: str
    file_name: str
    line: int
    packed_text: bytes

    @property
    def text(self) -> str:
        return zlib.decompress(self.packed_text).decode()

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.packed_text, digest_size=16).hexdigest()

    def parse(self) -> tuple[list[LabelObject], list[str]]:
        """Return the result of `parse_label_text`."""
        return parse_label_text(self.text)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """The objects by kind, for rows that no photograph has: parsing takes 3 ms for 3 kB, and
        most rows may be such rows.
        """
        return Counter(("", _KINDS[kind]) for kind in _SHAPE_KEY.findall(self.text))


@dataclass(frozen=True)
class LabelObject:
    """One annotated object: `points` (V, 2) float64, x and y in pixels
    of the original photograph.
    """

    value: str
    kind: Literal["polygon", "line"]
    points: np.ndarray


def count_objects(objects: Iterable[Any], complaints: Sequence[str]) -> Counter[tuple[str, str]]:
    """Return how many objects a row has by class and kind; those of
    the complaints have no class.
    """
    counts = Counter((item.value, _KINDS[item.kind]) for item in objects)
    return counts + Counter({("", "other"): len(complaints)})


class ClassTable:
    """Finds the class id of a spelling, in the numbering of dataset.yaml."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        ids = {_spelling_key(name): number for number, name in reversed(list(enumerate(names)))}
        for spelling, name in CLASS_ALIASES.items():
            if name in self.names:
                ids.setdefault(_spelling_key(spelling), self.names.index(name))
        self._ids = ids

    def find(self, value: str) -> int | None:
        """Return the class id, or None for an unknown spelling."""
        return (
            self.names.index(value) if value in self.names else self._ids.get(_spelling_key(value))
        )


def read_label_csv(path: Path, problems: list[Problem]) -> Iterator[LabelRow]:
    """Yield the rows of EPRI's label CSV in the order of the file. Adds rows without a file name to
    `problems`.

    Raises UserError when the file or one of its two columns is missing, and for UTF-16.
    """
    try:
        with path.open("rb") as binary:
            head = binary.read(4)
        if looks_like_utf_16(head):
            raise UserError(other_encoding(path, head, 0))
        # Undecodable bytes become U+FFFD: only their row is reported as a problem.
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
            csv.field_size_limit(MAX_FIELD_CHARACTERS)  # the default of 128 kB is too small
            yield from _rows(path, csv.reader(stream), problems)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; run python download_data.py") from error


def parse_label_text(text: str) -> tuple[list[LabelObject], list[str]]:
    """Parse one `Label` field, JSON or a Python literal.

    Returns (objects, messages about skipped objects). Raises LabelError when the whole field is
    unreadable.
    """
    if len(text) > MAX_LABEL_CHARACTERS:
        raise LabelError(
            f"label of {len(text)} characters, at most {MAX_LABEL_CHARACTERS} are read; is a "
            "quote missing?"
        )
    content = _parse_literal(text)
    if not isinstance(content, dict) or not isinstance(content.get("objects"), list):
        raise LabelError(f"label holds no `objects` list: {text[:40]!r}")
    if len(content["objects"]) > MAX_OBJECTS:
        raise LabelError(
            f"label of {len(content['objects']):,} objects, at most {MAX_OBJECTS:,} are read"
        )
    objects: list[LabelObject] = []
    complaints: list[str] = []
    for number, item in enumerate(content["objects"], start=1):
        try:
            objects.append(_parse_object(item))
        except (ValueError, OverflowError) as error:
            complaints.append(f"object {number}: {error}")
        except RecursionError:  # raised by repr, for the message
            complaints.append(f"object {number}: nested too deeply")
    return objects, complaints


def _spelling_key(value: str) -> str:
    return re.sub(r"[^a-z0-9]", "", value.lower()).removesuffix("s")


def _rows(path: Path, reader: Any, problems: list[Problem]) -> Iterator[LabelRow]:
    line = 1
    try:
        columns = [column.strip() for column in next(reader, [])]
        for column in (LABEL_COLUMN, NAME_COLUMN):
            if column not in columns:
                shown = printable(", ".join(columns), 200) or "an empty file"
                raise UserError(f"{path}:1: no column `{column}`; found {shown}")
        label_index, name_index = columns.index(LABEL_COLUMN), columns.index(NAME_COLUMN)
        line = reader.line_num + 1
        for fields in reader:
            name = fields[name_index] if len(fields) > name_index else ""
            name = re.split(r"[\\/]", name)[-1].strip()
            text = ""
            if fields and (not name or len(fields) <= label_index):
                text = f"no `{NAME_COLUMN}` or no `{LABEL_COLUMN}`"
            elif "\ufffd" in name:
                text = (
                    f"{printable(name)}: the name is not UTF-8; convert the file: iconv -f LATIN1 "
                    "-t UTF-8"
                )
            if text:
                problems.append(Problem(f"{path.name}:{line}", text, UNREADABLE_ROW))
            elif fields:
                yield LabelRow(
                    name, path.name, line, zlib.compress(fields[label_index].encode(), level=1)
                )
            # the first line of the next row: a quoted field may span lines
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{path}:{line}: not a CSV row ({error}); download the file again"
        ) from error


def _parse_literal(text: str) -> Any:
    try:
        try:
            return json.loads(text)
        except ValueError:
            if len(text) > MAX_LITERAL_CHARACTERS:
                raise ValueError(
                    f"not JSON, and too long for a Python literal: {len(text):,} characters"
                ) from None
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        reason = (
            "nested too deeply" if isinstance(error, RecursionError | MemoryError) else str(error)
        )
        # an address differs in every run
        reason = re.sub(r" object at 0x\w+", "", " ".join(reason.split()))
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
            raise ValueError(
                f"({value}) has a point that is not {{'x': …, 'y': …}}: {str(point)[:40]!r}"
            )
        for axis in ("x", "y"):
            number = point.get(axis)
            if (
                not isinstance(number, int | float)
                or isinstance(number, bool)
                or not math.isfinite(number)
            ):
                raise ValueError(
                    f"({value}) has the coordinate {axis}={str(number)[:40]}, not a finite number"
                )
            numbers.append(float(number))
    return np.array(numbers, dtype=np.float64).reshape(-1, 2)
