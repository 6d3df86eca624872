"""Mirrors a run's folder to an MLflow server.

A background thread of rank 0 reads the run's files, above all metrics.jsonl, and sends what the server lacks. The training
hands it nothing and waits for it only at its end. An epoch is sent once a checkpoint holds it, because a resumed run
repeats what no checkpoint holds. The server is asked which epochs it has, so none is sent twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from utils import distributed
from utils.common.bounded_http import ServerError
from utils.common.config import without_secrets
from utils.common.errors import UsageError, one_line, print_warning
from utils.common.files import read_text, write_text_atomic
from utils.common.threads import BackgroundWatch
from utils.run.checkpoint import latest_facts
from utils.run.log import METRICS_FILE
from utils.run.mlflow_api import Metric, MlflowServer, Run, allowed_name, authorization, checked_uri
from utils.run.records import CONFIG_FILE, Record, RecordTail, read_config, read_status
from utils.run.status import FAILED, FINISHED, STOPPED

POLL_S = 5.0
MOST_BACKOFF_S = 300.0
LOOK_S = 0.1  # at the end, between two looks at the server's progress
BEST_EVERY_S = 600.0  # at most so often is a new best.pt sent before the training ends
FINISH_WAIT_S = 60.0  # at the end of a training whose server answered last time
STOP_WAIT_S = 10.0  # at any other end, and for one answer; schedulers grant 30 seconds between a stop and a kill
NOTE_FILE = "mlflow.json"
KEY_TAG = "run_folder_key"
BEST_FILE = "best.pt"
SENT_SUFFIXES = (".csv", ".jpg", ".jsonl", ".png", ".txt", ".yaml")
STATUSES = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}


def mirror(folder: Path, uri: str | None) -> AbstractContextManager[object]:
    """Return what mirrors a run's folder while it is a context manager; on other ranks and without a server it does nothing.

    `uri` is the server's address; None: the environment's MLFLOW_TRACKING_URI; empty: no server. Raises UsageError if it
    is no address. A wrong variable costs a warning instead: it may be meant for another program.
    """
    text = os.environ.get("MLFLOW_TRACKING_URI") if uri is None else uri
    if not text or distributed.rank() != 0:
        return nullcontext()
    try:
        return Mirror(folder, checked_uri(text, "--mlflow" if uri else "MLFLOW_TRACKING_URI"), os.environ)
    except UsageError as error:
        if uri:
            raise
        print_warning(f"{without_secrets(str(error))}; this training is not sent to MLflow")
        return nullcontext()


@dataclass(frozen=True)
class _Epoch:
    """An epoch's record in metrics.jsonl. Its time is that of the last batch before it, so it is always the same."""

    number: int
    time_ms: int
    values: dict[str, float]


