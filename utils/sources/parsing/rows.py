"""What an annotation file says about one photograph, read back from its place in the file when it is needed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from utils.data.labels import LabelError
from utils.sources.parsing.label_csv import MAX_OBJECTS, LabelRow
from utils.sources.parsing.shapes import ShapeObject

DIGEST_BYTES = 16
Span = tuple[int, int, bytes]  # first byte in the file, the one after the last, and the digest of the bytes between
# Turns one value of the file into objects and messages about those left out.
ToObjects = Callable[[Any], tuple[list[ShapeObject], list[str]]]


@dataclass(frozen=True)
class AnnotationRow:
    """One photograph's values in a JSON file. Only their places are in memory.

    `names` are the paths under which the photograph may be found, the likeliest first. `context` is what else the objects depend on, such as the names of the categories, as text.
    """

    names: tuple[str, ...]
    file: Path
    spans: Iterable[Span]
    context: str
    to_objects: ToObjects
    line: None = None

    @property
    def image_name(self) -> str:
        return self.names[0]

    @property
    def file_name(self) -> str:
        return self.file.name

    @property
    def digest(self) -> str:
        parts = [self.context.encode("utf-8", "surrogatepass"), *(digest for _, _, digest in self.spans)]
        return hashlib.blake2b(b"\0json-1\0".join(parts), digest_size=DIGEST_BYTES).hexdigest()

    def parse(self) -> tuple[list[ShapeObject], list[str]]:
        """Return the objects and messages about objects that were left out. Raises LabelError."""
        objects: list[ShapeObject] = []
        complaints: list[str] = []
        try:
            with self.file.open("rb") as file:
                for start, end, digest in self.spans:
                    file.seek(start)
                    data = file.read(end - start)
                    if digest_of(data) != digest:
                        raise LabelError("the file has changed since this run began; start it again")
                    found, problems = self.to_objects(json.loads(data))
                    objects += found
                    complaints += problems
                    if len(objects) > MAX_OBJECTS:
                        raise LabelError(f"more than {MAX_OBJECTS:,} objects in one photograph")
        except OSError as error:
            raise LabelError(f"cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise LabelError(f"byte {start + error.start:,} is not UTF-8; export the file again") from error
        return objects, complaints


Row = LabelRow | AnnotationRow


def digest_of(data: bytes) -> bytes:
    """Return the digest of some bytes of a file."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def place_of(rows: Iterable[Row]) -> str:
    """Return where rows stand: `labels.csv:3,4`, or the name of a JSON file, which often is one line."""
    rows = list(rows)
    names = ", ".join(dict.fromkeys(row.file_name for row in rows))
    lines = ",".join(str(row.line) for row in rows if row.line is not None)
    return f"{names}:{lines}" if lines else names
