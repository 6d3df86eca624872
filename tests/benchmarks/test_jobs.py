"""Commands that are ended with all their descendants, and the comparison of two runs to the bit."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.jobs import Job, difference, is_alive, run
from tests.support.processes import wait_until
from utils.run.checkpoint import save_checkpoint


def state(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "model": {"weight": torch.tensor([0.0, float("nan")])},
        "ema": {"weight": torch.ones(2)},
        "ema_updates": 3,
        "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "scheduler": None,
        "scaler": {},
        "progress": {"epoch": 1, "best_value": float("nan"), "history": {"epoch_time_s": [1.0]}},
    }
    return {**parts, **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        ({"progress": {"epoch": 1, "best_value": float("nan"), "history": {"epoch_time_s": [2.0]}}}, ""),
        ({"model": {"weight": torch.tensor([-0.0, float("nan")])}}, "model.weight"),
        ({"model": {"weight": torch.tensor([0.0, float("nan")]).double()}}, "model.weight"),
        ({"ema": {"weight": torch.tensor([1.0, 1.0 + 2**-23])}}, "ema.weight"),
        ({"optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}, "different values"),
        ({"progress": {"epoch": 2, "best_value": float("nan"), "history": {}}}, "progress.epoch"),
        ({"ema_updates": 4}, "ema_updates"),
    ],
)
def test_two_runs_are_compared_to_the_bit(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    for name, content in (("one", state()), ("two", state(**changes))):
        save_checkpoint(tmp_path / name / "checkpoint", 1, content)
    said = difference(tmp_path / "one", tmp_path / "two")
    assert named in said
    assert bool(said) == bool(named)
    assert difference(tmp_path / "one", tmp_path / "absent") == "there is no checkpoint"


def test_a_job_takes_its_descendants_with_it(tmp_path: Path) -> None:
    with Job(["bash", "-c", "setsid sleep 100 & sleep 100"], tmp_path / "log") as job:
        job.wait_until(lambda: len(job.family()) == 3, "two children", 20)
        family = job.family()
        job.process.send_signal(signal.SIGKILL)
        job.popen.wait(20)
        assert sum(map(is_alive, family)) == 2, "orphans are still known"
    wait_until(lambda: not any(map(is_alive, family)))


def test_a_job_can_lose_only_its_descendants(tmp_path: Path) -> None:
    with Job(["bash", "-c", "sleep 100; echo went on"], tmp_path / "log") as job:
        job.wait_until(lambda: len(job.family()) == 2, "a child", 20)
        job.kill(only_descendants=True)
        assert job.wait(20) == 0
        assert job.last_line() == "went on"


def test_a_job_finds_what_the_user_put_on_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run([sys.executable, "-P", "-c", "import utils, of_the_user"], tmp_path / "log") == 0
