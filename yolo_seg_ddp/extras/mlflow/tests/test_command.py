"""Trainings of two ranks beside a real MLflow server, which has its own process and an SQLite
database.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.noise_data import write_noise_data
from tests.support.plugin import PROJECT, free_port, must_run, torchrun
from tests.support.processes import wait_until
from yolo_seg_ddp.extras.mlflow.sending import SETTINGS
from yolo_seg_ddp.extras.mlflow.tests.test_mirror import recorded
from yolo_seg_ddp.run.records import read_status

MLFLOW = os.environ.get("MLFLOW_SERVER")  # mlflow-skinny's own command has no server
EPOCHS = 10  # of about a second: the server has the first ones before the last begins
FLAGS = (
    "--model yolov8n-seg.yaml --img-size 64 --batch-size 2 --seed 3 --num-workers 0 --cache none "
    "--no-tensorboard "
    f"--val-pictures-every 0 --amp off --epochs {EPOCHS}"
).split()
pytestmark = pytest.mark.skipif(
    MLFLOW is None, reason="needs an MLflow server (set MLFLOW_SERVER to the mlflow command)"
)


@dataclass
class Server:
    """A running `mlflow server`."""

    url: str
    files: Path
    client: Any

    def runs(self) -> list[Any]:
        return list(self.client.search_runs(["0"]))

    def answers(self) -> bool:
        with suppress(Exception):
            return self.client.get_experiment("0") is not None
        return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port, files, database = free_port(), tmp_path / "files", tmp_path / "mlflow.db"
    command = [
        str(MLFLOW),
        "server",
        "--backend-store-uri",
        f"sqlite:///{database}",
        "--port",
        str(port),
    ]
    command += ["--artifacts-destination", str(files), "--workers", "1"]
    with patch.dict(os.environ, SETTINGS):
        from mlflow import MlflowClient

        client = MlflowClient(f"http://127.0.0.1:{port}")
        with (tmp_path / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
            )
        running = Server(f"http://127.0.0.1:{port}", files, client)
        try:
            wait_until(running.answers, timeout_s=180)
            yield running
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_noise_data(tmp_path_factory.mktemp("data"))


def test_a_training_killed_and_resumed_is_one_run_that_equals_its_metrics_jsonl(
    server: Server, data: Path, tmp_path: Path
) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    places = ("--data", str(data), "--save-dir", str(run), "--mlflow", server.url)
    command = (*torchrun(2), "train_yolo_ddp.py", *places, *FLAGS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        words = [sys.executable, *command[1:]]
        training = subprocess.Popen(words, cwd=PROJECT, env=environment, stdout=file, stderr=file)
    wait_until(
        lambda: any(one.data.metrics for one in server.runs()) or training.poll() is not None,
        timeout_s=200,
    )
    os.kill(read_status(run)["pid"], signal.SIGKILL)
    assert training.wait(timeout=60) == 1, log.read_text()[-3000:]
    assert [found.info.status for found in server.runs()] == ["RUNNING"]
    said = must_run(*command, OMP_NUM_THREADS="1")
    (found,) = server.runs()
    run_id = found.info.run_id
    assert f"MLflow: {server.url}/#/experiments/0/runs/{run_id}" in said
    assert found.info.status == "FINISHED"
    histories = [server.client.get_metric_history(run_id, name) for name in found.data.metrics]
    accepted = sorted(
        (metric.step, metric.key, metric.value) for history in histories for metric in history
    )
    assert accepted == recorded(run)
    assert {step for step, _, _ in recorded(run)} == set(range(1, EPOCHS + 1))
    assert (found.data.params["epochs"], found.data.params["model"]) == (
        str(EPOCHS),
        "yolov8n-seg.yaml",
    )
    for name in ("best.pt", "config.yaml", "results.csv", "metrics.jsonl", "results.png"):
        assert (server.files / "0" / run_id / "artifacts" / name).read_bytes() == (
            run / name
        ).read_bytes()
