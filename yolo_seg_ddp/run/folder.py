"""The folder of a training run: its options, its lock and status, and whether it continues an
earlier run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import traceback
from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from yolo_seg_ddp.data.fingerprint import Fingerprint
from yolo_seg_ddp.run.checkpoint import has_checkpoint, latest_manifest
from yolo_seg_ddp.run.console import ConsoleLog
from yolo_seg_ddp.run.records import CONFIG_FILE, read_config
from yolo_seg_ddp.run.status import (
    FAILED,
    FINISHED,
    RUNNING,
    STATUS_FILE,
    STOPPED,
    RunLock,
    write_status,
)
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.contents import read_back
from yolo_seg_ddp.utils.environment import environment_report
from yolo_seg_ddp.utils.errors import (
    EXIT_DONE,
    EXIT_STOPPED_BY_SIGNAL,
    UsageError,
    UserError,
    printable,
)
from yolo_seg_ddp.utils.files import in_the_way, warn_on_write_error, write_text_atomic
from yolo_seg_ddp.utils.option_names import FOLDER_PARTS
from yolo_seg_ddp.utils.options import to_dict

DATA_FILE = "data.json"  # the fingerprint of the data on which a run trains
CHANGES_FILE = "data_changes.txt"  # what changed in the data, and was accepted
# options that config.yaml does not hold: they are of one start
NOT_KEPT = ("resume", "config", "accept_changed_data")


class HasRunFolder(Protocol):
    """The fields that a run folder needs in a script's `Options` dataclass."""

    @property
    def save_dir(self) -> str: ...

    @property
    def resume(self) -> str | None: ...


def resume_arguments(argv: list[str], folder_flag: str = "--save-dir") -> list[str]:
    """Add the options of the run of `--resume RUN`; the rest of the command line overrides them.

    `folder_flag` is the script's flag for the run folder. Raises UsageError if it names a folder,
    too.
    """
    for position, argument in enumerate(argv):
        flag, equals, value = argument.partition("=")
        if flag != "--resume":
            continue
        value = value if equals else "".join(argv[position + 1 : position + 2])
        if not value or value.startswith("-"):
            raise UsageError(
                "--resume needs the run's folder: --resume models/mine; or type the same command "
                "again"
            )
        run = run_to_resume(value, {argument.split("=")[0] for argument in argv}, folder_flag)
        return ["--config", str(run / CONFIG_FILE), *argv, folder_flag, str(run)]
    return argv


def run_to_resume(resume: str, flags: Collection[str], folder_flag: str = "--save-dir") -> Path:
    """Return the folder of the run of `--resume RUN`.

    Raises UsageError if one of the given flags names a folder, too.
    """
    run = run_folder_of(resume)
    for flag in (folder_flag, *(f"--{part}" for part in FOLDER_PARTS)):
        if flag in flags:
            raise UsageError(
                f"{flag} has no effect with --resume, which names the run's folder: leave it out"
            )
    return run


