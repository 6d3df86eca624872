"""Builds a script's dataclass of options from its command line and its YAML file.

The command line overrides `--config FILE`, which overrides the defaults. An unknown key is an error
that names the nearest known one, and Ultralytics' names are other spellings. An option without
effect beside the others is refused (`needs=`); in a file it only causes a printed line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from yolo_seg_ddp.utils.command_line import build_parser, lower_if_chosen
from yolo_seg_ddp.utils.contents import mapping, read_back
from yolo_seg_ddp.utils.errors import UsageError, UserError, print_warning
from yolo_seg_ddp.utils.option_names import FOLDER_PARTS, instead, known_name, nearest
from yolo_seg_ddp.utils.options import Kinds, T, fields_of, flag_of, folder_option, ignored, unpack
from yolo_seg_ddp.utils.text import without_secrets


def read_yaml(
    kinds: Kinds, path: Path, flag: str = "", including: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Read a file of options over those that it names as `include: [FILE, ...]`, relative to
    itself; later ones win.

    `kinds`: each option's field and annotation. Raises UsageError that names the file and the key.
    """
    try:
        loaded = read_back(
            path, lambda one: mapping({} if one is None else one), "correct the file", is_yaml=True
        )
    except OSError as error:
        raise UsageError(f"{flag}{path}: {error.strerror}") from error
    except UserError as error:
        raise UsageError(f"{flag}{error}") from error
    values: dict[str, Any] = {}
    included = loaded.pop("include", None) or []
    for file in included if isinstance(included, list) else [included]:
        other = path.parent / str(file)
        if other.resolve() in (*including, path.resolve()):
            raise UsageError(f"{flag}{path}: include: {file} includes this file in turn")
        values.update(read_yaml(kinds, other, flag, (*including, path.resolve())))
    pairs: list[tuple[Any, Any]] = []
    # a key that is no option and holds a mapping, such as `training:`, is a heading
    for key, value in loaded.items():
        is_heading = isinstance(value, dict) and str(key).replace("-", "_") not in kinds
        pairs += value.items() if is_heading else [(key, value)]
    for key, value in pairs:
        name = known_name(str(key).replace("-", "_"), kinds)
        if name not in kinds:
            raise UsageError(
                f"{flag}{path}: unknown key {key}"
                + (instead(name, kinds) or nearest(name, list(kinds)))
            )
        values[name] = _checked(f"{flag}{path}: {name}", value, *kinds[name])
    return values


def _checked(place: str, value: Any, field: dataclasses.Field[Any], kind: Any) -> Any:
    base, is_list, optional = unpack(kind)
    if value is None and optional:
        return None
    items = value if is_list and isinstance(value, list) else [value]
    converted = []
    for item in items:
        if isinstance(item, str):
            item = field.metadata["words"].get(
                item, lower_if_chosen(item, field.metadata["choices"] or ())
            )
        if (
            base is str
            and isinstance(item, bool)
            and {"on", "off"} & set(field.metadata["choices"] or ())
        ):
            # YAML 1.1 reads both words as booleans.
            item = "on" if item else "off"
        if base is float and isinstance(item, str):
            with contextlib.suppress(ValueError):
                # YAML 1.1 reads numbers such as 1e-3 as text.
                item = float(item)
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        fits = {
            bool: isinstance(item, bool),
            int: is_number and item == item // 1,
            float: is_number,
        }
        if not fits.get(base, isinstance(item, str | int | float) and not isinstance(item, bool)):
            shown = (
                repr(item)[:80]
                if item is None or isinstance(item, str | int | float)
                else f"a {type(item).__name__}"
            )
            raise UsageError(f"{place}: expected {base.__name__}, found {shown}")
        choices = field.metadata["choices"]
        if choices and base(item) not in choices:
            raise UsageError(f"{place}: {item!r} is not one of {', '.join(map(str, choices))}")
        converted.append(base(item))
    return tuple(converted) if is_list else converted[0]


