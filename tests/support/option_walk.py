"""Walks a script's options: in every mode, each one has to change the notes of a run on paper, or to be refused or named."""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import pytest

from tests.support.on_paper import TESTED, Thing, on_paper
from tests.support.option_scripts import Script
from utils.common import config as configuration
from utils.common.config import words_of
from utils.common.errors import UsageError, UserError

# Functions that get all options, and what they do with some of them.
READERS: Mapping[str, tuple[str, ...]] = {"OwnedRun": ("save_dir",)}
BY_PARSER = {"config", "resume"}  # read before `main` has the options


def other_values(option: dataclasses.Field[Any]) -> list[Any]:
    """Return all other choices than the default; else one other value that is within the bounds."""
    kind, bounds, choices = str(option.type), option.metadata["bounds"], option.metadata["choices"]
    is_list = "tuple" in kind
    if choices:
        found = list(choices)
    elif "bool" in kind:
        found = [not option.default]
    elif "int" in kind:
        step, low = bounds.get("multiple_of", 1), max(bounds.get("at_least", 1), 1)
        found = [2 * low - 2 * low % step + number * step for number in (1, 2)]
    elif "float" in kind:
        low = max(bounds.get("at_least", 0), bounds.get("above", 0), 0)
        high = min(bounds.get("at_most", low + 1), bounds.get("below", low + 1))
        found = [low + (high - low) * share for share in (0.5, 0.75)]
    else:
        found = ["one", "two"]
    values = [(value,) if is_list else value for value in found]
    values = [value for value in values if value != option.default]
    return values if choices else values[:1]


class Refused(Exception):
    """The command line was refused."""


