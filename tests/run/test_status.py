"""One owner to a run folder, whatever becomes of the owner; a status file for launchers."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.plugin import PROJECT, read_json
from tests.support.processes import wait_until
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.run.records import read_status
from yolo_seg_ddp.run.status import FolderInUse, RunLock, write_status
from yolo_seg_ddp.training.config import TrainConfig

HOLDER = """
import sys, time
from pathlib import Path
from yolo_seg_ddp.run.status import RunLock
lock = RunLock(Path(sys.argv[1]), wait_s=float(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def holders(number: int, folder: Path, wait_s: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that take a folder if they get it within `wait_s`; kill them at the end."""
    command = [sys.executable, "-c", HOLDER, str(folder), str(wait_s)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=PROJECT, **pipes) for _ in range(number)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=60)


def test_a_successor_waits_for_the_owner_and_is_named_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = RunLock(folder)
    with holders(1, folder, wait_s=30) as (successor,):
        time.sleep(0.5)
        assert successor.poll() is None
        lock.release()
        assert successor.stdout.readline() == "held\n"  # type: ignore[union-attr]
        with pytest.raises(
            FolderInUse, match=rf"{folder}: process {successor.pid} on .*--save-dir"
        ) as caught:
            RunLock(folder, wait_s=0.2)
        assert caught.value.exit_code == 73
    RunLock(folder, wait_s=5).release()  # nothing to clean up by hand
    RunLock(folder, wait_s=0).release()


def test_of_two_that_start_at_once_one_wins(tmp_path: Path) -> None:
    with holders(2, tmp_path / "run", wait_s=0.5) as processes:
        wait_until(lambda: any(process.poll() is not None for process in processes))
        (winner,) = (process for process in processes if process.poll() is None)
        (loser,) = (process for process in processes if process is not winner)
        assert winner.stdout.readline() == "held\n"  # type: ignore[union-attr]
        assert f"process {winner.pid} on" in loser.stderr.read()  # type: ignore[union-attr]


def test_the_folder_may_be_renamed_while_it_is_held(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    lock = RunLock(folder)
    os.rename(folder, tmp_path / "run-1")
    with pytest.raises(FolderInUse):
        RunLock(folder, wait_s=0)
    lock.release()


def test_the_status_is_whole_and_says_where_the_run_stands(tmp_path: Path) -> None:
    write_status(tmp_path, "running", epoch=3, step=120)
    write_status(tmp_path, "stopped", "SIGTERM", epoch=4, step=130, exit_code=75)
    status = read_json(tmp_path / "status.json")
    expected = {
        "state": "stopped",
        "reason": "SIGTERM",
        "epoch": 4,
        "step": 130,
        "exit_code": 75,
        "pid": os.getpid(),
    }
    assert {**status, "updated": "", "host": ""} == {**expected, "updated": "", "host": ""}
    assert list(tmp_path.iterdir()) == [tmp_path / "status.json"]


def fail_in(folder: Path) -> None:
    with OwnedRun(TrainConfig(save_dir=str(folder))) as run:
        assert read_status(folder)["state"] == "running"
        with pytest.raises(FolderInUse):
            RunLock(folder, wait_s=0)
        assert not run.resumes
        raise ValueError("of no\nuse")


def test_a_run_that_fails_says_why_and_lets_go_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="of no\nuse"):
        fail_in(folder)
    status = read_status(folder)
    assert (status["state"], status["reason"]) == ("failed", "ValueError: of no use")
    RunLock(folder, wait_s=0).release()


def test_a_folder_that_cannot_be_opened_is_not_kept_locked(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="run"), OwnedRun(TrainConfig(save_dir=str(tmp_path / "run"))):
        pytest.fail("it is a file")
    RunLock(tmp_path / "run", wait_s=0).release()


def test_every_run_that_is_set_aside_gets_a_name_of_its_own(tmp_path: Path) -> None:
    for epochs in (1, 2, 3, 4):
        with OwnedRun(TrainConfig(save_dir=str(tmp_path / "run"), epochs=epochs)) as run:
            (run.folder / "mark").write_text(str(epochs))
    marks = {path.parent.name: path.read_text() for path in tmp_path.glob("*/mark")}
    assert marks == {"run-1": "1", "run-2": "2", "run-3": "3", "run": "4"}
