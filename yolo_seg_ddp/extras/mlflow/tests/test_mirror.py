"""The mirror of a run's folder on an MLflow server: complete, without duplicates, and harmless when
the server is not.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.plugin import PROJECT
from tests.support.processes import wait_until
from yolo_seg_ddp.extras.mlflow import sending as mlflow
from yolo_seg_ddp.extras.mlflow.tests.mlflow_server import FakeMlflow, hang_up, never_answer, reply
from yolo_seg_ddp.run import sending as folder_sending
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.run.status import FAILED, FINISHED, RUNNING, STOPPED, write_status
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.files import write_text_atomic

TOKEN = "hush-4f1d"


@pytest.fixture(autouse=True)
def hurried() -> Iterator[None]:
    """Shorten every wait, and restore the environment."""
    settings = patch.dict(mlflow.SETTINGS, MLFLOW_HTTP_REQUEST_TIMEOUT="60")
    waits = patch.multiple(folder_sending, POLL_S=0.02, MOST_BACKOFF_S=0.05, STOP_WAIT_S=3.0)
    with patch.dict(os.environ, no_proxy="*"), settings, waits:
        yield


@pytest.fixture
def server() -> Iterator[FakeMlflow]:
    with FakeMlflow() as fake:
        yield fake


class Folder:
    """A run's folder, written as a training would: two steps an epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(
            "# torch: 2.11\n# git_revision: abc\nepochs: 3\nlr: 0.1\n"
        )
        write_status(path, RUNNING)

    def epoch(self, number: int, is_saved: bool = True, loss: float = 0.5) -> None:
        values = {"train_loss": loss, "mask_map50": None, "note": "text"}
        with (self.path / "metrics.jsonl").open("a") as file:
            for record in ({"kind": "batch", "time_s": time.time()}, {"kind": "epoch", **values}):
                file.write(
                    json.dumps({**record, "epoch": number, "global_step": 2 * number}) + "\n"
                )
        (self.path / "best.pt").write_bytes(b"weights %d" % number)
        if is_saved:
            checkpoint = self.path / "checkpoint" / f"step-{2 * number:08d}"
            checkpoint.mkdir(parents=True)
            manifest = json.dumps({"step": 2 * number, "epoch": number})
            write_text_atomic(checkpoint / "manifest.json", manifest)  # the mirror reads meanwhile

    def drop_after(self, number: int) -> None:
        """Drop the epochs after `number`, as a resumed run does."""
        RunLog(self.path, is_main=True, tensorboard=False).truncate_after(2 * number)
        time.sleep(0.002)  # a repeated epoch ends later

    def send(self, server: FakeMlflow, state: str = FINISHED) -> None:
        """Mirror the folder as it stands, and end with this state."""
        with mlflow.Mirror(self.path, server.root):
            write_status(self.path, state)


def recorded(folder: Path) -> list[tuple[int, str, float]]:
    """Return (epoch, name, value) of every number in metrics.jsonl."""
    rows = [(record["epoch"], item) for record in read_epochs(folder) for item in record.items()]
    return sorted(
        (step, name, value) for step, (name, value) in rows if isinstance(value, int | float)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


@pytest.mark.parametrize(
    ("state", "status"), [(FINISHED, "FINISHED"), (STOPPED, "KILLED"), (FAILED, "FAILED")]
)
def test_a_run_is_on_the_server_with_options_metrics_files_and_status(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str], state: str, status: str
) -> None:
    os.environ.update(MLFLOW_EXPERIMENT_NAME="wires", MLFLOW_RUN_NAME="first")
    os.environ.update(
        MLFLOW_TRACKING_USERNAME="me", MLFLOW_TRACKING_PASSWORD="pw", MLFLOW_TRACKING_TOKEN=TOKEN
    )
    with mlflow.Mirror(folder.path, server.root):
        folder.epoch(1)
        wait_until(
            lambda: server.runs and server.metrics() == recorded(folder.path) and server.files
        )
        assert (server.runs[0]["status"], server.files) == ("RUNNING", {"best.pt": b"weights 1"})
        folder.epoch(2)
        write_status(folder.path, state)
    (run,) = server.runs
    assert set(server.authorizations) == {"Basic bWU6cHc="}
    assert server.metrics() == recorded(folder.path)
    assert len(server.metrics()) == 2 * 3, (
        "epoch, global_step and loss; null and text are no numbers"
    )
    assert (run["params"], run["run_name"], run["status"]) == (
        {"epochs": "3", "lr": "0.1"},
        "first",
        status,
    )
    assert server.experiments[int(run["experiment_id"])] == "wires"
    tags = {tag["key"]: tag["value"] for tag in run["tags"]}
    assert (tags["torch"], tags["mlflow.source.git.commit"]) == ("2.11", "abc")
    names = ("best.pt", "config.yaml", "metrics.jsonl")
    assert server.files == {name: (folder.path / name).read_bytes() for name in names}
    assert capsys.readouterr() == (f"MLflow: {server.root}/#/experiments/1/runs/0\n", "")


