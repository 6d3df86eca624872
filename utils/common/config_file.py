"""Reads a YAML file of options: their names, their types, and the files that it includes."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.common.errors import UsageError, UserError
from utils.common.read_back import mapping, read_back
from utils.common.spellings import nearest, own_name

Kinds = Mapping[str, tuple[dataclasses.Field[Any], Any]]  # each option's field and annotation


def unpack(kind: Any) -> tuple[type, bool, bool]:
    """Split an annotation into (scalar type, is a list, may be None)."""
    optional = False
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        optional, kind = len(members) < len(typing.get_args(kind)), members[0]
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True, optional
    return kind, False, optional


def read_yaml(kinds: Kinds, path: Path, flag: str = "", including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file of options over those that it names as `include: [FILE, ...]`, relative to itself; later ones win.

    `kinds`: each option's field and annotation. Raises UsageError that names the file and the key.
    """
    loaded = _load_yaml(path, flag)
    values: dict[str, Any] = {}
    included = loaded.pop("include", None) or []
    for file in included if isinstance(included, list) else [included]:
        other = path.parent / str(file)
        if other.resolve() in (*including, path.resolve()):
            raise UsageError(f"{flag}{path}: include: {file} includes this file in turn")
        values.update(read_yaml(kinds, other, flag, (*including, path.resolve())))
    for key, value in _without_sections(loaded, kinds):
        name = own_name(str(key).replace("-", "_"), kinds)
        if name not in kinds:
            raise UsageError(f"{flag}{path}: unknown key {key}{nearest(name, list(kinds))}")
        values[name] = _checked(f"{flag}{path}", name, value, *kinds[name])
    return values


def _without_sections(loaded: dict[Any, Any], kinds: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield keys and values. A key that is no option and holds a mapping, such as `training:`, is a heading; its keys are yielded."""
    for key, value in loaded.items():
        is_heading = isinstance(value, dict) and str(key).replace("-", "_") not in kinds
        yield from value.items() if is_heading else [(key, value)]


def _load_yaml(path: Path, flag: str) -> dict[Any, Any]:
    try:
        return read_back(path, lambda found: mapping({} if found is None else found), "correct the file", is_yaml=True)
    except OSError as error:
        raise UsageError(f"{flag}{path}: {error.strerror}") from error
    except UserError as error:
        raise UsageError(f"{flag}{error}") from error


def _checked(place: str, name: str, value: Any, field: dataclasses.Field[Any], kind: Any) -> Any:
    base, is_list, optional = unpack(kind)
    if value is None and optional:
        return None
    items = value if is_list and isinstance(value, list) else [value]
    converted = []
    for item in items:
        if isinstance(item, str):
            item = field.metadata["words"].get(item, lower_if_chosen(item, field.metadata["choices"] or ()))
        if base is str and isinstance(item, bool) and {"on", "off"} & set(field.metadata["choices"] or ()):
            item = "on" if item else "off"  # YAML 1.1 reads both words as booleans
        if base is float and isinstance(item, str):
            item = _number_or_text(item)
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        fits = {bool: isinstance(item, bool), int: is_number and item == item // 1, float: is_number}
        if not fits.get(base, isinstance(item, str | int | float) and not isinstance(item, bool)):
            shown = (
                repr(item)[:80] if item is None or isinstance(item, str | int | float) else f"a {type(item).__name__}"
            )
            raise UsageError(f"{place}: {name}: expected {base.__name__}, found {shown}")
        choices = field.metadata["choices"]
        if choices and base(item) not in choices:
            raise UsageError(f"{place}: {name}: {item!r} is not one of {', '.join(map(str, choices))}")
        converted.append(base(item))
    return tuple(converted) if is_list else converted[0]


def lower_if_chosen(text: str, choices: Sequence[Any]) -> str:
    """Return `text` in lower case if that, and not `text` itself, is one of the choices."""
    return text.lower() if text not in choices and text.lower() in choices else text


def _number_or_text(text: str) -> float | str:
    """Read numbers that YAML 1.1 reads as text, such as 1e-3."""
    try:
        return float(text)
    except ValueError:
        return text
