"""Errors a user can mend, and the one place where a script turns them into a line and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

MOST_DETAILS = 1000  # lines about single files before an error; more come from one cause
EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DIVERGED = 70  # the training is beyond help with these options
EXIT_LOCKED = 73  # EX_CANTCREAT: another process works in the same run folder
EXIT_IO = 74  # EX_IOERR: checkpoints cannot be written
EXIT_STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: launchers may start the run again
EXIT_STARTUP_TIMEOUT = 76  # the ranks did not come together: worth another try


class UserError(Exception):
    """Something the user can mend. The message is one line: the value, the place and the fix."""

    exit_code = EXIT_FAILED


class DataErrors(UserError):
    """Several files that cannot be used. `details`, one line each, are printed before the message, by rank 0 alone."""

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class UsageError(UserError):
    """The command line or a configuration file is wrong."""

    exit_code = EXIT_USAGE


# PyTorch frames a refusal in paragraphs, one of which tells the user to switch the protection off.
_PYTORCH_ADVICE = re.compile(
    r"Weights only load failed.*?trusted source\.|WeightsUnpickler error: |(Please file an issue|Check the documentation).*"
)


def one_line(error: BaseException, most_characters: int = 200) -> str:
    """Return a foreign error's words on one printable line, without PyTorch's advice around them."""
    text = _PYTORCH_ADVICE.sub("", " ".join(str(error).split())).strip() or type(error).__name__
    return printable(text, most_characters)


def printable(text: str, most_characters: int = 80) -> str:
    """Return `text` short enough and free of what would break a line of a report or confuse a terminal."""
    return (text if text.isprintable() else ascii(text)[1:-1])[:most_characters]


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and leave with its exit code; a UserError becomes one line on stderr.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        code = main()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f"[rank {rank}] "
        if isinstance(error, DataErrors) and rank == "0":
            more = len(error.details) - MOST_DETAILS
            shown = [*error.details[:MOST_DETAILS], *([f"… and {more} more"] if more > 0 else [])]
            print(*shown, sep="\n", file=sys.stderr)
        print(f"{where}error: {_last_line(error)}", file=sys.stderr, flush=True)
        code = error.exit_code
    except KeyboardInterrupt:
        print("stopped by the keyboard", file=sys.stderr, flush=True)
        code = 130  # the shell's convention: 128 + SIGINT
    except BrokenPipeError:
        # `script | head` closed our output: point stdout elsewhere so that the interpreter's last flush cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_DONE
    _leave(code or EXIT_DONE)


def _last_line(error: UserError) -> str:
    """Return the message alone: a loader's worker passes its error on at the end of a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^[\w.]+(Error|Errors): ", "", lines[-1]) if len(lines) > 1 else lines[0]


def _leave(code: int) -> NoReturn:
    """End the process; one of several ranks does so without the interpreter's teardown.

    A thread of the process group may still be letting go of a tensor then. It needs the interpreter for that, and C++
    answers its refusal with `terminate called without an active exception`: an abort (-6) after the work is done.
    """
    if "RANK" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()  # what the interpreter would do next: end loader workers, close logs
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)


def to_stderr(line: str) -> None:
    """Print a warning; a closed terminal is no reason to stop."""
    with contextlib.suppress(OSError):
        print(f"WARNING: {line}", file=sys.stderr, flush=True)
