"""Reads YOLO's label texts, one for each photograph, in the folders of Roboflow, Ultralytics,
LabelImg and CVAT.
"""

import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, Self

import numpy as np

from yolo_seg_ddp.data.dataset_yaml import IMAGE_SUFFIXES, load_dataset_yaml
from yolo_seg_ddp.data.labels import (
    ANY_CLASS,
    BOX_FIELDS,
    IGNORE_FOLDER,
    MAX_LABEL_FILE_BYTES,
    LabelError,
    parse_yolo_row,
)
from yolo_seg_ddp.prepare.parsing.label_csv import Problem
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject
from yolo_seg_ddp.prepare.parsing.rows import (
    BOX,
    IGNORED,
    NO_OBJECTS,
    POLYGON,
    AnnotationRow,
    Parsed,
    digest_of,
)
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.files import read_text
from yolo_seg_ddp.utils.text import counted

BACKGROUNDS = (*NO_OBJECTS, "background", "bg", "void", "unlabeled", "unlabelled")  # of class lists
ONLY_CLASS = "object"  # of labels that name no class
MAX_LIST_BYTES = 1_000_000
YOLO_LISTS = ("*.yaml", "*.yml", "classes.txt", "obj.names", "_darknet.labels")
_NAMES_KEY = re.compile(r"^(names|nc)\s*:", re.MULTILINE)


def is_background(name: str) -> bool:
    """Return whether a class list's name stands for what belongs to no object."""
    return name.lower() in BACKGROUNDS


def find_list(file: Path, patterns: Sequence[str], top: Path) -> Path | None:
    """Return the class list nearest to a file, in its folder or those above it up to `top`; the
    first pattern wins in a folder.

    Links are ignored: their content would be shown as class names. A YAML file counts if it has
    `names` or `nc`.
    """
    for folder in file.parents:
        class_list = _lists_in(folder, tuple(patterns), folder.stat().st_mtime_ns)
        if class_list or folder == top:
            return class_list
    return None


@functools.lru_cache(4096)  # a folder may hold 30,000 label files
def _lists_in(folder: Path, patterns: tuple[str, ...], stamp: int) -> Path | None:
    for file in (file for pattern in patterns for file in sorted(folder.glob(pattern))):
        is_small = (
            file.is_file() and not file.is_symlink() and file.stat().st_size <= MAX_LIST_BYTES
        )
        if is_small and (
            file.suffix not in (".yaml", ".yml") or _NAMES_KEY.search(read_text(file))
        ):
            return file
    return None


def read_names(file: Path) -> list[str]:
    """Return the class names of a data-set YAML, or of a text with one a line, by number.

    Raises UserError.
    """
    status = file.stat()
    return list(_read_names(file, status.st_mtime_ns, status.st_size))


@functools.lru_cache(64)
def _read_names(file: Path, stamp: int, size_bytes: int) -> tuple[str, ...]:
    if file.suffix in (".yaml", ".yml"):
        return load_dataset_yaml(file).names
    lines = [line.strip() for line in read_text(file).rstrip().splitlines()]
    if not lines or not all(lines):
        raise UserError(
            f"{file}: line {[*lines, ''].index('') + 1} is empty; write the name of one class in "
            "each line"
        )
    return tuple(map(printable, lines))


SHARES = (1.0, 1.0)  # coordinates are shares of the photograph's sides
HEAD_BYTES = 4096
# texts and lines, and the share of lines, that tell key points
MAX_COMPARED, MIN_LINES, MOST_LINES = 1000, 5, 0.95
_NUMBERS = re.compile(rb"\s*\d+(\.0*)?([ \t]+[-+.\deE]+){4,}[ \t]*(\r?\n|$)")


