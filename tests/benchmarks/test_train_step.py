"""What a training step is made of, and benchmarks/train_step.py."""

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import train_step
from benchmarks.train_step_sides import TheirSide, _their_batch
from tests.support.oracle import draw_data
from tests.support.recipes import run_command
from yolo_seg_ddp.engine.state import ModelEMA
from yolo_seg_ddp.measure import step_timer
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.utils.devices import keep_freed_memory

CPU = torch.device("cpu")
NAMES = ("pole", "wire", "insulator")


# --- what the step is made of ---------------------------------------------------------------------


@pytest.mark.parametrize("event", ["nothing", "load", "assign", "move", "another source"])
def test_the_average_follows_whatever_happens_to_the_tensors(event: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    ema = ModelEMA(model, decay=0.5, ramp_updates=0)
    expected = {name: value.double() for name, value in ema.module.state_dict().items()}
    for number in range(4):
        if number == 2:
            other = {name: value.clone() + 1 for name, value in model.state_dict().items()}
            if event in ("load", "assign"):
                model.load_state_dict(other, assign=event == "assign")
                ema.module.load_state_dict(
                    {name: value.clone() for name, value in other.items()}, assign=event == "assign"
                )
                expected = {name: value.double() for name, value in other.items()}
            elif event == "move":
                model.double()
                ema.module.double()
            elif event == "another source":
                model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        with torch.no_grad():
            model.train()(torch.rand(5, 3, dtype=next(model.parameters()).dtype))
            for parameter in model.parameters():
                parameter.add_(torch.rand_like(parameter))
        ema.update(model)
        state = model.state_dict()
        for name, value in ema.module.state_dict().items():
            now = state[name].double()
            expected[name] = (
                (expected[name] + now) / 2 if state[name].dtype.is_floating_point else now
            )
            torch.testing.assert_close(
                value.double(), expected[name].double(), rtol=1e-6, atol=1e-7, msg=name
            )


def test_freed_memory_is_kept_on_linux() -> None:
    assert keep_freed_memory() == (
        sys.platform.startswith("linux") and os.confstr("CS_GNU_LIBC_VERSION") is not None
    )


# --- benchmarks/train_step.py ---------------------------------------------------------------------


def test_the_script_times_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, file = draw_data(tmp_path, 5), tmp_path / "deep" / "step.json"
    flags = ("--img-size", "64", "--batch-size", "2", "--device", "cpu", "--threads", "1")
    places = ("--steps", "2", "--rounds", "2", "--data", data, "--json", file)
    assert run_command(train_step, *flags, *places) == 0
    found = re.fullmatch(r"ratio (\d+\.\d\d)", capsys.readouterr().out.splitlines()[-1])
    assert found is not None
    record = json.loads(file.read_text())
    ours, theirs = record["sides"]["project"], record["sides"]["ultralytics"]
    assert float(found[1]) == pytest.approx(record["ratio"], abs=0.006)
    assert record["ratio"] == pytest.approx(theirs["step_ms"] / ours["step_ms"])
    for side in (ours, theirs):
        assert set(side["phase_ms"]) == {"input", "forward", "loss", "backward", "optimizer"}
        assert min(side["phase_ms"].values()) > 0
        assert 0 < side["loss_share"] < 1


@pytest.mark.parametrize(("device", "is_locked"), [("cuda", True), ("cpu", False)])
def test_both_sides_upload_from_page_locked_memory(
    device: str, is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[int] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        locked.append(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    batch = synthetic_batch(2, 64, len(NAMES), objects_per_image=3)
    theirs = _their_batch(batch, torch.device(device))
    uploaded = [tensor.data_ptr() for tensor in theirs.values()] if is_locked else []
    assert sorted(locked) == sorted(uploaded)
    locked.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    monkeypatch.setattr(
        step_timer,
        "StepTimer",
        lambda device: SimpleNamespace(mark=None, phases_ms=lambda: np.zeros((1, 5))),
    )
    monkeypatch.setattr(step_timer, "run_training_steps", lambda *arguments: None)
    step_timer.time_training_steps(SimpleNamespace(device=torch.device(device)), batch, 1, 1)  # type: ignore[arg-type]
    assert (batch.images.data_ptr() in locked) == is_locked


def test_the_other_side_is_measured_with_its_trainers_switches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, bool]] = []
    side = object.__new__(TheirSide)
    side.device = CPU

    def step(timer: Any) -> None:
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
        )

    monkeypatch.setattr(side, "_step", step)
    side.phases_ms(1, 1)
    assert seen == [(True, True)] * 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
