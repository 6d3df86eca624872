"""The rows that each label file becomes, one for each photograph. A row is parsed into objects when
they are needed.

`label_file.py` says how a reader makes them.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yolo_seg_ddp.data.labels import LabelError
from yolo_seg_ddp.prepare.parsing.label_csv import MAX_OBJECTS, LabelRow
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject

DIGEST_BYTES = 16
NO_OBJECTS = ("_background_",)  # labels that LabelMe's own converters leave out
# letters of labels
NO_JUDGEMENT = ("ignore", "ignored", "ignoreregion", "ignoredregion", "ignoredregions", "dontcare")
NO_OBJECT = "label of the background"
UNUSED_SOURCE = "unused source"  # other labels of the photographs than those that are read
MAX_NAME_CHARACTERS = 4096  # of a photograph's name or path in a label file
# kinds of shapes; others as the files call them
POLYGON, POLYLINE, BOX, MASK = "polygon", "polyline", "box", "mask"
CROWD, IGNORED = "crowd", "region to ignore"
CLOSED = "closed polyline as an outline"
# objects by class, empty without one, and kind of shape, before any rule acts
ObjectCounts = Counter[tuple[str, str]]
Lost = Counter[tuple[str, str, str]]  # the same with the reason why no photograph has them
Parsed = tuple[list[ShapeObject], list[str]]  # objects, and messages about those that were left out


@dataclass(frozen=True)
class AnnotationRow:
    """The annotations of one photograph in a file.

    `names`: paths at which the photograph may lie, the likeliest first. `items`: parts of the file,
    JSON values or bytes, each of which `read_objects` turns into objects. With `file_digest` the
    whole file is the one item. It is read again when its objects are needed, because masks would
    fill the memory. `context`: text of all else that the objects depend on, such as the names of
    the categories. `counts`: for the account; the reader counts all objects when it reads the file
    first. `subset`: the name of a folder above the photograph. `place`: the path of a file whose
    name others have, too. `listed`: the classes that whoever labelled the photograph looked for.
    """

    names: tuple[str, ...]
    file: Path
    items: Sequence[Any]
    context: str
    read_objects: Callable[[Any], Parsed]
    counts: ObjectCounts = field(default_factory=Counter)
    subset: str = ""
    place: str = ""
    line: None = None
    file_digest: bytes = b""
    listed: frozenset[str] = frozenset()

    @property
    def image_name(self) -> str:
        return self.names[0]

    @property
    def file_name(self) -> str:
        return self.place or self.file.name

    @functools.cached_property
    def digest(self) -> str:
        texts = [
            item if isinstance(item, bytes) else json.dumps(item).encode() for item in self.items
        ]
        digests = [self.file_digest] if self.file_digest else [digest_of(text) for text in texts]
        parts = [self.context.encode("utf-8", "surrogatepass"), *digests]
        return hashlib.blake2b(b"\0json-1\0".join(parts), digest_size=DIGEST_BYTES).hexdigest()

    def parse(self) -> Parsed:
        """Return the objects and messages about objects that were left out. Raises LabelError."""
        items = self.items
        objects: list[ShapeObject] = []
        complaints: list[str] = []
        try:
            if self.file_digest:
                items = [self.file.read_bytes()]
                if digest_of(items[0]) != self.file_digest:
                    raise LabelError("the file has changed since this run began; start it again")
            for item in items:
                shapes, problems = self.read_objects(item)
                objects += shapes
                complaints += problems
                if len(objects) > MAX_OBJECTS:
                    raise LabelError(f"more than {MAX_OBJECTS:,} objects in one photograph")
        except OSError as error:
            raise LabelError(f"cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise LabelError(f"byte {error.start:,} is not UTF-8; export the file again") from error
        return _join_groups([shape.as_outline() for shape in objects]), complaints


def _join_groups(objects: list[ShapeObject]) -> list[ShapeObject]:
    """Return the objects, with polygons of one label and group as one object of several parts."""
    joined: dict[object, ShapeObject] = {}
    for number, shape in enumerate(objects):
        is_part = shape.group is not None and shape.parts and not shape.is_line
        key = (shape.value, shape.group) if is_part else number
        first = joined.get(key)
        if first is not None:
            parts, closed = first.parts + shape.parts, first.closed + shape.closed
            shape = dataclasses.replace(
                first,
                parts=parts,
                members=first.members + 1,
                closed=closed,
                is_box=first.is_box and shape.is_box,
            )
        joined[key] = shape
    return list(joined.values())


Row = LabelRow | AnnotationRow


def is_ignored(label: str) -> bool:
    """Return whether a label, such as LabelMe's `__ignore__`, is that of a region in which nobody
    says what is there.
    """
    return re.sub("[^a-z]", "", label.lower()) in NO_JUDGEMENT


def says_ignore(flags: Any) -> bool:
    """Return whether the flags of an object, a dictionary by name, make it a region to ignore."""
    return isinstance(flags, dict) and any(
        (is_ignored(name) or name.lower() == "difficult")
        and str(value).strip().lower() in ("1", "true", "yes")
        for name, value in flags.items()
    )


def lost_for(counts: ObjectCounts, reason: str) -> Lost:
    """Return objects with the reason why they are lost."""
    return Counter({(*key, reason): number for key, number in counts.items()})


def digest_of(data: bytes) -> bytes:
    """Return the digest of some bytes of a file."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def place_of(rows: Iterable[Row]) -> str:
    """Return the place of rows: `labels.csv:3,4`; without lines the name of the file."""
    rows = list(rows)
    names = ", ".join(dict.fromkeys(row.file_name for row in rows))
    lines = ",".join(str(row.line) for row in rows if row.line is not None)
    return f"{names}:{lines}" if lines else names