class YoloFile(LabelFile):
    """The labels of one photograph. A text that is no label file and has no photograph, such as a
    README, has no rows.

    The list of the classes lies in the text's folder or one above it, up to `folder`. Raises
    UserError without a list.
    """

    format = "yolo"
    title = "YOLO labels"
    has_lines = False
    patterns = ("**/*.txt",)
    how_to_export = (
        "put data.yaml beside the folders train and valid, each with images/ and labels/"
    )
    names_are_relative = missing_is_empty = takes_folder = True

    def __init__(self, path: Path, problems: list[Problem], folder: Path) -> None:
        super().__init__(path, problems)
        photographs, regions_of = photographs_for(path), photographs_for(path, IGNORE_FOLDER)
        # not beside it
        is_region = _has_photograph(path.parent, regions_of[: -len(IMAGE_SUFFIXES)])
        photographs = regions_of if is_region else photographs
        try:
            if path.stat().st_size > MAX_LABEL_FILE_BYTES:
                raise UserError(
                    f"larger than {MAX_LABEL_FILE_BYTES // 1_000_000} MB, not a label file"
                )
            if not looks_like_labels(path) and not _has_photograph(path.parent, photographs):
                self.is_other = True
                return
            lines = [line.split() for line in read_text(path).splitlines()]
            data = path.read_bytes()
        except (UserError, OSError) as error:
            self.rows = [AnnotationRow(photographs, path, [b""], "", partial(_refuse, str(error)))]
            return
        self.class_list = find_list(path, YOLO_LISTS, folder)
        if self.class_list is None:
            raise UserError(
                f"{path}: YOLO's labels, but no data.yaml, classes.txt or obj.names near it names "
                "the classes; "
                "write classes.txt with one name a line"
            )
        self.names = read_names(self.class_list)
        self.named_by = self.class_list.name
        self.numbers = {fields[0].partition(".")[0] for fields in lines if fields and not is_region}
        self.lengths = {
            len(fields) for fields in lines if len(fields) > BOX_FIELDS and not is_region
        }
        rows = [
            (
                _class_of(fields, self.names),
                IGNORED if is_region else BOX if len(fields) == BOX_FIELDS else POLYGON,
            )
            for fields in lines
            if fields and not (is_region and fields[0] == str(ANY_CLASS))
        ]
        objects = partial(_objects, tuple(self.names), is_region)
        context = "\n".join([*self.names, IGNORE_FOLDER] if is_region else self.names)
        digest = digest_of(data)
        self.rows = [
            AnnotationRow(
                photographs, path, (), context, objects, Counter(rows), file_digest=digest
            )
        ]

    @classmethod
    def is_of_format(cls, file: Path) -> bool:
        return file.suffix.lower() == ".txt" and looks_like_labels(file)

    @classmethod
    def agree(cls, read: Sequence[Self]) -> None:
        """Raises UserError if all texts of a class list together count the classes from 1, or hold
        key points.
        """
        texts_of = defaultdict[Path | None, list[Self]](list)
        for labels in read:
            texts_of[labels.class_list].append(labels)
        for file, texts in ((file, texts) for file, texts in texts_of.items() if file):
            numbers, last = (
                set[str]().union(*(labels.numbers for labels in texts)),
                len(texts[0].names),
            )
            if str(last) in numbers and "0" not in numbers:
                raise UserError(
                    f"{file}: names {counted(last, 'class')}, the first with the number 0, but "
                    "the labels count from 1 to "
                    f"{last}: subtract 1 from the first number of each line of the labels"
                )
            lengths = set[int]().union(*(labels.lengths for labels in texts))
            if len(lengths) == 1 and _are_key_points(
                [labels.path for labels in texts[:MAX_COMPARED]], *lengths
            ):
                raise UserError(
                    f"{texts[0].path}: its lines hold a box and then key points, or other points "
                    "inside of the box, as all "
                    "labels here: these are no outlines; export polygons, or the boxes alone"
                )

    def origin_of(self, name: str) -> str:
        return f"{self.named_by}: {[*self.names].index(name)}"


