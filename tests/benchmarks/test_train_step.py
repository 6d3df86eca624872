"""One training step: how often its host waits for the device, and what benchmarks/train_step.py says of it."""

from __future__ import annotations

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
from tests.support.oracle import draw_photos
from utils.common.devices import Precision, choose_precision, keep_freed_memory
from utils.engine import TrainingEngine
from utils.engine.ema import ModelEMA
from utils.measure import step_timer
from utils.measure.operators import LOSS_BACKWARD, PARTS, count_operators, outside_network
from utils.measure.step_timer import build_training
from utils.measure.synthetic import synthetic_batch
from utils.yolo.mask_loss import GROUP_SIZE, find_positives
from utils.yolo.model import build_model

CPU = torch.device("cpu")
NAMES = ("pole", "wire", "insulator")
MOST_OPERATORS = 515  # of one batch and its optimizer step with AdamW in bf16, outside the network
MOST_COMPUTING = 375  # of these, those that are not views
MOST_SYNCS = 2  # per optimizer step, outside the steps that are logged


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the counter ---------------------------------------------------------------------------------------------------

VALUES = torch.tensor([3, 1, 2])


@pytest.mark.parametrize(
    "function",
    [
        lambda: VALUES[0].item(),
        lambda: VALUES.tolist(),
        lambda: VALUES[0].tolist(),
        lambda: VALUES.cpu(),
        lambda: bool((VALUES > 1).any()),
        lambda: int(VALUES.max()),
        lambda: VALUES.nonzero(),
        lambda: VALUES[VALUES > 1],
        lambda: VALUES.clone().index_put_((VALUES > 1,), torch.zeros_like(VALUES[0])),
        lambda: VALUES.masked_select(VALUES > 1),
        lambda: torch.equal(VALUES, VALUES),
        lambda: VALUES.unique(),
        lambda: torch.bincount(VALUES),
        lambda: VALUES.repeat_interleave(VALUES),
        lambda: VALUES + torch.tensor([1, 2, 3]),
    ],
    ids=[
        *("item", "tolist", "tolist of one", "cpu", "bool", "int", "nonzero", "index", "index_put", "masked_select"),
        *("equal", "unique", "bincount", "repeat_interleave", "numbers"),
    ],
)
def test_each_kind_of_wait_is_counted_once(function: Callable[[], Any]) -> None:
    assert sum(count_host_syncs(function).values()) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda: VALUES[VALUES.clamp(max=2)],
        lambda: VALUES.repeat_interleave(VALUES, output_size=6),
        lambda: torch.nonzero_static(VALUES > 1, size=2),
        lambda: torch.where(VALUES > 1, VALUES, 0) * 2 + torch.full((), 3),
        lambda: VALUES.float().sort().values.cumsum(0),
    ],
    ids=["index", "output_size", "nonzero_static", "where", "sort"],
)
def test_what_does_not_wait_is_not_counted(function: Callable[[], Any]) -> None:
    assert count_host_syncs(function) == {}


def test_waits_add_up_by_operator() -> None:
    def function() -> None:
        for _ in range(3):
            VALUES.sum().item()
        VALUES.tolist()

    assert count_host_syncs(function) == {"_local_scalar_dense": 3, "tolist": 1}


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
    prepare, loss, update = engine.task.prepare, engine.task.loss, engine.step.update
    noise = torch.zeros(2)

    def with_noise(outputs: Any, targets: Any) -> Any:
        found, values = loss(outputs, targets)
        noise.neg()
        return found * 1, values  # and one more in the backward pass

    monkeypatch.setattr(engine.task, "prepare", lambda *arguments: noise.neg() is noise or prepare(*arguments))
    monkeypatch.setattr(engine.task, "loss", with_noise)
    monkeypatch.setattr(engine.step, "update", lambda: (update(), noise[0], noise.neg()))
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


