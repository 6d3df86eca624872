"""The training loop on one rank and two: the guide's way of using it, resume to the bit, best, early stop, averages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.ranks import run_ranks
from utils import distributed
from utils.common.devices import Precision
from utils.engine import stopping
from utils.engine.loop import TrainingEngine
from utils.engine.schedule import ScheduleSpec, StepSchedule
from utils.run.checkpoint import load_latest

CPU = torch.device("cpu")
Record = dict[str, Any]


pytestmark = pytest.mark.usefixtures("one_thread")


def points(count: int, seed: int = 0) -> TensorDataset:
    """Return points of two classes that a small network can tell apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    return TensorDataset(torch.randn(count, 4, generator=generator) + 2 * labels[:, None] - 1, labels)


def classifier(norm: bool = True, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Linear(8, 2)]
    return nn.Sequential(*layers)


def loader_of(data: TensorDataset, batch_size: int, shuffle: bool = True) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=distributed.world_size(), rank=distributed.rank(), shuffle=shuffle
    )
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def engine_of(model: nn.Module, folder: Path, **options: Any) -> TrainingEngine:
    settings = {
        "distributed": distributed.is_distributed(),
        "local_rank": distributed.rank(),
        "world_size": distributed.world_size(),
        "backend": "gloo",
        "use_amp": False,
        "save_dir": folder,
        "tensorboard": False,
        **options,
    }
    return TrainingEngine(model=model, device=CPU, **settings)


def plain(state: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in state.items()}


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
        use_ema=True,
        ema_decay=0.9,
        ema_ramp_updates=5,
        gradient_clip_val=1.0,
        accumulation_steps=accumulation_steps,
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
    assert trainer.ema is not None
    momenta = [entry["momentum_buffer"].numpy().copy() for entry in optimizer.state_dict()["state"].values()]
    return {
        "weights": plain(model.state_dict()),
        "average": plain(trainer.ema.module.state_dict()),
        "momenta": {str(k): momentum for k, momentum in enumerate(momenta)},
        "updates": trainer.ema.updates,
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
    train_sampler = DistributedSampler(train_dataset, num_replicas=world_size, rank=rank)
    val_sampler = DistributedSampler(val_dataset, num_replicas=world_size, rank=rank)
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
    engine_of(model, folder, accumulation_steps=accumulation_steps).train(
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
    trainer = engine_of(model, folder, use_ema=True, ema_ramp_updates=0.001)
    assert trainer.ema is not None
    if distributed.rank() == 1:
        next(trainer.ema.module.buffers()).add_(1e-6)
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
    trainer = engine_of(classifier(), folder)
    return trainer.validate(share, criterion)


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


# --- best, last, early stop ----------------------------------------------------------------------------------------


def train_on_script(
    folder: Path, values: list[float], name: str = "score", **options: Any
) -> tuple[TrainingEngine, list[tuple[str, int]]]:
    """Train one epoch for each scripted value of a metric; return the engine and which files were written when."""
    written: list[tuple[str, int]] = []
    remaining = iter(values)
    model = classifier()
    trainer = engine_of(
        model,
        folder,
        evaluator=lambda module, loader: {name: next(remaining)},
        save_model=lambda path, module, info: written.append((path.name, info["epoch"])),
    )
    trainer.train(
        loader_of(points(8), 4),
        None,
        torch.optim.SGD(model.parameters(), lr=0.01),
        nn.CrossEntropyLoss(),
        num_epochs=len(values),
        monitor_metric=name,
        **options,
    )
    return trainer, written


def epochs_of(written: list[tuple[str, int]], name: str) -> list[int]:
    return [epoch for file, epoch in written if file == name]


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "higher_is_better", "values", "best_epochs"),
    [
        ("val_loss", None, [3, 2, 2, 4, 1], [1, 2, 5]),
        ("val_acc", None, [3, 2, 5, 5, 6], [1, 3, 5]),
        ("mask_map50_95", None, [0.1, 0.3, 0.2], [1, 2]),
        ("score", True, [1, 0, 2], [1, 3]),
        ("mask_map50_95", False, [0.1, 0.3, 0.05], [1, 3]),
        ("val_loss", None, [NAN, 3, NAN, 2, NAN], [2, 4]),
        ("val_acc", None, [NAN, 0.1, NAN, 0.3], [2, 4]),
        ("val_loss", None, [NAN, NAN], []),
    ],
)
def test_best_follows_the_monitored_value_and_last_every_epoch(
    tmp_path: Path, name: str, higher_is_better: bool | None, values: list[float], best_epochs: list[int]
) -> None:
    trainer, written = train_on_script(tmp_path, values, name, higher_is_better=higher_is_better)
    assert epochs_of(written, "best.pt") == best_epochs
    assert epochs_of(written, "last.pt") == list(range(1, len(values) + 1))
    assert trainer.progress.best_epoch == (best_epochs[-1] - 1 if best_epochs else -1)
    assert trainer.progress.best_value == (values[best_epochs[-1] - 1] if best_epochs else None)
    np.testing.assert_array_equal(trainer.progress.history[name], values)