def without_local_rank(argv: list[str]) -> list[str]:
    """Drop `--local-rank N` or `--local_rank=N`, which `torch.distributed.launch` adds; LOCAL_RANK
    says the same.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--local-rank", "--local_rank", nargs="?")
    return parser.parse_known_args(argv)[1]


def run_folder_of(resume: str) -> Path:
    """Return the run folder of a path to it or to a file in it.

    Raises UserError when it holds no run.
    """
    path = Path(resume)
    folder = path.parent if path.is_file() or path.suffix == ".pt" else path
    if not (folder / CONFIG_FILE).is_file() or not has_checkpoint(folder):
        raise UserError(
            f"--resume {resume}: {folder} holds no run to continue (no {CONFIG_FILE} with a "
            "checkpoint)"
        )
    return folder


def open_run_folder(
    folder: Path, config: HasRunFolder, may_resume: bool = True, data: Fingerprint | None = None
) -> tuple[bool, list[str]]:
    """Prepare the run folder; return whether it resumes an earlier run, and lines to print. Rank 0
    only.

    Resumes if the options are the same, and if it may. Otherwise renames the earlier run's folder
    and starts a new run. Raises UserError if `--resume` is given and the options differ, or if
    `data` is not what the earlier run trained on.
    """
    lines: list[str] = []
    accepts = getattr(config, "accept_changed_data", False)
    earlier = read_config(folder)
    changed = differences(config, earlier, folder) if earlier else []
    if earlier and data and (moved := _other_place(changed)):
        before = read_fingerprint(folder)
        is_same = (
            before is not None
            and before.names == data.names
            and (accepts or not data.changes_since(before))
        )
        # Otherwise `compare_data` says what changed.
        if is_same or config.resume:
            changed = [line for line in changed if line != moved]
            lines += [f"The data set lies elsewhere now: {moved}"] * is_same
    resumes = may_resume and bool(earlier) and not changed and has_checkpoint(folder)
    require_same_options(config, may_move=data is not None)
    if resumes and data:
        lines += compare_data(folder, data, accepts)
    if folder.exists() and any(folder.iterdir()) and not resumes:
        names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        os.rename(folder, aside)
        reason = f" ({'; '.join(changed[:3])})" if changed else ""
        lines.append(f"Set the earlier run aside as {aside}{reason}")
    folder.mkdir(parents=True, exist_ok=True)
    if data:
        write_text_atomic(folder / DATA_FILE, data.to_json() + "\n")
    environment = "".join(f"# {name}: {value}\n" for name, value in environment_report().items())
    options = {name: value for name, value in to_dict(config).items() if name not in NOT_KEPT}
    head = "# The resolved options of this run; usable with --config.\n"
    write_text_atomic(
        folder / CONFIG_FILE, head + environment + yaml.safe_dump(options, sort_keys=False)
    )
    return resumes, lines


def compare_data(folder: Path, data: Fingerprint, accepts_changes: bool) -> list[str]:
    """Return lines about what changed in the data since a run began, which go into CHANGES_FILE,
    too.

    Raises UserError for other classes, and for other photographs or labels unless these changes are
    accepted.
    """
    if (before := read_fingerprint(folder)) is None:
        return [
            f"{folder} does not say which data it began with ({DATA_FILE}), so changes of the "
            "data are not noticed"
        ]
    if before.names != data.names:
        raise UserError(
            f"{folder}: the run learns the classes {_listed(before.names)}, but --data has "
            f"{_listed(data.names)}; restore the names, or choose a new --save-dir"
        )
    if not (changes := data.changes_since(before)):
        return []
    text = printable("; ".join(changes), 1000)
    if not accepts_changes:
        raise UserError(
            f"{folder}: the data changed since the run began: {text}; undo the change, choose a "
            "new --save-dir, or go on with --accept-changed-data"
        )
    if problem := in_the_way(folder / CHANGES_FILE):
        raise UserError(problem)
    line = f"The data changed, which --accept-changed-data accepts: {text}"
    with (folder / CHANGES_FILE).open("a", encoding="utf-8") as file:
        step = latest_manifest(folder / "checkpoint").get("step")
        file.write(f"{datetime.now().isoformat(timespec='seconds')} after step {step}: {text}\n")
    return [line]


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """Return the fingerprint of the data on which a run in a folder trains; None without it.

    Raises UserError.
    """
    try:
        return read_back(
            folder / DATA_FILE,
            Fingerprint.of_content,
            "restore it, or remove it and changes go unnoticed",
        )
    except (FileNotFoundError, NotADirectoryError):
        return None


def _listed(names: Sequence[str]) -> str:
    return printable(", ".join(f"{number} {name}" for number, name in enumerate(names)), 1000)


def require_same_options(config: HasRunFolder, may_move: bool = False) -> None:
    """Raise UserError if `--resume` is given and the options differ from that run's; `may_move`:
    `--data` may.
    """
    folder = Path(config.save_dir)
    changed = differences(config, read_config(folder), folder) if config.resume else []
    if changed := [line for line in changed if not may_move or line != _other_place(changed)]:
        raise UserError(
            f"--resume {config.resume}: other options than that run's: {'; '.join(changed)}; "
            "remove them, or use another --save-dir"
        )


def _other_place(changed: Sequence[str]) -> str:
    """Return the difference in `--data`, which may be the same data set in another place; empty
    without one.
    """
    return next((line for line in changed if line.startswith("data ")), "")


def differences(config: Any, earlier: dict[str, Any], folder: Path | None = None) -> list[str]:
    """Return the options in which `config` differs from `earlier`, the resolved options of another
    run, in `folder`.

    An option that is missing in `earlier` had its default there. Ignores options that `may_differ`,
    and how many images a process takes, if a step takes as many over all processes as that run's
    steps.
    """
    compared = [field for field in fields(config) if not field.metadata["may_differ"]]
    images = latest_manifest(folder / "checkpoint").get("global_batch_size") if folder else None
    per_step = getattr(config, "accumulate", 1) * distributed.read_rank_environment().world_size
    if images and images == config.batch_size * per_step:
        compared = [field for field in compared if field.name not in ("batch_size", "accumulate")]
    values = [
        (field.name, earlier.get(field.name, field.default), getattr(config, field.name))
        for field in compared
    ]
    values = [
        (name, tuple(before) if isinstance(before, list) else before, now)
        for name, before, now in values
    ]
    return [f"{name} {before} -> {now}" for name, before, now in values if before != now]


class OwnedRun:
    """Locks and opens a run's folder, and keeps its status.json. Every rank must reach each method.

    On every rank `resumes` tells whether an earlier run is resumed, and `choices` holds the
    manifest of its newest checkpoint (empty for a new run). On rank 0 `notes` are lines to print.
    """

    def __init__(
        self, config: HasRunFolder, may_resume: bool = True, data: Fingerprint | None = None
    ) -> None:
        """`may_resume`: whether an earlier run with the same options is continued; otherwise it is
        set aside.

        `data`: on rank 0, what the run trains on; a run is only resumed on the same, unless its
        owner accepts changes.
        """
        self.data = data
        self.folder = Path(config.save_dir)
        self.config = config
        self.may_resume = may_resume
        self.resumes = False
        self.choices: dict[str, Any] = {}
        self.notes: list[str] = []
        self._lock: RunLock | None = None
        self._console: Any = None

    def __enter__(self) -> OwnedRun:
        distributed.run_on_main(self._open)
        self.resumes = distributed.any_rank(self.resumes)
        self.choices = distributed.broadcast_from_main(self.choices)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._lock is None:
            return
        if error is not None:
            self.set_status(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self._console.say("".join(traceback.format_exception(error)))
        self._console.close()
        self._lock.release()

    def set_status(self, state: str, reason: str = "", **progress: Any) -> None:
        """Write status.json, on rank 0 only."""
        if self._lock is not None:
            with warn_on_write_error(str(self.folder / STATUS_FILE)):
                write_status(self.folder, state, reason, **progress)

    def conclude(self, stopped_by: str, reason: str = "", **progress: Any) -> int:
        """Write the final status and return the exit code; `stopped_by` names the signal that ended
        the run, if one did.
        """
        self.set_status(STOPPED if stopped_by else FINISHED, stopped_by or reason, **progress)
        return EXIT_STOPPED_BY_SIGNAL if stopped_by else EXIT_DONE

    def _open(self) -> None:
        self._lock = RunLock(self.folder)
        try:
            self.resumes, self.notes = open_run_folder(
                self.folder, self.config, self.may_resume, self.data
            )
            if self.resumes:
                self.choices = latest_manifest(self.folder / "checkpoint")
        except BaseException:
            self._lock.release()
            self._lock = None
            raise
        self.set_status(RUNNING)
        self._console = ConsoleLog(self.folder)