def _are_key_points(files: Sequence[Path], length: int) -> bool:
    """Return whether the first four numbers of nearly all lines are a box around the points that
    follow.

    Points have two numbers or three, of which the last is 0, 1 or 2; a point at 0, 0 is not shown.
    Outlines may lie in such boxes, too. But their second corner, which would be the width and the
    height, is near the others, and they hardly fill the box.
    """
    lines = [line.split() for file in files for line in read_text(file).splitlines()]
    try:
        values = np.array([fields[1:] for fields in lines if len(fields) == length], np.float64)
    except ValueError:  # said line by line
        return False
    centre, sides = values[:, None, :2], values[:, None, 2:4]
    for size in (2, 3):
        num_points, rest = divmod(length - BOX_FIELDS, size)
        if rest or num_points < 2 or len(values) < MIN_LINES:
            continue
        points = values[:, 4:].reshape(len(values), -1, size)
        places = points[..., :2]
        places = np.where(places.any(axis=2, keepdims=True), places, centre)
        is_inside = (np.abs(places - centre) <= 0.55 * sides + 0.01).all(axis=(1, 2))
        low, high = places.min(axis=1), places.max(axis=1)
        fills = (3 * (high - low) >= sides[:, 0]).all(axis=1)
        reach = np.maximum(high, centre[:, 0]) - np.minimum(low, centre[:, 0])
        is_near = (np.abs(sides[:, 0] - (low + high) / 2) <= 1.5 * reach).all(axis=1)
        if (is_inside & (fills | ~is_near)).mean() >= MOST_LINES and np.isin(
            points[..., 2:], (0, 1, 2)
        ).all():
            return True
    return False


def _class_of(fields: Sequence[str], names: Sequence[str]) -> str:
    """Return the class of a line; empty if its number is none."""
    number = fields[0].partition(".")[0]
    return names[int(number)] if number.isdecimal() and int(number) < len(names) else ""


def _refuse(reason: str, _: bytes) -> NoReturn:
    raise LabelError(reason)  # else the photograph would count as one without objects


def looks_like_labels(path: Path) -> bool:
    """Return whether a text begins with a whole number and four or more other numbers."""
    with path.open("rb") as file:
        return (
            _NUMBERS.match(file.read(HEAD_BYTES).partition(b"\n")[0][:HEAD_BYTES] + b"\n")
            is not None
        )


def photographs_for(path: Path, name: str = "labels") -> tuple[str, ...]:
    """Return possible paths of a text's photograph, relative to the text: in `images` instead of
    `name`, or beside it.
    """
    parts = list(path.parent.parts)
    folders = ["."]
    if name in parts:
        last = len(parts) - 1 - parts[::-1].index(name)
        folders.insert(
            0, os.path.relpath(Path(*parts[:last], "images", *parts[last + 1 :]), path.parent)
        )
    return tuple(f"{folder}/{path.stem}{suffix}" for folder in folders for suffix in IMAGE_SUFFIXES)


def _has_photograph(folder: Path, names: tuple[str, ...]) -> bool:
    spellings = (
        spelling
        for name in names
        for spelling in (name, str(Path(name).with_suffix(Path(name).suffix.upper())))
    )
    return any((folder / spelling).is_file() for spelling in spellings)


def _objects(names: tuple[str, ...], is_region: bool, data: bytes) -> Parsed:
    """Return the objects, or regions to ignore, of one label text, and messages about what was left
    out.
    """
    objects, complaints = [], []
    for number, line in enumerate(data.decode("utf-8-sig").splitlines(), start=1):
        if fields := line.split():
            try:
                class_id, polygon = parse_yolo_row(
                    fields, len(names), ANY_CLASS if is_region else 0
                )
                points, label = (
                    (polygon.astype(np.float64),),
                    "" if class_id == ANY_CLASS else names[class_id],
                )
                objects.append(
                    ShapeObject(
                        label,
                        f"line {number}",
                        SHARES,
                        None,
                        points,
                        is_region=is_region,
                        is_box=len(fields) == BOX_FIELDS,
                    )
                )
            except ValueError as error:
                if label := _class_of(fields, names):
                    objects.append(ShapeObject(label, f"line {number}", error=str(error)))
                else:
                    complaints.append(f"line {number}: {error}")
    return objects, complaints
