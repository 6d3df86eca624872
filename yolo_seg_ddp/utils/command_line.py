"""Builds the parser of a command line, with its `--help`, from a dataclass of options."""

import argparse
import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from yolo_seg_ddp.utils.errors import EXIT_USAGE
from yolo_seg_ddp.utils.option_names import FOLDER_PARTS, instead, nearest, other_names
from yolo_seg_ddp.utils.options import GROUPS, fields_of, flag_of, folder_option, unpack
from yolo_seg_ddp.utils.text import as_called, coloured, without_secrets


def lower_if_chosen(text: str, choices: Sequence[Any]) -> str:
    """Return `text` in lower case if that, and not `text` itself, is one of the choices."""
    return text.lower() if text not in choices and text.lower() in choices else text


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        head = f"{self.prog}: {coloured('error:', 'red', sys.stderr)}"
        self.exit(EXIT_USAGE, f"{head} {without_secrets(message)} -- see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].split("=")[0]
            flags = [one for each in self._actions for one in each.option_strings]
            advice = instead(flag, {action.dest for action in self._actions}) or nearest(
                flag, flags
            )
            self.error(f"unknown argument {unknown[0]}{advice}")
        return known


def build_parser(config_class: type, description: str) -> argparse.ArgumentParser:
    sentence, *examples = as_called(description.strip()).split("\n\n")[:2]
    # After `python -m` it has a name.
    module = getattr(sys.modules["__main__"].__spec__, "name", "")
    parser = Parser(
        prog=f"python -m {module.removesuffix('.__main__')}"
        if module.startswith("yolo_seg_ddp.extras.")
        else None,
        usage=argparse.SUPPRESS,
        description="\n\n".join(
            [
                *map(textwrap.dedent, examples),
                textwrap.fill(sentence, 79),
                "[VALUE]: the default. --no-X undoes --X.",
            ]
        ),
        formatter_class=HelpFormatter,
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    folder = folder_option(config_class)
    known = [field.name for field, _ in fields_of(config_class)]
    groups = _groups(config_class, parser)
    for field, kind in fields_of(config_class):
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
        groups[field.name].add_argument(
            flag_of(field.name), *map(flag_of, other_names(field.name, known)), **keywords
        )
    for part in FOLDER_PARTS if folder else ():
        parser.add_argument(flag_of(part), help=argparse.SUPPRESS)
    return parser


def _groups(
    config_class: type, parser: argparse.ArgumentParser
) -> dict[str, argparse._ArgumentGroup]:
    """Return the `--help` group of each option: its own, or that of
    the section that declares it.
    """
    sections: dict[str, Any] = {
        name: section
        for section in config_class.__mro__
        for name in vars(section).get("__annotations__", ())
    }
    titles = {
        field.name: field.metadata["group"] or sections[field.name].group
        for field in dataclasses.fields(config_class)
    }
    groups = {
        title: parser.add_argument_group(title) for title in GROUPS if title in titles.values()
    }
    return {name: groups[title] for name, title in titles.items()}


def _reader(kind: type, words: Mapping[str, Any], choices: Sequence[Any]) -> Callable[[str], Any]:
    """Return a function that turns a word of the command line into a value; `AdamW` is the choice
    `adamw`.
    """

    def read(text: str) -> Any:
        return words[text] if text in words else kind(lower_if_chosen(text, choices))

    # argparse prints this name when a value is wrong
    read.__name__ = " or ".join([kind.__name__, *words])
    return read


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows `--[no-]ema` for a switch and `--batch-size, --batch N` for a value; paragraphs of a
    description stay apart.
    """

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 100) - 1
        super().__init__(prog, indent_increment=1, max_help_position=26, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Return `--ema` as `--[no-]ema`, and an option with a value
        as `--batch-size, --batch N`.
        """
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]")
        value = f" {self._format_args(action, str(action.metavar))}" if action.nargs != 0 else ""
        return ", ".join(action.option_strings) + value.replace(f" [{action.metavar} ...]", " ...")


def help_text_of(field: dataclasses.Field[Any], is_folder: bool) -> str:
    """Return an option's choices, meaning and default, in words: `none|auto: weights of the classes
    [none]`.
    """
    choices = field.metadata["choices"]
    words = {value: word for word, value in field.metadata["words"].items()}
    text = ("|".join(map(str, choices)) + ": " if choices else "") + field.metadata["help"]
    text += " (or --project and --name)" if is_folder else ""
    if (
        field.default not in (None, "", ())
        and field.default is not False
        and not field.metadata["required"]
    ):
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        shown = (
            words.get(value, f"{value:g}" if isinstance(value, float) else str(value))
            for value in values
        )
        text += " [on]" if field.default is True else f" [{' '.join(shown)}]"
    return text.replace("%", "%%")
