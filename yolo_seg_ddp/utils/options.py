"""Declares a script's options in one frozen dataclass, and says which of them act beside the
others.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.option_names import FOLDER_PARTS, FOLDERS

Kinds = Mapping[str, tuple[dataclasses.Field[Any], Any]]  # each option's field and annotation
T = TypeVar("T")
FRACTION: dict[str, Any] = {"at_least": 0, "at_most": 1}  # bounds of a share or a probability
CONFIG_HELP = "YAML file of options; the command line wins"
# in `--help`, in this order
GROUPS = ("options", "data", "model", "run", "speed", "augmentation", "advanced")
THREADS_HELP = "compute threads per process; 0: the cores that it may use"
PRECISION_CHOICES = ("auto", "bf16", "fp16", "off")
MOST = 1e18  # no option has a use for more; 64 bits hold it
# bounds of the network input's side in pixels
INPUT_SIZE: dict[str, Any] = {"at_least": 64, "multiple_of": 32}


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

    `bool` becomes `--name/--no-name`, `tuple[X, ...]` takes one or more values, `X | None` may be
    left unset. `words` maps words to values, such as `auto` to 0. `bounds` are any of `at_least`,
    `at_most`, `above`, `below` and `multiple_of`; they apply to each number of a tuple; without
    any, a number is at least 0. `may_differ`: a resumed run may change this option. `group`: its
    group in `--help`, if not its section's.

    `needs`: conditions on other options. This option has an effect only if all of them hold. A
    condition is `windows` (neither 0, empty nor unset), `tiles=off`, `not sample`, `not tiles=off`,
    or several of these joined by ` or `. If one does not hold, the option is refused; with `wants`
    instead of `needs`, a printed line says that it has no effect. The condition `... or x=VALUE` on
    the option x itself allows its value VALUE. The default is always allowed.
    """
    texts = {
        "help": help,
        "choices": choices,
        "metavar": metavar,
        "required": required,
        "words": words or {},
    }
    conditions = {
        kind: (given,) if isinstance(given, str) else given
        for kind, given in (("needs", needs), ("wants", wants))
    }
    return dataclasses.field(
        default=default,
        metadata={
            **texts,
            **conditions,
            "may_differ": may_differ,
            "group": group,
            "bounds": bounds,
        },
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

    A section declares the options of one room; `--help` shows them below its `group`, one of
    GROUPS. Raises UsageError when a number is outside the bounds of its `option`; without bounds,
    below 0; and if it is infinite or NaN.
    """

    group: ClassVar[str] = "options"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            declared = field.metadata.get("bounds")
            for number in value if isinstance(value, tuple | list) else [value]:
                is_number = (
                    isinstance(number, int | float)
                    and not isinstance(number, bool)
                    and declared is not None
                )
                if is_number and not abs(number) < MOST:
                    raise UsageError(
                        f"{flag_of(field.name)} {number}: must be a finite number below {MOST:.0e}"
                    )
                bounds = declared or ({"at_least": 0} if is_number else {})
                if number is not None and not all(
                    _BOUNDS[kind][1](number, bound) for kind, bound in bounds.items()
                ):
                    rule = " and ".join(
                        f"{text} {bounds[kind]:g}"
                        for kind, (text, _) in _BOUNDS.items()
                        if kind in bounds
                    )
                    rule = " or ".join([rule, *field.metadata["words"]])
                    if step := bounds.get("multiple_of"):
                        nearest = max(bounds.get("at_least", step), round(number / step) * step)
                        rule += f", such as {nearest}"
                    raise UsageError(f"{flag_of(field.name)} {number}: must be {rule}")


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options by their Python names as words of a command line; None is an option that is
    not given.
    """
    words: list[str] = []
    for name, value in options.items():
        flag = flag_of(name)
        if isinstance(value, bool):
            words.append(flag if value else flag_of(f"no_{name}"))
        elif isinstance(value, list | tuple):
            words += [flag, *map(str, value)]
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


def ignored(config: Any, names: Collection[str], *kinds: str) -> Iterator[str]:
    """Yield a line for each of the named options that has another value than by default and cannot
    act.

    `kinds`: `needs`, `wants` or both.
    """
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            conditions = [condition for kind in kinds for condition in field.metadata[kind]]
            failing = [
                each
                for each in conditions
                if not any(_is_true(config, term) for term in each.split(" or "))
            ]
            if failing:
                reason = _reason(config, field.name, failing[0])
                yield f"{flag_of(field.name)} has no effect {reason}"


def _is_true(config: Any, term: str) -> bool:
    name, _, wanted = term.removeprefix("not ").partition("=")
    value = getattr(config, name)
    return (_shown(value) == wanted if wanted else bool(value)) != term.startswith("not ")


def _reason(config: Any, option_name: str, condition: str) -> str:
    """Return why no term of a condition holds, in flags: `without --windows`, `with --no-ema`,
    `with --tiles off`.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    reasons = []
    for term in condition.split(" or "):
        name, _, wanted = term.removeprefix("not ").partition("=")
        value = getattr(config, name)
        if name == option_name:
            continue
        if value == defaults[name] and not term.startswith("not "):
            reasons.append(f"without {flag_of(name)} {wanted}")
        elif value is False:
            reasons.append(f"with {flag_of('no_' + name)}")
        else:
            reasons.append(
                f"with {flag_of(name)} {wanted if term.startswith('not ') else _shown(value)}"
            )
    return " and ".join(reason.strip() for reason in reasons)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def to_dict(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values for YAML (tuples become lists)."""
    values = dataclasses.asdict(config)
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def section_of(config: Any, section: type[T]) -> T:
    """Return the options of one section of a configuration."""
    fields = dataclasses.fields(section)  # type: ignore[arg-type]
    return section(**{field.name: getattr(config, field.name) for field in fields})


def folder_option(config_class: type) -> dataclasses.Field[Any] | None:
    """Return the option whose folder `--project` and `--name` name together; None if the script has
    no such option.
    """
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    if any(part in fields for part in FOLDER_PARTS):
        return None
    return next(
        (
            fields[name]
            for name in FOLDERS
            if name in fields and isinstance(fields[name].default, str)
        ),
        None,
    )


def unpack(kind: Any) -> tuple[type, bool, bool]:
    """Split an annotation into (scalar type, is a list, may be None)."""
    optional = False
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        optional = len(members) < len(typing.get_args(kind))
        kind = members[0]
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True, optional
    return kind, False, optional


def fields_of(config_class: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    kinds = typing.get_type_hints(config_class)
    return [(field, kinds[field.name]) for field in dataclasses.fields(config_class)]
