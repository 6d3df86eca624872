"""Training on two ranks: the gradient and the metrics of one, resumable to the bit after a kill,
with the guide's files.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crowd_bt import train
from crowd_bt.model import load_scorer, read_checkpoint
from crowd_bt.options import TrainConfig
from crowd_bt.scoring import image_loader
from crowd_bt.task import PairComparison

from recipes.crowd_bt.tests.small import config_for, read, small_model, train_small, write_data
from tests.support.plugin import read_json
from tests.support.ranks import RankFailed, run_ranks
from tests.support.recipes import assert_equal, assert_equal_moments, assert_refused
from yolo_seg_ddp.data.loader import EpochBatches, get_dataloader
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine, stopping
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.utils import distributed

KILL_AT = 10  # the fourth batch of the second epoch
# a difference, or BatchNorm, cancels them
WITHOUT_EFFECT = ("scorer.head.6.bias", "scorer.backbone.0.bias")
NUM_PAIRS = 71  # the last step of an epoch has 11 pairs: 6 for one rank, 5 for the other


def gradient_and_metrics(config: TrainConfig, folder: Path, batch_size: int) -> None:
    """Write the gradient of an epoch's last step over pairs of different weights, and the metrics
    of the first weights.
    """
    found, rank, world_size = read(config), distributed.rank(), distributed.world_size()
    rows = [
        replace(row, weight=1.0 + number % 4) for number, row in enumerate(found.train[:NUM_PAIRS])
    ]
    comparisons = replace(found, train=rows)
    task = PairComparison(comparisons, {})
    options = EngineOptions(precision="off", sync_batchnorm=True, quiet=True)
    model = small_model(*train.eta_of(config, comparisons), dropout=False)
    engine = TrainingEngine(model, torch.device("cpu"), options, task=task, run=folder / "engine")
    task.state, engine.state.optimizer = engine.state, train.build_optimizer(model, config)
    batches = EpochBatches(len(rows), batch_size, rank, world_size, config.seed)
    *_, last = get_dataloader(train.training_pairs(config, comparisons), batches, 0, False)
    loader = image_loader(task.val_images, Path(config.image_dir), config.input_size, 5, 0)
    metrics = engine.validate(loader)
    engine.model.train()
    values, num_pairs = engine.forward_backward(last)
    weights = engine.state.model.named_parameters()
    gradients: dict[str, Any] = {
        name: weight.grad.numpy() for name, weight in weights if weight.grad is not None
    }
    loss = float(distributed.all_reduce_sum(values["loss"].detach())) / world_size
    np.savez(folder / f"{world_size}-{rank}.npz", **gradients)
    facts = {"metrics": metrics, "num_pairs": num_pairs, "loss": loss}
    (folder / f"{world_size}-{rank}.json").write_text(json.dumps(facts))


def train_and_die(config: TrainConfig, folder: Path) -> None:
    stopping.STOP_CHECK_STEPS = 2
    train.SAVE_EVERY_S = 0.0
    gradient_and_metrics(config, folder, 6)
    train_small(replace(config, checkpoint_dir=str(folder / "whole")))
    kill_at = KILL_AT if distributed.rank() else 0
    train_small(replace(config, checkpoint_dir=str(folder / "killed")), kill_at=kill_at)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two ranks, whole and killed and resumed; measure the gradient on two ranks and on
    this one.
    """
    folder = tmp_path_factory.mktemp("runs")
    config = config_for(write_data(folder / "data", num_annotators=3), folder / "killed")
    with pytest.raises(RankFailed, match="rank 1 died"):
        run_ranks(train_and_die, 2, config, folder, timeout_s=240)
    run_ranks(train_small, 2, config, timeout_s=240)
    gradient_and_metrics(config, folder, 12)
    return folder


def test_two_ranks_have_the_gradient_and_the_metrics_of_one(folder: Path) -> None:
    names = ("1-0", "2-0", "2-1")
    one, ours, theirs = (np.load(folder / f"{name}.npz") for name in names)
    facts = [read_json(folder / f"{name}.json") for name in names]
    assert [found["num_pairs"] for found in facts] == [11, 6, 5]
    assert set(one.files) == set(ours.files)
    assert {"eta_logit", "draw_log", "scorer.head.6.weight", "scorer.backbone.0.weight"} <= set(
        one.files
    )
    # of each annotator, with the prior's part, which must count once
    assert one["eta_logit"].shape == (3,)
    # η's gradient is a small difference of larger ones, so a tenth of the largest gradient bounds
    # the scale from below.
    least = max(float(np.abs(one[name]).max()) for name in one.files) / 10
    for name in one.files:
        scale = float(np.abs(one[name]).max())
        assert scale > 1e-4 or name in WITHOUT_EFFECT, name
        for found in (ours[name], theirs[name]):
            assert float(np.abs(found - one[name]).max()) <= 1e-5 * max(scale, least), name
    assert facts[1]["loss"] == pytest.approx(facts[0]["loss"], rel=1e-6)
    of_one, of_ours, of_theirs = (found["metrics"] for found in facts)
    assert of_ours == of_theirs == pytest.approx(of_one, rel=1e-6)
    names_of_metrics = ("loss", "accuracy", "gold_accuracy", "order_accuracy", "kendall_tau")
    assert {"eta", *(f"val_{name}" for name in names_of_metrics)} <= of_one.keys()


