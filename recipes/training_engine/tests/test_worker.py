"""The recipe's worker on two ranks: equal to one rank, resumable after a kill, with the guide's
history and files.
"""

import inspect
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import training_engine
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from recipes.training_engine.tests.small import (
    NUM_STEPS,
    assert_same_state,
    checkpoint,
    pictures,
    residual_network,
    small_network,
    train_small,
)
from tests.support.ranks import RankFailed, run_ranks
from tests.support.recipes import assert_equal, assert_refused
from yolo_seg_ddp.engine import EngineOptions, stopping
from yolo_seg_ddp.engine import TrainingEngine as PlainEngine

KILL_AT = 13  # the third batch of the third epoch


def place() -> tuple[int, int]:
    """Return rank and world size, in a group that outlives the worker: several trainings follow
    each other here.
    """
    # a picture costs a second, and the training of one rank draws it
    training_engine.report_end = lambda trainer: None
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def train_and_die(folder: Path) -> None:
    stopping.STOP_CHECK_STEPS = 2
    train_small(folder / "two ranks", *place(), model_fn=residual_network)
    often: dict[str, Any] = {"augment": True, "use_ema": True, "save_every_s": 0}
    train_small(folder / "whole", *place(), **often)
    train_small(folder / "killed", *place(), kill_at=KILL_AT, **often)


def resume(folder: Path) -> dict[str, list[float]]:
    return train_small(folder / "killed", *place(), augment=True, use_ema=True, resume=True)


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, list[dict[str, list[float]]]]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(train_and_die, 2, folder, join=False)
    return folder, run_ranks(resume, 2, folder, join=False)


