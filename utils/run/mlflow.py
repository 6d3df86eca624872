"""Mirrors a run's folder to an MLflow server, through MLflow's client.

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
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from utils import distributed
from utils.common.config import without_secrets
from utils.common.errors import UsageError, one_line, print_warning, printable
from utils.common.files import read_text, write_text_atomic
from utils.common.threads import BackgroundWatch
from utils.run.checkpoint import latest_facts
from utils.run.log import METRICS_FILE
from utils.run.mlflow_client import checked_uri, import_library
from utils.run.records import CONFIG_FILE, Record, RecordTail, number_of, read_config, read_mapping, read_status
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
        return Mirror(folder, checked_uri(text, "--mlflow" if uri else "MLFLOW_TRACKING_URI"))
    except UsageError as error:
        if uri:
            raise
        print_warning(f"{without_secrets(str(error))}; this training is not sent to MLflow")
        return nullcontext()


class Mirror(BackgroundWatch):
    """Sends what an MLflow server lacks of a run's folder: every few seconds while it is a context manager, and at its end.

    After an error it waits longer each time, asks the server what it has, and continues there. It prints a warning at the
    first error, and another at the end if something is missing there.
    """

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__("MLflow")
        self._folder, self._url = folder, url
        self._mlflow = import_library()
        self._client = self._mlflow.MlflowClient(url, url)
        self._tail = RecordTail(folder / METRICS_FILE)
        self._time_ms = 0
        self._epochs: dict[int, tuple[int, dict[str, float]]] = {}  # by number: time of its last batch in ms, values
        self._run: Any = None  # None: the server must be asked
        self._sent_epochs: set[int] = set()
        self._sent_files: dict[str, tuple[int, int]] = {}  # by name: time and size
        self._best_is_due_s = 0.0
        self._progress_s = -math.inf  # when the server last got on, by time.monotonic; infinity while a file is sent
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
        while self._thread.is_alive() and now_s < min(end_s, max(start_s, self._progress_s) + STOP_WAIT_S):
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
            except Exception as error:  # noqa: BLE001 # whatever the server answers, the training continues
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
        self._send_epochs(run, final_status == "FINISHED")
        if final_status:
            self._client.set_terminated(run.info.run_id, final_status)
        self._progress_s = time.monotonic()
        if self._takes_files(run):
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
                values = {_allowed_name(name): value for name, value in _numbers(record).items()}
                self._epochs[int(values.get("epoch", 0))] = self._time_ms, values

    def _send_epochs(self, run: Any, is_finished: bool) -> None:
        """Send the complete epochs that the run lacks, oldest first; of each its number last, which says that it is there."""
        epochs_saved = latest_facts(self._folder / "checkpoint").get("epoch", 0)
        numbers = [number for number in self._epochs if is_finished or number <= epochs_saved]
        missing = [number for number in numbers if number not in self._sent_epochs]
        metrics = [
            self._mlflow.entities.Metric(name, value, self._epochs[number][0], number)
            for number in missing
            for name, value in sorted(self._epochs[number][1].items(), key=lambda item: item[0] == "epoch")
        ]
        self._client.log_batch(run.info.run_id, metrics)
        self._sent_epochs.update(missing)
        self._progress_s = time.monotonic()

    def _open_run(self) -> Any:
        """Return the folder's run on the server; create it if there is none. The options become its parameters."""
        note = _read_note(self._folder, self._url)
        run = self._find_run(note)
        if run is None:
            # The key is on the disk before the run is on the server: a kill between the two leaves no second run.
            note = {"server": self._url, "key": secrets.token_hex(8)}
            self._write_note(note)
            tags = {KEY_TAG: note["key"], **_source_tags(self._folder / CONFIG_FILE)}
            name = os.environ.get("MLFLOW_RUN_NAME") or self._folder.absolute().name
            run = self._client.create_run(self._experiment_id(), tags=tags, run_name=name)
            self._sent_epochs = set()
        run_id = run.info.run_id
        if not re.fullmatch(r"\w[\w-]{0,255}", run_id, re.ASCII):
            raise ValueError("the name of a run is missing in an answer; is this an MLflow server?")
        if note.get("run_id") != run_id:
            self._write_note({**note, "run_id": run_id})
        options = {_allowed_name(key): str(value)[:6000] for key, value in read_config(self._folder).items()}
        missing = {key: value for key, value in options.items() if key not in run.data.params}
        params = [self._mlflow.entities.Param(key, value) for key, value in missing.items()]
        self._client.log_batch(run_id, params=params)
        if run.info.status != "RUNNING":
            self._client.update_run(run_id, "RUNNING")
        if self._says_first("page"):
            page = printable(f"{self._url}/#/experiments/{run.info.experiment_id}/runs/{run_id}", 400)
            files = "" if self._takes_files(run) else " (without files: this server does not take them)"
            with contextlib.suppress(OSError):  # a closed terminal, as in RunLog.print
                print(f"MLflow: {page}{files}", flush=True)
        return run

    def _experiment_id(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))

    def _find_run(self, note: dict[str, str]) -> Any:
        """Return the noted run; None if it was deleted or holds an epoch that metrics.jsonl does not."""
        if "key" not in note:
            return None
        try:
            if "run_id" in note:
                run = self._client.get_run(note["run_id"])
            else:  # the answer to its creation was lost
                question = f"tags.{KEY_TAG} = '{note['key']}'"
                run = next(iter(self._client.search_runs([self._experiment_id()], question, max_results=1)), None)
        except self._mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if run is None or run.info.lifecycle_stage == "deleted":
            return None
        sent = self._client.get_metric_history(run.info.run_id, "epoch")
        times_ms = {metric.step: metric.timestamp for metric in sent}
        if any(number not in self._epochs or self._epochs[number][0] != time for number, time in times_ms.items()):
            print_warning(f"MLflow: run {run.info.run_id} holds other epochs than {METRICS_FILE}; a new run begins")
            return None
        self._sent_epochs = set(times_ms)
        return run

    def _takes_files(self, run: Any) -> bool:
        """Whether the run's files lie on the server itself: nothing is sent or written to any other address."""
        try:
            address = urlsplit(str(run.info.artifact_uri))
        except ValueError:
            return False
        return address.scheme == "mlflow-artifacts" and address.netloc in ("", urlsplit(self._url).netloc)

    def _send_files(self, run: Any, is_last: bool) -> None:
        """Send best.pt if it changed, at most every ten minutes; at the end every changed file. Raises the last error."""
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
                self._progress_s = math.inf
                files_of = self._mlflow.store.artifact.mlflow_artifacts_repo.MlflowArtifactsRepository
                files_of(run.info.artifact_uri, self._url).log_artifact(str(file))
                self._sent_files[file.name] = version
            except Exception as error:  # noqa: BLE001 # raised below: one file must not keep the others away
                problem = error
            finally:
                self._progress_s = time.monotonic()
        if problem is not None:
            raise problem

    def _write_note(self, note: dict[str, str]) -> None:
        write_text_atomic(self._folder / NOTE_FILE, json.dumps(note, indent=2) + "\n")