def test_a_killed_rank_costs_nothing_after_a_resume(folder: Path) -> None:
    whole, killed = (read_checkpoint(folder / name / "last.pt") for name in ("whole", "killed"))
    assert_equal(whole["model"], killed["model"])
    assert whole["eta_logit"] == killed["eta_logit"]
    num_moments = assert_equal_moments(whole["optimizer"], killed["optimizer"])
    # BatchNorm's statistics have none, η and ν have
    assert num_moments == len(whole["model"]) - 3 + 2
    results = [read_json(folder / name / "evaluation_results.json") for name in ("whole", "killed")]
    assert results[0] == results[1]
    assert len(read_epochs(folder / "killed")) == 2


def test_files_are_those_of_the_guide(folder: Path) -> None:
    run = folder / "whole"
    files = {
        "best_model.pt",
        "last.pt",
        "final_model.pt",
        "training_log.json",
        "evaluation_results.json",
    }
    assert files | {"config.yaml"} <= {file.name for file in run.iterdir()}
    saved = read_checkpoint(run / "best_model.pt")
    names = {
        "epoch",
        "model",
        "optimizer",
        "scheduler",
        "metrics",
        "config",
        "eta_logit",
        "draw_log",
    }
    assert names == saved.keys()
    assert {"val_accuracy", "loss", "accuracy"} <= saved["metrics"].keys()
    assert saved["config"] == {"backbone_name": "efficientnet_b4", "input_size": 32}
    assert saved["model"].keys() == small_model().scorer.state_dict().keys()
    *epochs, last = read_json(run / "training_log.json")
    assert [entry["epoch"] for entry in epochs] == [1, 2]
    names = {
        "train_loss",
        "train_accuracy",
        "val_loss",
        "val_accuracy",
        "learning_rate",
        "eta",
        "timestamp",
    }
    assert names <= epochs[0].keys()
    assert [entry["learning_rate"] for entry in epochs] == pytest.approx(
        [2e-3, 2e-3 * (0.01 + 0.99 / 2)]
    )
    assert last["evaluation"]["by_pair_type"].keys() == {
        "gold_gold",
        "anchor_anchor",
        "anchor_regular",
    }
    assert next(iter(last["evaluation"])) == "gold_gold_accuracy"
    reliabilities = {name: entry["eta"] for name, entry in last["evaluation"]["annotators"].items()}
    assert sorted(reliabilities) == ["user0", "user1", "user2"]
    eta = torch.sigmoid(torch.tensor(saved["eta_logit"])).tolist()
    assert eta == pytest.approx([reliabilities[name] for name in sorted(reliabilities)], abs=1e-6)
    # train.py once took all answers for the first annotator's: the others' η followed the prior
    # alone, all in the same way.
    assert len(set(read_checkpoint(run / "last.pt")["eta_logit"])) == 3


def test_a_resumed_run_keeps_its_effective_batch_and_its_comparisons(
    folder: Path, tmp_path: Path
) -> None:
    with assert_refused("effective batch size of 12, not 6; start 2 processes"):
        train_small(config_for(folder / "data", folder / "killed", epochs=3))
    config = config_for(write_data(tmp_path / "data", reliability=0.1), folder / "killed", epochs=3)
    with OwnedRun(config) as run:
        facts = {"global_batch_size": 12, "comparisons": train.hash_of(read(config))}
        with assert_refused(
            "began with other comparisons; bring them back, or use --no-auto-resume"
        ):
            train.require_same(config, run, facts)


def test_without_auto_resume_the_earlier_run_is_set_aside(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "killed", tmp_path / "run")
    with OwnedRun(config_for(folder / "data", tmp_path / "run"), may_resume=False) as run:
        assert not run.resumes
        assert run.notes == [f"Set the earlier run aside as {tmp_path / 'run-1'}"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such checkpoint"), ({"a": 1}, "not a checkpoint"), (b"\x80", "not a checkpoint")],
)
def test_other_files_are_no_checkpoints(tmp_path: Path, content: Any, reason: str) -> None:
    file = tmp_path / "x.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with assert_refused(f"{file}: {reason}"):
        load_scorer(file, torch.device("cpu"))
