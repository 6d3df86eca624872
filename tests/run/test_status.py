"""One owner to a run folder, whatever becomes of the owner; a status file for launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from utils.run.folder import OwnedRun
from utils.run.status import FolderInUse, RunLock, write_status
from utils.training.config import TrainConfig

HOLDER = """
import sys, time
from pathlib import Path
from utils.run.status import RunLock
lock = RunLock(Path(sys.argv[1]), wait_s=float(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


def start_holder(folder: Path, wait_s: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(folder), str(wait_s)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def wait_until_held(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"


def test_a_taken_folder_names_its_owner_and_is_free_once_that_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = start_holder(folder)
    try:
        wait_until_held(holder)
        with pytest.raises(FolderInUse, match=rf"{folder}: process {holder.pid} on .*--save-dir") as caught:
            RunLock(folder, wait_s=0.2)
        assert caught.value.exit_code == 73
    finally:
        end(holder)
    RunLock(folder, wait_s=5).release()  # nothing to clean up by hand
    RunLock(folder, wait_s=0).release()


def test_a_successor_waits_for_a_dying_owner(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lock = RunLock(folder)
    successor = start_holder(folder, wait_s=30)
    try:
        time.sleep(0.5)
        assert successor.poll() is None
        lock.release()
        wait_until_held(successor)
        with pytest.raises(FolderInUse):
            RunLock(folder, wait_s=0)
    finally:
        end(successor)


def test_of_two_that_start_at_once_one_wins(tmp_path: Path) -> None:
    holders = [start_holder(tmp_path / "run", wait_s=0.5) for _ in range(3)]
    try:
        deadline_s = time.monotonic() + 20
        while sum(holder.poll() is None for holder in holders) > 1 and time.monotonic() < deadline_s:
            time.sleep(0.1)
        alive = [holder for holder in holders if holder.poll() is None]
        assert len(alive) == 1
        wait_until_held(alive[0])
        for loser in holders:
            if loser is not alive[0]:
                assert loser.stderr is not None
                assert f"process {alive[0].pid} on" in loser.stderr.read()
    finally:
        for holder in holders:
            end(holder)


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
    status = json.loads((tmp_path / "status.json").read_text())
    assert {**status, "updated": "", "host": ""} == {
        "state": "stopped",
        "reason": "SIGTERM",
        "epoch": 4,
        "step": 130,
        "exit_code": 75,
        "pid": os.getpid(),
        "host": "",
        "updated": "",
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "status.json"]


def status_of(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "status.json").read_text())
    return content


def fail_in(folder: Path) -> None:
    with OwnedRun(TrainConfig(save_dir=str(folder))) as run:
        assert status_of(folder)["state"] == "running"
        with pytest.raises(FolderInUse):
            RunLock(folder, wait_s=0)
        assert not run.resumes
        raise ValueError("of no\nuse")


def test_a_run_that_fails_says_why_and_lets_go_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ValueError, match="of no\nuse"):
        fail_in(folder)
    assert (status_of(folder)["state"], status_of(folder)["reason"]) == ("failed", "ValueError: of no use")
    RunLock(folder, wait_s=0).release()


def test_a_folder_that_cannot_be_opened_is_not_kept_locked(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OSError, match="run"), OwnedRun(TrainConfig(save_dir=str(tmp_path / "run"))):
        pytest.fail("it is a file")
    RunLock(tmp_path / "run", wait_s=0).release()
