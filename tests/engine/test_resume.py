"""Training on one rank and on two: stopped and resumed equal to the bit, two equal to one, and when
ranks agree to stop.
"""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.small import (
    CPU,
    CountedLoss,
    Record,
    assert_bitwise_equal,
    classifier,
    engine_of,
    fit,
    loader_of,
    plain,
    plain_steps,
    points,
    train_with_everything,
)
from tests.support.ranks import run_ranks
from yolo_seg_ddp.engine import Task, stopping
from yolo_seg_ddp.engine.stopping import StopAgreement
from yolo_seg_ddp.run.checkpoint import CheckpointFiles, load_latest
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.utils import distributed

Answers = tuple[list[Record], Path]  # of both ranks, in this folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Train at once; a resume without a checkpoint begins at the beginning."""
    torch.set_num_threads(1)
    return train_with_everything(tmp_path_factory.mktemp("whole"), 4, resume=True)


@pytest.mark.parametrize(("stop_at", "place"), [(1, (0, 1, 1)), (20, (1, 3, 20)), (33, (2, 0, 34))])
def test_a_stop_and_a_resume_change_nothing(
    whole: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_at: int,
    place: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 2)
    stopped = train_with_everything(tmp_path, 4, stop_at=stop_at)
    assert stopped["stopped"] is True
    assert stopped["place"] == place  # an epoch whose batches are all done is completed first
    continued = train_with_everything(tmp_path, 4, resume=True)
    assert continued["stopped"] is False
    assert continued["num_batches"] == 4 * 17 - stopped["num_batches"]
    assert_bitwise_equal(whole, continued)


def test_an_epoch_that_has_shrunk_below_its_place_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 2)
    assert train_with_everything(tmp_path, 2, stop_at=10)["place"][1] > 5
    assert train_with_everything(tmp_path, 2, resume=True, num_points=20)["num_batches"] == 2 * 5


