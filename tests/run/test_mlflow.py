"""The mirror of a run's folder on an MLflow server: complete, without duplicates, and harmless when the server is not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import PROJECT
from tests.engine.small import classifier, fit, loader_of, plain, points
from tests.support.mlflow_server import FakeMlflow, drip, hang_up, never_answer, reply
from tests.support.processes import wait_until
from tests.support.ranks import RankFailed, run_ranks
from utils.common.errors import UsageError
from utils.run import mlflow, mlflow_client
from utils.run.log import RunLog
from utils.run.records import read_epochs
from utils.run.status import FINISHED, RUNNING, STOPPED, write_status

TOKEN = "hush-4f1d"


def hurry() -> None:
    """Shorten every wait."""
    mlflow.POLL_S, mlflow.MOST_BACKOFF_S, mlflow.STOP_WAIT_S = 0.02, 0.05, 3.0
    mlflow_client.SETTINGS["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "1"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("POLL_S", "MOST_BACKOFF_S", "STOP_WAIT_S"):
        monkeypatch.setattr(mlflow, name, getattr(mlflow, name))
    monkeypatch.setattr(mlflow_client, "SETTINGS", dict(mlflow_client.SETTINGS))
    with patch.dict(os.environ, no_proxy="*"):
        hurry()
        yield


@pytest.fixture
def server() -> Iterator[FakeMlflow]:
    with FakeMlflow() as fake:
        yield fake


class Folder:
    """A run's folder, written as a training would: two steps an epoch."""

    def __init__(self, place: Path) -> None:
        self.path = place
        place.mkdir()
        (place / "config.yaml").write_text("# torch: 2.11\n# git_revision: abc\nepochs: 3\nlr: 0.1\nmodel: n.yaml\n")
        write_status(place, RUNNING)

    def epoch(self, number: int, saved: bool = True, loss: float | None = None, **more: float | None) -> None:
        values = {"train_loss": 1.0 / number if loss is None else loss, "lr": 0.1, **more}
        place = {"epoch": number, "global_step": 2 * number}
        with (self.path / "metrics.jsonl").open("a") as file:
            for record in ({"kind": "batch", "time_s": time.time()}, {"kind": "epoch", **values, "note": "text"}):
                file.write(json.dumps({**record, **place}) + "\n")
        (self.path / "best.pt").write_bytes(b"weights %d" % number)
        if saved:
            checkpoint = self.path / "checkpoint" / f"step-{2 * number:08d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "manifest.json").write_text(json.dumps({"step": 2 * number, "epoch": number}))

    def drop_after(self, number: int) -> None:
        """Drop the epochs after `number`, as a resumed run does."""
        RunLog(self.path, is_main=True, tensorboard=False).truncate_after(2 * number)


