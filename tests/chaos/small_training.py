"""Train a small network for a few seconds in the project's own engine, and misbehave on demand.

    TRAIN_SCRIPT=tests/chaos/small_training.py bash train_ddp.sh 2 -- --save-dir outputs/small

Ranks, rendezvous, run folder, checkpoints, signals and exit codes are those of train_yolo_ddp.py;
only model and data are small. The run folder also gets `starts.jsonl`, one line per start;
`samples-<rank>.jsonl`, one line per batch; and at the end `result.json` with a hash of weights,
averaged weights and optimizer.
"""

import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# started by its path: Python would search this folder instead of the project's
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks.jobs import leaves
from yolo_seg_ddp.data.loader import EpochBatches, EpochLoader, ShardBatches, prepare_worker
from yolo_seg_ddp.engine import EngineOptions, Epoch, Task, TrainingEngine
from yolo_seg_ddp.engine.schedule import ScheduleSpec, StepSchedule
from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.run.folder import OwnedRun
from yolo_seg_ddp.run.status import RUNNING
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.distributed import (
    RankInfo,
    cleanup_ddp,
    read_rank_environment,
    run_on_main,
    setup_ddp,
)
from yolo_seg_ddp.utils.errors import run_script
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.options import Options, option
from yolo_seg_ddp.utils.signals import die_with_parent