def parse_config(
    config_class: type[T],
    description: str,
    argv: Sequence[str] | None = None,
) -> T:
    """Build `config_class` from the command line `argv` and the YAML file of its `--config`.

    `description`: one sentence, or a script's docstring, whose second paragraph is example
    commands; `--help` begins with them. Prints one line and exits with code 2 when a flag, key or
    value is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(config_class, description)
    given = vars(parser.parse_args(arguments))
    try:
        return _over_file(config_class, given)
    except UsageError as error:
        parser.error(str(error))


def config_of(config_class: type[T], arguments: Mapping[str, Any]) -> T:
    """Build `config_class` from arguments by their Python names; None is one that is not given.

    They act as on the command line, beside the file of `config`. Raises UsageError.
    """
    kinds = _kinds(config_class)
    given = {}
    try:
        for name, value in arguments.items():
            known = known_name(name, kinds)
            if known not in kinds:
                flag = flag_of(name)
                advice = instead(flag, kinds) or nearest(flag, list(map(flag_of, kinds)))
                raise UsageError(f"unknown argument {flag}={value}{advice}")
            if value is not None:
                given[known] = _checked(name, _plain(value), *kinds[known])
        return _over_file(config_class, given)
    except UsageError as error:
        raise UsageError(without_secrets(str(error))) from error


def _plain(value: Any) -> Any:
    """Return a value as a YAML file would hold it: paths as text, NumPy's numbers as numbers."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item() if hasattr(value, "item") else value


def _over_file(config_class: type[T], given: dict[str, Any]) -> T:
    """Build `config_class` from given options, which win over those of the file of `config`."""
    _join_folder(config_class, given)
    file = given.get("config")
    from_file = read_yaml(_kinds(config_class), Path(file), "--config ") if file else {}
    _join_folder(config_class, from_file)
    values = {**from_file, **given}
    _require(config_class, values)
    config = config_class(**values)
    if refused := list(ignored(config, given, "needs")):
        raise UsageError("; ".join(refused))
    _warn("", ignored(config, given, "wants"))
    # The file of a run that continues may hold what an `auto` became.
    if "resume" not in given:
        others = from_file.keys() - given.keys()
        _warn(f"--config {file}: ", ignored(config, others, "needs", "wants"))
    return config


def show_help(config_class: type, description: str) -> None:
    """Print the help and exit if nothing else is asked for; scripts call this before they import
    PyTorch, which takes long.
    """
    if sys.argv[1:] in (["-h"], ["--help"]):
        parse_config(config_class, description)


def read_config(config_class: type[T], path: Path) -> T:
    """Build `config_class` from a YAML file alone, for a script without flags.

    Raises UsageError that names file and key.
    """
    values = read_yaml(_kinds(config_class), path)
    try:
        _join_folder(config_class, values)
        _require(config_class, values)
        config = config_class(**values)
    # The message names the flag of the command line.
    except UsageError as error:
        flag, _, rest = str(error).partition(" ")
        raise UsageError(f"{path}: {flag.removeprefix('--').replace('-', '_')} {rest}") from error
    _warn(f"{path}: ", ignored(config, values, "needs", "wants"))
    return config


def _warn(place: str, lines: Iterable[str]) -> None:
    """Print lines about options that have no effect, on one of the ranks."""
    for line in lines:
        if os.environ.get("RANK", "0") == "0":
            print_warning(without_secrets(f"{place}{line}"))


def _join_folder(config_class: type, values: dict[str, Any]) -> None:
    """Replace `project` and `name` by the folder that they name.

    Raises UsageError if that option is given, too.
    """
    folder = folder_option(config_class)
    given = {part: values.pop(part) for part in FOLDER_PARTS if folder and part in values}
    if folder and given:
        if folder.name in values:
            raise UsageError(
                f"{flag_of(next(iter(given)))} and {flag_of(folder.name)} name the same folder: "
                "give one of them"
            )
        default = Path(str(folder.default))
        parent, name = given.get("project", default.parent), given.get("name", default.name)
        values[folder.name] = str(Path(parent, name))


def _kinds(config_class: type) -> Kinds:
    """Return the keys that a file of options may hold, with each option's field and annotation."""
    parts = (
        dict.fromkeys(FOLDER_PARTS, (folder, str))
        if (folder := folder_option(config_class))
        else {}
    )
    return parts | {field.name: (field, kind) for field, kind in fields_of(config_class)}


def _require(config_class: type, values: dict[str, Any]) -> None:
    """Raise UsageError for a missing option; convert lists to tuples in place."""
    for field, kind in fields_of(config_class):
        if field.metadata["required"] and field.name not in values:
            raise UsageError(f"{flag_of(field.name)} is required")
        if isinstance(values.get(field.name), list) and unpack(kind)[1]:
            values[field.name] = tuple(values[field.name])
