"""train.log: what the console says of a run."""

import logging
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

CONSOLE_FILE = "train.log"
MAX_BYTES = 4_000_000  # of train.log; then it becomes train.log.1, in the place of an earlier one
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class _Copied:
    """A stream that also hands its text to `write`."""

    def __init__(self, stream: Any, write: Callable[[str], None]) -> None:
        self._stream, self._copy = stream, write

    def write(self, text: str) -> int:
        self._copy(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ConsoleLog:
    """Appends what this process prints to train.log of a run's folder, without colours and bars, until `close`."""

    def __init__(self, run_folder: Path) -> None:
        self._file = RotatingFileHandler(
            run_folder / CONSOLE_FILE, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", delay=True
        )
        self._file.terminator = ""
        # A full disk must not end a training; its records and checkpoints warn of it.
        self._file.handleError = lambda record: None  # type: ignore[method-assign]
        self._streams = ExitStack()
        copies: list[Any] = [_Copied(stream, self.write) for stream in (sys.stdout, sys.stderr)]
        self._streams.enter_context(redirect_stdout(copies[0]))
        self._streams.enter_context(redirect_stderr(copies[1]))

    def write(self, text: str) -> None:
        """Append text, at once, unless it is a bar's."""
        if "\r" not in text:
            self._file.handle(logging.makeLogRecord({"msg": _COLOUR.sub("", text)}))

    def close(self) -> None:
        """Give the console its streams back."""
        self._streams.close()
        with suppress(OSError):  # what did not fit onto a full disk
            self._file.close()
