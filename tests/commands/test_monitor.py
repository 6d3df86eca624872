"""yolo_seg_ddp.run.monitor as a command: into a pipe, into a terminal, and without a run."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.run.made_up import batch, epoch_record, write_run
from tests.support.plugin import PROJECT
from tests.support.recipes import run_command
from yolo_seg_ddp.run import monitor
from yolo_seg_ddp.utils.errors import UserError


def test_the_command_prints_once_into_a_pipe_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, [batch(1, 0)])
    before = {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()
    }
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(monitor, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "Epoch 1/4" in shown
    assert "\x1b" not in shown
    assert {
        path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.iterdir()
    } == before


def test_a_folder_without_a_run_is_told_in_one_line(
    tmp_path: Path,
) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=f"^{path}: no run there .*"):
            run_command(monitor, path)


def test_in_a_terminal_the_view_is_refreshed_until_the_run_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, [batch(1, 0)])
    shown, screen = pty.openpty()
    command = [sys.executable, "-m", "yolo_seg_ddp.run.monitor", str(folder), "--every", "0.05"]
    watcher = subprocess.Popen(
        command, cwd=PROJECT, stdout=screen, stderr=screen, stdin=subprocess.DEVNULL
    )
    os.close(screen)
    try:
        text = read_until(shown, "batch 1/20")
        write_run(folder, [batch(1, 0), batch(1, 7)])
        text += read_until(shown, "batch 8/20")
        write_run(folder, [batch(1, 0), batch(1, 7), epoch_record(1)], "finished")
        text += read_until(shown, "finished")
        assert watcher.wait(timeout=120) == 0
    finally:
        watcher.kill()
        watcher.wait()
        os.close(shown)
    assert "F" in text.partition("\x1b[")[2]  # goes back to the first line instead of scrolling on


def read_until(terminal: int, word: str) -> str:
    text, deadline_s = "", time.monotonic() + 120
    while word not in text:
        assert time.monotonic() < deadline_s, text
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text
