"""The folder of one training run: what was asked, on what it ran, and whether it continues an earlier run."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import yaml

from utils import distributed
from utils.common.config import to_dict
from utils.common.environment import environment_report
from utils.common.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL, UserError
from utils.common.files import going_on_without, write_text_atomic
from utils.run.checkpoint import latest_facts
from utils.run.records import CONFIG_FILE, read_config
from utils.run.status import FAILED, FINISHED, RUNNING, STATUS_FILE, STOPPED, RunLock, write_status


class RunOptions(Protocol):
    """What a run folder needs of a script's options, which are an `Options` dataclass."""

    @property
    def save_dir(self) -> str: ...

    @property
    def resume(self) -> str | None: ...


def resume_arguments(argv: list[str]) -> list[str]:
    """Turn `--resume RUN` into that run's own options, which the rest of the command line then overrides."""
    for position, argument in enumerate(argv):
        if argument == "--resume" and position + 1 < len(argv):
            run = run_folder_of(argv[position + 1])
        elif argument.startswith("--resume="):
            run = run_folder_of(argument.split("=", 1)[1])
        else:
            continue
        return ["--config", str(run / CONFIG_FILE), *argv, "--save-dir", str(run)]
    return argv


def run_folder_of(resume: str) -> Path:
    """Return the run folder meant by a folder or a file in it. Raises UserError when it holds no run."""
    path = Path(resume)
    folder = path.parent if path.is_file() or path.suffix == ".pt" else path
    if not (folder / CONFIG_FILE).is_file() or not any((folder / "checkpoint").glob("step-*")):
        raise UserError(f"--resume {resume}: {folder} holds no run to continue (no {CONFIG_FILE} with a checkpoint)")
    return folder


def open_run_folder(folder: Path, config: RunOptions) -> tuple[bool, list[str]]:
    """Prepare the run folder; return whether an earlier run continues, and lines to tell the user. Rank 0 only.

    The same options again continue the run. Other options set the old folder aside under a new name: nothing is lost.
    """
    lines: list[str] = []
    earlier = read_config(folder)
    changed = differences(config, earlier) if earlier else []
    resumes = bool(earlier) and not changed and any((folder / "checkpoint").glob("step-*"))
    if config.resume and changed:
        raise UserError(
            f"--resume {config.resume}: would change {'; '.join(changed)}; leave that out, or start a new --save-dir"
        )
    if folder.exists() and any(folder.iterdir()) and not resumes:
        aside = _free_name(folder)
        os.rename(folder, aside)
        reason = f" ({'; '.join(changed[:3])})" if changed else ""
        lines.append(f"Set the earlier run aside as {aside}{reason}")
    folder.mkdir(parents=True, exist_ok=True)
    _write_config(folder, config)
    return resumes, lines


class OwnedRun:
    """A run's folder while this process works in it: locked, opened, its status kept. Every rank must reach each method.

    `resumes` says on every rank whether an earlier run continues, and `choices` what it chose, as far as its newest
    checkpoint says (empty for a new run); `notes` (rank 0) is what to tell the user.
    """

    def __init__(self, config: RunOptions) -> None:
        self.folder = Path(config.save_dir)
        self.config = config
        self.resumes = False
        self.choices: dict[str, Any] = {}
        self.notes: list[str] = []
        self._lock: RunLock | None = None

    def __enter__(self) -> OwnedRun:
        distributed.on_main(self._open)
        self.resumes = distributed.any_rank(self.resumes)
        self.choices = distributed.from_main(self.choices)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        if error is not None:
            self.say(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self._lock.release()

    def say(self, state: str, reason: str = "", **facts: Any) -> None:
        """Write the run's status; only rank 0 has one to write."""
        if self._lock is not None:
            with going_on_without(str(self.folder / STATUS_FILE)):
                write_status(self.folder, state, reason, **facts)

    def conclude(self, stopped_by: str, reason: str = "", **facts: Any) -> int:
        """Write the final status and return the exit code; `stopped_by` names the signal that ended the run, if one did."""
        self.say(STOPPED if stopped_by else FINISHED, stopped_by or reason, **facts)
        return EXIT_STOPPED_BY_SIGNAL if stopped_by else EXIT_DONE

    def _open(self) -> None:
        self._lock = RunLock(self.folder)
        try:
            self.resumes, self.notes = open_run_folder(self.folder, self.config)
            if self.resumes:
                self.choices = latest_facts(self.folder / "checkpoint")
        except BaseException:
            self._lock.release()
            self._lock = None
            raise
        self.say(RUNNING)


def _write_config(folder: Path, config: RunOptions) -> None:
    facts = "".join(f"# {name}: {value}\n" for name, value in environment_report().items())
    options = {name: value for name, value in to_dict(config).items() if name not in ("resume", "config")}
    text = (
        "# The resolved options of this run; usable with --config.\n" + facts + yaml.safe_dump(options, sort_keys=False)
    )
    write_text_atomic(folder / CONFIG_FILE, text)


def _free_name(folder: Path) -> Path:
    number = 1
    while folder.with_name(f"{folder.name}-{number}").exists():
        number += 1
    return folder.with_name(f"{folder.name}-{number}")


def differences(config: Any, earlier: dict[str, Any]) -> list[str]:
    """Return what makes `config` another run than the one whose resolved options are `earlier`.

    An option that the earlier run had not yet heard of stood at its default there.
    """
    compared = [field for field in fields(config) if not field.metadata["may_differ"]]
    values = [(field.name, earlier.get(field.name, field.default), getattr(config, field.name)) for field in compared]
    return [f"{name} {before} -> {now}" for name, before, now in values if before != now]