def test_twenty_steps_of_two_ranks_give_the_weights_of_one_with_the_double_batch(
    two_ranks: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # keeps the worker from setting the threads of this process
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train_small(tmp_path / "one", batch_size=8, model_fn=residual_network)
    ours, theirs = checkpoint(two_ranks[0] / "two ranks"), checkpoint(tmp_path / "one")
    assert ours["global_step"] == theirs["global_step"] == NUM_STEPS
    began = residual_network().state_dict()
    for name, value in theirs["model_state_dict"].items():
        scale = max(float(value.abs().max()), 1e-3)
        gap = float((ours["model_state_dict"][name] - value).abs().max()) / scale
        assert gap <= 1e-5, f"{name}: {gap}"
        if name.endswith("0.weight"):
            assert not torch.allclose(value, began[name], rtol=1e-2), f"{name} was not trained"
    history = theirs["history"]
    for name in ("val_accuracy", "val_loss"):
        assert ours["history"][name] == pytest.approx(history[name], rel=1e-4)
    # whatever the batch
    assert ours["optimizer_state_dict"]["param_groups"][0]["weight_decay"] == 1e-4
    # Files hold plain names, and the history the guide's.
    assert theirs["model_state_dict"].keys() == began.keys()
    assert theirs["epoch"] == 4
    assert {
        "train_loss",
        "train_accuracy",
        "val_loss",
        "val_accuracy",
        "val_top5_accuracy",
        "lr",
    } <= history.keys()
    assert history["lr"] == pytest.approx([0.05, 0.05, 0.005, 0.005])
    files = {"best.pt", "last.pt", "training_history.png", "metrics.jsonl"}
    assert files <= {file.name for file in (tmp_path / "one").iterdir()}


def test_a_seed_gives_an_order_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(training_engine, "report_end", lambda trainer: None)
    loss = nn.CrossEntropyLoss.forward
    with mock.patch.object(nn.CrossEntropyLoss, "forward", autospec=True, side_effect=loss) as spy:
        for seed in (0, 1):
            train_small(tmp_path / str(seed), seed=seed, quiet=True)
    labels = [call.args[2].tolist() for call in spy.call_args_list]
    assert labels[:10] != labels[len(labels) // 2 :][:10]


def test_a_killed_rank_costs_nothing_after_a_resume(
    two_ranks: tuple[Path, list[dict[str, list[float]]]],
) -> None:
    folder, histories = two_ranks
    assert_same_state(checkpoint(folder / "whole"), checkpoint(folder / "killed"))
    assert histories[0]["val_loss"] == histories[1]["val_loss"]


def test_the_average_is_validated_and_equal_on_all_ranks(two_ranks: tuple[Path, Any]) -> None:
    """The engine refuses to save averages that differ between ranks, so the file holds that of
    every rank.
    """
    saved = checkpoint(two_ranks[0] / "whole")
    network = small_network()
    network.load_state_dict(saved["ema_state_dict"])
    images, labels = zip(*(pictures(21, seed=1)[index] for index in range(21)), strict=True)
    scores = network.eval()(torch.stack(images))
    accuracy = (scores.argmax(1) == torch.stack(labels)).float().mean().item()
    loss = nn.functional.cross_entropy(scores, torch.stack(labels)).item()
    assert saved["history"]["val_accuracy"][-1] == pytest.approx(accuracy)
    assert saved["history"]["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
    network.load_state_dict(saved["model_state_dict"])
    assert nn.functional.cross_entropy(
        network(torch.stack(images)), torch.stack(labels)
    ).item() != pytest.approx(loss)


def engine_with_loaders(
    folder: Path, **keywords: Any
) -> tuple[training_engine.TrainingEngine, Any, Any, list[Any]]:
    torch.manual_seed(0)
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    settings = {"use_amp": False, "tensorboard": False, "quiet": True, **keywords}
    engine = training_engine.TrainingEngine(model, "cpu", save_dir=folder, **settings)
    loaders = [
        DataLoader(data, 8, sampler=DistributedSampler(data, 1, 0))
        for data in (pictures(40, augment=True), pictures(21, seed=1))
    ]
    return engine, optimizer, scheduler, loaders


def train_from(
    folder: Path, num_epochs: int, loaded: Path | None = None
) -> training_engine.TrainingEngine:
    engine, optimizer, scheduler, loaders = engine_with_loaders(folder, use_ema=True)
    if loaded is not None:
        assert engine.load_checkpoint(loaded, optimizer, scheduler) == 2
    train_loader, val_loader = loaders
    history = engine.train(
        train_loader, val_loader, optimizer, nn.CrossEntropyLoss(), scheduler, num_epochs=num_epochs
    )
    assert len(history["train_learning_rate"]) == len(history["val_accuracy"]) == num_epochs
    return engine


def test_a_loaded_checkpoint_continues_to_the_bit(tmp_path: Path) -> None:
    train_from(tmp_path / "whole", 4)
    train_from(tmp_path / "half", 2)
    train_from(tmp_path / "continued", 4, tmp_path / "half" / "experiment" / "last.pt")
    assert_same_state(
        *(checkpoint(tmp_path / name / "experiment") for name in ("whole", "continued"))
    )


@pytest.mark.parametrize(("load_ema", "updates"), [(True, 10), (False, 0)])
def test_an_average_that_begins_anew_begins_to_count_anew(
    tmp_path: Path, load_ema: bool, updates: int
) -> None:
    trained = train_from(tmp_path, 2)
    engine, optimizer, scheduler, _ = engine_with_loaders(tmp_path / "other", use_ema=True)
    engine.load_checkpoint(
        tmp_path / "experiment" / "last.pt", optimizer, scheduler, load_ema=load_ema
    )
    assert engine.state.ema.updates == updates
    source = trained.state.ema.module if load_ema else trained.state.model
    assert_equal(engine.state.ema.module.state_dict(), source.state_dict())


def test_weights_alone_load_from_any_naming(tmp_path: Path) -> None:
    trained = train_from(tmp_path, 2)
    file = tmp_path / "experiment" / "last.pt"
    saved = torch.load(file, weights_only=True)
    wrapped = {f"module.{name}": value for name, value in saved["model_state_dict"].items()}
    torch.save({**saved, "model_state_dict": wrapped}, file)
    engine, *_ = engine_with_loaders(tmp_path / "other", use_ema=True)
    assert engine.load_checkpoint(file, load_ema=False, map_location="cpu") == 2
    for module in engine.state.modules().values():
        assert_equal(module.state_dict(), trained.state.model.state_dict())


# --- the keywords ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{"local_rank": 1}, {"world_size": 2}, {"backend": "nccl"}])
def test_a_keyword_that_contradicts_the_process_group_is_refused(
    tmp_path: Path, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    training_engine.TrainingEngine.setup_distributed(0, 1)
    try:
        engine_with_loaders(tmp_path, local_rank=0, world_size=1, backend="gloo")
        with assert_refused("the process group says"):
            engine_with_loaders(tmp_path, **keywords)
    finally:
        training_engine.TrainingEngine.cleanup_distributed()


class BareTask(training_engine.Classification):
    """Writes no best.pt and last.pt."""

    def save(self, *arguments: Any) -> None:
        pass


def after_an_epoch(engine: Any, optimizer: Any, loaders: list[Any]) -> list[torch.Tensor]:
    """Train with all options of the engine; return its weights, and its moving average if there is
    one.
    """
    engine.train(*loaders, optimizer, nn.CrossEntropyLoss())
    return [
        value
        for module in engine.state.modules().values()
        for value in module.state_dict().values()
    ]


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({"gradient_clip_val": 0.01}, {"clip_norm": 0.01}),
        ({"accumulate": 2}, {"accumulate": 2}),
        ({"precision": "bf16"}, {"precision": "bf16"}),
        (
            {"use_ema": True, "ema_decay": 0.5, "ema_ramp": 1},
            {"ema": True, "ema_decay": 0.5, "ema_ramp": 1},
        ),
        ({"ema_decay": 0.9}, {"ema": True, "ema_decay": 0.9}),
        ({"use_ema": True}, {"ema": True, "ema_decay": 0.9999}),
        ({"use_ema": False, "ema_decay": 0.5}, {}),
    ],
)
def test_a_keyword_gives_the_weights_of_the_option_that_it_names(
    tmp_path: Path, keywords: dict[str, Any], options: dict[str, Any]
) -> None:
    use_amp = {"use_amp": None} if "precision" in keywords else {}
    engine, optimizer, _, loaders = engine_with_loaders(tmp_path, epochs=1, **use_amp, **keywords)
    ours, others = after_an_epoch(engine, optimizer, loaders), []
    for chosen in (options, {}):
        same, optimizer, _, loaders = engine_with_loaders(tmp_path / "unused")
        own = replace(
            training_engine.DEFAULTS, **{"epochs": 1, "precision": "off", "quiet": True, **chosen}
        )
        plain = PlainEngine(
            same.state.model, torch.device("cpu"), own, task=BareTask(), run=tmp_path / "plain"
        )
        others.append(after_an_epoch(plain, optimizer, loaders))
    assert all(torch.equal(one, other) for one, other in zip(ours, others[0], strict=True))
    is_baseline = len(ours) == len(others[1]) and all(map(torch.equal, ours, others[1]))
    assert is_baseline == (not options)


def test_keywords_of_the_constructor_are_refused_where_they_cannot_act(tmp_path: Path) -> None:
    found = [
        engine_with_loaders(tmp_path, use_amp=value)[0].options.precision
        for value in (True, False, None)
    ]
    assert found == ["auto", "off", "auto"]  # mixed precision is a switch
    engine, optimizer, _, loaders = engine_with_loaders(tmp_path, use_ema=True)
    names = {field.name for field in fields(EngineOptions)} | {
        "gradient_clip_val",
        "use_ema",
        "use_amp",
        "use_apex",
    }
    for method in (engine.train, super(training_engine.TrainingEngine, engine).train):
        acting = inspect.signature(method).parameters
        for name in names - set(acting):
            with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
                method(*loaders, optimizer, nn.CrossEntropyLoss(), **{name: 1})
    assert engine.progress.global_step == 0
    for keywords in ({"use_apex": True}, {"gradient_clip_val": 1.0, "clip_norm": 2.0}):
        with pytest.raises(TypeError, match=r"use_apex|clip_norm"):
            engine_with_loaders(tmp_path, **keywords)


def test_the_keywords_of_train_act(tmp_path: Path) -> None:
    engine, optimizer, _, loaders = engine_with_loaders(tmp_path)
    optimizer.param_groups[0]["lr"] = 0.0
    keywords = {
        "num_epochs": 6,
        "save_last": False,
        "early_stopping_patience": 2,
        "monitor_metric": "loss",
    }
    history = engine.train(*loaders, optimizer, nn.CrossEntropyLoss(), **keywords)
    assert len(history["val_loss"]) == 3  # BatchNorm's statistics get better once
    assert {path.name for path in (tmp_path / "experiment").glob("*.pt")} == {"best.pt"}
    assert engine.progress.best_value == min(history["val_loss"])


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such checkpoint"), ({"a": 1}, "not a checkpoint"), ("fit", "does not fit")],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, content: Any, reason: str) -> None:
    engine, optimizer, *_ = engine_with_loaders(tmp_path)
    file = tmp_path / "other.pt"
    if content == "fit":
        weights = nn.Linear(1, 1).state_dict()
        content = {"model_state_dict": weights, "ema_state_dict": None, "progress": {}, "epoch": 1}
    if content is not None:
        torch.save(content, file)
    with assert_refused(f"{file}: {reason}"):
        engine.load_checkpoint(file, optimizer)
