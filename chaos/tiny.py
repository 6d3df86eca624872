"""A small model in the project's own engine, run folder and process group: starts in seconds, and misbehaves on demand.

python -m torch.distributed.run --nproc-per-node=2 chaos/tiny.py --save-dir DIR
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from utils.common.config import Options, option, parse_config
from utils.common.errors import EXIT_STOPPED_BY_SIGNAL, run_script
from utils.common.signals import die_with_parent
from utils.data.loader import EpochBatches, EpochLoader, ShardBatches, prepare_worker
from utils.distributed import cleanup_ddp, rank, read_rank_environment, setup_ddp
from utils.engine.loop import TrainingEngine
from utils.engine.schedule import ScheduleSpec, StepSchedule
from utils.run.folder import OwnedRun
from utils.run.status import FINISHED, RUNNING, STOPPED
from utils.train_config import TrainConfig

NUM_CLASSES, HEIGHT, WIDTH = 3, 2, 3


@dataclass(frozen=True)
class TinyConfig(Options):
    """Options of the tiny training."""

    save_dir: str = option("models/tiny", "run folder", metavar="DIR")
    epochs: int = option(4, "passes over the samples")
    samples: int = option(61, "training samples")
    val_samples: int = option(9, "validation samples")
    batch_size: int = option(4, "samples per process and step")
    accumulate: int = option(1, "batches per optimizer step")
    num_workers: int = option(0, "loader processes per rank")
    sync_bn: bool = option(False, "batch statistics over all ranks")
    step_s: float = option(0.02, "seconds that each batch takes longer, so that an attack can hit it")
    validation_s: float = option(0.0, "seconds that each validation batch takes longer")
    nan_steps: str = option("", "batches, counted from the start of the process, whose loss is a NaN on the last rank")


class Pictures(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Small pictures of a few classes, a function of (epoch, index) as the project's own samples are."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        epoch, index = key
        generator = torch.Generator().manual_seed(1000 * epoch + index)
        label = index % NUM_CLASSES
        features = torch.randn(1, HEIGHT, WIDTH, generator=generator) + label
        return features, torch.tensor(label), torch.tensor(index)


class Attacked:
    """What a batch goes through on its way to the model: its samples are written down, and it is delayed."""

    def __init__(self, config: TinyConfig, run: OwnedRun) -> None:
        self.config = config
        self.log = (run.folder / f"samples-{rank()}.jsonl").open("a")
        self.nan_steps = [int(number) for number in config.nan_steps.split(",") if number]
        self.num_batches = 0
        self.engine: TrainingEngine | None = None

    def prepare(self, batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs float32 (B, 1, H, W) and labels int64 (B,)."""
        features, labels, indices = batch
        assert self.engine is not None
        split = "train" if torch.is_grad_enabled() else "val"
        facts = {"split": split, "epoch": self.engine.progress.epoch, "indices": indices.tolist()}
        self.log.write(json.dumps(facts) + "\n")
        self.log.flush()
        time.sleep(self.config.step_s if split == "train" else self.config.validation_s)
        return features.to(device), labels.to(device)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss (), at the wanted batches a NaN on the last rank alone."""
        loss = nn.functional.cross_entropy(outputs, labels)
        if not outputs.requires_grad:
            return loss
        self.num_batches += 1
        assert self.engine is not None
        is_last_rank = rank() == self.engine.world_size - 1
        return loss * float("nan") if self.num_batches in self.nan_steps and is_last_rank else loss


def main() -> int:
    """Train; return the exit code."""
    config = parse_config(TinyConfig, "Train a tiny model", None)
    ranks = read_rank_environment()
    die_with_parent()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    channels = 16
    model = nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),  # an area to average over: one sample is then enough for its statistics
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(channels * HEIGHT * WIDTH, NUM_CLASSES),
    )
    device = torch.device("cpu")
    setup_ddp(device, ranks)
    try:
        with OwnedRun(TrainConfig(save_dir=config.save_dir)) as run:
            return train(config, model, device, run)
    finally:
        cleanup_ddp()


def train(config: TinyConfig, model: nn.Module, device: torch.device, run: OwnedRun) -> int:
    """Train with everything a checkpoint has to bring back: momentum, schedule, batch statistics, moving average."""
    ranks = read_rank_environment()
    attacked = Attacked(config, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = EpochBatches(config.samples, config.batch_size, ranks.rank, ranks.world_size, seed=0)
    val_batches = ShardBatches(config.val_samples, config.batch_size, ranks.rank, ranks.world_size)
    steps = -(-len(batches) // config.accumulate)
    engine = TrainingEngine(
        model=model,
        device=device,
        distributed=ranks.world_size > 1,
        world_size=ranks.world_size,
        backend="gloo",
        use_amp=False,
        use_ema=True,
        ema_ramp_updates=20,
        gradient_clip_val=1.0,
        sync_batchnorm=config.sync_bn,
        accumulation_steps=config.accumulate,
        log_interval=1,
        save_dir=run.folder,
        prepare_batch=attacked.prepare,
        on_epoch_end=lambda record: run.set_status(RUNNING, epoch=record["epoch"], step=record["global_step"]),
        tensorboard=False,
    )
    attacked.engine = engine
    engine.train(
        train_loader=loader(config.samples, batches, config.num_workers),
        val_loader=loader(config.val_samples, val_batches, 0),
        optimizer=optimizer,
        criterion=attacked.loss,
        scheduler=StepSchedule(optimizer, ScheduleSpec(0.05, steps * config.epochs, warmup_steps=3)),
        num_epochs=config.epochs,
        resume=run.resumes,
    )
    state = STOPPED if engine.stopped_by_signal else FINISHED
    run.set_status(state, epoch=engine.progress.epoch, step=engine.progress.global_step)
    return EXIT_STOPPED_BY_SIGNAL if engine.stopped_by_signal else 0


def loader(count: int, batches: Any, num_workers: int) -> EpochLoader:
    """Return a loader of tuples, with the project's own way to be told the epoch."""
    return EpochLoader(
        Pictures(count),  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=prepare_worker,
    )


if __name__ == "__main__":
    run_script(main)
