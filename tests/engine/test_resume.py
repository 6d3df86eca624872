"""Training on one rank and two, stopped and resumed: equal to the bit. The TrainingEngine guide's first method."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.engine.small import CPU, classifier, engine_of, loader_of, plain, points
from tests.ranks import run_ranks
from utils import distributed
from utils.engine import Task, TrainingEngine, stopping
from utils.engine.schedule import ScheduleSpec, StepSchedule
from utils.run.checkpoint import load_latest

Record = dict[str, Any]


pytestmark = pytest.mark.usefixtures("one_thread")


def train_with_everything(
    folder: Path, num_epochs: int, *, resume: bool = False, stop_at: int | None = None, accumulation_steps: int = 1
) -> Record:
    """Train with momentum, schedule, BatchNorm, EMA and clipping; `stop_at` is the batch at which the last rank is told
    to stop. Return all that a resumed run has to bring back.
    """
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = engine_of(
        model,
        folder,
        ema_decay=0.9,
        ema_ramp=5,
        clip_norm=1.0,
        accumulate=accumulation_steps,
    )
    num_batches = 0

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        nonlocal num_batches
        num_batches += outputs.requires_grad
        if num_batches == stop_at and distributed.rank() == distributed.world_size() - 1:
            trainer.stop_flag.set("test")
        loss = nn.functional.cross_entropy(outputs, labels)
        return loss, {"margin": outputs.abs().mean()}

    history = trainer.train(
        train_loader=loader_of(points(68), 4),
        val_loader=loader_of(points(20, seed=1), 4),
        optimizer=optimizer,
        criterion=criterion,
        scheduler=StepSchedule(optimizer, ScheduleSpec(0.1, total_steps=60, warmup_steps=5)),
        num_epochs=num_epochs,
        resume=resume,
    )
    assert trainer.state.ema is not None
    momenta = [entry["momentum_buffer"].numpy().copy() for entry in optimizer.state_dict()["state"].values()]
    return {
        "weights": plain(model.state_dict()),
        "average": plain(trainer.state.ema.module.state_dict()),
        "momenta": {str(k): momentum for k, momentum in enumerate(momenta)},
        "updates": trainer.state.ema.updates,
        "val_loss": history.get("val_loss"),
        "lr": history.get("lr"),
        "place": (trainer.progress.epoch, trainer.progress.batch, trainer.progress.global_step),
        "num_batches": num_batches,
        "stopped": trainer.stopped_by_signal,
    }


def stop_soon() -> None:
    stopping.STOP_CHECK_STEPS = 2


def assert_bitwise_equal(first: Record, second: Record) -> None:
    for part in ("weights", "average", "momenta"):
        assert first[part].keys() == second[part].keys()
        for name, value in first[part].items():
            np.testing.assert_array_equal(second[part][name], value, err_msg=f"{part} {name}", strict=True)
    for part in ("updates", "val_loss", "lr", "place"):
        assert first[part] == second[part], part


# --- two ranks -----------------------------------------------------------------------------------------------------


def as_in_the_guide(rank: int, world_size: int, folder: Path) -> Record:
    """Follow the guide's first method line by line; only the backend is named, because there is no GPU here."""
    os.chdir(folder)
    device = CPU
    train_dataset, val_dataset, batch_size, num_epochs = points(64), points(16, seed=1), 4, 3

    TrainingEngine.setup_distributed(rank, world_size, backend="gloo")
    model = classifier(seed=rank).to(device)  # DDP must give rank 1 the weights of rank 0
    train_sampler: DistributedSampler[Any] = DistributedSampler(train_dataset, num_replicas=world_size, rank=rank)
    val_sampler: DistributedSampler[Any] = DistributedSampler(val_dataset, num_replicas=world_size, rank=rank)
    train_loader = DataLoader(train_dataset, batch_size=batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_dataset, batch_size=batch_size, sampler=val_sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    trainer = TrainingEngine(
        model=model,
        device=device,
        distributed=True,
        local_rank=rank,
        world_size=world_size,
        backend="gloo",
    )
    history = trainer.train(
        train_loader=train_loader,
        val_loader=val_loader,
        optimizer=optimizer,
        criterion=criterion,
        scheduler=scheduler,
        num_epochs=num_epochs,
    )
    reduced = trainer._reduce_tensor(torch.tensor([1.0, 4.0]) * (rank + 1))
    return {
        "history": history,
        "weights": plain(model.state_dict()),
        "reduced": reduced.tolist(),
        "files": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }


def plain_steps(folder: Path, batch_size: int, accumulation_steps: int, num_samples: int) -> dict[str, np.ndarray]:
    """Train without BatchNorm and in the data's own order; return the weights."""
    model = classifier(norm=False)
    engine_of(model, folder, accumulate=accumulation_steps).train(
        train_loader=loader_of(points(num_samples), batch_size, shuffle=False),
        val_loader=loader_of(points(8, seed=1), 4),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        criterion=nn.CrossEntropyLoss(),
        num_epochs=2,
    )
    return plain(model.state_dict())


def drifting_apart(folder: Path) -> str:
    """Train while rank 1's moving average goes its own way; return what ends the training."""
    model = classifier()
    trainer = engine_of(model, folder, ema_decay=0.9999, ema_ramp=0.001)
    assert trainer.state.ema is not None
    if distributed.rank() == 1:
        next(trainer.state.ema.module.buffers()).add_(1e-6)
    try:
        trainer.train(
            loader_of(points(8), 4),
            loader_of(points(8), 4),
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            num_epochs=1,
        )
    except distributed.RankDisagreement as error:
        return str(error)
    return "nothing"


def on_two_ranks(folder: Path) -> Record:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stop_soon()
    answers: Record = {"guide": as_in_the_guide(rank, world_size, folder)}
    answers["whole"] = train_with_everything(folder / "whole", 4)
    answers["half"] = train_with_everything(folder / "halves", 2)
    answers["halves"] = train_with_everything(folder / "halves", 4, resume=True)
    answers["stopped"] = train_with_everything(folder / "stopped", 4, stop_at=11)
    answers["continued"] = train_with_everything(folder / "stopped", 4, resume=True)
    answers["plain"] = plain_steps(folder / "plain", 4, 1, 64)
    answers["accumulated"] = plain_steps(folder / "accumulated", 2, 2, 64)
    answers["drift"] = drifting_apart(folder / "drifted")
    TrainingEngine.cleanup_distributed()
    answers["left"] = not torch.distributed.is_initialized()
    return answers


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Record], Path]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(on_two_ranks, 2, folder, join=False), folder


