"""train.log: what the console says of a run."""

import re
import sys
from contextlib import suppress
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

CONSOLE_FILE = "train.log"
MAX_BYTES = 4_000_000  # of train.log; then it becomes train.log.1, in the place of an earlier one
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class ConsoleLog(RotatingFileHandler):
    """Appends what this process prints to train.log of a run's folder, without colours and bars,
    until `close`.
    """

    terminator = ""

    def __init__(self, run_folder: Path) -> None:
        super().__init__(
            run_folder / CONSOLE_FILE,
            maxBytes=MAX_BYTES,
            backupCount=1,
            encoding="utf-8",
            delay=True,
        )
        self._console: Any = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (_Copied(stream, self) for stream in self._console)

    def say(self, text: str) -> None:
        """Append text, at once, unless it is a bar's."""
        if "\r" not in text:
            self.handle(makeLogRecord({"msg": _COLOUR.sub("", text)}))

    def handleError(self, record: LogRecord) -> None:
        """Go on: a full disk must not end a training, whose records and checkpoints warn of it."""

    def close(self) -> None:
        """Give the console its streams back."""
        sys.stdout, sys.stderr = self._console
        # What did not fit onto a full disk is left.
        with suppress(OSError):
            super().close()


class _Copied:
    """A stream of the console whose text a ConsoleLog hears, too."""

    def __init__(self, stream: Any, log: ConsoleLog) -> None:
        self._stream = stream
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        self._log.say(text)
        return self._stream.write(text)