class Walk:
    """One script, run on paper again and again."""

    def __init__(self, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script = script
        self.notes: list[str] = []
        self.said: list[str] = []
        self.num_combinations = self.num_refused = 0
        self.main = importlib.import_module(script.module)
        home = importlib.import_module(script.home)
        kind = getattr(home, script.options)
        self.options = {f.name: f for f in dataclasses.fields(kind) if f.name not in BY_PARSER}
        real = [self.main, *map(importlib.import_module, script.real)]
        kept = {
            **{name: self._reader(name, options) for name, options in {**READERS, **script.readers}.items()},
            "settings_of_command_line": lambda: configuration.parse_config(kind, ""),
            **script.kept,
        }
        for module in real:
            for name, value in on_paper(module, self.notes, [home, *real], kept, script.stubs).items():
                monkeypatch.setattr(module, name, value, raising=False)
        for name in script.stubs:
            if "." in name:
                monkeypatch.setattr(name, Thing(name, self.notes))
        for name, value in script.tested.items():
            monkeypatch.setitem(TESTED, name, value)
        monkeypatch.setattr(kind, "__repr__", lambda _: "<options>")  # who gets them all uses none of them yet
        for name in ("_build_parser", "_fields"):
            monkeypatch.setattr(configuration, name, functools.cache(getattr(configuration, name)))
        monkeypatch.setattr(configuration._Parser, "error", _refuse)
        monkeypatch.setattr(configuration, "print_warning", self.said.append)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setattr(sys, "argv", [])

    def _reader(self, name: str, options: Sequence[str]) -> Callable[..., Thing]:
        """Return what stands for a function that gets all options and reads some of them."""
        return lambda config, *_, **more: Thing(name, self.notes)(*(getattr(config, each) for each in options), **more)

    def run(self, flags: Sequence[str]) -> list[str]:
        """Return the notes of a run with these flags. Raises Refused."""
        self.notes.clear()
        self.said.clear()
        sys.argv = [self.script.module, *self.script.flags, *flags]
        try:
            self.notes.append(repr(self.main.main()))
        except UsageError as error:
            raise Refused(str(error)) from error
        except UserError as error:
            self.notes.append(f"error: {error}")
        return list(self.notes)

    def all(self) -> tuple[set[str], list[tuple[tuple[str, ...], str]]]:
        """Walk every option in every mode; return the options that acted in one, and (mode, option) without a word."""
        acted: set[str] = set()
        wanted = self.script.only or self.options
        idle = [(mode, name) for mode in self.modes() for name in self.idle(mode, wanted, acted)]
        return acted, idle

    def unneeded_rules(self) -> set[str]:
        """Return the options whose `needs` and `wants` the walk does not miss when they are taken away."""
        found, modes = set(), self.modes()
        for option in self.options.values():
            if conditions_of(option) and option.name not in self.script.elsewhere:
                with pytest.MonkeyPatch.context() as without:
                    without.setattr(option, "metadata", {**option.metadata, "needs": (), "wants": ()})
                    if not any(self.idle(mode, [option.name]) for mode in modes):
                        found.add(option.name)
        return found

    def idle(self, mode: tuple[str, ...], names: Iterable[str], acted: set[str] | None = None) -> list[str]:
        """Return the options that neither act in a mode nor are refused nor named; add those that act to `acted`."""
        try:
            plain = self.run(mode)
        except Refused:  # the mode is walked with what it needs, too
            return []
        return [name for name in names if not self._is_in(mode, name) and not self._acts(mode, plain, name, acted)]

    def _is_in(self, mode: tuple[str, ...], name: str) -> bool:
        """Return whether a mode sets an option, so that another value would be another mode."""
        given = {flag.split("=")[0] for flag in mode}
        is_set = bool(given & {f"--{hyphened(name)}", f"--no-{hyphened(name)}"})
        return is_set and (mode not in self.script.modes or self.options[name].default is False)

    def _acts(self, mode: Sequence[str], plain: list[str], name: str, acted: set[str] | None) -> bool:
        """Return whether an option acts, or is refused or named. One of several `choices` may be what `auto` means."""
        each = (self._does(mode, plain, name, value, acted) for value in self._values(name))
        return any(each) if self.options[name].metadata["choices"] else all(each)

    def _does(self, mode: Sequence[str], plain: list[str], name: str, value: Any, acted: set[str] | None) -> bool:
        self.num_combinations += 1
        flag = f"--{hyphened(name)}"
        try:
            changed = self.run([*mode, *words_of({name: value})])
        except Refused as refusal:
            self.num_refused += 1
            return hyphened(name) in str(refusal)
        if changed == plain:
            self.num_refused += (is_named := any(line.startswith(f"{flag} has no effect") for line in self.said))
            return is_named or self._asks_for_nothing(name, value)
        if acted is not None:
            acted.add(name)
        return True

    def _asks_for_nothing(self, name: str, value: Any) -> bool:
        return any(f"{name}={value}" in condition.split(" or ") for condition in conditions_of(self.options[name]))

    def modes(self) -> list[tuple[str, ...]]:
        """Return flags: none, each value of an option that chooses, and what each option needs to act."""
        found = [(), *self.script.modes]
        terms = {
            term_of(term)[:2]
            for name, option in self.options.items()
            for condition in conditions_of(option)
            for term in condition.split(" or ")
            if term_of(term)[0] != name
        }
        for name, option in self.options.items():
            if "bool" in str(option.type) or option.metadata["choices"]:
                found += [tuple(words_of({name: value})) for value in self._values(name)]
            elif name in dict(terms):
                found += [] if option.default else [tuple(words_of({name: value})) for value in self._values(name)[:1]]
                found += [
                    (f"--{hyphened(name)}={value or 0}",)
                    for at, value in terms
                    if at == name and (value or option.default)
                ]
            found.append(tuple(self._needed(option)))
        return list(dict.fromkeys(found))

    def _needed(self, option: Any) -> Iterator[str]:
        """Yield the flags with which the conditions of an option hold."""
        for condition in conditions_of(option):
            name, value, is_not = term_of(condition.split(" or ")[0])
            needed = self.options.get(name)
            if needed is None or is_not:
                continue
            if value and str(needed.default) != value:
                yield f"--{hyphened(name)}={value}"
            elif not value and not needed.default:
                yield from words_of({name: self._values(name)[0]})

    def _values(self, name: str) -> list[Any]:
        option = self.options[name]
        return list(self.script.values.get(name) or other_values(option))


def _refuse(_: object, message: str) -> NoReturn:
    raise Refused(message)


def conditions_of(option: Any) -> list[str]:
    return [condition for kind in ("needs", "wants") for condition in option.metadata[kind]]


def term_of(term: str) -> tuple[str, str, bool]:
    """Split a term of a condition into the option's name, the value or an empty string, and whether it is negated."""
    name, _, value = term.removeprefix("not ").partition("=")
    return name, value, term.startswith("not ")


def hyphened(name: str) -> str:
    return name.replace("_", "-")
