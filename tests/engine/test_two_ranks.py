"""Training on two ranks: with samplers, equal ranks, resume and stop, equal to one rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.engine.small import (
    CPU,
    Record,
    assert_bitwise_equal,
    classifier,
    engine_of,
    loader_of,
    plain,
    plain_steps,
    points,
    stop_soon,
    train_with_everything,
)
from tests.support.ranks import run_ranks
from utils import distributed
from utils.run.checkpoint import load_latest

Answers = tuple[list[Record], Path]  # of both ranks, in this folder
pytestmark = pytest.mark.usefixtures("one_thread")


def train_with_samplers(folder: Path) -> Record:
    model = classifier(seed=distributed.rank())  # DDP must give rank 1 the weights of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    train_loader, val_loader = (loader_of(points(number, seed), 4) for number, seed in ((64, 0), (16, 1)))
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
        trainer.train(loader, loader, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    except distributed.RankDisagreement as error:
        return str(error)
    return "nothing"


def on_two_ranks(folder: Path) -> Record:
    distributed.setup_ddp(CPU)
    stop_soon()
    answers: Record = {"samplers": train_with_samplers(folder)}
    answers["whole"] = train_with_everything(folder / "whole", 4)
    answers["half"] = train_with_everything(folder / "halves", 2)
    answers["halves"] = train_with_everything(folder / "halves", 4, resume=True)
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


def test_training_with_samplers_works_on_two_ranks_and_files_hold_the_raw_modules_names(two_ranks: Answers) -> None:
    first, second = (answers["samplers"] for answers in two_ranks[0])
    assert isinstance(first["history"]["train_loss"], list)
    assert len(first["history"]["train_loss"]) == len(first["history"]["val_loss"]) == 3
    assert first["history"]["train_loss"][-1] < 0.7 * first["history"]["train_loss"][0]
    assert first["history"]["val_loss"][-1] < first["history"]["val_loss"][0]
    assert first["history"]["lr"] == [0.1, 0.1, pytest.approx(0.01)]
    for name in ("train_loss", "val_loss"):
        assert first["history"][name] == second["history"][name]
    folder = two_ranks[1] / "checkpoints"
    assert {"best.pt", "last.pt", "metrics.jsonl", "results.csv"} <= {path.name for path in folder.iterdir()}
    saved, found = torch.load(folder / "last.pt", weights_only=True), load_latest(folder / "checkpoint")
    assert found is not None
    assert saved["model_state_dict"].keys() == found[1]["model"].keys() == first["weights"].keys()
    np.testing.assert_equal(plain(saved["model_state_dict"]), first["weights"])
    assert all(answers["left"] for answers in two_ranks[0])


def test_ranks_end_with_equal_weights_averages_and_batch_statistics(two_ranks: Answers) -> None:
    first, second = two_ranks[0]
    np.testing.assert_equal(second["samplers"]["weights"], first["samplers"]["weights"])
    for run in ("whole", "halves", "continued"):
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
            np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=1e-6, err_msg=f"{run} {name}")


def test_two_ranks_resume_to_the_bit(two_ranks: Answers) -> None:
    for answers in two_ranks[0]:
        assert answers["half"]["place"] == (2, 0, 18)
        assert answers["halves"]["num_batches"] == answers["half"]["num_batches"] == 18
        assert_bitwise_equal(answers["whole"], answers["halves"])


def test_a_stop_told_to_one_rank_stops_both_at_the_same_step(two_ranks: Answers) -> None:
    first, second = two_ranks[0]
    assert first["stopped"]["stopped"] is second["stopped"]["stopped"] is True
    assert first["stopped"]["place"] == second["stopped"]["place"] == (1, 3, 12)
    assert first["whole"]["stopped"] is False
    for answers in (first, second):
        assert answers["continued"]["num_batches"] == 36 - 12
        assert_bitwise_equal(answers["whole"], answers["continued"])