class Mirror(BackgroundWatch):
    """Sends what an MLflow server lacks of a run's folder: every few seconds while it is a context manager, and at its end.

    After an error it waits longer each time, asks the server what it has, and continues there. It prints a warning at the
    first error, and another at the end if something is missing there.
    """

    def __init__(self, folder: Path, url: str, environment: Mapping[str, str]) -> None:
        super().__init__("MLflow")
        self._folder = folder
        self._server = MlflowServer(url, authorization(environment))
        self._experiment = environment.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        self._run_name = environment.get("MLFLOW_RUN_NAME") or folder.absolute().name
        self._tail = RecordTail(folder / METRICS_FILE)
        self._time_ms = 0
        self._epochs: dict[int, _Epoch] = {}
        self._run: Run | None = None  # None: the server must be asked
        self._sent_files: dict[str, tuple[int, int]] = {}  # by name: time and size
        self._best_is_due_s = 0.0
        self._num_failures = 0  # in a row
        self._problem = ""
        self._said: set[str] = set()
        self._final_status = ""
        self._is_complete = False

    def __exit__(self, *error: object) -> None:
        state = FAILED if error[0] is not None else str(read_status(self._folder).get("state"))
        self._final_status = STATUSES.get(state, "KILLED")
        is_worth_waiting = state == FINISHED and not self._num_failures
        self._is_over.set()
        start_s = now_s = time.monotonic()
        end_s = start_s + (FINISH_WAIT_S if is_worth_waiting else STOP_WAIT_S)
        assert self._thread is not None
        while self._thread.is_alive() and now_s < min(end_s, max(start_s, self._server.progress_s) + STOP_WAIT_S):
            self._thread.join(LOOK_S)
            now_s = time.monotonic()
        if not self._is_complete:
            why = self._problem or f"not done after {now_s - start_s:.0f} s"
            print_warning(f"MLflow lacks a part of this run ({why}); the same training command sends the rest")

    def _watch(self) -> None:
        is_last, delay_s = False, POLL_S
        while not is_last:
            is_last = self._is_over.wait(delay_s)
            try:
                self._send_what_is_missing()
            except (ServerError, OSError) as error:
                self._run = None
                self._num_failures += 1
                self._problem = one_line(error, 400)
                if not is_last and self._says_first("problem"):
                    print_warning(f"MLflow: {self._problem}; training continues, and the rest is sent when this works")
            else:
                self._num_failures, self._problem, self._is_complete = 0, "", is_last
            delay_s = min(POLL_S * 2**self._num_failures, MOST_BACKOFF_S)

    def _says_first(self, what: str) -> bool:
        is_first = what not in self._said
        self._said.add(what)
        return is_first

    def _send_what_is_missing(self) -> None:
        final_status = self._final_status
        self._read_epochs()
        run = self._run = self._run or self._open_run()
        self._server.log_metrics(run, self._missing_metrics(run, final_status == "FINISHED"))
        self._server.set_status(run, final_status or "RUNNING")
        if run.artifacts:
            self._send_files(run, is_last=bool(final_status))

    def _read_epochs(self) -> None:
        """Read the new records. Once the run went back to a checkpoint, all are new, and the server is asked again."""
        is_new, records = self._tail.read()
        if is_new:
            self._epochs.clear()
            self._run = None
        for record in records:
            if record.get("kind") == "batch":
                self._time_ms = int(_numbers(record).get("time_s", 0) * 1000)
            elif record.get("kind") == "epoch":
                values = {allowed_name(name): value for name, value in _numbers(record).items()}
                number = int(values.get("epoch", 0))
                self._epochs[number] = _Epoch(number, self._time_ms, values)

    def _missing_metrics(self, run: Run, is_finished: bool) -> list[Metric]:
        """Return the values of complete epochs that the run lacks, oldest first."""
        epochs_saved = latest_facts(self._folder / "checkpoint").get("epoch", 0)
        return [
            Metric(name, value, epoch.time_ms, epoch.number)
            for epoch in self._epochs.values()
            for name, value in epoch.values.items()
            if (is_finished or epoch.number <= epochs_saved)
            and (name not in run.latest or run.latest[name].step < epoch.number)
        ]

    def _open_run(self) -> Run:
        """Return the folder's run on the server; create it if there is none. The options become its parameters."""
        note = _read_note(self._folder / NOTE_FILE, self._server.url)
        run = self._find_run(note)
        if run is None:
            # The key is on the disk before the run is on the server: a kill between the two leaves no second run.
            note = {"server": self._server.url, "key": secrets.token_hex(8)}
            self._write_note(note)
            experiment_id = self._server.experiment_id(self._experiment)
            tags = {KEY_TAG: note["key"], **_source_tags(self._folder / CONFIG_FILE)}
            run = self._server.create_run(experiment_id, self._run_name, tags)
        if note.get("run_id") != run.run_id:
            self._write_note({**note, "run_id": run.run_id})
        self._server.log_params(run, read_config(self._folder))
        if self._says_first("page"):
            files = "" if run.artifacts else " (without files: this server does not take them)"
            with contextlib.suppress(OSError):  # a closed terminal, as in RunLog.print
                print(f"MLflow: {self._server.page_of(run)}{files}", flush=True)
        return run

    def _find_run(self, note: Mapping[str, str]) -> Run | None:
        """Return the noted run; None if it was deleted or holds an epoch that metrics.jsonl does not."""
        if "run_id" in note:
            run = self._server.get_run(note["run_id"])
        elif "key" in note:  # the answer to its creation was lost
            run = self._server.find_run(self._server.experiment_id(self._experiment), KEY_TAG, note["key"])
        else:
            return None
        if run is None or run.is_deleted:
            return None
        for metric in run.latest.values():
            epoch = self._epochs.get(metric.step)
            if epoch is None or epoch.time_ms != metric.timestamp:
                print_warning(f"MLflow: run {run.run_id} holds other epochs than {METRICS_FILE}; a new run begins")
                return None
        return run

    def _send_files(self, run: Run, is_last: bool) -> None:
        """Send best.pt if it changed, at most every ten minutes; at the end every changed file. Raises the last ServerError."""
        if not is_last and time.monotonic() < self._best_is_due_s:
            return
        files = [file for file in self._folder.iterdir() if file.suffix in SENT_SUFFIXES] if is_last else []
        problem = None
        for file in [*sorted(files), self._folder / BEST_FILE]:  # the small ones first
            version = _version(file)
            if version is None or self._sent_files.get(file.name) == version:
                continue
            self._best_is_due_s = time.monotonic() + BEST_EVERY_S
            try:
                self._server.upload(run, file)
                self._sent_files[file.name] = version
            except ServerError as error:
                problem = error
        if problem is not None:
            raise problem

    def _write_note(self, note: Mapping[str, str]) -> None:
        write_text_atomic(self._folder / NOTE_FILE, json.dumps(note, indent=2) + "\n")


def _read_note(file: Path, url: str) -> dict[str, str]:
    """Return what an earlier process noted about its run on this server: `key`, `run_id`; empty if there is nothing."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_note = isinstance(note, dict) and note.get("server") == url and re.fullmatch("[0-9a-f]+", str(note.get("key")))
    return {str(name): str(value) for name, value in note.items()} if is_note else {}


def _source_tags(config_file: Path) -> dict[str, str]:
    """Return the script's name, and the versions and hardware that the head of config.yaml names."""
    with contextlib.suppress(OSError):
        facts: dict[str, str] = dict(re.findall(r"^# (\w+): (.+)$", read_text(config_file), re.MULTILINE))
        source = {"name": Path(sys.argv[0]).name, "type": "LOCAL", "git.commit": facts.get("git_revision", "unknown")}
        return {**facts, **{f"mlflow.source.{name}": value for name, value in source.items()}}
    return {}


def _numbers(record: Record) -> dict[str, float]:
    """Return the finite numbers of a record. metrics.jsonl has null for others."""
    found = {
        name: value for name, value in record.items() if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _version(file: Path) -> tuple[int, int] | None:
    """Return a file's time and size; None if there is no such file."""
    try:
        facts = file.stat()
    except FileNotFoundError:
        return None
    return facts.st_mtime_ns, facts.st_size