def recorded(folder: Path) -> list[tuple[int, str, float]]:
    """Return (epoch, name, value) of every number in metrics.jsonl."""
    rows = [(record["epoch"], record) for record in read_epochs(folder)]
    return sorted(
        (step, name, value) for step, row in rows for name, value in row.items() if isinstance(value, int | float)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def send(folder: Folder, server: FakeMlflow, state: str = FINISHED) -> None:
    """Mirror a folder as it stands, and end with this state."""
    with mlflow.Mirror(folder.path, server.url):
        write_status(folder.path, state)


def test_a_finished_run_is_on_the_server_with_options_metrics_files_and_status(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    odd: Any = {"AP of wires/é": 0.5}
    for number in (1, 2, 3):
        folder.epoch(number, val_loss=0.5, mask_map50=None, **odd)
    with (folder.path / "config.yaml").open("a") as file:
        file.write(f"'size/é': {'x' * 9000}\n")
    os.environ.update(MLFLOW_EXPERIMENT_NAME="wires", MLFLOW_RUN_NAME="first")
    os.environ.update(MLFLOW_TRACKING_USERNAME="me", MLFLOW_TRACKING_PASSWORD="pw", MLFLOW_TRACKING_TOKEN=TOKEN)
    send(folder, server)
    assert set(server.authorizations) == {"Basic bWU6cHc="}
    ((run_id, run),) = server.runs.items()
    allowed = [(step, name.replace("/é", "__"), value) for step, name, value in recorded(folder.path)]
    assert server.metrics_of(run_id) == allowed
    assert len(allowed) == 3 * 6, "epoch, global_step and four values; null and text are no numbers"
    assert run["params"] == {"epochs": "3", "lr": "0.1", "model": "n.yaml", "size__": "x" * 6000}
    assert (run["run_name"], run["status"], server.experiments["wires"]) == ("first", "FINISHED", run["experiment_id"])
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert (tags["torch"], tags["mlflow.source.git.commit"]) == ("2.11", "abc")
    sent = {name.rpartition("/")[2]: content for name, content in server.files.items()}
    assert sent == {name: (folder.path / name).read_bytes() for name in ("best.pt", "config.yaml", "metrics.jsonl")}
    assert all(name.startswith(f"1/{run_id}/artifacts/") for name in server.files)
    said = capsys.readouterr()
    assert said.err == ""
    assert f"MLflow: {server.url}/#/experiments/1/runs/{run_id}\n" in said.out


def test_epochs_appear_while_the_training_runs_and_best_pt_when_it_changed(server: FakeMlflow, folder: Folder) -> None:
    with mlflow.Mirror(folder.path, server.url):
        folder.epoch(1)
        wait_until(lambda: server.runs and server.metrics_of("run0") == recorded(folder.path) and server.files)
        assert server.runs["run0"]["status"] == "RUNNING"
        assert server.files == {"0/run0/artifacts/best.pt": b"weights 1"}
        folder.epoch(2)
        wait_until(lambda: server.metrics_of("run0") == recorded(folder.path))
        write_status(folder.path, STOPPED)
    assert server.runs["run0"]["status"] == "KILLED"
    assert server.files["0/run0/artifacts/best.pt"] == b"weights 2"


@pytest.mark.parametrize("ends_between", [True, False], ids=["resumed", "rolled back"])
def test_an_epoch_that_a_run_repeats_after_its_checkpoint_is_sent_once(
    server: FakeMlflow, folder: Folder, ends_between: bool
) -> None:
    folder.epoch(1)
    folder.epoch(2, saved=False, loss=7.0)  # killed, or gone back, before its checkpoint
    if ends_between:
        send(folder, server, RUNNING)
    with mlflow.Mirror(folder.path, server.url):
        wait_until(lambda: server.runs and server.metrics_of("run0"))
        assert {step for step, _, _ in server.metrics_of("run0")} == {1}
        folder.drop_after(1)
        folder.epoch(2, loss=8.0)
        folder.epoch(3)
        write_status(folder.path, FINISHED)
    assert list(server.runs) == ["run0"]
    assert server.metrics_of("run0") == recorded(folder.path)
    assert server.runs["run0"]["status"] == "FINISHED"


@pytest.mark.parametrize("request_name", ["create", "log-batch", "update"])
def test_a_request_whose_answer_is_lost_is_not_done_twice(
    server: FakeMlflow, folder: Folder, request_name: str
) -> None:
    folder.epoch(1)
    folder.epoch(2)
    server.after[request_name] = hang_up
    send(folder, server, RUNNING)  # as if the process had been killed then
    send(folder, server)
    assert list(server.runs) == ["run0"]
    assert server.metrics_of("run0") == recorded(folder.path)


@pytest.mark.parametrize(("answers_in_time", "warnings"), [(True, 1), (False, 2)])
def test_what_a_dead_server_missed_is_sent_when_it_answers_or_by_the_same_command(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str], answers_in_time: bool, warnings: int
) -> None:
    server.always = reply(503, b"")
    with mlflow.Mirror(folder.path, server.url):
        for number in range(1, 4):
            folder.epoch(number)
            seen = len(server.requests)
            wait_until(lambda seen=seen: len(server.requests) > seen + 1)  # type: ignore[misc]
        server.always = None if answers_in_time else hang_up
        write_status(folder.path, FINISHED)
    said = capsys.readouterr().err
    assert said.count("WARNING") == warnings
    assert ("the same training command sends the rest" in said) != answers_in_time
    server.always = None
    if not answers_in_time:
        send(folder, server)
    assert server.metrics_of("run0") == recorded(folder.path)


def test_a_folder_that_contradicts_its_run_gets_a_new_one_and_the_old_one_stays(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.epoch(1)
    folder.epoch(2)
    send(folder, server)
    before = server.metrics_of("run0")
    folder.drop_after(1)  # its newest checkpoint was damaged: an older one was loaded
    time.sleep(0.002)
    folder.epoch(2, saved=False, loss=9.0)
    send(folder, server)
    assert server.metrics_of("run0") == before
    assert server.metrics_of("run1") == recorded(folder.path)
    assert "run run0 holds other epochs than metrics.jsonl" in capsys.readouterr().err


def test_a_new_folder_a_deleted_run_and_another_server_get_new_runs(server: FakeMlflow, tmp_path: Path) -> None:
    first, second = Folder(tmp_path / "first"), Folder(tmp_path / "second")
    for folder in (first, second):
        folder.epoch(1)
        send(folder, server)
    assert list(server.runs) == ["run0", "run1"]
    server.runs["run0"]["stage"] = "deleted"
    send(first, server)
    assert list(server.runs) == ["run0", "run1", "run2"]
    with FakeMlflow() as other:
        send(first, other)
        assert other.metrics_of("run0") == recorded(first.path)


def test_a_resumed_run_keeps_the_parameters_with_which_it_began(server: FakeMlflow, folder: Folder) -> None:
    folder.epoch(1)
    send(folder, server, STOPPED)
    (folder.path / "config.yaml").write_text("epochs: 30\nworkers: 2\n")
    send(folder, server)
    assert server.runs["run0"]["params"] == {"epochs": "3", "lr": "0.1", "model": "n.yaml", "workers": "2"}
    assert server.runs["run0"]["status"] == "FINISHED"


@pytest.mark.parametrize(
    "root", ["file:///srv/mlruns/", "s3://bucket/", "mlflow-artifacts://elsewhere:80/", "http://["]
)
def test_files_are_not_sent_to_another_place(folder: Folder, root: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder.epoch(1)
    with FakeMlflow(root) as server:
        send(folder, server)
        assert server.metrics_of("run0") == recorded(folder.path)
        assert server.files == {}
    said = capsys.readouterr()
    assert said.out.count("without files") == 1
    assert said.err == ""


def test_a_file_that_the_server_refuses_does_not_keep_the_rest_away(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.epoch(1)
    server.after["config.yaml"] = reply(413, b"<html>too large</html>")
    send(folder, server)
    assert {"best.pt", "metrics.jsonl"} <= {name.rpartition("/")[2] for name in server.files}
    assert server.runs["run0"]["status"] == "FINISHED"
    assert "413 Client Error: Request Entity Too Large" in capsys.readouterr().err


HOSTILE: dict[str, Callable[[Any], None]] = {
    "garbage": reply(200, b'{"run": '),
    "a list": reply(200, b"[]"),
    "a page": reply(200, b"<html>\x1b[31mLog in</html>"),
    "deep": reply(200, b"[" * 200_000),
    "huge": reply(200, b" " * (5 << 20)),
    "cut off": reply(200, b'{"run": {', **{"Content-Length": "9000"}),
    "strange types": reply(200, b'{"experiment": [], "experiment_id": 5, "run": 7}'),
    "strange run": reply(200, b'{"experiment": {"experiment_id": "0"}, "run": {"info": {"run_id": "../x"}}}'),
    "error page": reply(500, b"<html>" + b"x" * 500_000),
    "strange error": reply(404, b'{"error_code": ["RESOURCE_DOES_NOT_EXIST"], "message": {"a": 1}}'),
    "hangs up": hang_up,
    "never answers": never_answer,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_costs_two_short_lines_and_no_time(
    server: FakeMlflow, folder: Folder, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.epoch(1)
    server.always = HOSTILE[kind]
    with mlflow.Mirror(folder.path, server.url) as watch:
        wait_until(lambda: watch._num_failures > (0 if kind == "never answers" else 2))
        write_status(folder.path, FINISHED)
        ends_s = time.monotonic()
    assert time.monotonic() - ends_s < 10, "it waits three seconds; the rest is for a busy machine"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert all(line.startswith("WARNING: MLflow") and line.isprintable() and len(line) < 500 for line in lines)


def test_a_server_that_begins_to_drip_does_not_delay_the_end_of_a_training(
    server: FakeMlflow, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mlflow, "STOP_WAIT_S", 0.4)
    folder.epoch(1)
    with mlflow.Mirror(folder.path, server.url):
        wait_until(lambda: server.files)  # all is sent: the server answered last time
        server.always = drip
        write_status(folder.path, FINISHED)
        ends_s = time.monotonic()
    assert time.monotonic() - ends_s < 3, "its answer takes eight seconds"
    assert "MLflow lacks a part of this run (not done after" in capsys.readouterr().err


def test_a_redirect_takes_no_token_to_another_server(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.epoch(1)
    with FakeMlflow() as other:
        server.always = reply(307, b"", Location=f"{other.url}/api")
        os.environ.update(MLFLOW_TRACKING_USERNAME="me", MLFLOW_TRACKING_PASSWORD="", MLFLOW_TRACKING_TOKEN=TOKEN)
        with mlflow.Mirror(folder.path, server.url):
            wait_until(lambda: server.requests)
        assert other.requests == []
    assert set(server.authorizations) == {f"Bearer {TOKEN}"}
    said = capsys.readouterr()
    assert f"HTTP 307 redirects to {other.url.removeprefix('http://')}; not followed" in said.err
    assert TOKEN not in said.out + said.err
    assert not [file for file in folder.path.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


def test_a_broken_token_and_a_missing_package_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", f"{TOKEN}\n")
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_TOKEN: holds a character") as refused:
        mlflow.mirror(tmp_path, "http://127.0.0.1:1")
    assert TOKEN not in str(refused.value)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--mlflow: .* pip install -r requirements-mlflow.txt"):
        mlflow.mirror(tmp_path, "http://127.0.0.1:1")


SEND_AND_LIST_ADDRESSES = """
import pathlib, socket, sys
addresses, lookup, connect = set(), socket.getaddrinfo, socket.socket.connect
socket.getaddrinfo = lambda host, *rest, **more: (addresses.add(str(host)), lookup(host, *rest, **more))[1]
socket.socket.connect = lambda self, address: (addresses.add(str(address[0])), connect(self, address))[1]
from utils.run import mlflow, mlflow_client
from utils.run.status import write_status
with mlflow.Mirror(pathlib.Path(sys.argv[1]), sys.argv[2]):
    write_status(pathlib.Path(sys.argv[1]), "finished")
import atexit
atexit._run_exitfuncs()
print(sorted(addresses))
"""


def test_no_other_address_than_the_server_s_is_looked_up_or_called(server: FakeMlflow, folder: Folder) -> None:
    folder.epoch(1)
    # MLflow itself sends no statistics where it sees a test or a build server.
    unset = {"PYTEST_CURRENT_TEST", "CI", *mlflow_client.SETTINGS}
    plain = {name: text for name, text in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", SEND_AND_LIST_ADDRESSES, str(folder.path), server.url]
    done = subprocess.run(command, env=plain, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "['127.0.0.1']"
    assert done.stderr == ""
    assert server.metrics_of("run0") == recorded(folder.path)


@pytest.mark.parametrize("uri", ["sqlite:///a.db", "127.0.0.1:5000", "https://", "https://h:x/", "https://[", "https://h/#/experiments/0", "databricks"])  # fmt: skip
def test_an_address_that_is_none_is_refused(uri: str) -> None:
    with pytest.raises(UsageError, match=r"--mlflow .*: expected a server's address"):
        mlflow_client.checked_uri(uri, "--mlflow")


def test_the_variable_names_the_server_and_an_empty_option_means_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not isinstance(mlflow.mirror(tmp_path, None), mlflow.Mirror)
    assert isinstance(mlflow.mirror(tmp_path, "https://example.org/mlflow/"), mlflow.Mirror)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://example.org")
    assert isinstance(mlflow.mirror(tmp_path, None), mlflow.Mirror)
    assert not isinstance(mlflow.mirror(tmp_path, ""), mlflow.Mirror)
    for other in ("sqlite:///mlflow.db", f"https://me:{TOKEN}@example.org", f"ftp://h/?sig={TOKEN}"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
        assert not isinstance(mlflow.mirror(tmp_path, None), mlflow.Mirror)
    said = capsys.readouterr().err
    assert said.count("this training is not sent to MLflow") == 3
    assert TOKEN not in said


def train_small(folder: Path, url: str, resume: bool, kill_at: int | None = None, pause_s: float = 0.0) -> Any:
    """Train for four epochs of 4 batches per rank; rank 0 dies by SIGKILL at batch number `kill_at`. Return the weights."""
    hurry()
    folder.mkdir(exist_ok=True)
    model, num_batches = classifier(), 0

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nonlocal num_batches
        num_batches += outputs.requires_grad
        time.sleep(pause_s)
        if num_batches == kill_at and torch.distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.cross_entropy(outputs, labels)

    with mlflow.mirror(folder, url):
        loader = loader_of(points(32), 4)
        fit(model, folder, loader, loader, criterion, resume=resume, ema_decay=0.9, epochs=4)
        write_status(folder, FINISHED)
    return plain(model.state_dict())


def test_two_ranks_killed_and_resumed_leave_one_run_that_equals_metrics_jsonl(
    server: FakeMlflow, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with pytest.raises(RankFailed):
        run_ranks(train_small, 2, run, server.url, False, 4 * 2 + 2, 0.01)
    assert {step for step, _, _ in server.metrics_of("run0")} <= {1, 2}
    run_ranks(train_small, 2, run, server.url, True)
    assert list(server.runs) == ["run0"]
    assert server.metrics_of("run0") == recorded(run)
    assert {step for step, _, _ in recorded(run)} == {1, 2, 3, 4}
    assert server.runs["run0"]["status"] == "FINISHED"


def test_a_training_without_its_server_ends_with_the_same_weights(tmp_path: Path) -> None:
    alone = train_small(tmp_path / "alone", "", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        beside = train_small(tmp_path / "beside", f"http://127.0.0.1:{silent.getsockname()[1]}", False)
    for name, value in alone.items():
        np.testing.assert_array_equal(beside[name], value, strict=True)
