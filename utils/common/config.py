"""Builds a script's command line and reads its YAML file from one frozen dataclass of options.

The command line overrides `--config FILE`, which overrides the defaults. An unknown key is an error that names the
nearest known one. An option that can do nothing beside the others is refused (`needs=`); from a file it is one printed line.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from utils.common.errors import EXIT_USAGE, UsageError, UserError, print_warning
from utils.common.files import read_text

T = TypeVar("T")
FRACTION: dict[str, Any] = {"at_least": 0, "at_most": 1}  # bounds of a share or a probability
INPUT_SIZE: dict[str, Any] = {"at_least": 64, "multiple_of": 32}  # bounds of the network input's side in pixels


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    metavar: str | None = None,
    required: bool = False,
    words: Mapping[str, Any] | None = None,
    may_differ: bool = False,
    needs: str | tuple[str, ...] = (),
    wants: str | tuple[str, ...] = (),
    **bounds: float,
) -> Any:
    """Declare one option of an `Options` dataclass; the field's annotation gives its type.

    `bool` becomes `--name/--no-name`, `tuple[X, ...]` takes one or more values, `X | None` may be left unset. `words`
    maps words to values, such as `auto` to 0. `bounds` are any of `at_least`, `at_most`, `above`, `below` and
    `multiple_of`; they apply to each number of a tuple. `may_differ`: a resumed run may change this option.

    `needs`: conditions on the other options, all of which must hold for this one to act: `windows` (neither 0, empty nor
    unset), `tiles=off`, `not sample`, `not tiles=off`, or several of these joined by ` or `. Where one does not hold, the
    option is refused; with `wants` instead of `needs`, one line says that it has no effect. With `x or x=VALUE` an
    option may have the value that asks for nothing. The default always may stand.
    """
    facts = {"help": help, "choices": choices, "metavar": metavar, "required": required, "words": words or {}}
    conditions = {
        kind: (given,) if isinstance(given, str) else given for kind, given in (("needs", needs), ("wants", wants))
    }
    return dataclasses.field(
        default=default, metadata={**facts, **conditions, "may_differ": may_differ, "bounds": bounds}
    )


_BOUNDS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "multiple_of": ("a multiple of", lambda value, bound: value % bound == 0),
    "at_least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


@dataclass(frozen=True)
class Options:
    """Base of a script's options. Raises UsageError when a value is outside the bounds of its `option`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, bounds = getattr(self, field.name), field.metadata["bounds"]
            for number in value if isinstance(value, tuple | list) else [value]:
                if number is not None and not all(_BOUNDS[kind][1](number, bound) for kind, bound in bounds.items()):
                    rule = " and ".join(
                        f"{text} {bounds[kind]:g}" for kind, (text, _) in _BOUNDS.items() if kind in bounds
                    )
                    raise UsageError(f"{_flag(field.name)} {number}: must be {rule}{_example(number, bounds)}")


def _example(number: float, bounds: Mapping[str, float]) -> str:
    step = bounds.get("multiple_of")
    return f", such as {max(bounds.get('at_least', step), round(number / step) * step)}" if step else ""


def parse_config(config_class: type[T], description: str, argv: Sequence[str] | None = None) -> T:
    """Build `config_class` from the command line `argv` and the YAML file of its `--config`.

    Prints one line and exits with code 2 when a flag, key or value is wrong.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser(config_class, description)
    given = vars(parser.parse_args(arguments))
    try:
        config_file = given.get("config")
        from_file = _read_yaml(config_class, Path(config_file), "--config ") if config_file else {}
        values = {**from_file, **given}
        _require(config_class, values)
        config = config_class(**values)
        if refused := list(ignored(config, given, "needs")):
            raise UsageError("; ".join(refused))
        _warn("", ignored(config, given, "wants"))
        if "resume" not in given:  # a run's own file may hold what an `auto` became
            _warn(f"--config {config_file}: ", ignored(config, from_file.keys() - given.keys(), "needs", "wants"))
        return config
    except UsageError as error:
        parser.error(str(error))


def read_config(config_class: type[T], path: Path) -> T:
    """Build `config_class` from a YAML file alone, for a script without flags. Raises UsageError that names file and key."""
    values = _read_yaml(config_class, path)
    try:
        _require(config_class, values)
        config = config_class(**values)
    except UsageError as error:  # it names the flag of the command line
        flag, _, rest = str(error).partition(" ")
        raise UsageError(f"{path}: {flag.removeprefix('--').replace('-', '_')} {rest}") from error
    _warn(f"{path}: ", ignored(config, values, "needs", "wants"))
    return config


def ignored(config: Any, names: Collection[str], *kinds: str) -> Iterator[str]:
    """Yield a line for each of the named options that has another value than by default and cannot act.

    `kinds`: `needs`, `wants` or both.
    """
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            conditions = [condition for kind in kinds for condition in field.metadata[kind]]
            failing = [condition for condition in conditions if not _holds(config, condition)]
            if failing:
                yield f"{_flag(field.name)} has no effect {_reason(config, field.name, failing[0])}"


def _holds(config: Any, condition: str) -> bool:
    return any(_is_true(config, term) for term in condition.split(" or "))


def _is_true(config: Any, term: str) -> bool:
    name, _, wanted = term.removeprefix("not ").partition("=")
    value = getattr(config, name)
    return (_shown(value) == wanted if wanted else bool(value)) != term.startswith("not ")


def _reason(config: Any, option_name: str, condition: str) -> str:
    """Return why no term of a condition holds, in flags: `without --windows`, `with --no-ema`, `with --tiles off`."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    reasons = []
    for term in condition.split(" or "):
        name, _, wanted = term.removeprefix("not ").partition("=")
        value = getattr(config, name)
        if name == option_name:
            continue
        if value == defaults[name] and not term.startswith("not "):
            reasons.append(f"without {_flag(name)} {wanted}")
        elif value is False:
            reasons.append(f"with {_flag('no_' + name)}")
        else:
            reasons.append(f"with {_flag(name)} {wanted if term.startswith('not ') else _shown(value)}")
    return " and ".join(reason.strip() for reason in reasons)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _warn(place: str, lines: Iterable[str]) -> None:
    """Print lines about options that have no effect, on one of the ranks."""
    for line in lines:
        if os.environ.get("RANK", "0") == "0":
            print_warning(without_secrets(f"{place}{line}"))


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values for YAML (tuples become lists)."""
    values = dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` with the most similar known word, or an empty string."""
    matches = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def without_secrets(text: str) -> str:
    """Return `text` without the user, password and query of its URLs."""
    return re.sub(r"(://[^\s?]*)\?\S+", r"\1?…", re.sub(r"://[^/\s]*@", "://…@", text))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {without_secrets(message)} -- see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            self.error(f"unknown argument {unknown[0]}{nearest(unknown[0].split('=')[0], flags)}")
        return known


