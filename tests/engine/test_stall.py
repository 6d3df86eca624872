"""The stall watch: it writes the stacks of a rank that makes no progress, once."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from utils.engine.stall import StallWatch

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_stall_shows_the_stacks_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with StallWatch(tmp_path, rank=3, limit_s=0.1) as watch:
        time.sleep(0.5)
        watch.beat()
    told = (tmp_path / "stacks-rank3.txt").read_text(encoding="utf-8")
    assert told.count("[rank 3] no progress for 0 s") == 1
    assert "test_a_stall_shows_the_stacks_once" in told
    assert "test_a_stall_shows_the_stacks_once" in capfd.readouterr().err


def test_who_goes_on_is_left_alone(tmp_path: Path) -> None:
    with StallWatch(tmp_path, rank=0, limit_s=0.4) as watch:
        for _ in watch.watched(range(8)):
            time.sleep(0.1)
    assert not watch.file.exists()
