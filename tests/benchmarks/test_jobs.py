"""Jobs of the benchmarks, the comparison of two runs to the bit, and what the benchmarks refuse."""

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.__main__ import GpuConfig
from benchmarks.jobs import Job, difference, is_alive, run
from benchmarks.recipe import RecipeConfig
from benchmarks.train_step import StepConfig
from tests.support.processes import wait_until
from yolo_seg_ddp.run.checkpoint import save_checkpoint
from yolo_seg_ddp.utils.config import parse_config

# --- Commands that are ended with all their descendants, and the comparison of two runs to the bit


def state(**changes: Any) -> dict[str, Any]:
    parts: dict[str, Any] = {
        "model": {"weight": torch.tensor([0.0, float("nan")])},
        "ema": {"weight": torch.ones(2)},
        "ema_updates": 3,
        "optimizer": {
            "state": {0: {"momentum_buffer": torch.ones(2)}},
            "param_groups": [{"lr": 0.1}],
        },
        "scheduler": None,
        "scaler": {},
        "progress": {"epoch": 1, "best_value": float("nan"), "history": {"epoch_time_s": [1.0]}},
    }
    return {**parts, **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, ""),
        (
            {
                "progress": {
                    "epoch": 1,
                    "best_value": float("nan"),
                    "history": {"epoch_time_s": [2.0]},
                }
            },
            "",
        ),
        ({"model": {"weight": torch.tensor([-0.0, float("nan")])}}, "model.weight"),
        ({"model": {"weight": torch.tensor([0.0, float("nan")]).double()}}, "model.weight"),
        ({"ema": {"weight": torch.tensor([1.0, 1.0 + 2**-23])}}, "ema.weight"),
        ({"optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}, "different values"),
        ({"progress": {"epoch": 2, "best_value": float("nan"), "history": {}}}, "progress.epoch"),
        ({"ema_updates": 4}, "ema_updates"),
    ],
)
def test_two_runs_are_compared_to_the_bit(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    for name, content in (("one", state()), ("two", state(**changes))):
        save_checkpoint(tmp_path / name / "checkpoint", 1, content)
    said = difference(tmp_path / "one", tmp_path / "two")
    assert named in said
    assert bool(said) == bool(named)
    assert difference(tmp_path / "one", tmp_path / "absent") == "there is no checkpoint"


def test_a_job_takes_its_descendants_with_it_and_can_lose_them_alone(tmp_path: Path) -> None:
    with Job(["bash", "-c", "setsid sleep 100 & sleep 100"], tmp_path / "log") as job:
        job.wait_until(lambda: len(job.family()) == 3, "two children", 20)
        family = job.family()
        job.process.send_signal(signal.SIGKILL)
        job.popen.wait(20)
        assert sum(map(is_alive, family)) == 2, "orphans are still known"
    wait_until(lambda: not any(map(is_alive, family)))
    with Job(["bash", "-c", "sleep 100; echo went on"], tmp_path / "log") as job:
        job.wait_until(lambda: len(job.family()) == 2, "a child", 20)
        job.kill(only_descendants=True)
        assert job.wait(20) == 0
        assert job.last_line() == "went on"


def test_a_job_finds_what_the_user_put_on_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert (
        run([sys.executable, "-P", "-c", "import yolo_seg_ddp, of_the_user"], tmp_path / "log") == 0
    )


# --- What the benchmarks refuse: one line on stderr and code 2 ------------------------------------


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        (StepConfig, "--img-size 100", "--img-size 100: must be a multiple of 32 and at least 64"),
        (StepConfig, "--objects -1", "--objects -1: must be at least 0"),
        (GpuConfig, "--only ncll", "--only ncll: there is same_as_cpu data"),
        (RecipeConfig, "--recipes nameless", 'must be "name: options'),
        (RecipeConfig, "--recipes :", 'must be "name: options'),
        (RecipeConfig, "--recipes a: a:", "must have different names"),
        (
            RecipeConfig,
            "--recipes ultralytics:",
            "must have different names, none of them ultralytics",
        ),
        (RecipeConfig, "--sets shrooms", "neither one of mushrooms"),
    ],
)
def test_wrong_options_are_one_line_and_code_2(
    config: Any, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_config(config, "Compare", flags.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2
    assert said in line