def test_the_guides_training_works_on_two_ranks(two_ranks: tuple[list[Record], Path]) -> None:
    first, second = (answers["guide"] for answers in two_ranks[0])
    assert isinstance(first["history"]["train_loss"], list)
    assert len(first["history"]["train_loss"]) == len(first["history"]["val_loss"]) == 3
    assert first["history"]["train_loss"][-1] < 0.7 * first["history"]["train_loss"][0]
    assert first["history"]["val_loss"][-1] < first["history"]["val_loss"][0]
    assert first["history"]["lr"] == [0.1, 0.1, pytest.approx(0.01)]
    for name in ("train_loss", "val_loss"):
        assert first["history"][name] == second["history"][name]
    assert first["reduced"] == second["reduced"] == [1.5, 6.0]
    assert {"best.pt", "last.pt", "checkpoint", "metrics.jsonl", "results.csv"} <= set(first["files"])
    assert all(answers["left"] for answers in two_ranks[0])


def test_ranks_end_with_equal_weights_averages_and_batch_statistics(two_ranks: tuple[list[Record], Path]) -> None:
    first, second = two_ranks[0]
    for name, value in first["guide"]["weights"].items():
        np.testing.assert_array_equal(second["guide"]["weights"][name], value, err_msg=name)
    for run in ("whole", "halves", "continued"):
        assert_bitwise_equal(first[run], second[run])


def test_ranks_that_drift_apart_stop_before_anything_is_saved(two_ranks: tuple[list[Record], Path]) -> None:
    answers, folder = two_ranks
    for rank in range(2):
        assert "1 of " in answers[rank]["drift"]
        assert "the first is ema." in answers[rank]["drift"]
    assert not (folder / "drifted" / "checkpoint").exists()
    assert not list((folder / "drifted").glob("*.pt"))


def test_files_hold_the_raw_modules_names(two_ranks: tuple[list[Record], Path]) -> None:
    answers, folder = two_ranks
    saved = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    assert saved["model_state_dict"].keys() == answers[0]["guide"]["weights"].keys()
    for name, value in saved["model_state_dict"].items():
        np.testing.assert_array_equal(value.numpy(), answers[0]["guide"]["weights"][name])
    found = load_latest(folder / "checkpoints" / "checkpoint")
    assert found is not None
    assert found[1]["model"].keys() == answers[0]["guide"]["weights"].keys()


def test_two_ranks_step_like_one_with_the_double_batch(two_ranks: tuple[list[Record], Path], tmp_path: Path) -> None:
    expected = plain_steps(tmp_path, 8, 1, 64)
    for run in ("plain", "accumulated"):
        for name, value in two_ranks[0][0][run].items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=f"{run} {name}")


def test_two_ranks_resume_to_the_bit(two_ranks: tuple[list[Record], Path]) -> None:
    for answers in two_ranks[0]:
        assert answers["half"]["place"] == (2, 0, 18)
        assert answers["halves"]["num_batches"] == answers["half"]["num_batches"] == 18
        assert_bitwise_equal(answers["whole"], answers["halves"])


def test_a_stop_told_to_one_rank_stops_both_at_the_same_step(two_ranks: tuple[list[Record], Path]) -> None:
    first, second = two_ranks[0]
    assert first["stopped"]["stopped"] is second["stopped"]["stopped"] is True
    assert first["stopped"]["place"] == second["stopped"]["place"] == (1, 3, 12)
    assert first["whole"]["stopped"] is False
    for answers in (first, second):
        assert answers["continued"]["num_batches"] == 36 - 12
        assert_bitwise_equal(answers["whole"], answers["continued"])


