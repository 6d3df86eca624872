"""Mirrors a run's folder to an MLflow server, through MLflow's own client.

A thread of rank 0 reads metrics.jsonl and sends what the server lacks. The training hands it
nothing and waits for it only at its end. An epoch is sent once a checkpoint holds it, because a
resumed run repeats the epochs that no checkpoint holds.
"""

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from yolo_seg_ddp.run.checkpoint import latest_manifest
from yolo_seg_ddp.run.records import RecordTail, read_config
from yolo_seg_ddp.run.sending import FolderSender
from yolo_seg_ddp.run.status import FAILED, FINISHED
from yolo_seg_ddp.utils.contents import read_mapping
from yolo_seg_ddp.utils.errors import UsageError, print_warning, printable
from yolo_seg_ddp.utils.files import read_text, write_text_atomic
from yolo_seg_ddp.utils.text import without_secrets

# of MLflow's client: no statistics for its makers, short waits, no address but the server's
SETTINGS = {
    **dict.fromkeys(
        ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"),
        "true",
    ),
    **dict.fromkeys(
        ("MLFLOW_ALLOW_HTTP_REDIRECTS", "MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD"), "false"
    ),
    **dict.fromkeys(("MLFLOW_TRACKING_INSECURE_TLS", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"), "0"),
    # seconds, for a connection and for the next bytes of an answer
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
}
SENT_SUFFIXES = (".csv", ".jpg", ".jsonl", ".png", ".txt", ".yaml")


def checked_uri(text: str, name: str) -> str:
    """Return a server's address.

    Raises UsageError, which names `name`, for any other text, and without MLflow's package.
    """
    if not re.fullmatch(
        r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:[1-9]\d{0,4})?(/[!$->A-~]*)?", text, re.ASCII
    ):
        given = printable(without_secrets(text.rpartition("@")[2]))
        address = (
            "a server's address such as http://127.0.0.1:5000; for a user set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
        raise UsageError(f"{name} {given}: expected {address}")
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError(
            f"{name}: MLflow's package is not installed: pip install -r requirements-mlflow.txt"
        )
    # requests would show it in its error
    if not os.environ.get("MLFLOW_TRACKING_TOKEN", "").isprintable():
        raise UsageError(
            "MLFLOW_TRACKING_TOKEN: holds a character that no HTTP header may hold, such as a "
            "line break"
        )
    return text.rstrip("/")


def mirror(folder: Path, uri: str | None) -> "Mirror | None":
    """Return what mirrors a run's folder.

    Rank 0 only. `uri`: a checked one; None: MLFLOW_TRACKING_URI; empty: no server.
    """
    text = os.environ.get("MLFLOW_TRACKING_URI") if uri is None else uri
    try:
        if text:
            return Mirror(folder, checked_uri(text, "MLFLOW_TRACKING_URI"))
    except UsageError as error:
        print_warning(f"{error}; this training is not sent to MLflow")
    return None


class Mirror(FolderSender):
    """Sends what an MLflow server lacks of a run's folder, while it is a context manager and at its
    end.
    """

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__("MLflow", folder)
        os.environ.update(SETTINGS)
        # Here and not in the thread: a loader process that is forked during an import could wait
        # for it without end.
        import mlflow.tracking.request_header.registry
        from mlflow.store.artifact.mlflow_artifacts_repo import MlflowArtifactsRepository

        self._url = url
        self._entities = mlflow.entities
        self._store_of = MlflowArtifactsRepository
        self._client = mlflow.MlflowClient(url, url)
        self._tail = RecordTail(folder / "metrics.jsonl")
        self._time_ms = 0
        # by number: MLflow's metrics, the epoch's number last
        self._epochs: dict[int, list[Any]] = {}
        self._sent_files: dict[Path, int] = {}  # their times in ns
        self._sent: set[int] | None = None
        self._page = ""

    def _send(self, state: str) -> None:
        status = state and (state.upper() if state in (FINISHED, FAILED) else "KILLED")
        self._read_epochs()
        saved = latest_manifest(self._folder / "checkpoint").get("epoch", 0)
        ready = {number for number in self._epochs if number <= saved or state == FINISHED}
        if ready != self._sent or status:
            self._send_run(ready, status)
        self._sent = ready

    def _read_epochs(self) -> None:
        is_new, records = self._tail.read()
        # The file is new when the run went back to a checkpoint.
        self._epochs = {} if is_new else self._epochs
        for record in records:
            if record.get("kind") == "batch":
                self._time_ms = int(record.get("time_s", 0) * 1000)
            elif record.get("kind") == "epoch":
                # now the last value: it says that the others are there
                number = record["epoch"] = record.pop("epoch")
                values = [
                    (name, value)
                    for name, value in record.items()
                    if isinstance(value, int | float)
                ]
                self._epochs[number] = [
                    self._entities.Metric(*one, self._time_ms, number) for one in values
                ]

    def _send_run(self, ready: set[int], status: str) -> None:
        """Send what the server lacks: these epochs, the options, files. A `status` ends the run."""
        client, folder, (run, there) = self._client, self._folder, self._open_run()
        run_id = run.info.run_id
        options = read_config(folder).items()
        params = [self._entities.Param(*item) for item in options if item[0] not in run.data.params]
        metrics = [metric for number in sorted(ready - there) for metric in self._epochs[number]]
        client.log_batch(run_id, metrics, params)
        if status:
            client.set_terminated(run_id, status)
        elif run.info.status != "RUNNING":
            client.update_run(run_id, "RUNNING")
        # A store on the server itself: nothing is sent or written to any other address.
        takes_files = re.match("mlflow-artifacts:/(?!/)", run.info.artifact_uri)
        page = printable(f"{self._url}/#/experiments/{run.info.experiment_id}/runs/{run_id}", 400)
        if page != self._page:
            self._page = page
            print(
                f"MLflow: {page}" + " (without files: it keeps them elsewhere)" * (not takes_files),
                flush=True,
            )
        files = (
            sorted(file for file in folder.iterdir() if file.suffix in SENT_SUFFIXES)
            if status
            else []
        )
        # The large one comes last.
        for file in [*files, *folder.glob("best.pt")] if takes_files else []:
            if self._sent_files.get(file) != (time_ns := file.stat().st_mtime_ns):
                self._store_of(run.info.artifact_uri, self._url).log_artifact(str(file))
                self._sent_files[file] = time_ns

    def _open_run(self) -> tuple[Any, set[int]]:
        """Return the folder's run and the epochs that it has; a new run if there is none, or if
        metrics.jsonl contradicts it.
        """
        client = self._client
        note = read_mapping(self._folder / "mlflow.json")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        experiment = client.get_experiment_by_name(name)
        place = str(experiment.experiment_id if experiment else client.create_experiment(name))
        if note.get("server") == self._url:
            # Notes of an older version name none.
            places = [note.get("experiment_id") or place]
            for run in client.search_runs(places, f"tags.run_folder_key = '{note['key']}'"):
                history = client.get_metric_history(run.info.run_id, "epoch")
                times = {number: metrics[-1].timestamp for number, metrics in self._epochs.items()}
                if all(times.get(metric.step) == metric.timestamp for metric in history):
                    return run, {metric.step for metric in history}
                print_warning(
                    "MLflow: the run there holds other epochs than metrics.jsonl; a new run begins"
                )
        # The key is on the disk before the run is on the server: a kill between the two leaves no
        # second run.
        note = {"server": self._url, "experiment_id": place, "key": os.urandom(8).hex()}
        write_text_atomic(self._folder / "mlflow.json", json.dumps(note) + "\n")
        tags = dict(
            re.findall(r"^# (\w+): (.+)$", read_text(self._folder / "config.yaml"), re.MULTILINE)
        )
        tags |= {
            "run_folder_key": note["key"],
            "mlflow.source.git.commit": tags.get("git_revision", "unknown"),
        }
        name = os.environ.get("MLFLOW_RUN_NAME") or self._folder.absolute().name
        return client.create_run(place, tags=tags, run_name=name), set()