def test_a_target_with_many_anchors_gets_as_many_groups_as_it_needs() -> None:
    foreground = torch.zeros(2, 40, dtype=torch.bool)
    foreground[0, :23] = True
    foreground[1, 5] = True
    target_index = torch.zeros(2, 40, dtype=torch.int64)
    target_index[1, 5] = 1
    boxes = torch.tensor([[[0.0, 0, 9, 8], [0, 0, 0, 0]], [[0, 0, 1, 1], [12.5, 4, 16, 12]]])  # prototype pixels
    found = find_positives(foreground, target_index, boxes, side=16)
    assert found.num_groups == 4
    assert (found.slot // GROUP_SIZE).bincount().tolist() == [GROUP_SIZE, GROUP_SIZE, 23 - 2 * GROUP_SIZE, 1]
    assert found.unit_target.tolist() == [0] * 9 + [3]
    assert sorted(found.slot.tolist()) == [*range(23), 3 * GROUP_SIZE]
    assert found.unit_group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert found.unit_block.tolist() == [0, 1, 2] * 3 + [0]  # 9 * 8 pixels, and 3 * 8


def test_a_box_without_a_single_pixel_costs_nothing() -> None:
    foreground = torch.ones(1, 4, dtype=torch.bool)
    boxes = torch.tensor([[[3.1, 2, 3.9, 9]]])  # between two columns
    found = find_positives(foreground, torch.zeros(1, 4, dtype=torch.int64), boxes, side=16)
    assert len(found.slot) == 4
    assert len(found.unit_group) == 0


def test_freed_memory_is_kept_on_linux_and_training_gives_the_same_numbers() -> None:
    def losses() -> list[float]:
        torch.manual_seed(0)
        trained = build_training(build_model("yolov8n-seg.yaml", NAMES), CPU, Precision("off", None, False))
        trained.model.train()
        batch = synthetic_batch(1, 64, len(NAMES), objects_per_image=3)
        return [float(trained.step.forward_backward(batch)[0]["loss"]) for _ in range(2)]

    before = losses()
    assert keep_freed_memory() == (sys.platform.startswith("linux") and os.confstr("CS_GNU_LIBC_VERSION") is not None)
    assert losses() == before


# --- benchmarks/train_step.py --------------------------------------------------------------------------------------


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [train_step.__file__, *arguments])
    return train_step.main()


def test_the_script_times_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--img-size", "64", "--batch-size", "1", "--objects", "3", "--device", "cpu", "--threads", "1")
    file = tmp_path / "deep" / "step.json"
    assert run_main(monkeypatch, *flags, "--steps", "1", "--rounds", "2", "--json", str(file)) == 0
    lines = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"ratio (\d+\.\d\d)", lines[-1])
    assert found is not None
    record = json.loads((tmp_path / "deep" / "step.json").read_text())
    ours, theirs = record["sides"]["project"], record["sides"]["ultralytics"]
    assert float(found[1]) == pytest.approx(record["ratio"], abs=0.006)
    assert record["ratio"] == pytest.approx(theirs["step_ms"] / ours["step_ms"])
    assert ours["host_syncs"] <= MOST_SYNCS < theirs["host_syncs"]
    for side in (ours, theirs):
        assert set(side["phase_ms"]) == {"input", "forward", "loss", "backward", "optimizer"}
        assert min(side["phase_ms"].values()) > 0
        assert 0 < side["loss_share"] < 1
    assert any(line.startswith("Ceiling, one batch that is already in memory:") for line in lines)


def test_loading_is_measured_against_the_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    draw_photos(tmp_path / "images" / "train", 5)
    data = tmp_path / "dataset.yaml"
    data.write_text("path: .\ntrain: images/train\nval: images/train\nnames: [pole, wire, insulator]\n")
    flags = ("--img-size", "64", "--batch-size", "2", "--data", str(data), "--device", "cpu", "--threads", "1")
    file = tmp_path / "step.json"
    assert run_main(monkeypatch, *flags, "--steps", "2", "--rounds", "2", "--json", str(file)) == 0
    assert "With loading:" in capsys.readouterr().out
    record = json.loads(file.read_text())
    loading, ceiling = record["loading"], record["sides"]["project"]["images_per_s"]
    assert 0 < loading["wait_share"] < 1
    assert loading["of_ceiling"] == pytest.approx(loading["images_per_s"] / ceiling)


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
    monkeypatch.setattr(step_timer, "StepTimer", lambda device: SimpleNamespace(phases_ms=lambda: np.zeros((1, 5))))
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
