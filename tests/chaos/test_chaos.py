"""The attacks that no other test makes, a trial each; and that the suite itself can tell a wound from none."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos import __main__ as command
from chaos import kills, saves, stops
from chaos.jobs import Job
from chaos.scenario import Result, Scenario, Setting, Skipped, row
from chaos.trainers import difference
from utils.common.errors import UsageError
from utils.run.checkpoint import save_checkpoint

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc (run them on Linux)")


@pytest.mark.parametrize("attack", [kills.killed_launcher, stops.second_signal, saves.damage])
def test_an_attack_is_survived(attack: Any, tmp_path: Path) -> None:
    result = attack(Setting(tmp_path, quick=True))
    assert result.trials > 0
    assert result.failures == []


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
    told = difference(tmp_path / "one", tmp_path / "two")
    assert named in told
    assert bool(told) == bool(named)
    assert difference(tmp_path / "one", tmp_path / "absent") == "there is no checkpoint"


def test_a_job_takes_its_descendants_with_it(tmp_path: Path) -> None:
    with Job(["bash", "-c", "setsid sleep 100 & sleep 100"], tmp_path / "log") as job:
        job.wait_until(lambda: len(job.family()) == 3, "two children", 20)
        family = job.family()
        job.process.send(signal.SIGKILL)
        job.popen.wait(20)
        assert sum(process.is_alive() for process in family) == 2, "orphans are still known"
    deadline_s = time.monotonic() + 10
    while any(process.is_alive() for process in family) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(process.is_alive() for process in family)


def test_a_trial_fails_once_however_much_is_wrong_with_it() -> None:
    result = Result()
    result.trial("first", "", "")
    result.trial("second", "this: and that", "more")
    result.trial("second")
    assert (result.trials, result.passes, len(result.failures)) == (3, 2, 2)
    result.figures["recovery"] = 1.23456
    scenario = Scenario("R0", "what", "criterion", lambda setting: result)
    assert row(scenario, result) == "| R0 | what | criterion | 2/3 | recovery 1.235 |"


def test_the_command_writes_what_it_found_and_names_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos", "--only", "R99"])
    with pytest.raises(UsageError, match="--only R99: there is R1 R2"):
        command.main()
    report = tmp_path / "new" / "report.json"
    monkeypatch.setattr(sys, "argv", ["chaos", "--only", "R8", "--quick", "--json", str(report)])
    assert command.main() == 0
    assert "| 10/10 |" in capsys.readouterr().out
    assert json.loads(report.read_text())["results"][0]["passes"] == 10


def test_a_failed_trial_and_a_broken_scenario_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(setting: Setting) -> Result:
        result = Result()
        result.trial("wound", "it bleeds")
        return result

    def skip(setting: Setting) -> Result:
        raise Skipped("no Slurm here")

    def break_down(setting: Setting) -> Result:
        raise ValueError("broken")

    monkeypatch.setattr(sys, "argv", ["chaos"])
    for attack, code, told in (
        (fail, 1, "1 wound: it bleeds"),
        (skip, 0, "skipped: no Slurm"),
        (break_down, 1, "broken"),
    ):
        monkeypatch.setattr(command, "SCENARIOS", (Scenario("R0", "what", "criterion", attack),))
        assert command.main() == code
        assert told in capsys.readouterr().out
