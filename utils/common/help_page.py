"""How `--help` looks: one line per option where possible, as wide as the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from typing import Any


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
