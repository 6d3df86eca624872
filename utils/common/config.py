"""Builds a script's command line and reads its YAML file from one frozen dataclass of options.

The command line overrides `--config FILE`, which overrides the defaults. An unknown key is an error that names the
nearest known one, and Ultralytics' names are other spellings. An option without effect beside the others is refused (`needs=`); in a file it only causes a printed line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import operator
import os
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

from utils.common.errors import EXIT_USAGE, UsageError, UserError, print_warning
from utils.common.files import mapping, read_back
from utils.common.text import as_called, coloured

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
    try:
        loaded = read_back(path, lambda one: mapping({} if one is None else one), "correct the file", is_yaml=True)
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
    for key, value in loaded.items():  # a key that is no option and holds a mapping, such as `training:`, is a heading
        is_heading = isinstance(value, dict) and str(key).replace("-", "_") not in kinds
        pairs += value.items() if is_heading else [(key, value)]
    for key, value in pairs:
        name = own_name(str(key).replace("-", "_"), kinds)
        if name not in kinds:
            raise UsageError(f"{flag}{path}: unknown key {key}{instead(name, kinds) or nearest(name, list(kinds))}")
        values[name] = _checked(f"{flag}{path}", name, value, *kinds[name])
    return values


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
            with contextlib.suppress(ValueError):
                item = float(item)  # YAML 1.1 reads numbers such as 1e-3 as text
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


T = TypeVar("T")
FRACTION: dict[str, Any] = {"at_least": 0, "at_most": 1}  # bounds of a share or a probability
CONFIG_HELP = "YAML file of options; the command line wins"
GROUPS = ("options", "data", "model", "run", "speed", "augmentation", "advanced")  # in `--help`, in this order
THREADS_HELP = "compute threads per process; 0: the cores that it may use"
PRECISION_CHOICES = ("auto", "bf16", "fp16", "off")
MOST = 1e18  # no option has a use for more; 64 bits hold it
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
    group: str | None = None,
    needs: str | tuple[str, ...] = (),
    wants: str | tuple[str, ...] = (),
    **bounds: float,
) -> Any:
    """Declare one option of an `Options` dataclass; the field's annotation gives its type.

    `bool` becomes `--name/--no-name`, `tuple[X, ...]` takes one or more values, `X | None` may be left unset. `words`
    maps words to values, such as `auto` to 0. `bounds` are any of `at_least`, `at_most`, `above`, `below` and
    `multiple_of`; they apply to each number of a tuple; without any, a number is at least 0. `may_differ`: a resumed run may change this option. `group`: its
    group in `--help`, if not its section's.

    `needs`: conditions on other options. This option has an effect only if all of them hold. A condition is `windows` (neither
    0, empty nor unset), `tiles=off`, `not sample`, `not tiles=off`, or several of these joined by ` or `. If one does not
    hold, the option is refused; with `wants` instead of `needs`, a printed line says that it has no effect. The condition
    `... or x=VALUE` on the option x itself allows its value VALUE. The default is always allowed.
    """
    facts = {"help": help, "choices": choices, "metavar": metavar, "required": required, "words": words or {}}
    conditions = {
        kind: (given,) if isinstance(given, str) else given for kind, given in (("needs", needs), ("wants", wants))
    }
    return dataclasses.field(
        default=default, metadata={**facts, **conditions, "may_differ": may_differ, "group": group, "bounds": bounds}
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
    """Base of a script's options, and of their sections.

    A section declares the options of one room; `--help` shows them below its `group`, one of GROUPS. Raises UsageError
    when a number is outside the bounds of its `option`; without bounds, below 0; and if it is infinite or NaN.
    """

    group: ClassVar[str] = "options"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, declared = getattr(self, field.name), field.metadata.get("bounds")
            for number in value if isinstance(value, tuple | list) else [value]:
                is_number = isinstance(number, int | float) and not isinstance(number, bool) and declared is not None
                if is_number and not abs(number) < MOST:
                    raise UsageError(f"{_flag(field.name)} {number}: must be a finite number below {MOST:.0e}")
                bounds = declared or ({"at_least": 0} if is_number else {})
                if number is not None and not all(_BOUNDS[kind][1](number, bound) for kind, bound in bounds.items()):
                    rule = " and ".join(
                        f"{text} {bounds[kind]:g}" for kind, (text, _) in _BOUNDS.items() if kind in bounds
                    )
                    rule = " or ".join([rule, *field.metadata["words"]])
                    if step := bounds.get("multiple_of"):
                        rule += f", such as {max(bounds.get('at_least', step), round(number / step) * step)}"
                    raise UsageError(f"{_flag(field.name)} {number}: must be {rule}")


def parse_config(
    config_class: type[T], description: str, argv: Sequence[str] | None = None, *, exits: bool = True
) -> T:
    """Build `config_class` from the command line `argv` and the YAML file of its `--config`.

    `description`: one sentence, or a script's docstring, whose second paragraph is example commands; `--help` begins with them.
    Prints one line and exits with code 2 when a flag, key or value is wrong; with `exits=False` raises UsageError.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _build_parser(config_class, description, _Parser if exits else _RaisingParser)
    given = vars(parser.parse_args(arguments))
    try:
        _join_folder(config_class, given)
        from_file = read_yaml(_kinds(config_class), Path(file), "--config ") if (file := given.get("config")) else {}
        _join_folder(config_class, from_file)
        values = {**from_file, **given}
        _require(config_class, values)
        config = config_class(**values)
        if refused := list(ignored(config, given, "needs")):
            raise UsageError("; ".join(refused))
        _warn("", ignored(config, given, "wants"))
        if "resume" not in given:  # a run's own file may hold what an `auto` became
            _warn(f"--config {file}: ", ignored(config, from_file.keys() - given.keys(), "needs", "wants"))
        return config
    except UsageError as error:
        parser.error(str(error))