def _read_note(folder: Path, url: str) -> dict[str, str]:
    """Return what an earlier process noted about its run on this server: `key`, `run_id`; empty if there is nothing."""
    note = read_mapping(folder / NOTE_FILE)
    is_note = note.get("server") == url and re.fullmatch("[0-9a-f]+", str(note.get("key")))
    return {str(name): str(value) for name, value in note.items()} if is_note else {}


def _source_tags(config_file: Path) -> dict[str, str]:
    """Return the script's name, and the versions and hardware that the head of config.yaml names."""
    with contextlib.suppress(OSError):
        facts: dict[str, str] = dict(re.findall(r"^# (\w+): (.+)$", read_text(config_file), re.MULTILINE))
        source = {"name": Path(sys.argv[0]).name, "type": "LOCAL", "git.commit": facts.get("git_revision", "unknown")}
        return {**facts, **{f"mlflow.source.{name}": value for name, value in source.items()}}
    return {}


def _allowed_name(text: object) -> str:
    """Return a name of characters that MLflow allows for metrics and parameters."""
    return re.sub(r"[^\w.\- ]", "_", str(text), flags=re.ASCII)[:250]


def _numbers(record: Record) -> dict[str, float]:
    """Return the finite numbers of a record."""
    numbers = {name: number_of(value) for name, value in record.items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _version(file: Path) -> tuple[int, int] | None:
    """Return a file's time and size; None if there is no such file."""
    with contextlib.suppress(FileNotFoundError):
        facts = file.stat()
        return facts.st_mtime_ns, facts.st_size
    return None
