"""Errors that a user can fix, exit codes, and `run_script`, which prints an error as one line and
exits.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from yolo_seg_ddp.utils.text import as_called, coloured

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DIVERGED = 70  # the training diverges with these options
EXIT_LOCKED = 73  # EX_CANTCREAT: another process uses the same run folder
EXIT_IO = 74  # EX_IOERR: checkpoints cannot be written
EXIT_STOPPED_BY_SIGNAL = 75  # EX_TEMPFAIL: a checkpoint is saved; launchers may start the run again
EXIT_STARTUP_TIMEOUT = 76  # not all ranks joined in time; launchers may try again
EXIT_KEYBOARD = 130  # the shell's convention: 128 + SIGINT

SAID = "said-"  # how the files of `print_error` begin, in torchrun's folder of a start of the ranks
MAX_DETAILS = 1000  # lines of a DataErrors that are printed
_ACCESS = "give the user who runs this access to it and to its folder"
_OTHER_PLACE = "name another place"
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
ADVICE = {  # by the number of a file's error
    **dict.fromkeys((errno.EACCES, errno.EPERM), _ACCESS),
    **dict.fromkeys(DISK_IS_FULL, "make room there, or name another place"),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENAMETOOLONG), _OTHER_PLACE
    ),
}


class UserError(Exception):
    """An error that the user can fix. The message is one line: the value, the place and the fix."""

    exit_code = EXIT_FAILED


class DataErrors(UserError):
    """Several files cannot be used.

    The first process of a machine prints `details`, one line each, before the message.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class UsageError(UserError):
    """The command line or a configuration file is wrong."""

    exit_code = EXIT_USAGE


# Parts of the message of a RuntimeError, which torch.OutOfMemoryError is too. cuDNN leaves out the
# engines whose workspace cannot be allocated; when none is left it says "FIND (or GET) was unable
# to find an engine to execute this computation".
_OUT_OF_MEMORY = (
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "unable to find an engine",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device's memory is used up."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextlib.contextmanager
def explain_out_of_memory(message: str) -> Iterator[None]:
    """Turn the error of a device whose memory is used up into a UserError with `message`."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(message) from error


# PyTorch wraps the reason in paragraphs of advice; one of them tells the user to load without
# protection.
_PYTORCH_ADVICE = re.compile(
    r"Weights only load failed.*?trusted source\.|WeightsUnpickler error: |(Please file an "
    r"issue|Check the documentation).*"
)


def one_line(error: BaseException, most_characters: int = 200) -> str:
    """Return an error's message as one printable line, without PyTorch's advice."""
    text = _PYTORCH_ADVICE.sub("", " ".join(str(error).split())).strip() or type(error).__name__
    return printable(text, most_characters)


def printable(text: str, most_characters: int = 80) -> str:
    """Return `text`, escaped if it holds unprintable characters (line breaks, terminal codes), and
    cut to length.
    """
    return (text if text.isprintable() else ascii(text)[1:-1])[:most_characters]


def reason_of(error: OSError) -> str:
    """Return why a file cannot be read or written."""
    return "the disk is full" if error.errno in DISK_IS_FULL else error.strerror or str(error)


def print_warning(line: str) -> None:
    """Print a warning on stderr. A closed terminal raises nothing."""
    with contextlib.suppress(OSError):
        print(f"{coloured('WARNING:', 'yellow', sys.stderr)} {line}", file=sys.stderr, flush=True)


def print_error(line: str) -> None:
    """Print an error on stderr, with the number of the rank if it is not rank 0.

    Of a machine's ranks under torchrun only the first prints a line.
    `yolo_seg_ddp.utils.distributed.loopback` reads the files, too.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        try:
            said = f"{SAID}{zlib.crc32(repr(line).encode())}"
            Path(file).parents[1].joinpath(said).touch(exist_ok=False)
        except OSError as error:
            if isinstance(error, FileExistsError):
                return

    rank = os.environ.get("RANK", "0")
    head = ("" if rank == "0" else f"[rank {rank}] ") + coloured("error:", "red", sys.stderr)
    print(f"{head} {as_called(line)}", file=sys.stderr, flush=True)


def run_script(main: Callable[[], int | None]) -> None:
    """Run a script's `main` and exit with its code; print a UserError, or a place that cannot be
    written, as one line on stderr.

    Any other exception is a bug and keeps its traceback. One of several ranks then exits at once,
    like after a UserError: it must not wait for the other ranks.
    """
    try:
        code = main()
    except KeyboardInterrupt:
        print("stopped by the keyboard", file=sys.stderr, flush=True)
        code = EXIT_KEYBOARD
    except BrokenPipeError:
        # `script | head` closed our output: redirect stdout so that the interpreter's last flush
        # cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_DONE
    except Exception as error:
        known = error if isinstance(error, UserError) else None
        if (
            isinstance(error, OSError)
            and error.errno in ADVICE
            and (error.filename or error.errno in DISK_IS_FULL)
        ):
            name = printable(str(error.filename or "a file"), 400)
            known = UserError(f"{name}: {reason_of(error)}; {ADVICE[error.errno]}")
        if known is not None:
            # The first process of each machine: its files may be the only ones that cannot be used.
            if isinstance(known, DataErrors) and os.environ.get("LOCAL_RANK", "0") == "0":
                more = len(known.details) - MAX_DETAILS
                shown = [
                    *known.details[:MAX_DETAILS],
                    *([f"… and {more} more"] if more > 0 else []),
                ]
                print(*shown, sep="\n", file=sys.stderr)
            print_error(_last_line(known))
        elif "RANK" not in os.environ:
            raise
        else:
            traceback.print_exc()
        code = known.exit_code if known is not None else EXIT_FAILED
    _exit(code or EXIT_DONE)


def _last_line(error: UserError) -> str:
    """Return the message alone: PyTorch re-raises a loader worker's error with its traceback in
    front.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^[\w.]+(Error|Errors): ", "", lines[-1]) if len(lines) > 1 else lines[0]


def _exit(code: int) -> NoReturn:
    """Exit with `code`; a rank of several skips the interpreter's teardown.

    A thread of the process group may still release a tensor then, and it needs the interpreter for
    that. Without it, C++ aborts with `terminate called without an active exception` (-6) after all
    work is done.
    """
    if "RANK" not in os.environ:
        sys.exit(code)
    # As the interpreter does: this ends loader workers and closes logs.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The stream is closed, or a pipe without a reader.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