@pytest.mark.parametrize("accumulation_steps", [2, 3])
def test_a_stop_is_heard_and_resumed_between_accumulated_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation_steps: int
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 1)
    expected = train_with_everything(tmp_path / "whole", 2, accumulation_steps=accumulation_steps)
    assert expected["place"] == (2, 0, 2 * -(-17 // accumulation_steps))  # steps, not batches
    stopped = train_with_everything(
        tmp_path / "part", 2, stop_at=2, accumulation_steps=accumulation_steps
    )
    assert stopped["place"] == (0, accumulation_steps, 1)
    continued = train_with_everything(
        tmp_path / "part", 2, resume=True, accumulation_steps=accumulation_steps
    )
    assert_bitwise_equal(expected, continued)


class KeyedLoader:
    """A loader that is told the epoch and where to begin, as the project's own is."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return 5

    def set_epoch(self, epoch: int, start_batch: int) -> None:
        self.calls.append((epoch, start_batch))

    def __iter__(self) -> Any:
        return iter(list(DataLoader(points(20), batch_size=4))[self.calls[-1][1] :])


def test_a_loader_that_can_start_in_the_middle_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 1)
    calls = []
    for resume in (False, True):
        loader, model = KeyedLoader(), classifier()
        trainer = engine_of(model, tmp_path, epochs=3)
        criterion = CountedLoss(None if resume else 7, partial(trainer.stop_flag.set, "test"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.train(loader, loader_of(points(8), 4), optimizer, criterion, resume=resume)
        calls.append(loader.calls)
    assert calls == [[(0, 0), (1, 0)], [(1, 2), (2, 0)]]


def test_accumulation_with_a_partial_last_group_equals_the_double_batch(tmp_path: Path) -> None:
    doubled = plain_steps(tmp_path / "doubled", 4, 1, 10)  # batches of 4, 4, 2
    accumulated = plain_steps(tmp_path / "accumulated", 2, 2, 10)  # groups of 2 + 2, 2 + 2, 2
    for name, value in doubled.items():
        np.testing.assert_allclose(accumulated[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    single = plain_steps(tmp_path / "single", 2, 1, 10)
    assert max(np.abs(single[name] - value).max() for name, value in doubled.items()) > 1e-3


def test_samplers_are_told_the_epoch_so_that_each_has_its_own_order(tmp_path: Path) -> None:
    model, seen = nn.Linear(1, 1), []

    def criterion(outputs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        seen.append(numbers.flatten().tolist())
        return outputs.mean()

    numbers = torch.arange(8.0)[:, None]
    train_loader = loader_of(TensorDataset(numbers, numbers), 8)
    fit(model, tmp_path, train_loader, [(numbers, numbers)], criterion, lr=0.0, epochs=3)
    orders = [tuple(labels) for labels in seen[::2]]  # every other call is the validation's
    assert len(set(orders)) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(8))}


def test_a_task_keeps_its_checkpoints_where_and_when_it_is_told(tmp_path: Path) -> None:
    steps: list[int] = []

    class Noting(CheckpointFiles):
        def save(self, step: int, state: dict[str, Any], facts: Any) -> None:
            steps.append(step)
            super().save(step, state, facts)

    class Own(Task):
        samples = "points"

        def checkpoints(self, run_folder: Path) -> CheckpointFiles:
            return Noting(run_folder)

        def after_log(self, record: dict[str, Any], log: RunLog) -> None:
            logged.append((record["global_step"], record["loss"] > 0))

    logged: list[tuple[int, bool]] = []
    options: Record = {
        "epochs": 2,
        "save_every_steps": 3,
        "log_interval": 4,
        "save_last": False,
        "save_best": False,
    }
    options |= {"task": Own(), "manifest": {"name": "own"}}
    # 7 steps an epoch
    fit(classifier(), tmp_path, loader_of(points(28), 4), loader_of(points(8), 4), **options)
    assert steps == [3, 6, 7, 9, 12, 14]
    assert logged == [(1, True), (5, True), (7, True), (8, True), (12, True), (14, True)]
    assert [path.name for path in tmp_path.glob("*.pt")] == ["ckpt-14.pt"]
    assert torch.load(tmp_path / "ckpt-14.pt", weights_only=True)["name"] == "own"


def made_up_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let the agreement read its time from the returned clock's `now_s`."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(stopping, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


@pytest.mark.parametrize(
    ("step_s", "slowest_s", "expected"),
    [
        ([0.1] * 30, 0.0, [1, 10, 20, 30]),
        ([0.6] * 9, 0.0, [1, 4, 7]),
        ([5.0] * 4, 0.0, [1, 2, 3, 4]),
        # the first step of a process, which sets everything up
        ([60.0] + [0.1] * 11, 0.0, [1, 2, 10]),
        ([0.1] * 12 + [3.0] * 10, 0.0, [1, 10, 20, 21, 22]),
        *[([step_s] * 12, 1.0, [1, 3, 5, 7, 9, 10, 12]) for step_s in (0.01, 0.5, 1.0)],
    ],
)
def test_ranks_agree_within_ten_steps_or_two_seconds_of_the_slowest(
    monkeypatch: pytest.MonkeyPatch, step_s: list[float], slowest_s: float, expected: list[int]
) -> None:
    clock = made_up_clock(monkeypatch)
    monkeypatch.setattr(stopping, "max_over_ranks", lambda own: [*own[:2], max(own[2], slowest_s)])
    own = StopAgreement()
    own.start(0)
    found = []
    for step, seconds in enumerate(step_s, start=1):
        clock.now_s += seconds
        if own.is_due(step):
            found.append(step)
            own.agree(step, False, False)
    assert found == expected


def test_what_comes_between_epochs_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = made_up_clock(monkeypatch), StopAgreement()
    own.start(6)
    clock.now_s += 0.1
    own.agree(7, False, False)
    clock.now_s += 500  # validation
    own.start(12)
    own.agree(12, False, False)
    assert [step for step in range(13, 31) if own.is_due(step)] == [20, 30]


def train_with_samplers(folder: Path) -> Record:
    model = classifier(seed=distributed.rank())  # DDP must give rank 1 the weights of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    train_loader, val_loader = (
        loader_of(points(number, seed), 4) for number, seed in ((64, 0), (16, 1))
    )
    trainer = engine_of(model, folder / "checkpoints", epochs=3)
    history = trainer.train(train_loader, val_loader, optimizer, nn.CrossEntropyLoss(), scheduler)
    return {"history": history, "weights": plain(model.state_dict())}


def drifting_apart(folder: Path) -> str:
    """Train while rank 1's moving average goes its own way; return what ends the training."""
    model = classifier()
    trainer = engine_of(model, folder, ema_decay=0.9999, ema_ramp=0.001, epochs=1)
    assert trainer.state.ema is not None
    if distributed.rank() == 1:
        next(trainer.state.ema.module.buffers()).add_(1e-6)
    loader = loader_of(points(8), 4)
    try:
        trainer.train(
            loader, loader, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
        )
    except distributed.RankDisagreement as error:
        return str(error)
    return "nothing"


def on_two_ranks(folder: Path) -> Record:
    distributed.setup_ddp(CPU)
    stopping.STOP_CHECK_STEPS = 2
    answers: Record = {"samplers": train_with_samplers(folder)}
    answers["whole"] = train_with_everything(folder / "whole", 4)
    answers["stopped"] = train_with_everything(folder / "stopped", 4, stop_at=11)
    answers["continued"] = train_with_everything(folder / "stopped", 4, resume=True)
    answers["plain"] = plain_steps(folder / "plain", 4, 1, 64)
    answers["accumulated"] = plain_steps(folder / "accumulated", 2, 2, 64)
    answers["drift"] = drifting_apart(folder / "drifted")
    distributed.cleanup_ddp()
    answers["left"] = not torch.distributed.is_initialized()
    return answers


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(on_two_ranks, 2, folder, join=False), folder


def test_training_with_samplers_works_on_two_ranks_and_files_hold_the_raw_modules_names(
    two_ranks: Answers,
) -> None:
    first, second = (answers["samplers"] for answers in two_ranks[0])
    assert isinstance(first["history"]["train_loss"], list)
    assert len(first["history"]["train_loss"]) == len(first["history"]["val_loss"]) == 3
    assert first["history"]["train_loss"][-1] < 0.7 * first["history"]["train_loss"][0]
    assert first["history"]["val_loss"][-1] < first["history"]["val_loss"][0]
    assert first["history"]["lr"] == [0.1, 0.1, pytest.approx(0.01)]
    for name in ("train_loss", "val_loss"):
        assert first["history"][name] == second["history"][name]
    folder = two_ranks[1] / "checkpoints"
    assert {"best.pt", "last.pt", "metrics.jsonl", "results.csv"} <= {
        path.name for path in folder.iterdir()
    }
    saved, found = (
        torch.load(folder / "last.pt", weights_only=True),
        load_latest(folder / "checkpoint"),
    )
    assert found is not None
    assert saved["model_state_dict"].keys() == found[1]["model"].keys() == first["weights"].keys()
    np.testing.assert_equal(plain(saved["model_state_dict"]), first["weights"])
    assert all(answers["left"] for answers in two_ranks[0])


def test_ranks_end_with_equal_weights_averages_and_batch_statistics(two_ranks: Answers) -> None:
    first, second = two_ranks[0]
    np.testing.assert_equal(second["samplers"]["weights"], first["samplers"]["weights"])
    for run in ("whole", "continued"):
        assert_bitwise_equal(first[run], second[run])


def test_ranks_that_drift_apart_stop_before_anything_is_saved(two_ranks: Answers) -> None:
    answers, folder = two_ranks
    for rank in range(2):
        assert "1 of " in answers[rank]["drift"]
        assert "the first is ema." in answers[rank]["drift"]
    assert not (folder / "drifted" / "checkpoint").exists()
    assert not list((folder / "drifted").glob("*.pt"))


def test_two_ranks_step_like_one_with_the_double_batch(two_ranks: Answers, tmp_path: Path) -> None:
    expected = plain_steps(tmp_path, 8, 1, 64)
    for run in ("plain", "accumulated"):
        for name, value in two_ranks[0][0][run].items():
            np.testing.assert_allclose(
                value, expected[name], rtol=1e-4, atol=1e-6, err_msg=f"{run} {name}"
            )


def test_a_stop_told_to_one_rank_stops_both_at_the_same_step(two_ranks: Answers) -> None:
    first, second = two_ranks[0]
    assert first["stopped"]["stopped"] is second["stopped"]["stopped"] is True
    assert first["stopped"]["place"] == second["stopped"]["place"] == (1, 3, 12)
    assert first["whole"]["stopped"] is False
    for answers in (first, second):
        assert answers["continued"]["num_batches"] == 36 - 12
        assert_bitwise_equal(answers["whole"], answers["continued"])
