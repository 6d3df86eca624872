"""What `--help` prints: examples first, groups of options in one order, a line for most options."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import textwrap
from typing import Any

GROUPS = ("options", "data", "model", "run", "speed", "augmentation", "advanced")  # in `--help`, in this order


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Set options in two columns: `--ema` as `--[no-]ema`, with a value as `--batch-size, --batch N`."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 100) - 1
        super().__init__(prog, indent_increment=1, max_help_position=26, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[0].replace("--", "--[no-]")
        value = f" {self._format_args(action, str(action.metavar))}" if action.nargs != 0 else ""
        return ", ".join(action.option_strings) + value.replace(f" [{action.metavar} ...]", " ...")


def help_head(description: str) -> str:
    """Return the example commands and the sentence of a script's docstring, and what the brackets mean."""
    sentence, *examples = description.strip().split("\n\n")[:2]
    legend = "[VALUE]: the default. --no-X undoes --X."
    return "\n\n".join([*map(textwrap.dedent, examples), textwrap.fill(sentence, 79), legend])


def help_text(field: dataclasses.Field[Any], is_folder: bool) -> str:
    """Return an option's choices, meaning and default, in words: `none|auto: weights of the classes [none]`."""
    choices, words = field.metadata["choices"], {value: word for word, value in field.metadata["words"].items()}
    text = ("|".join(map(str, choices)) + ": " if choices else "") + field.metadata["help"]
    text += " (or --project and --name)" if is_folder else ""
    if field.default not in (None, "", ()) and field.default is not False and not field.metadata["required"]:
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        shown = (words.get(value, f"{value:g}" if isinstance(value, float) else str(value)) for value in values)
        text += " [on]" if field.default is True else f" [{' '.join(shown)}]"
    return text.replace("%", "%%")
