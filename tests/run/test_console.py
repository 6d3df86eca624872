"""train.log: what the console said, bounded, without bars and colours."""

import sys
from pathlib import Path

import pytest

from yolo_seg_ddp.run import console
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils.errors import UserError


def test_a_run_its_resume_and_its_error_are_copied_without_bars_and_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yolo_seg_ddp.run.folder.has_checkpoint", lambda folder: True)
    streams = sys.stdout, sys.stderr
    for number in (1, 2):
        with OwnedRun(TrainConfig(save_dir=str(tmp_path))) as run:
            print(f"\x1b[1;32mstart {number}\x1b[0m", flush=True)
            print("\r 50% |####", end="", file=sys.stderr)
            print("WARNING: ä", file=sys.stderr)
            run.conclude("")
    with pytest.raises(UserError), OwnedRun(TrainConfig(save_dir=str(tmp_path))):
        raise UserError("no such file")
    said = (tmp_path / "train.log").read_text()
    assert said.startswith("start 1\nWARNING: ä\nstart 2\nWARNING: ä\nTraceback")
    assert said.endswith("UserError: no such file\n")
    assert streams == (sys.stdout, sys.stderr)
    assert "50% |####" in capsys.readouterr().err


def test_the_log_keeps_the_newest_part_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "MAX_BYTES", 1000)
    log = console.ConsoleLog(tmp_path)
    print(*range(1000), sep="\n")
    log.close()
    kept = [(tmp_path / name).read_text() for name in ("train.log.1", "train.log")]
    assert 1000 < len("".join(kept)) <= 2000
    assert capsys.readouterr().out.endswith("".join(kept))


def test_a_log_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.log").symlink_to("/dev/full")
    log = console.ConsoleLog(tmp_path)
    print("goes on")
    log.close()
    assert capsys.readouterr() == ("goes on\n", "")