def validate_on_a_share(folder: Path) -> Record:
    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(outputs, labels), {"margin": outputs.abs().mean()}

    data = points(6)
    share = [data.tensors] if distributed.rank() == 0 else []
    trainer = engine_of(classifier(), folder, task=Task(criterion))
    return trainer.validate(share)


def test_a_rank_without_validation_images_takes_part_in_named_values(tmp_path: Path) -> None:
    alone = validate_on_a_share(tmp_path)
    assert run_ranks(validate_on_a_share, 2, tmp_path, timeout_s=15) == [pytest.approx(alone)] * 2


# --- one rank ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Record:
    torch.set_num_threads(1)
    return train_with_everything(tmp_path_factory.mktemp("whole"), 4)


def test_one_rank_resumes_to_the_bit(whole: Record, tmp_path: Path) -> None:
    assert train_with_everything(tmp_path, 2)["place"] == (2, 0, 34)
    assert_bitwise_equal(whole, train_with_everything(tmp_path, 4, resume=True))


def test_resume_without_a_checkpoint_begins_at_the_beginning(whole: Record, tmp_path: Path) -> None:
    assert_bitwise_equal(whole, train_with_everything(tmp_path, 4, resume=True))


@pytest.mark.parametrize(("stop_at", "place"), [(1, (0, 1, 1)), (20, (1, 3, 20)), (33, (2, 0, 34))])
def test_a_stop_and_a_resume_change_nothing(
    whole: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, place: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 2)
    stopped = train_with_everything(tmp_path, 4, stop_at=stop_at)
    assert stopped["stopped"] is True
    assert stopped["place"] == place  # an epoch whose batches are all done is completed first
    continued = train_with_everything(tmp_path, 4, resume=True)
    assert continued["stopped"] is False
    assert continued["num_batches"] == 4 * 17 - stopped["num_batches"]
    assert_bitwise_equal(whole, continued)


@pytest.mark.parametrize("accumulation_steps", [2, 3, 4])
def test_a_stop_is_heard_and_resumed_between_accumulated_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulation_steps: int
) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 1)
    expected = train_with_everything(tmp_path / "whole", 2, accumulation_steps=accumulation_steps)
    stopped = train_with_everything(tmp_path / "part", 2, stop_at=2, accumulation_steps=accumulation_steps)
    assert stopped["place"] == (0, accumulation_steps, 1)
    continued = train_with_everything(tmp_path / "part", 2, resume=True, accumulation_steps=accumulation_steps)
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
        epoch, start = self.calls[-1]
        data = points(20, seed=epoch)
        return iter(list(DataLoader(data, batch_size=4))[start:])


def test_a_loader_that_can_start_in_the_middle_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "STOP_CHECK_STEPS", 1)
    calls = []
    for resume in (False, True):
        loader, model = KeyedLoader(), classifier()
        trainer = engine_of(model, tmp_path)

        def criterion(
            outputs: Any, labels: Any, trainer: TrainingEngine = trainer, stops: bool = not resume
        ) -> torch.Tensor:
            if stops and trainer.progress.global_step == 6:
                trainer.stop_flag.set("test")
            return nn.functional.cross_entropy(outputs, labels)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer.train(loader, loader_of(points(8), 4), optimizer, criterion, num_epochs=3, resume=resume)
        calls.append(loader.calls)
    assert calls == [[(0, 0), (1, 0)], [(1, 2), (2, 0)]]


def test_accumulation_with_a_partial_last_group_equals_the_double_batch(tmp_path: Path) -> None:
    doubled = plain_steps(tmp_path / "doubled", 4, 1, 10)  # batches of 4, 4, 2
    accumulated = plain_steps(tmp_path / "accumulated", 2, 2, 10)  # groups of 2 + 2, 2 + 2, 2
    for name, value in doubled.items():
        np.testing.assert_allclose(accumulated[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    single = plain_steps(tmp_path / "single", 2, 1, 10)
    assert max(np.abs(single[name] - value).max() for name, value in doubled.items()) > 1e-3


def test_accumulation_counts_steps_and_not_batches(tmp_path: Path) -> None:
    assert train_with_everything(tmp_path, 1, accumulation_steps=4)["place"] == (1, 0, 5)  # 17 batches


def test_samplers_are_told_the_epoch_so_that_each_has_its_own_order(tmp_path: Path) -> None:
    model, seen = nn.Linear(1, 1), []

    def criterion(outputs: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        seen.append(numbers.flatten().tolist())
        return outputs.mean()

    numbers = torch.arange(8.0)[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_loader = loader_of(TensorDataset(numbers, numbers), 8)
    engine_of(model, tmp_path).train(train_loader, [(numbers, numbers)], optimizer, criterion, num_epochs=3)
    orders = [tuple(labels) for labels in seen[::2]]  # every other call is the validation's
    assert len(set(orders)) == 3
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(8))}
