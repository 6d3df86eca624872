"""Finds and reads the list of class names near a label file that holds only numbers or colours."""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from utils.common.errors import UserError, printable
from utils.common.files import read_text
from utils.data.dataset_yaml import load_dataset_yaml

MAX_LIST_BYTES = 1_000_000
YOLO_LISTS = ("*.yaml", "*.yml", "classes.txt", "obj.names", "_darknet.labels")
COLOUR_LIST = "labelmap.txt"
VALUE_LIST = "obj_class_to_machine_color.json"  # Supervisely's
MASK_LISTS = (COLOUR_LIST, VALUE_LIST, "class_names.txt", "classes.txt", "labels.txt")
COLOUR = 1 << 24  # added to colours of 24 bits, so that none equals an index of a palette
_NAMES_KEY = re.compile(r"^(names|nc)\s*:", re.MULTILINE)
_COLOUR_LINE = re.compile(r"^(.+?):(\d{1,3}),(\d{1,3}),(\d{1,3})(:.*)?$")


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


def read_values(file: Path) -> dict[int, str]:
    """Return the class names by their values in masks.

    A value is a colour (COLOUR plus 24 bits) in CVAT's labelmap.txt (`wire:250,50,83::`), else a number: in LabelMe's
    class_names.txt, and in its labels.txt, which begins with `__ignore__` for -1. Supervisely writes `{"wire": 1}` or
    `{"wire": [1, 1, 1]}`. Raises UserError.
    """
    if file.name == VALUE_LIST:
        try:
            items = json.loads(read_text(file)).items()
            values = {name: [value] * 3 if isinstance(value, int) else [*map(int, value)] for name, value in items}
            return {
                r if r == g == b else COLOUR | r << 16 | g << 8 | b: printable(name)
                for name, (r, g, b) in values.items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f'{file}: not Supervisely\'s list of values, such as {{"wire": 1}}; export it again'
            ) from error
    if file.name != COLOUR_LIST:
        names = read_names(file)
        return dict(enumerate(names[1:] if names[0] == "__ignore__" else names))
    found = {}
    for line in read_text(file).splitlines():
        if match := _COLOUR_LINE.match(line.strip()):
            red, green, blue = (int(match[position]) for position in (2, 3, 4))
            found[COLOUR | red << 16 | green << 8 | blue] = printable(match[1].strip())
    if not found:
        raise UserError(f"{file}: names no class; write lines such as wire:250,50,83::")
    return found