def test_best_and_last_can_be_left_out(tmp_path: Path) -> None:
    assert train_on_script(tmp_path, [3, 2], save_best=False, save_last=False)[1] == []


@pytest.mark.parametrize(
    ("values", "patience", "epochs"),
    [
        ([5, 4, 4, 4, 3, 2], 2, 4),
        ([5, 4, 6, 3, 6, 6, 1], 2, 6),
        ([5, 6, 7, 8], None, 4),
        ([5, 6, 7, 8], 0, 4),
        ([NAN, NAN, NAN, NAN], 2, 2),
    ],
)
def test_patience_ends_the_training(tmp_path: Path, values: list[float], patience: int | None, epochs: int) -> None:
    trainer, _ = train_on_script(tmp_path, values, "val_loss", early_stopping_patience=patience)
    assert trainer.progress.epoch == epochs
    assert trainer.progress.stopped_early == (epochs < len(values))
    resumed, written = train_on_script(tmp_path, values, "val_loss", early_stopping_patience=patience, resume=True)
    assert written == []  # it is over: nothing more is trained
    assert resumed.progress.epoch == epochs


def test_the_best_so_far_survives_a_resume(tmp_path: Path) -> None:
    train_on_script(tmp_path, [3, 1], "val_loss")
    model = classifier()
    trainer = engine_of(model, tmp_path, evaluator=lambda module, loader: {"val_loss": 2.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer.train(loader_of(points(8), 4), None, optimizer, nn.CrossEntropyLoss(), num_epochs=3, resume=True)
    assert (trainer.progress.best_value, trainer.progress.best_epoch) == (1.0, 1)
    assert trainer.progress.history["val_loss"] == [3, 1, 2]
    assert (tmp_path / "last.pt").exists()
    assert not (tmp_path / "best.pt").exists()


def test_a_value_nobody_reports_is_named_with_those_there_are(tmp_path: Path) -> None:
    model = classifier()
    trainer = engine_of(model, tmp_path, evaluator=lambda module, loader: {"score": 1.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = nn.CrossEntropyLoss()
    with pytest.raises(Exception, match=r"val_dice.*score.*train_loss"):
        trainer.train(loader_of(points(8), 4), None, optimizer, loss, num_epochs=1, monitor_metric="val_dice")


# --- what is reported and averaged ---------------------------------------------------------------------------------


def test_reported_losses_are_means_over_images_and_not_over_batches(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    data = points(7)

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(outputs, labels)
        return loss, {"first": labels.float().mean()}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = engine_of(model, tmp_path)
    history = trainer.train(
        DataLoader(data, batch_size=3), DataLoader(data, batch_size=5), optimizer, criterion, num_epochs=1
    )
    expected = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    assert [*history["train_loss"], *history["val_loss"]] == pytest.approx([expected] * 2, rel=1e-6)
    assert [*history["train_first"], *history["val_first"]] == pytest.approx([3 / 7] * 2)


def test_the_average_is_judged_and_deployed_and_equals_the_one_by_hand(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    judged: list[torch.Tensor] = []
    deployed: list[torch.Tensor] = []
    raw: list[torch.Tensor] = [model.weight.detach().double().clone()]

    def judge(module: nn.Module, loader: Any) -> dict[str, float]:
        judged.append(module.weight.detach().double().clone())  # type: ignore[union-attr,operator]
        raw.append(model.weight.detach().double().clone())
        return {"val_loss": 1.0}

    def save(path: Path, module: nn.Module, info: dict[str, Any]) -> None:
        deployed.append(module.weight.detach().double().clone())  # type: ignore[union-attr,operator]

    trainer = engine_of(
        model, tmp_path, use_ema=True, ema_decay=0.8, ema_ramp_updates=0, evaluator=judge, save_model=save
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer.train(  # one batch, and so one update, an epoch
        loader_of(points(8), 8), None, optimizer, nn.CrossEntropyLoss(), num_epochs=4, save_best=False
    )
    average = raw[0]
    for epoch in range(4):
        average = 0.8 * average + 0.2 * raw[epoch + 1]
        torch.testing.assert_close(judged[epoch], average, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(deployed[epoch], average, rtol=1e-6, atol=1e-8)
    assert (raw[-1] - average).abs().max() > 1e-3


def test_schedulers_of_both_kinds_are_called_when_they_expect_it(tmp_path: Path) -> None:
    calls: list[Any] = []

    class EachStep:
        def step_update(self, step: int) -> None:
            calls.append(step)

    class EachEpoch:
        def step(self) -> None:
            calls.append("epoch")

    for scheduler in (EachStep(), EachEpoch()):
        model = classifier()
        engine_of(model, tmp_path / type(scheduler).__name__, accumulation_steps=2).train(
            loader_of(points(20), 4),
            loader_of(points(4), 4),
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            scheduler,
            num_epochs=2,
        )
    assert calls == [0, 1, 2, 3, 4, 5, "epoch", "epoch"]


def gradient_norms(folder: Path, clip: float | None, precision: Precision | None = None) -> float:
    """Return how far one step of plain SGD with rate 1 moved the weights."""
    model = classifier(norm=False)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    engine_of(model, folder, gradient_clip_val=clip, precision=precision).train(
        loader_of(points(8), 8),
        loader_of(points(8), 8),
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda outputs, labels: 100 * nn.functional.cross_entropy(outputs, labels),
        num_epochs=1,
    )
    return float((torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm())


def test_gradients_are_clipped_to_the_given_norm(tmp_path: Path) -> None:
    assert gradient_norms(tmp_path / "free", None) > 10
    assert gradient_norms(tmp_path / "clipped", 0.5) == pytest.approx(0.5, rel=1e-3)


def test_reduced_precision_trains_too(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []
    model = classifier()

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(outputs.dtype)
        return nn.functional.cross_entropy(outputs, labels)

    history = engine_of(model, tmp_path, precision=Precision("bf16", torch.bfloat16, False)).train(
        loader_of(points(64), 8),
        loader_of(points(16, seed=1), 8),
        torch.optim.SGD(model.parameters(), lr=0.2),
        criterion,
        num_epochs=3,
    )
    assert set(seen) == {torch.bfloat16}
    assert history["train_loss"][-1] < 0.7 * history["train_loss"][0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_callbacks_run_on_the_main_rank_after_every_epoch(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    model = classifier()
    callback: Callable[[dict[str, Any]], None] = records.append
    engine_of(model, tmp_path, experiment_name="named", on_epoch_end=callback).train(
        loader_of(points(20), 4),
        loader_of(points(8), 4),
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        num_epochs=2,
    )
    assert [record["epoch"] for record in records] == [1, 2]
    assert [record["global_step"] for record in records] == [5, 10]
    assert {"train_loss", "val_loss", "lr", "images_per_s", "epoch_time_s"} <= records[0].keys()
    assert (tmp_path / "named" / "metrics.jsonl").exists()
