"""Shows a running or finished training in the terminal, also over ssh: `python -m
yolo_seg_ddp.run.monitor models/my_run`.

It reads the run's files and changes none. In a terminal it refreshes the view until the run ends.
Into a pipe, or with `--once`, it prints the view once.
"""

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from yolo_seg_ddp.run.records import RunState
from yolo_seg_ddp.run.status import RUNNING
from yolo_seg_ddp.run.view import view_lines
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UserError, run_script
from yolo_seg_ddp.utils.options import Options, option

GONE_S = 3.0  # a folder may be missing this long: a new run renames the old one first


@dataclass(frozen=True)
class MonitorConfig(Options):
    run: str = option(
        "", "run folder; may be the first argument, without --run", required=True, metavar="RUN"
    )
    once: bool = option(False, "print the current state and exit")
    every: float = option(2.0, "seconds between two updates", above=0, needs="not once")


def main() -> int:
    """Show the run of a folder, or of a file in it; return 0 once it has ended."""
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--run", *arguments]
    config = parse_config(
        MonitorConfig, "Show a running or finished training in the terminal.", arguments
    )
    path = Path(config.run)
    state = RunState(path.parent if path.is_file() else path)
    if config.once or not sys.stdout.isatty():
        print("\n".join(_look(state, config.run)[0]))
        return 0
    try:
        _watch(state, config)
    except KeyboardInterrupt:
        print()
    return 0


def _look(state: RunState, run: str) -> tuple[list[str], bool]:
    """Return the view, and whether the run continues."""
    columns, rows = shutil.get_terminal_size()
    try:
        state.read()
    except FileNotFoundError as error:
        raise UserError(
            f"{run}: no run there (no config.yaml, status.json or metrics.jsonl); was it moved, "
            "or has it not started yet?"
        ) from error
    is_unicode = "utf" in (sys.stdout.encoding or "").lower()
    lines = view_lines(state, columns, time.time(), is_unicode=is_unicode)
    height = rows - 1 if sys.stdout.isatty() else len(lines)
    return lines[:height], state.state in (RUNNING, "")


def _watch(state: RunState, config: MonitorConfig) -> None:
    """Redraw the view in place; keep what the terminal showed before it."""
    num_lines = 0
    gone_since_s: float | None = None
    while True:
        try:
            lines, continues = _look(state, config.run)
            gone_since_s = None
        except UserError:
            gone_since_s = gone_since_s or time.monotonic()
            if not num_lines or time.monotonic() - gone_since_s >= GONE_S:
                raise
        else:
            back = f"\x1b[{num_lines}F" if num_lines else ""
            print(
                back + "\n".join(f"{line}\x1b[K" for line in lines) + "\n\x1b[J", end="", flush=True
            )
            num_lines = len(lines)
            if not continues:
                return
        time.sleep(config.every)


if __name__ == "__main__":
    run_script(main)