def _build_parser(config_class: type, description: str) -> argparse.ArgumentParser:
    parser = _Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for field, kind in _fields(config_class):
        help_text = field.metadata["help"].replace("%", "%%")
        if not field.metadata["required"]:
            help_text += f" (default: {_shown(field.default)})"
        keywords: dict[str, Any] = {"help": help_text}
        base, is_list, _ = _unpack(kind)
        if base is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords.update(
                type=_reader(base, field.metadata["words"]),
                choices=field.metadata["choices"],
                metavar=field.metadata["metavar"],
            )
            if is_list:
                keywords["nargs"] = "+"
        parser.add_argument(_flag(field.name), **keywords)
    return parser


def _reader(kind: type, words: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a function that turns a word of the command line into a value."""

    def read(text: str) -> Any:
        return words[text] if text in words else kind(text)

    read.__name__ = " or ".join([kind.__name__, *words])  # argparse prints this name when a value is wrong
    return read


def _fields(config_class: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    kinds = typing.get_type_hints(config_class)
    return [(field, kinds[field.name]) for field in dataclasses.fields(config_class)]


def _unpack(kind: Any) -> tuple[type, bool, bool]:
    """Split an annotation into (scalar type, is a list, may be None)."""
    optional = False
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        optional, kind = len(members) < len(typing.get_args(kind)), members[0]
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True, optional
    return kind, False, optional


def _require(config_class: type, values: dict[str, Any]) -> None:
    """Raise UsageError for a missing option; convert lists to tuples in place."""
    for field, kind in _fields(config_class):
        if field.metadata["required"] and field.name not in values:
            raise UsageError(f"{_flag(field.name)} is required")
        if isinstance(values.get(field.name), list) and _unpack(kind)[1]:
            values[field.name] = tuple(values[field.name])


def _number_or_text(text: str) -> float | str:
    """Read numbers that YAML 1.1 reads as text, such as 1e-3."""
    try:
        return float(text)
    except ValueError:
        return text


def _read_yaml(config_class: type, path: Path, flag: str = "", including: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file of options over those that it names as `include: [FILE, ...]`, relative to itself; later ones win."""
    loaded = _load_yaml(path, flag)
    kinds = {field.name: (field, kind) for field, kind in _fields(config_class)}
    values: dict[str, Any] = {}
    included = loaded.pop("include", None) or []
    for file in included if isinstance(included, list) else [included]:
        other = path.parent / str(file)
        if other.resolve() in (*including, path.resolve()):
            raise UsageError(f"{flag}{path}: include: {file} includes this file in turn")
        values.update(_read_yaml(config_class, other, flag, (*including, path.resolve())))
    for key, value in _without_sections(loaded, kinds):
        name = str(key).replace("-", "_")
        if name not in kinds:
            raise UsageError(f"{flag}{path}: unknown key {key}{nearest(name, list(kinds))}")
        values[name] = _checked(f"{flag}{path}", name, value, *kinds[name])
    return values


def _without_sections(loaded: dict[Any, Any], kinds: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield keys and values; a key that is no option and holds a mapping, such as `training:`, is a heading for it."""
    for key, value in loaded.items():
        is_heading = isinstance(value, dict) and str(key).replace("-", "_") not in kinds
        yield from value.items() if is_heading else [(key, value)]


def _load_yaml(path: Path, flag: str) -> dict[Any, Any]:
    try:
        loaded = yaml.safe_load(read_text(path))
    except OSError as error:
        raise UsageError(f"{flag}{path}: {error.strerror}") from error
    except UserError as error:
        raise UsageError(f"{flag}{error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{flag}{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if loaded is not None and not isinstance(loaded, dict):
        raise UsageError(f"{flag}{path}: expected `key: value` lines, found a {type(loaded).__name__}")
    return loaded or {}


def _checked(place: str, name: str, value: Any, field: dataclasses.Field[Any], kind: Any) -> Any:
    base, is_list, optional = _unpack(kind)
    if value is None and optional:
        return None
    items = value if is_list and isinstance(value, list) else [value]
    converted = []
    for item in items:
        item = field.metadata["words"].get(item, item) if isinstance(item, str) else item
        if base is str and isinstance(item, bool) and {"on", "off"} & set(field.metadata["choices"] or ()):
            item = "on" if item else "off"  # YAML 1.1 reads both words as booleans
        if base is float and isinstance(item, str):
            item = _number_or_text(item)
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        fits = {bool: isinstance(item, bool), int: is_number and float(item).is_integer(), float: is_number}
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