def show_help(config_class: type, description: str) -> None:
    """Print the help and exit if nothing else is asked for; scripts call this before they import PyTorch, which takes long."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        parse_config(config_class, description)


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options by their Python names as words of a command line; None is an option that is not given."""
    words: list[str] = []
    for name, value in options.items():
        flag = _flag(name)
        if isinstance(value, bool):
            words.append(flag if value else _flag(f"no_{name}"))
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def read_config(config_class: type[T], path: Path) -> T:
    """Build `config_class` from a YAML file alone, for a script without flags. Raises UsageError that names file and key."""
    values = read_yaml(_kinds(config_class), path)
    try:
        _join_folder(config_class, values)
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
            failing = [each for each in conditions if not any(_is_true(config, term) for term in each.split(" or "))]
            if failing:
                yield f"{_flag(field.name)} has no effect {_reason(config, field.name, failing[0])}"


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


def without_secrets(text: str) -> str:
    """Return `text` without the user, password and query of its URLs."""
    return re.sub(r"(://[^\s?]*)\?\S+", r"\1?…", re.sub(r"://[^/\s]*@", "://…@", text))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        head = f"{self.prog}: {coloured('error:', 'red', sys.stderr)}"
        self.exit(EXIT_USAGE, f"{head} {without_secrets(message)} -- see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag, flags = unknown[0].split("=")[0], [one for each in self._actions for one in each.option_strings]
            advice = instead(flag, {action.dest for action in self._actions}) or nearest(flag, flags)
            self.error(f"unknown argument {unknown[0]}{advice}")
        return known


class _RaisingParser(_Parser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(without_secrets(message))


def _build_parser(config_class: type, description: str, parser_class: type[_Parser]) -> argparse.ArgumentParser:
    sentence, *examples = as_called(description.strip()).split("\n\n")[:2]
    module = getattr(sys.modules["__main__"].__spec__, "name", "")  # of `python -m`
    parser = parser_class(
        prog=f"python -m {module.removesuffix('.__main__')}" if module.startswith("extras.") else None,
        usage=argparse.SUPPRESS,
        description="\n\n".join(
            [*map(textwrap.dedent, examples), textwrap.fill(sentence, 79), "[VALUE]: the default. --no-X undoes --X."]
        ),
        formatter_class=HelpFormatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    folder, known = _folder_field(config_class), [field.name for field, _ in _fields(config_class)]
    groups = _groups(config_class, parser)
    for field, kind in _fields(config_class):
        keywords: dict[str, Any] = {"help": help_text_of(field, field is folder)}
        base, is_list, _ = unpack(kind)
        if base is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords.update(
                type=_reader(base, field.metadata["words"], field.metadata["choices"] or ()),
                choices=field.metadata["choices"],
                metavar=field.metadata["metavar"] or {int: "N", float: "X"}.get(base, "NAME"),
            )
            if is_list:
                keywords["nargs"] = "+"
        groups[field.name].add_argument(_flag(field.name), *map(_flag, other_names(field.name, known)), **keywords)
    for part in FOLDER_PARTS if folder else ():
        parser.add_argument(_flag(part), help=argparse.SUPPRESS)
    return parser


def _groups(config_class: type, parser: argparse.ArgumentParser) -> dict[str, argparse._ArgumentGroup]:
    """Return the `--help` group of each option: its own, or that of the section that declares it."""
    sections: dict[str, Any] = {
        name: section for section in config_class.__mro__ for name in vars(section).get("__annotations__", ())
    }
    titles = {
        field.name: field.metadata["group"] or sections[field.name].group for field in dataclasses.fields(config_class)
    }
    groups = {title: parser.add_argument_group(title) for title in GROUPS if title in titles.values()}
    return {name: groups[title] for name, title in titles.items()}


def section_of(config: Any, section: type[T]) -> T:
    """Return the options of one section of a configuration."""
    return section(**{field.name: getattr(config, field.name) for field in dataclasses.fields(section)})  # type: ignore[arg-type]


def _folder_field(config_class: type) -> dataclasses.Field[Any] | None:
    """Return the option whose folder `--project` and `--name` name together; None if the script has no such option."""
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    if any(part in fields for part in FOLDER_PARTS):
        return None
    return next((fields[name] for name in FOLDERS if name in fields and isinstance(fields[name].default, str)), None)


def _join_folder(config_class: type, values: dict[str, Any]) -> None:
    """Replace `project` and `name` by the folder that they name. Raises UsageError if that option is given, too."""
    folder = _folder_field(config_class)
    given = {part: values.pop(part) for part in FOLDER_PARTS if folder and part in values}
    if folder and given:
        if folder.name in values:
            raise UsageError(
                f"{_flag(next(iter(given)))} and {_flag(folder.name)} name the same folder: give one of them"
            )
        default = Path(str(folder.default))
        parent, name = given.get("project", default.parent), given.get("name", default.name)
        values[folder.name] = str(Path(parent, name))


def _reader(kind: type, words: Mapping[str, Any], choices: Sequence[Any]) -> Callable[[str], Any]:
    """Return a function that turns a word of the command line into a value; `AdamW` is the choice `adamw`."""

    def read(text: str) -> Any:
        return words[text] if text in words else kind(lower_if_chosen(text, choices))

    read.__name__ = " or ".join([kind.__name__, *words])  # argparse prints this name when a value is wrong
    return read


def _fields(config_class: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    kinds = typing.get_type_hints(config_class)
    return [(field, kinds[field.name]) for field in dataclasses.fields(config_class)]


def _kinds(config_class: type) -> Kinds:
    """Return the keys that a file of options may hold, with each option's field and annotation."""
    parts = dict.fromkeys(FOLDER_PARTS, (folder, str)) if (folder := _folder_field(config_class)) else {}
    return parts | {field.name: (field, kind) for field, kind in _fields(config_class)}


def _require(config_class: type, values: dict[str, Any]) -> None:
    """Raise UsageError for a missing option; convert lists to tuples in place."""
    for field, kind in _fields(config_class):
        if field.metadata["required"] and field.name not in values:
            raise UsageError(f"{_flag(field.name)} is required")
        if isinstance(values.get(field.name), list) and unpack(kind)[1]:
            values[field.name] = tuple(values[field.name])


# Ultralytics' name of an option, and its names here; a script has at most one of them.
OTHER_NAMES = {
    "imgsz": ("img_size",),
    "batch": ("batch_size", "batch_sizes"),
    "workers": ("num_workers",),
    "max_det": ("max_detections",),
    "weights": ("model",),
}
_MAPS = "python -m extras.maps makes the map, after this command (extras/maps/README.md)"
_CUT = "python -m extras.orthophotos.cut reads labels of orthophotos (extras/orthophotos/README.md)"
# What people type, an option by which the script is known, and what to do there.
INSTEAD = (
    ("half", "amp", "--amp auto computes in half precision where the hardware has it"),
    ("augment", "mosaic", "training always augments; --mosaic, --scale, --fliplr, --hsv-h and others say how much"),
    ("augment", "tiles", "predictions are made once; --tiles or a larger --img-size finds smaller objects"),
    ("show", "source", "no window opens; the annotated pictures, or the film, are written to --output"),
    ("every frames-per-second", "source", "it is for a film: name one with --source, on this line"),
    ("save save-txt save-conf", "source", "pictures, labels/ and predictions.json are always in --output"),
    ("classes", "mosaic", "python parse_labels.py --classes NAME ... makes a data set of these classes"),
    ("geo assets asset-range before ground-height ground-sigma", "source", _MAPS),
    ("labels line-width-m", "line_width", _CUT),
)
FOLDER_PARTS = ("project", "name")  # Ultralytics names a folder by two options: its parent and its name
FOLDERS = ("save_dir", "output")  # the scripts here name it by one of these
NEAR = 0.75  # similarity by difflib: `modle` is near `model`, `rect` is not near `project`


def own_name(name: str, known: Collection[str]) -> str:
    """Return the name of an option in a script with the options `known`; `name` may be Ultralytics' name or a wrong one."""
    return name if name in known else next((own for own in OTHER_NAMES.get(name, ()) if own in known), name)


def other_names(name: str, known: Collection[str]) -> list[str]:
    """Return Ultralytics' names for the option `name` of a script with the options `known`."""
    return [other for other in OTHER_NAMES if other not in known and own_name(other, known) == name]


def instead(name: str, known: Collection[str]) -> str:
    """Return `; ` and what to do in a script with the options `known` instead of a wrong one, or an empty string."""
    return next((f"; {way}" for names, own, way in INSTEAD if own in known and _bare(name) in names.split()), "")


def nearest(word: str, known: Sequence[str]) -> str:
    """Return ` (did you mean X?)` with the known word of the most similar spelling, or an empty string."""
    bare = {_bare(each): each for each in reversed(known)}
    matches = difflib.get_close_matches(_bare(word), bare, n=1, cutoff=NEAR)
    return f" (did you mean {bare[matches[0]]}?)" if matches else ""


def _bare(word: str) -> str:
    return word.lstrip("-").replace("_", "-")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows `--[no-]ema` for a switch and `--batch-size, --batch N` for a value; paragraphs of a description stay apart."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 100) - 1
        super().__init__(prog, indent_increment=1, max_help_position=26, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return `--ema` as `--[no-]ema`, and an option with a value as `--batch-size, --batch N`."""
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]")
        value = f" {self._format_args(action, str(action.metavar))}" if action.nargs != 0 else ""
        return ", ".join(action.option_strings) + value.replace(f" [{action.metavar} ...]", " ...")


def help_text_of(field: dataclasses.Field[Any], is_folder: bool) -> str:
    """Return an option's choices, meaning and default, in words: `none|auto: weights of the classes [none]`."""
    choices, words = field.metadata["choices"], {value: word for word, value in field.metadata["words"].items()}
    text = ("|".join(map(str, choices)) + ": " if choices else "") + field.metadata["help"]
    text += " (or --project and --name)" if is_folder else ""
    if field.default not in (None, "", ()) and field.default is not False and not field.metadata["required"]:
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        shown = (words.get(value, f"{value:g}" if isinstance(value, float) else str(value)) for value in values)
        text += " [on]" if field.default is True else f" [{' '.join(shown)}]"
    return text.replace("%", "%%")
