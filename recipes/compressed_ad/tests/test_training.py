"""The network, and its training on two ranks: the gradients of one rank, and a kill that costs
nothing.
"""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from recipes.compressed_ad import train
from recipes.compressed_ad.distillation import Distillation, loaders
from recipes.compressed_ad.environment import Darkroom
from recipes.compressed_ad.model import CompressedAD
from recipes.compressed_ad.rollout import InContext, random_returns, roll_out
from recipes.compressed_ad.settings import Settings
from recipes.compressed_ad.sizes import ModelSize
from recipes.compressed_ad.tests.small import NUM_STEPS, small_settings, write_small_histories
from tests.support.ranks import RankFailed, run_ranks
from tests.support.recipes import assert_equal, assert_equal_moments, dying
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.run.checkpoint import CheckpointFiles

# --- The network: what sees what, and that rollouts compute what the training computes ------------

SIZE = ModelSize(
    grid_size=3,
    width=16,
    heads=2,
    feedforward=16,
    encoder_layers=2,
    decoder_layers=2,
    latents=3,
    dropout=0,
)


def network(**changes: int) -> CompressedAD:
    torch.manual_seed(1)
    return CompressedAD(replace(SIZE, **changes)).eval()


def random_steps(batch: int, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    highest = torch.tensor([9, 5, 2, 9])
    return (torch.rand(batch, length, 4, generator=generator) * highest).byte()


def inputs(depth: int, length: int = 12, queries: int = 4) -> dict[str, Any]:
    return {
        "recent": random_steps(2, length, 0),
        "query_cells": random_steps(2, queries, 1)[..., 0],
        "segments": [random_steps(2, 7, 2 + stage) for stage in range(depth)],
        "segment_lengths": torch.tensor([[7, 5, 3][:depth], [6, 7, 2][:depth]]),
    }


def test_the_default_network_has_one_and_a_half_million_weights() -> None:
    number = sum(weight.numel() for weight in CompressedAD(Settings()).parameters())
    assert number == pytest.approx(1.5e6, rel=0.08)


@pytest.mark.parametrize("depth", [0, 2])
def test_padding_changes_nothing(depth: int) -> None:
    model, batch = network(), inputs(depth)
    scores = model(batch)
    padded = dict(batch)
    padded["segments"] = [torch.cat([part, random_steps(2, 5, 9)], 1) for part in batch["segments"]]
    for stage, part in enumerate(batch["segments"]):
        for row, length in enumerate(batch["segment_lengths"][:, stage]):
            padded["segments"][stage][row, length:] = 1  # other padding
            padded["segments"][stage][row, :length] = part[row, :length]
    padded["recent"] = torch.cat([batch["recent"], random_steps(2, 3, 8)], 1)
    padded["query_cells"] = torch.cat([batch["query_cells"], random_steps(2, 3, 7)[..., 0]], 1)
    assert torch.allclose(model(padded)[:, :4], scores, atol=1e-6)


def test_a_step_is_embedded_with_its_reward() -> None:
    """From cell 5 by action 3 to cell 7, with and without a reward: rows and columns one-hot, then
    the linear layer.
    """
    model = network()
    for reward in (0, 1):
        features = torch.zeros(6 + 5 + 1 + 6)
        # row 1, column 2; action 3; row 2, column 1
        features[[0 + 1, 3 + 2, 6 + 3, 12 + 2, 15 + 1]] = 1.0
        features[11] = reward
        layer = model.step_embedding
        expected = functional.layer_norm(layer.weight @ features + layer.bias, (SIZE.width,))
        found = model.embed_steps(torch.tensor([[[5, 3, reward, 7]]]))
        assert torch.allclose(found[0, 0], expected, atol=1e-5), reward


@pytest.mark.parametrize("depth", [0, 1])
def test_a_query_sees_what_came_before_it_only(depth: int) -> None:
    model, batch = network(), inputs(depth)
    scores = model(batch)  # of the queries before steps 9, 10, 11 and 12
    changed = dict(batch, recent=batch["recent"].clone())
    changed["recent"][:, 10] = torch.tensor([8, 4, 1, 8])
    after = model(changed)
    assert torch.equal(after[:, :2], scores[:, :2])
    assert (after[:, 2:] - scores[:, 2:]).abs().amin(0).amax() > 1e-3
    alone = dict(batch, recent=batch["recent"][:, :10], query_cells=batch["query_cells"][:, 1:2])
    assert torch.allclose(model(alone)[:, 0], scores[:, 1], atol=1e-6)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_every_weight_gets_a_gradient_at_every_depth(depth: int) -> None:
    model = network()
    model(inputs(depth)).sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("encoder_layers", [2, 0])
def test_a_rollout_with_its_cache_computes_what_training_computes(encoder_layers: int) -> None:
    """Including the layer norm of new steps, positions after a compression, and two in a row;
    without an encoder it forgets.
    """
    model, steps = network(encoder_layers=encoder_layers), random_steps(2, 40, 5)
    context = InContext(model, 2, most_recent=15, segment=12)
    begins: list[int] = []  # of the segments
    with torch.inference_mode():
        for number in range(36):
            start = 12 * len(begins)
            whole = {
                "recent": steps[:, start:number],
                "query_cells": steps[:, number : number + 1, 0],
                "segments": [steps[:, begin : begin + 12] for begin in begins if encoder_layers],
                "segment_lengths": torch.full((2, len(begins)), 12),
            }
            expected = model(whole)[:, 0]
            assert torch.allclose(context.scores(steps[:, number, 0]), expected, atol=1e-5), number
            context.observe(steps[:, number])
            if number + 1 - start == 15:
                begins.append(start)
    assert len(begins) == 2


def test_returns_count_the_steps_on_the_goal_which_the_model_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stays(CompressedAD):
        """Always chooses the last action."""

        def __init__(self) -> None:
            super().__init__(SIZE)
            with torch.no_grad():
                self.action_head.weight.zero_()
                self.action_head.bias.copy_(torch.tensor([0.0, 0, 0, 0, 100]))

    seen: list[torch.Tensor] = []
    observe = InContext.observe

    def noting(self: InContext, steps: torch.Tensor) -> None:
        seen.append(steps)
        observe(self, steps)

    monkeypatch.setattr(InContext, "observe", noting)
    returns = roll_out(
        Stays(), Darkroom(np.array([4, 0]), 3, 5), 8, most_recent=10, segment=6, seed=0
    )
    assert returns.tolist() == [[5] * 8, [0] * 8]
    assert torch.stack(seen).unique(dim=0).tolist() == [[[4, 4, 1, 4], [4, 4, 0, 4]]]
    by_chance = random_returns(Darkroom(np.full(200, 4), 3, 5), 3, 0)
    assert by_chance.shape == (200, 3)
    assert 0.5 < by_chance.mean() < 1.5


# --- Training on two ranks: the gradients of one rank, and a kill that costs nothing --------------


KILL_AT = 7  # the step after the checkpoint in the middle of the second epoch

Gradients = dict[int, dict[str, np.ndarray]]


def gradients_of_each_depth(config: Settings, rank: int = 0, world_size: int = 1) -> Gradients:
    torch.manual_seed(0)
    model = CompressedAD(config)
    options = EngineOptions(precision="off", quiet=True, tensorboard=False)
    engine = TrainingEngine(
        model,
        torch.device("cpu"),
        options,
        task=Distillation(config, world_size),
        run=config.save_dir,
    )
    batches, _ = loaders(config, 1, rank, world_size)
    found: Gradients = {}
    number = 0
    while len(found) < 4:
        depth, chosen = batches.records_of(number)
        number += 1
        if depth not in found:
            model.zero_grad()
            engine.forward_backward(batches.records[depth].batch(batches.histories, chosen))
            found[depth] = {
                name: weight.grad.numpy().copy()
                for name, weight in model.named_parameters()
                if weight.grad is not None
            }
    return found


def settings_of_rank(folder: Path, name: str) -> Settings:
    return small_settings(
        folder, save_dir=str(folder / name), dropout=0.3, gradient_accumulation_steps=2
    )


def train_run(folder: Path, name: str, resume: bool, kill_at: int = 0) -> None:
    config = settings_of_rank(folder, name)
    kill_at = 2 * kill_at if os.environ["RANK"] == "1" else 0  # two batches for each step
    with pytest.MonkeyPatch.context() as patch, dying(Distillation, "loss", kill_at):
        # its import takes a second
        patch.setattr(train, "EngineOptions", partial(EngineOptions, tensorboard=False))
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
    """Return the folder of the runs, both ranks' gradients, and the checkpoints
    that the kill left.
    """
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
                assert np.abs(found[depth][name] - gradient).max() <= 1e-5 * max(scale, 1e-3), (
                    f"depth {depth}: {name}"
                )
    assert all(np.abs(one[depth]["action_head.weight"]).max() > 1e-3 for depth in range(4))
    assert np.abs(one[0]["latent_queries"]).max() == 0 < np.abs(one[1]["latent_queries"]).max()


def test_a_killed_rank_costs_nothing_after_a_resume(
    two_ranks: tuple[Path, Any, list[Path]],
) -> None:
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
    # the last steps of both epochs
    cosine = [1e-3 * (1 + np.cos(np.pi * step / NUM_STEPS)) / 2 for step in (3, 7)]
    assert whole["progress"]["history"]["lr"] == pytest.approx(cosine)
