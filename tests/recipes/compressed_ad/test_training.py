"""Training on two ranks: the gradients of one rank, and a kill that costs nothing."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.compressed_ad import train
from recipes.compressed_ad.distillation import Distillation, build_model, loaders
from recipes.compressed_ad.settings import Settings
from tests.recipes.compressed_ad.small import NUM_STEPS, small_settings, write_small_histories
from tests.recipes.harness import assert_equal, assert_equal_moments, dying
from tests.support.ranks import RankFailed, run_ranks
from utils.engine import EngineOptions, TrainingEngine
from utils.run.checkpoint import CheckpointFiles

pytestmark = pytest.mark.usefixtures("one_thread")
KILL_AT = 7  # the step after the checkpoint in the middle of the second epoch

Gradients = dict[int, dict[str, np.ndarray]]


def gradients_of_each_depth(config: Settings, rank: int = 0, world_size: int = 1) -> Gradients:
    torch.manual_seed(0)
    model = build_model(config)
    options = EngineOptions(precision="off", quiet=True, tensorboard=False)
    engine = TrainingEngine(
        model, torch.device("cpu"), options, task=Distillation(config, world_size), run=config.save_dir
    )
    batches, _ = loaders(config, 1, rank, world_size)
    found: Gradients = {}
    number = 0
    while len(found) < 4:
        depth, chosen = batches.records_of(number)
        number += 1
        if depth not in found:
            model.zero_grad()
            engine.step.forward_backward(batches.records[depth].batch(batches.histories, chosen))
            found[depth] = {
                name: weight.grad.numpy().copy() for name, weight in model.named_parameters() if weight.grad is not None
            }
    return found


def settings_of_rank(folder: Path, name: str) -> Settings:
    return small_settings(folder, save_dir=str(folder / name), dropout=0.3, gradient_accumulation_steps=2)


def train_run(folder: Path, name: str, resume: bool, kill_at: int = 0) -> None:
    config = settings_of_rank(folder, name)
    kill_at = 2 * kill_at if os.environ["RANK"] == "1" else 0  # two batches for each step
    with pytest.MonkeyPatch.context() as patch, dying(Distillation, "loss", kill_at):
        patch.setattr(train, "EngineOptions", partial(EngineOptions, tensorboard=False))  # its import takes a second
        train.train(config, train.start(config), resume)


def compute_then_die(folder: Path) -> Gradients:
    train_run(folder, "whole", resume=False)
    train_run(folder, "killed", resume=False, kill_at=KILL_AT)
    return {}


def gradients_then_resume(folder: Path) -> Gradients:
    found = gradients_of_each_depth(
        small_settings(folder, dropout=0), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    )
    train_run(folder, "killed", resume=True)
    return found


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Gradients], list[Path]]:
    """Return the folder of the runs, both ranks' gradients, and the checkpoints that the kill left."""
    folder = tmp_path_factory.mktemp("compressed")
    write_small_histories(small_settings(folder))
    # Which comes first is chance: that rank 1 is gone, or that rank 0 misses it.
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(compute_then_die, 2, folder, timeout_s=120)
    left = CheckpointFiles(settings_of_rank(folder, "killed").run_folder).files()
    return folder, run_ranks(gradients_then_resume, 2, folder, timeout_s=120), left


def test_two_ranks_have_the_gradients_of_one_with_the_double_batch(
    two_ranks: tuple[Path, list[Gradients], Any],
) -> None:
    folder, both, _ = two_ranks
    one = gradients_of_each_depth(small_settings(folder, dropout=0, train_batch_size=8))
    for depth, expected in one.items():
        for found in both:
            assert found[depth].keys() == expected.keys()
            for name, gradient in expected.items():
                scale = np.abs(gradient).max()
                assert np.abs(found[depth][name] - gradient).max() <= 1e-5 * max(scale, 1e-3), f"depth {depth}: {name}"
    assert all(np.abs(one[depth]["action_head.weight"]).max() > 1e-3 for depth in range(4))
    assert np.abs(one[0]["latent_queries"]).max() == 0 < np.abs(one[1]["latent_queries"]).max()


def test_a_killed_rank_costs_nothing_after_a_resume(two_ranks: tuple[Path, Any, list[Path]]) -> None:
    folder, _, left = two_ranks
    assert [path.name for path in left] == ["ckpt-6.pt"]  # in the middle of an epoch
    states = []
    for name in ("whole", "killed"):
        (path,) = CheckpointFiles(settings_of_rank(folder, name).run_folder).files()
        assert path.name == f"ckpt-{NUM_STEPS}.pt"
        states.append(torch.load(path, weights_only=True))
    whole, killed = states
    assert whole["step"] == killed["step"] == NUM_STEPS
    assert_equal(whole["model"], killed["model"])
    for moment in ("exp_avg", "exp_avg_sq"):
        assert_equal_moments(whole["optimizer"], killed["optimizer"], moment)
    for name in ("val_loss", "val_acc_action", "lr"):
        assert whole["progress"]["history"][name] == killed["progress"]["history"][name]
    # The rate follows the optimizer steps, whatever the number of ranks.
    cosine = [1e-3 * (1 + np.cos(np.pi * step / NUM_STEPS)) / 2 for step in (3, 7)]  # the last steps of both epochs
    assert whole["progress"]["history"]["lr"] == pytest.approx(cosine)
