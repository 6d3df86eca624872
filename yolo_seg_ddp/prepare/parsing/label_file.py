"""What a reader of label files is. `formats.py` lists the core's own; those of other tools are in
`yolo_seg_ddp/extras/labels`.

How to add a format: write one file with a subclass of `LabelFile`, for example
`yolo_seg_ddp/extras/labels/rsml.py`, and add the class to `READERS` in
`yolo_seg_ddp/extras/labels/__init__.py`. `--format`, the recognition of a folder and messages
follow from the class; `MISSING_EXTRA` in `foreign.py` and docs/labels.md list the formats.
"""

import functools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, Problem
from yolo_seg_ddp.prepare.parsing.rows import AnnotationRow, Lost, ObjectCounts, lost_for
from yolo_seg_ddp.utils.contents import read_back
from yolo_seg_ddp.utils.errors import UserError, printable

HEAD_BYTES = 65_536
MAX_LABEL_BYTES = 1_500_000_000  # of a file with the labels of many photographs; LVIS has 1.2 GB
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
_ELEMENT = re.compile(rb"<([A-Za-z_][\w.:-]*)")


class LabelFile:
    """A label file of an annotation tool. Construction reads it once and adds what cannot be used
    to `problems`.

    It fills `names`, the classes in the order of their numbers in the data set, and `rows`, one for
    each labelled photograph in the order of the file. A row keeps what the file says of the
    photograph's objects, and a function that turns it into objects. It names its photograph; the
    name is compared with the photographs that are there, never opened. What cannot be used becomes
    a problem (`complain`, `lose`), and the rest is read. A file of another format raises UserError,
    unless each photograph has its own file.

    `is_of_format`, or `is_json_of_format` for files called .json, says which files are of the
    format. UserError and OSError mean no.
    """

    format: str  # the value of `--format`
    title: str  # of the format in the report
    patterns: tuple[str, ...]  # the files are those that match the first pattern with any match
    how_to_export: str

    # Where the names of the classes stand, and the file that names them if another one does.
    named_by = "label"
    class_list: Path | None = None

    # There may be more than one file, and a photograph may have several of them.
    several_files = True
    several_files_a_photograph = False

    # The files are pictures. They are never taken for photographs, and count after all other
    # formats of a folder.
    are_pictures = False

    # Some objects are lines, so that `--line-width` acts.
    has_lines = True

    # Names of photographs are relative to the label file's folder.
    names_are_relative = False

    # The files list only the classes in use.
    lists_used_classes = False

    # The file itself says the `subset` of a row. Else the name of the file does, which is less
    # reliable.
    names_subsets = False

    # A photograph without a label file has no objects, if other photographs of its folder have
    # label files.
    missing_is_empty = False

    # The reader is given the input folder, too, to look there for a list of the classes.
    takes_folder = False

    # Nothing of this file can be used; it is not taken for a photograph either.
    is_damaged = False

    # The file is of another kind, and was not read.
    is_other = False

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.path, self.problems = path, problems
        self.place = ""  # the path below the input folder, if other files have the same name
        self.names: Collection[str] = ()
        self.rows: list[AnnotationRow] = []
        self.lost: Lost = Counter()  # objects that no row has

    @classmethod
    def is_of_format(cls, file: Path) -> bool:
        """Return whether a file that is not called .json is of this format."""
        return False

    @classmethod
    def is_json_of_format(cls, key: str | None, value: Any) -> bool:
        """Return whether JSON is of this format by a key of its object and the value.

        The key is None if the file is a list; the value is then its first item, a dictionary.
        """
        return False

    def origin_of(self, name: str) -> str:
        """Return where the name of a class stands."""
        return self.named_by

    def lose(self, counts: ObjectCounts, reason: str) -> None:
        """Count objects that no row has."""
        self.lost += lost_for(counts, reason)

    @classmethod
    def agree(cls, read: Sequence[Self]) -> None:
        """Decide from all files of a folder what one file alone does not tell."""

    @classmethod
    def one_source(
        cls, read: Sequence[Self], rows: dict[str, tuple[Any, ...]], problems: list[Problem]
    ) -> None:
        """Keep one of several files that each hold all labels of a photograph; `rows` are those of
        each photograph.
        """

    def complain(self, text: str, kind: str = UNREADABLE_ROW) -> None:
        """Add something that cannot be used to the problems."""
        self.problems.append(Problem(printable(self.path.name, 400), text, kind))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; change nothing in it. Raises UserError."""
    try:
        return _read_json(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


@functools.lru_cache(1)  # a file is read to recognise its format, and then for its labels
def _read_json(path: Path, _: int) -> Any:
    return read_back(
        path, lambda content: content, "export the file again", most_bytes=MAX_LABEL_BYTES
    )


def first_element(file: Path) -> str:
    """Return the name of an XML file's first element; empty if there is none near its beginning."""
    with file.open("rb") as stream:
        match = _ELEMENT.search(_COMMENT.sub(b"", stream.read(HEAD_BYTES)))
    return match[1].decode("ascii", "replace") if match else ""