NUM_SAMPLES, GLOBAL_BATCH_SIZE = 61, 8  # the last batches of an epoch are smaller
NUM_BATCHES = -(-NUM_SAMPLES // GLOBAL_BATCH_SIZE)  # of an epoch
NUM_CLASSES, HEIGHT, WIDTH, CHANNELS = 3, 2, 3, 16
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class SmallConfig(Options):
    save_dir: str = option("models/small", "run folder", metavar="DIR", may_differ=True)
    epochs: int = option(8, "passes over the samples", may_differ=True)
    samples: int = option(NUM_SAMPLES, "training samples")
    val_samples: int = option(9, "validation samples")
    accumulate: int = option(1, "batches per optimizer step")
    num_workers: int = option(0, "loader processes per rank", may_differ=True)
    sync_bn: bool = option(False, "batch statistics over all ranks")
    step_s: float = option(0.1, "seconds to wait before each training batch", may_differ=True)
    validation_s: float = option(
        0.0, "seconds to wait before each validation batch", may_differ=True
    )
    nan_steps: str = option(
        "",
        "batches, counted from the start of the process, at which the last rank's loss is NaN",
        may_differ=True,
    )

    @property
    def resume(self) -> None:
        """A run is resumed by the same command; there is no option for it."""


class SmallImages(Dataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """Random images of a few classes: a function of (epoch, index), as the project's own samples
    are.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        epoch, index = key
        generator = torch.Generator().manual_seed(1000 * epoch + index)
        label = index % NUM_CLASSES
        image = torch.randn(1, HEIGHT, WIDTH, generator=generator) + label
        return image, torch.tensor(label), torch.tensor([epoch, index])


class SmallTask(Task):
    """What the engine calls for a batch and after an epoch; the place of all delays and NaNs."""

    def __init__(self, config: SmallConfig, run: OwnedRun, ranks: RankInfo) -> None:
        super().__init__()
        self.config, self.run = config, run
        self.log = (run.folder / f"samples-{ranks.rank}.jsonl").open("a", encoding="utf-8")
        steps = [int(number) for number in config.nan_steps.split(",") if number]
        self.nan_steps = steps if ranks.rank == ranks.world_size - 1 else []
        self.num_batches = self.val_epoch = 0

    def prepare(self, batch: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Log the samples and wait; return inputs float32 (B, 1, H, W) and labels int64 (B,)."""
        images, labels, keys = batch  # keys int64 (B, 2): epoch and index
        split = "train" if torch.is_grad_enabled() else "val"
        epoch = int(keys[0, 0]) if split == "train" else self.val_epoch
        facts = {"split": split, "epoch": epoch, "indices": keys[:, 1].tolist()}
        self.log.write(json.dumps(facts) + "\n")
        self.log.flush()
        time.sleep(self.config.step_s if split == "train" else self.config.validation_s)
        return images.to(device), labels.to(device)

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss (); NaN at this rank's `nan_steps`."""
        loss = nn.functional.cross_entropy(outputs, labels)
        if not outputs.requires_grad:
            return loss
        self.num_batches += 1
        return loss * float("nan") if self.num_batches in self.nan_steps else loss

    def evaluate(self, model: nn.Module, loader: Any, epoch: Epoch) -> dict[str, Any]:
        """Note the epoch for `prepare`."""
        self.val_epoch = epoch.number - 1
        return super().evaluate(model, loader, epoch)

    def after_epoch(self, record: dict[str, Any], epoch: Epoch) -> None:
        self.run.set_status(RUNNING, epoch=record["epoch"], step=record["global_step"])


def main() -> int:
    config = parse_config(SmallConfig, "Train a small network for a few seconds")
    ranks = read_rank_environment()
    die_with_parent()
    torch.set_num_threads(1)
    setup_ddp(torch.device("cpu"), ranks)
    with OwnedRun(config) as run:
        run_on_main(lambda: note_start(run, ranks.world_size))
        code = train(config, run, ranks)
    cleanup_ddp()
    return code


def train(config: SmallConfig, run: OwnedRun, ranks: RankInfo) -> int:
    """Train to the end or to a signal; return the exit code.

    A checkpoint holds momentum, schedule, batch statistics and averaged weights.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        # 2 x 3 values per channel: BatchNorm works with a single sample
        nn.Conv2d(1, CHANNELS, 3, padding=1),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(CHANNELS * HEIGHT * WIDTH, NUM_CLASSES),
    )
    task = SmallTask(config, run, ranks)
    batch_size = max(GLOBAL_BATCH_SIZE // (ranks.world_size * config.accumulate), 1)
    batches = EpochBatches(
        config.samples,
        batch_size,
        ranks.rank,
        ranks.world_size,
        seed=0,
        batches_per_group=config.accumulate,
    )
    val_batches = ShardBatches(config.val_samples, batch_size, ranks.rank, ranks.world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    steps = len(batches) // config.accumulate * config.epochs
    options = EngineOptions(
        epochs=config.epochs,
        precision="off",
        accumulate=config.accumulate,
        clip_norm=1.0,
        ema_decay=0.9999,
        ema_ramp=20,
        sync_batchnorm=config.sync_bn,
        log_interval=1,
        tensorboard=False,
    )
    engine = TrainingEngine(model, torch.device("cpu"), options, task=task, run=run.folder)
    engine.train(
        build_loader(config.samples, batches, config.num_workers),
        build_loader(config.val_samples, val_batches, 0),
        optimizer,
        scheduler=StepSchedule(optimizer, ScheduleSpec(LEARNING_RATE, steps, warmup_steps=3)),
        resume=run.resumes,
    )
    if not engine.stopped_by:
        run_on_main(lambda: write_result(run.folder, ranks.world_size))
    return run.conclude(
        engine.stopped_by, epoch=engine.progress.epoch, step=engine.progress.global_step
    )


def build_loader(count: int, batches: Any, num_workers: int) -> EpochLoader:
    """Return a loader of (images, labels, indices)."""
    return EpochLoader(
        SmallImages(count),  # type: ignore[arg-type] # indexed by (epoch, index)
        batch_sampler=batches,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        worker_init_fn=prepare_worker,
    )


def note_start(run: OwnedRun, world_size: int) -> None:
    """Add a line to `starts.jsonl`, and the step of the newest checkpoint to the run's status."""
    step = run.choices.get("step", 0)
    run.set_status(RUNNING, step=step)
    facts = {"time_s": time.time(), "world_size": world_size, "step": step, "pid": os.getpid()}
    with (run.folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def write_result(folder: Path, world_size: int) -> None:
    """Write `result.json`: the last checkpoint's hash and step."""
    found = load_latest(folder / "checkpoint")
    assert found is not None, "a finished training has a checkpoint"
    state = found[1]
    content = {name: state[name] for name in ("model", "ema", "ema_updates", "optimizer")}
    digest = hashlib.sha256(repr(sorted(leaves(content).items())).encode()).hexdigest()
    result = {"hash": digest, "step": state["progress"]["global_step"], "world_size": world_size}
    write_text_atomic(folder / "result.json", json.dumps(result) + "\n")


if __name__ == "__main__":
    run_script(main)
