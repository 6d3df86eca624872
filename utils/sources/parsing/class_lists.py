"""Finds and reads the list of class names near a label file that holds only their numbers."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path

from utils.common.errors import UserError, printable
from utils.common.files import read_text
from utils.data.dataset_yaml import load_dataset_yaml
from utils.sources.parsing.rows import NO_OBJECTS

BACKGROUNDS = (*NO_OBJECTS, "background", "bg", "void", "unlabeled", "unlabelled")  # of class lists
ONLY_CLASS = "object"  # of labels that name no class
MAX_LIST_BYTES = 1_000_000
YOLO_LISTS = ("*.yaml", "*.yml", "classes.txt", "obj.names", "_darknet.labels")
_NAMES_KEY = re.compile(r"^(names|nc)\s*:", re.MULTILINE)


def is_background(name: str) -> bool:
    """Return whether a class list's name stands for what belongs to no object."""
    return name.lower() in BACKGROUNDS


def find_list(file: Path, patterns: Sequence[str], top: Path) -> Path | None:
    """Return the class list nearest to a file, in its folder or those above it up to `top`; the first pattern wins in a folder.

    Links are ignored: their content would be shown as class names. A YAML file counts if it has `names` or `nc`.
    """
    for folder in file.parents:
        found = _lists_in(folder, tuple(patterns), folder.stat().st_mtime_ns)
        if found or folder == top:
            return found
    return None


@functools.lru_cache(4096)  # a folder may hold 30,000 label files
def _lists_in(folder: Path, patterns: tuple[str, ...], stamp: int) -> Path | None:
    for file in (file for pattern in patterns for file in sorted(folder.glob(pattern))):
        is_small = file.is_file() and not file.is_symlink() and file.stat().st_size <= MAX_LIST_BYTES
        if is_small and (file.suffix not in (".yaml", ".yml") or _NAMES_KEY.search(read_text(file))):
            return file
    return None


def read_names(file: Path) -> list[str]:
    """Return the class names of a data-set YAML, or of a text with one a line, by number. Raises UserError."""
    facts = file.stat()
    return list(_read_names(file, facts.st_mtime_ns, facts.st_size))


@functools.lru_cache(64)
def _read_names(file: Path, stamp: int, size_bytes: int) -> tuple[str, ...]:
    if file.suffix in (".yaml", ".yml"):
        return load_dataset_yaml(file).names
    lines = [line.strip() for line in read_text(file).rstrip().splitlines()]
    if not lines or not all(lines):
        raise UserError(f"{file}: line {[*lines, ''].index('') + 1} is empty; write the name of one class in each line")
    return tuple(map(printable, lines))
