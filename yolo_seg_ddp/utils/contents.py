"""The content of JSON and YAML files of strangers, read within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from yolo_seg_ddp.utils.errors import UserError, one_line, printable
from yolo_seg_ddp.utils.files import MAX_READ_BYTES, read_text

T = TypeVar("T")
MAX_YAML_CHARACTERS = 10_000_000  # PyYAML reads some 300,000 a second
MAX_DEPTH = 100
# Of YAML: aliases of aliases can then repeat a value 1,600 times; without a bound they fill the
# memory.
MAX_ALIASES = 20
# What PyYAML raises (a KeyError for `!!bool x`), and what reading a content of another form raises.
BAD_CONTENT = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def read_back(
    path: Path,
    build: Callable[[Any], T],
    cure: str,
    *,
    is_yaml: bool = False,
    most_bytes: int = MAX_READ_BYTES,
) -> T:
    """Return what `build` makes of the content of a JSON or YAML file; it may raise one of
    BAD_CONTENT.

    Raises UserError with the file, the problem and the cure; OSError for a file that cannot be
    opened.
    """
    text = read_text(path, most_bytes)
    try:
        return build(parse_yaml(text) if is_yaml else parse_json(text))
    except BAD_CONTENT as error:
        what_to_do = f"; {cure}" if cure else ""
        raise UserError(
            f"{printable(str(path), 400)}: {reason_of_content(error)}{what_to_do}"
        ) from error


def read_mapping(file: Path) -> dict[str, Any]:
    """Return a JSON file's mapping; an empty dictionary for any other file."""
    try:
        return read_back(file, mapping, "")
    except (OSError, UserError):
        return {}


def reason_of_content(error: BaseException) -> str:
    """Return in one line what is wrong with a content, from one of BAD_CONTENT."""
    return f"lacks {one_line(error)}" if isinstance(error, KeyError) else one_line(error, 400)


def mapping(content: Any) -> dict[Any, Any]:
    """Return a content that is a mapping. Raises TypeError for another."""
    if not isinstance(content, dict):
        raise TypeError(f"expected `key: value` lines, found a {type(content).__name__}")
    return content


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text.

    Raises ValueError for another text, and if it is nested too deeply.
    """
    try:
        return shallow(json.loads(text))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"not valid JSON: {reason}") from error


def shallow(content: Any) -> Any:
    """Return a content of at most MAX_DEPTH levels of lists and mappings: deeper ones end what
    walks through them.
    """
    level = [content] if isinstance(content, dict | list) else []
    for _ in range(MAX_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
    if level:
        raise RecursionError("nested too deeply")
    return content


def parse_yaml(text: str) -> Any:
    """Return the content of a YAML text as `yaml.safe_load` does.

    Raises ValueError for another text and beyond the bounds.
    """
    if len(text) > MAX_YAML_CHARACTERS:
        raise ValueError(f"larger than {MAX_YAML_CHARACTERS // 10**6} MB")
    try:
        return _BoundedLoader(text).get_single_data()
    except BAD_CONTENT as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(error, 400)
        raise ValueError(f"not valid YAML: {reason}") from error


class _BoundedLoader(yaml.SafeLoader):
    _depth = _num_aliases = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._num_aliases += self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH or self._num_aliases > MAX_ALIASES:
            raise ValueError(f"nested too deeply, or more than {MAX_ALIASES} aliases")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node