@pytest.mark.parametrize("is_resumed", [True, False], ids=["resumed", "rolled back"])
def test_an_epoch_that_a_run_repeats_after_its_checkpoint_is_sent_once(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str], is_resumed: bool
) -> None:
    folder.epoch(1)
    folder.epoch(2, is_saved=False)  # killed, or gone back, before its checkpoint
    if is_resumed:
        folder.send(server, RUNNING)
        os.environ["MLFLOW_EXPERIMENT_NAME"] = "another"
        (folder.path / "config.yaml").write_text("epochs: 30\nworkers: 2\n")
    with mlflow.Mirror(folder.path, server.root):
        wait_until(
            lambda: server.runs and server.metrics() and server.runs[0]["status"] == "RUNNING"
        )
        assert {step for step, _, _ in server.metrics()} == {1}
        folder.drop_after(1)
        folder.epoch(2, loss=8.0)
        write_status(folder.path, FINISHED)
    assert (len(server.runs), server.metrics()) == (1, recorded(folder.path))
    assert server.runs[0]["status"] == "FINISHED"
    assert server.runs[0]["params"] == {"epochs": "3", "lr": "0.1"} | (
        {"workers": "2"} if is_resumed else {}
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("request_name", ["create", "log-batch", "update"])
def test_a_request_whose_answer_is_lost_is_not_done_twice(
    server: FakeMlflow, folder: Folder, request_name: str
) -> None:
    folder.epoch(1)
    server.after[request_name] = hang_up
    folder.send(server, RUNNING)  # as if the process had been killed then
    note_file = folder.path / "mlflow.json"  # notes of an older version name no experiment
    note_file.write_text(
        json.dumps({**json.loads(note_file.read_text()), "experiment_id": None, "run_id": "0"})
    )
    folder.send(server)
    assert (len(server.runs), server.metrics()) == (1, recorded(folder.path))


def test_what_a_dead_server_missed_is_sent_when_it_answers_or_by_the_same_command(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (1, 2):
        server.always = reply(503, b"")
        seen = len(server.authorizations)
        with mlflow.Mirror(folder.path, server.root):
            folder.epoch(number)
            wait_until(lambda seen=seen: len(server.authorizations) > seen + 3)  # type: ignore[misc]
            server.always = hang_up if number == 1 else None
            write_status(folder.path, FINISHED)
        first, *more = capsys.readouterr().err.splitlines()
        assert first.startswith("WARNING: MLflow: ")
        assert first.endswith("; training continues, and the rest is sent when this works")
        assert [line[-42:] for line in more] == ["; the same training command sends the rest"] * (
            number == 1
        )
    assert server.metrics() == recorded(folder.path)


def test_what_contradicts_its_run_a_deleted_run_and_another_server_get_new_runs(
    server: FakeMlflow, folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.epoch(1)
    folder.send(server)
    before = server.metrics()
    folder.drop_after(0)  # its newest checkpoint was damaged
    folder.epoch(1, is_saved=False, loss=9.0)
    folder.send(server)
    assert (server.metrics(0), server.metrics(1)) == (before, recorded(folder.path))
    assert "holds other epochs than metrics.jsonl; a new run begins" in capsys.readouterr().err
    server.runs[1]["is_deleted"] = True
    folder.send(server)
    with FakeMlflow() as other:
        folder.send(other)
        assert (len(server.runs), other.metrics()) == (3, recorded(folder.path))


@pytest.mark.parametrize(
    "root", ["file:///srv/mlruns/", "s3://bucket/", "mlflow-artifacts://elsewhere:80/", "http://["]
)
def test_files_are_not_sent_to_another_place(
    folder: Folder, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.epoch(1)
    with FakeMlflow(root) as server:
        folder.send(server)
        assert (server.metrics(), server.files) == (recorded(folder.path), {})
    assert capsys.readouterr() == (
        f"MLflow: {server.root}/#/experiments/0/runs/0 (without files: it keeps them elsewhere)\n",
        "",
    )


HOSTILE: dict[str, Callable[[Any], None]] = {
    "garbage": reply(200, b'{"run": '),
    "a page": reply(200, b"<html>\x1b[31mLog in</html>"),
    "deep": reply(200, b"[" * 200_000),
    "strange types": reply(200, b'{"experiment": [], "experiment_id": 5, "run": 7}'),
    "error page": reply(500, b"<html>" + b"x" * 500_000),
    "redirect": reply(307, b"", Location="http://127.0.0.1:1/api"),
    "hangs up": hang_up,
    "never answers": never_answer,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_costs_two_short_lines_and_no_time(
    server: FakeMlflow, folder: Folder, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(
        MLFLOW_TRACKING_USERNAME="me", MLFLOW_TRACKING_PASSWORD="", MLFLOW_TRACKING_TOKEN=TOKEN
    )
    folder.epoch(1)
    server.always = HOSTILE[kind]
    with mlflow.Mirror(folder.path, server.root):
        wait_until(lambda: len(server.authorizations) > (0 if kind == "never answers" else 2))
        write_status(folder.path, FINISHED)
        ends_s = time.monotonic()
    assert time.monotonic() - ends_s < 50, "it waits three seconds; the rest is for a busy machine"
    assert set(server.authorizations) == {f"Bearer {TOKEN}"}
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert (len(lines), said.out) == (2, ""), lines
    assert all(
        line.startswith("WARNING: MLflow") and line.isprintable() and len(line) < 500
        for line in lines
    )
    assert TOKEN not in said.err + "".join(
        file.read_text() for file in folder.path.rglob("*.json*")
    )


SEND_AND_LIST_ADDRESSES = """
import atexit, pathlib, socket, sys
addresses, lookup, connect = set(), socket.getaddrinfo, socket.socket.connect
def get_address(host, *rest, **more):
    addresses.add(str(host))
    return lookup(host, *rest, **more)
def connect_noted(self, address):
    addresses.add(str(address[0]))
    return connect(self, address)
socket.getaddrinfo, socket.socket.connect = get_address, connect_noted
from yolo_seg_ddp.extras.mlflow import sending as mlflow
from yolo_seg_ddp.run.status import write_status
with mlflow.Mirror(pathlib.Path(sys.argv[1]), sys.argv[2]):
    write_status(pathlib.Path(sys.argv[1]), "finished")
atexit._run_exitfuncs()
print(sorted(addresses))
"""


def test_no_other_address_than_the_server_s_is_looked_up_or_called(
    server: FakeMlflow, folder: Folder
) -> None:
    folder.epoch(1)
    # MLflow itself sends no statistics where it sees a test or a build server.
    unset = {"PYTEST_CURRENT_TEST", "CI", *mlflow.SETTINGS}
    plain = {name: text for name, text in os.environ.items() if name not in unset}
    command = [sys.executable, "-c", SEND_AND_LIST_ADDRESSES, str(folder.path), server.root]
    done = subprocess.run(
        command, env=plain, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=True
    )
    assert (done.stdout.splitlines()[-1], done.stderr) == ("['127.0.0.1']", "")
    assert server.metrics() == recorded(folder.path)


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:///a.db",
        "127.0.0.1:5000",
        "https://",
        "https://h:x/",
        "https://[",
        "https://h/#/runs/0",
        "databricks",
        f"me:{TOKEN}@h",
        f"https://me:{TOKEN}@h/",
        f"https://h/?sig={TOKEN}",
    ],
)
def test_another_text_is_no_address(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"--mlflow .*: expected a server's address") as refused:
        mlflow.checked_uri(text, "--mlflow")
    os.environ["MLFLOW_TRACKING_URI"] = text
    assert not isinstance(mlflow.mirror(tmp_path, None), mlflow.Mirror)
    said = capsys.readouterr().err
    assert said.endswith("this training is not sent to MLflow\n")
    assert TOKEN not in said + str(refused.value)


def test_a_broken_token_and_a_missing_package_are_refused(tmp_path: Path) -> None:
    os.environ["MLFLOW_TRACKING_URI"] = "https://example.org/mlflow/"
    assert isinstance(mlflow.mirror(tmp_path, None), mlflow.Mirror)
    assert not isinstance(mlflow.mirror(tmp_path, ""), mlflow.Mirror)
    refused = pytest.raises(
        UsageError, match=r"--mlflow: .* pip install -r requirements-mlflow.txt"
    )
    with patch("importlib.util.find_spec", lambda name: None), refused:
        mlflow.checked_uri("http://127.0.0.1", "--mlflow")
    os.environ["MLFLOW_TRACKING_TOKEN"] = f"{TOKEN}\n"
    with pytest.raises(UsageError, match="MLFLOW_TRACKING_TOKEN: holds a character") as error:
        mlflow.checked_uri("http://127.0.0.1", "--mlflow")
    assert TOKEN not in str(error.value)


def test_a_password_in_mlflows_address_is_refused_before_anything_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(TrainConfig, "", ["--mlflow", "https://me:hush-4f1d@example.org"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in said
    assert "hush-4f1d" not in said
