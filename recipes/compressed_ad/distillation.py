"""The training: the task for the engine, and the batches."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from recipes.compressed_ad.environment import split_goals
from recipes.compressed_ad.histories import read_histories
from recipes.compressed_ad.records import Records, TestBatches, TrainBatches, draw_records
from recipes.compressed_ad.settings import Settings
from recipes.compressed_ad.sizes import CONTEXTS
from yolo_seg_ddp.engine.state import TrainState
from yolo_seg_ddp.engine.task import Epoch, Task
from yolo_seg_ddp.run.checkpoint import CheckpointFiles
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.utils.devices import copy_to_device


class Distillation(Task):
    """Predicts the learner's actions: cross-entropy, a mean over each record's targets, then over
    records.

    Ranks have equal numbers of records but not of targets. So the mean over the ranks equals that
    of one large batch.
    """

    samples = "records"
    state: TrainState

    def __init__(self, config: Settings, world_size: int) -> None:
        super().__init__()
        self.config = config
        self.world_size = world_size

    def prepare(self, batch: Any, device: torch.device) -> tuple[Any, Any]:
        """Move a batch of `Records.batch` to the device."""
        segments = [copy_to_device(part, device) for part in batch["segments"]]
        moved = {
            name: copy_to_device(value, device)
            for name, value in batch.items()
            if name != "segments"
        }
        targets = moved.pop("targets")
        return {**moved, "segments": segments}, targets

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Return the mean over records of scores (B, queries, actions) and targets (B, queries), -1
        for padding.
        """
        is_target = targets >= 0
        losses = functional.cross_entropy(
            outputs.float().flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none"
        ).view_as(targets)
        hits = (outputs.argmax(-1) == targets) & is_target
        count = is_target.sum(1)
        loss = (losses.sum(1) / count).mean()
        return loss, {"loss_action": loss.detach(), "acc_action": (hits.sum(1) / count).mean()}

    def checkpoints(self, run_folder: Path) -> CheckpointFiles:
        """Keep the newest `ckpt-<step>.pt`."""
        return CheckpointFiles(run_folder)

    def after_log(self, record: dict[str, Any], log: RunLog) -> None:
        """Write the guide's scalars; samples_per_sec is the speed since the last line."""
        values = {name: record[name] for name in ("loss", "loss_action", "acc_action")}
        values["lr"] = self.state.optimizer.param_groups[0]["lr"]
        values["samples_per_sec"] = (
            self.config.train_batch_size * self.world_size / (record["step_ms"] / 1000)
        )
        log.scalars("train", values, record["global_step"])

    def after_epoch(self, record: dict[str, Any], epoch: Epoch) -> None:
        """Print and write the test's results."""
        values = {name: record[f"val_{name}"] for name in ("loss_action", "acc_action")}
        epoch.log.scalars("test", values, record["global_step"])
        epoch.log.print(
            f"  Step {record['global_step']}: action accuracy {record['train_acc_action']:.3f} in "
            f"training, {values['acc_action']:.3f} on test goals"
        )


def loaders(
    config: Settings, accumulate: int, rank: int, world_size: int
) -> tuple[TrainBatches, TestBatches]:
    """Return this rank's training and test batches."""
    train_goals, test_goals = split_goals(config.goals, config.env_split_seed)
    histories, records = [], []
    for goals, streams, seed in (
        (train_goals, config.train_streams, 0),
        (test_goals, config.test_streams, 1),
    ):
        of_goals = read_histories(config, goals, streams, config.train_source_steps)
        histories.append(of_goals)
        drawn = draw_records(len(of_goals), of_goals.shape[1], seed)
        # The same recent steps, without what came before them.
        if not config.encoder_layers:
            table = np.concatenate([each.table[:, :3] for each in drawn])
            drawn = [Records(0, table[table[:, 2] >= CONTEXTS[0]])]
        records.append(drawn)
    place = {"rank": rank, "world_size": world_size}
    return (
        TrainBatches(
            histories[0],
            records[0],
            batch_size=config.train_batch_size,
            num_batches=config.eval_interval * accumulate,
            seed=config.seed,
            **place,
        ),
        TestBatches(histories[1], records[1], batch_size=config.test_batch_size, **place),
    )
