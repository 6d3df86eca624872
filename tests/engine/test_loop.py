"""The training loop: what is best, when it stops early, what it reports and averages, whom it
calls.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.engine.small import (
    CPU,
    Record,
    ScriptedTask,
    classifier,
    engine_of,
    fit,
    loader_of,
    points,
)
from yolo_seg_ddp.engine import Epoch, Task, TrainingEngine
from yolo_seg_ddp.utils.errors import UserError

# --- best, last, early stop -----------------------------------------------------------------------


def train_on_script(
    folder: Path, values: list[float], name: str = "score", *, resume: bool = False, **options: Any
) -> tuple[TrainingEngine, list[tuple[str, int]]]:
    """Train one epoch for each scripted value of a metric; return the engine and which files were
    written when.
    """
    written: list[tuple[str, int]] = []
    options = {"epochs": len(values), "monitor": name, **options}
    task = ScriptedTask(name, values, written)
    trainer = fit(
        classifier(), folder, loader_of(points(8), 4), None, task=task, resume=resume, **options
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
        ("heatmap_loss", None, [3, 2, 5], [1, 2]),
        ("map_loss", None, [3, 2, 5], [1, 2]),
        ("score", True, [1, 0, 2], [1, 3]),
        ("mask_map50_95", False, [0.1, 0.3, 0.05], [1, 3]),
        ("val_loss", None, [NAN, 3, NAN, 2, NAN], [2, 4]),
        ("val_acc", None, [NAN, 0.1, NAN, 0.3], [2, 4]),
        ("val_loss", None, [NAN, NAN], []),
    ],
)
def test_best_follows_the_monitored_value_and_last_every_epoch(
    tmp_path: Path,
    name: str,
    higher_is_better: bool | None,
    values: list[float],
    best_epochs: list[int],
) -> None:
    trainer, written = train_on_script(tmp_path, values, name, higher_is_better=higher_is_better)
    assert epochs_of(written, "best.pt") == best_epochs
    assert epochs_of(written, "last.pt") == list(range(1, len(values) + 1))
    assert trainer.progress.best_epoch == (best_epochs[-1] - 1 if best_epochs else -1)
    assert trainer.progress.best_value == (values[best_epochs[-1] - 1] if best_epochs else None)
    np.testing.assert_array_equal(trainer.progress.history[name], values)


def test_a_run_that_keeps_no_best_speaks_of_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on_script(tmp_path / "both", [3, 2], "val_loss")[1] != []
    assert capsys.readouterr().out.count("best val_loss so far") == 2
    assert (
        train_on_script(tmp_path / "none", [3, 2], "val_loss", save_best=False, save_last=False)[1]
        == []
    )
    assert "best" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "patience", "epochs"),
    [
        *[([5, 4, 4, 4, 3, 2], 2, 4), ([5, 4, 6, 3, 6, 6, 1], 2, 6), ([NAN, NAN, NAN, NAN], 2, 2)],
        *[([5, 6, 7, 8], None, 4), ([5, 6, 7, 8], 0, 4)],
    ],
)
def test_patience_ends_the_training(
    tmp_path: Path, values: list[float], patience: int | None, epochs: int
) -> None:
    trainer, _ = train_on_script(tmp_path, values, "val_loss", patience=patience)
    assert trainer.progress.epoch == epochs
    assert trainer.progress.stopped_early == (epochs < len(values))
    resumed, written = train_on_script(tmp_path, values, "val_loss", patience=patience, resume=True)
    assert written == []  # it is over: nothing more is trained
    assert resumed.progress.epoch == epochs


# --- what is reported and averaged ----------------------------------------------------------------


def test_reported_losses_are_means_over_images_and_not_over_batches(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    data = points(7)

    def criterion(outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(outputs, labels)
        return loss, {"first": labels.float().mean()}

    train_loader, val_loader = (DataLoader(data, batch_size=size) for size in (3, 5))
    history = fit(
        model, tmp_path, train_loader, val_loader, criterion, lr=0.0, epochs=1
    ).progress.history
    expected = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    assert [*history["train_loss"], *history["val_loss"]] == pytest.approx([expected] * 2, rel=1e-6)
    assert [*history["train_first"], *history["val_first"]] == pytest.approx([3 / 7] * 2)


def test_the_average_is_judged_and_deployed_and_equals_the_one_by_hand(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    judged, deployed = [], []
    raw = [model.weight.detach().double().clone()]

    class Watching(Task):
        def evaluate(self, module: nn.Module, loader: Any, epoch: Epoch) -> dict[str, Any]:
            judged.append(module.weight.detach().double().clone())  # type: ignore[union-attr,operator]
            raw.append(model.weight.detach().double().clone())
            return {"val_loss": 1.0}

        def save(self, path: Path, module: nn.Module, info: dict[str, Any]) -> None:
            deployed.append(module.weight.detach().double().clone())  # type: ignore[union-attr,operator]
            assert not module.training
            assert not any(weight.requires_grad for weight in module.parameters())

    options: Record = {"ema_decay": 0.8, "ema_ramp": 5, "epochs": 4, "save_best": False}
    # one update an epoch
    fit(model, tmp_path, loader_of(points(8), 8), None, lr=0.5, task=Watching(), **options)
    average = raw[0]
    for epoch in range(4):
        decay = 0.8 * (1 - math.exp(-(epoch + 1) / 5))
        average = decay * average + (1 - decay) * raw[epoch + 1]
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
        loader, folder = loader_of(points(20), 4), tmp_path / type(scheduler).__name__
        fit(classifier(), folder, loader, loader, scheduler=scheduler, accumulate=2, epochs=2)
    assert calls == [0, 1, 2, 3, 4, 5, "epoch", "epoch"]


def gradient_norms(folder: Path, clip: float | None) -> float:
    """Return how far one step of plain SGD with rate 1 moved the weights."""
    model = classifier(norm=False)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    loader = loader_of(points(8), 8)
    large = lambda outputs, labels: 100 * nn.functional.cross_entropy(outputs, labels)  # noqa: E731
    fit(model, folder, loader, loader, large, lr=1.0, clip_norm=clip, epochs=1)
    return float((torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before).norm())


def test_gradients_are_clipped_to_the_given_norm(tmp_path: Path) -> None:
    assert gradient_norms(tmp_path / "free", None) > 10
    assert gradient_norms(tmp_path / "clipped", 0.5) == pytest.approx(0.5, rel=1e-3)


def test_callbacks_run_on_the_main_rank_after_every_epoch(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = []
    epochs: list[tuple[int, bool]] = []

    class Following(Task):
        def after_epoch(self, record: dict[str, Any], epoch: Epoch) -> None:
            records.append(record)
            epochs.append((epoch.number, epoch.is_last))

    loader = loader_of(points(20), 4)
    fit(classifier(), tmp_path, loader, loader, task=Following(), epochs=2)
    assert [record["epoch"] for record in records] == [1, 2]
    assert epochs == [(1, False), (2, True)]
    assert [record["global_step"] for record in records] == [5, 10]
    assert {"train_loss", "val_loss", "lr", "images_per_s", "epoch_time_s"} <= records[0].keys()
    assert (tmp_path / "metrics.jsonl").exists()


# --- the interface --------------------------------------------------------------------------------


def test_what_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="use_apex"):
        engine_of(classifier(), tmp_path, use_apex=True)
    with pytest.raises(UserError, match="without a process group"):
        TrainingEngine(classifier(), CPU, distributed=True)
    model = classifier()
    with pytest.raises(TypeError, match="criterion"):
        engine_of(model, tmp_path).train(
            loader_of(points(8), 4), None, torch.optim.SGD(model.parameters(), lr=0.1)
        )
    with pytest.raises(Exception, match=r"val_dice.*score.*train_loss"):
        train_on_script(tmp_path, [1.0], monitor="val_dice")
