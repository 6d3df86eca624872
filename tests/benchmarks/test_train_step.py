"""One training step: how often its host waits for the device, and what benchmarks/train_step.py says of it."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks import train_step
from benchmarks.host_syncs import count_host_syncs
from benchmarks.train_step_sides import TheirSide, _their_batch
from tests.support.oracle import draw_data
from tests.support.plugin import run_main
from utils.common.devices import choose_precision, keep_freed_memory
from utils.data.synthetic import synthetic_batch
from utils.engine import TrainingEngine, step_timer
from utils.engine.state import ModelEMA
from utils.measure.operators import LOSS_BACKWARD, PARTS, count_operators, outside_network
from utils.yolo.model import build_model
from utils.yolo.training_step import build_training

CPU = torch.device("cpu")
NAMES = ("pole", "wire", "insulator")
MOST_OPERATORS = 515  # of one batch and its optimizer step with AdamW in bf16, outside the network
MOST_COMPUTING = 375  # of these, those that are not views
MOST_SYNCS = 2  # per optimizer step, outside the steps that are logged


# --- the counter ---------------------------------------------------------------------------------------------------

VALUES = torch.tensor([3, 1, 2])


WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: VALUES[0].item(),
    "tolist": lambda: VALUES.tolist(),
    "tolist of one": lambda: VALUES[0].tolist(),
    "cpu": lambda: VALUES.cpu(),
    "bool": lambda: bool((VALUES > 1).any()),
    "int": lambda: int(VALUES.max()),
    "nonzero": lambda: VALUES.nonzero(),
    "index": lambda: VALUES[VALUES > 1],
    "index_put": lambda: VALUES.clone().index_put_((VALUES > 1,), torch.zeros_like(VALUES[0])),
    "masked_select": lambda: VALUES.masked_select(VALUES > 1),
    "equal": lambda: torch.equal(VALUES, VALUES),
    "unique": lambda: VALUES.unique(),
    "bincount": lambda: torch.bincount(VALUES),
    "repeat_interleave": lambda: VALUES.repeat_interleave(VALUES),
    "numbers": lambda: VALUES + torch.tensor([1, 2, 3]),
}
DO_NOT_WAIT: dict[str, Callable[[], Any]] = {
    "index": lambda: VALUES[VALUES.clamp(max=2)],
    "output_size": lambda: VALUES.repeat_interleave(VALUES, output_size=6),
    "nonzero_static": lambda: torch.nonzero_static(VALUES > 1, size=2),
    "where": lambda: torch.where(VALUES > 1, VALUES, 0) * 2 + torch.full((), 3),
    "sort": lambda: VALUES.float().sort().values.cumsum(0),
}


def test_each_kind_of_wait_is_counted_once_and_nothing_else() -> None:
    assert {name: sum(count_host_syncs(wait).values()) for name, wait in WAITS.items()} == dict.fromkeys(WAITS, 1)
    assert {name: count_host_syncs(work) for name, work in DO_NOT_WAIT.items()} == {name: {} for name in DO_NOT_WAIT}


def test_waits_add_up_by_operator() -> None:
    found = count_host_syncs(lambda: [VALUES.sum().item(), VALUES[0].item(), VALUES.tolist()])
    assert found == {"_local_scalar_dense": 2, "tolist": 1}


# --- the real step -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> TrainingEngine:
    torch.manual_seed(0)
    trained = build_training(build_model("yolov8n-seg.yaml", NAMES), CPU, choose_precision("auto", CPU), "adamw")
    trained.model.train()
    return trained


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_has_few_operators_outside_the_network(engine: TrainingEngine, accumulated: int) -> None:
    batch = synthetic_batch(2, 64, len(NAMES), objects_per_image=12)
    batch.colour_gains = torch.tensor([[1.01, 0.8, 1.2], [0.99, 1.3, 0.9]])
    engine.state.accumulate = accumulated
    found = count_operators(engine, batch)
    engine.state.accumulate = 1
    assert list(found) == list(PARTS)
    assert all(count.operators > 0 for count in found.values())
    outside = outside_network(found)
    assert outside.operators <= MOST_OPERATORS * accumulated, found
    assert outside.computing <= MOST_COMPUTING * accumulated, found


def test_an_operator_that_is_added_is_counted_in_its_part(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = synthetic_batch(2, 64, len(NAMES), objects_per_image=2)
    before = count_operators(engine, batch)
    prepare, loss, update = engine.task.prepare, engine.task.loss, engine.update
    noise = torch.zeros(2)

    def with_noise(outputs: Any, targets: Any) -> Any:
        found, values = loss(outputs, targets)
        noise.neg()
        return found * 1, values  # and one more in the backward pass

    monkeypatch.setattr(engine.task, "prepare", lambda *arguments: noise.neg() is noise or prepare(*arguments))
    monkeypatch.setattr(engine.task, "loss", with_noise)
    monkeypatch.setattr(engine, "update", lambda: (update(), noise[0], noise.neg()))
    more = count_operators(engine, batch)
    added = {
        part: (more[part].operators - before[part].operators, more[part].computing - before[part].computing)
        for part in PARTS
    }
    expected = {"input": (1, 1), "loss": (2, 2), LOSS_BACKWARD: (1, 1), "optimizer": (2, 1)}  # noise[0] is a view
    assert {part: change for part, change in added.items() if change != (0, 0)} == expected


# --- what the step is made of --------------------------------------------------------------------------------------


def naive_average(average: dict[str, torch.Tensor], module: nn.Module, weight: float) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {
        name: value + weight * (state[name] - value) if state[name].dtype.is_floating_point else state[name].double()
        for name, value in average.items()
    }


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
        expected = naive_average(expected, model, 0.5)
        for name, value in ema.module.state_dict().items():
            torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-6, atol=1e-7, msg=name)


def test_freed_memory_is_kept_on_linux() -> None:
    assert keep_freed_memory() == (sys.platform.startswith("linux") and os.confstr("CS_GNU_LIBC_VERSION") is not None)


# --- benchmarks/train_step.py --------------------------------------------------------------------------------------


def test_the_script_times_both_sides_and_loading_against_the_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, file = draw_data(tmp_path, 5), tmp_path / "deep" / "step.json"
    flags = ("--img-size", "64", "--batch-size", "2", "--device", "cpu", "--threads", "1")
    places = ("--steps", "2", "--rounds", "2", "--data", data, "--json", file)
    assert run_main(train_step, monkeypatch, *flags, *places) == 0
    lines = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"ratio (\d+\.\d\d)", lines[-1])
    assert found is not None
    record = json.loads(file.read_text())
    ours, theirs, loading = record["sides"]["project"], record["sides"]["ultralytics"], record["loading"]
    assert float(found[1]) == pytest.approx(record["ratio"], abs=0.006)
    assert record["ratio"] == pytest.approx(theirs["step_ms"] / ours["step_ms"])
    assert ours["host_syncs"] <= MOST_SYNCS < theirs["host_syncs"]
    for side in (ours, theirs):
        assert set(side["phase_ms"]) == {"input", "forward", "loss", "backward", "optimizer"}
        assert min(side["phase_ms"].values()) > 0
        assert 0 < side["loss_share"] < 1
    assert any(line.startswith("Ceiling, one batch that is already in memory:") for line in lines)
    assert any("With loading:" in line for line in lines)
    assert 0 < loading["wait_share"] < 1
    assert loading["of_ceiling"] == pytest.approx(loading["images_per_s"] / ours["images_per_s"])


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
        step_timer, "StepTimer", lambda device: SimpleNamespace(mark=None, phases_ms=lambda: np.zeros((1, 5)))
    )
    monkeypatch.setattr(step_timer, "run_training_steps", lambda *arguments: None)
    step_timer.time_training_steps(SimpleNamespace(device=torch.device(device)), batch, 1, 1)  # type: ignore[arg-type]
    assert (batch.images.data_ptr() in locked) == is_locked


def test_the_other_side_is_measured_with_its_trainers_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    side = object.__new__(TheirSide)
    side.device = CPU

    def step(timer: Any) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic))

    monkeypatch.setattr(side, "_step", step)
    side.phases_ms(1, 1)
    assert seen == [(True, True)] * 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic
