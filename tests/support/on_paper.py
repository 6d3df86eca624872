"""Runs a script's `main` on paper: its own code is real, and each thing that it imports is a `Thing`.

A Thing stands for any value. What is done with it is written down with the arguments, and gives another Thing, named by how
it came about. Two runs whose notes differ used their options differently, however far from the command line.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

MOST_LETTERS = 200  # of a Thing's name; longer ones become their hash
KEYS = ("confusion_matrix", "val_loss")  # of a Thing that is unpacked into a dictionary
TESTED = {  # attributes that code branches on
    "type": "cpu",
    "is_main": True,
    "resumes": False,
    "stopped_by": "",
    "any_rank": lambda *_: False,
    "begin_epoch": lambda *_: False,
    "is_file": lambda: True,
    "is_dir": lambda: False,
    "exists": lambda: False,
}
# Names that stay real wherever they are imported: they only carry values on.
CARRIERS = {
    "sys",
    "math",
    "itertools",
    "fields",
    "partial",
    "Any",
    "dataclass",
    "parse_config",
    "resume_arguments",
    "without_local_rank",
}
UNPACK, UNPACK_WITH_STAR = dis.opmap["UNPACK_SEQUENCE"], dis.opmap["UNPACK_EX"]


class Thing(str):
    """Stands for any value; `notes` lists what was done with it and with those that came from it."""

    _notes: list[str]

    def __new__(cls, name: str, notes: list[str]) -> Thing:
        thing = super().__new__(cls, name if len(name) <= MOST_LETTERS else f"<{hash(name):x}>")
        thing.__dict__["_notes"] = notes
        return thing

    def _next(self, text: str) -> Thing:
        return Thing(text, self._notes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith(("Error", "Exception")):
            return type(name, (Exception,), {})
        return TESTED[name] if name in TESTED else self._next(f"{self}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self._notes.append(f"{self}.{name} = {shown(value)}")

    def __call__(self, *values: Any, **named: Any) -> Any:
        text = f"{self}({', '.join([*map(shown, values), *(f'{key}={shown(v)}' for key, v in named.items())])})"
        self._notes.append(text)
        for value in values:  # such as what only rank 0 does
            if isinstance(value, types.FunctionType) and not inspect.signature(value).parameters:
                value()
        return self._next(text)

    def __iter__(self) -> Iterator[Any]:
        """Yield as many Things as the caller unpacks, else two."""
        caller = sys._getframe(1)
        operation, number = caller.f_code.co_code[caller.f_lasti : caller.f_lasti + 2]
        if operation == UNPACK_WITH_STAR:
            number = 3  # two and the starred one, or one of two
        elif operation != UNPACK:
            number = 2
        return iter([self._next(f"{self}[{place}]") for place in range(number)])

    def __getitem__(self, key: Any) -> Thing:
        return self._next(f"{self}[{shown(key)}]")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._notes.append(f"{self}[{shown(key)}] = {shown(value)}")

    def __enter__(self) -> Thing:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __ne__(self, _: object) -> bool:
        return False

    __hash__ = str.__hash__

    index = count = property(lambda thing: thing._next(f"{thing}.number"))  # type: ignore[assignment]

    def __repr__(self) -> str:
        return str.__str__(self)

    def __format__(self, _: str) -> str:
        return str.__str__(self)

    def __len__(self) -> int:
        return 3

    def __int__(self) -> int:
        return 3

    __index__ = __int__

    def __float__(self) -> float:
        return 3.0

    def __contains__(self, _: object) -> bool:
        return False

    def keys(self) -> tuple[str, ...]:
        """For `**thing`."""
        return KEYS


def _operator(name: str) -> Callable[..., Thing]:
    return lambda thing, *others: thing._next(f"({thing} {name} {', '.join(map(shown, others))})")


def _comparison(name: str) -> Callable[[Thing, Any], bool]:
    def compare(thing: Thing, other: Any) -> bool:
        thing._notes.append(f"{thing} {name} {shown(other)}")
        return name in ("gt", "ge")

    return compare


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "or", "and", "divmod"):
    setattr(Thing, f"__{_name}__", _operator(_name))
    setattr(Thing, f"__r{_name}__", _operator(f"r{_name}"))
for _name in ("neg", "abs", "round"):
    setattr(Thing, f"__{_name}__", _operator(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Thing, f"__{_name}__", _comparison(_name))


def shown(value: Any) -> str:
    """Return a value as text that is equal in another run: no addresses; functions with what they hold."""
    if isinstance(value, str | int | float | Thing | None):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{shown(key)}: {shown(held)}' for key, held in value.items())}}}"
    if isinstance(value, functools.partial):
        return f"partial({shown(value.func)}, {shown(value.args)}, {shown(value.keywords)})"
    if isinstance(value, types.FunctionType) and value.__name__ == "<lambda>" and not takes_any_number(value):
        notes: list[str] = []
        result = value(*(Thing(name, notes) for name in inspect.signature(value).parameters))
        return f"lambda: {notes}, {shown(result)}"
    if isinstance(value, types.FunctionType):
        return f"{value.__qualname__}({', '.join(shown(cell.cell_contents) for cell in value.__closure__ or ())})"
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return f"{value.__qualname__}({shown(dict(frame.f_locals)) if frame else ''})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def takes_any_number(function: types.FunctionType) -> bool:
    return bool(function.__code__.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS))


def on_paper(
    module: types.ModuleType,
    notes: list[str],
    real: Sequence[types.ModuleType],
    kept: Mapping[str, Any],
    stubs: Sequence[str],
) -> dict[str, Any]:
    """Return what takes the place of a module's imports: Things, but for what `real` modules define and `kept` names.

    `stubs` are functions of its own that become Things, too: those that import further modules themselves.
    """
    homes = {module.__name__, *(other.__name__ for other in real)}
    replaced: dict[str, Any] = {"print": Thing("print", notes), "isinstance": _isinstance}
    for name, value in vars(module).items():
        if name in kept:
            replaced[name] = kept[name]
        elif value is dataclasses.replace:
            replaced[name] = _replace
        elif name in stubs or (name[:2] != "__" and name not in CARRIERS and _is_foreign(value, homes)):
            replaced[name] = Thing(name, notes)
    return replaced


def _replace(value: Any, **changes: Any) -> Any:
    return value(**changes) if isinstance(value, Thing) else dataclasses.replace(value, **changes)


def _isinstance(value: Any, kinds: Any) -> bool:
    return isinstance(kinds, Thing) or isinstance(value, kinds)


def _is_foreign(value: Any, homes: set[str]) -> bool:
    if isinstance(value, types.ModuleType):
        return value.__name__ not in homes
    if isinstance(value, type) and issubclass(value, Exception):
        return False
    return callable(value) and getattr(value, "__module__", None) not in homes
