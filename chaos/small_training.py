"""A training of a few seconds on the project's own engine, for everything that interrupts one.

    bash train_ddp.sh 2 -- --folder outputs/small            with TRAIN_SCRIPT=chaos/small_training.py

Ranks, rendezvous, lock, status, checkpoints, signals and exit codes are those of train_yolo_ddp.py; only model and data
are small. The folder gets `starts.jsonl`, one line for each start, and in the end `result.json` with a hash over
weights, average and optimizer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a file, it finds the project

import torch
from torch import nn

from utils.common.errors import EXIT_STOPPED_BY_SIGNAL, run_script
from utils.common.files import write_text_atomic
from utils.common.signals import die_with_parent
from utils.distributed import RankInfo, cleanup_ddp, read_rank_environment, run_on_main, setup_ddp
from utils.engine.loop import TrainingEngine
from utils.run.checkpoint import load_latest
from utils.run.status import FINISHED, RUNNING, STOPPED, RunLock, write_status

NUM_BATCHES = 8  # of an epoch
GLOBAL_BATCH_SIZE = 8
SEED = 3


class SmallLoader:
    """Batches that depend on (seed, epoch, index) alone, dealt out to the ranks; each takes `step_s` to come."""

    def __init__(self, rank: int, world_size: int, step_s: float) -> None:
        self.rank, self.world_size, self.step_s = rank, world_size, step_s
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        return NUM_BATCHES

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        self.epoch, self.start = epoch, start_batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(NUM_BATCHES * GLOBAL_BATCH_SIZE, generator=_generator(self.epoch))
        for batch in order.view(NUM_BATCHES, GLOBAL_BATCH_SIZE)[self.start :]:
            time.sleep(self.step_s)
            mine = batch[self.rank :: self.world_size].tolist()
            inputs = torch.stack([torch.randn(8, generator=_generator(index)) for index in mine])
            yield inputs, inputs.sum(dim=1, keepdim=True).sin()


def main() -> int:
    """Train, or go on; return the exit code."""
    options = _parse()
    ranks = read_rank_environment()
    die_with_parent()
    torch.set_num_threads(1)
    setup_ddp(torch.device("cpu"), ranks)
    try:
        lock = run_on_main(lambda: RunLock(options.folder))  # held until the process ends
        run_on_main(lambda: _note_start(options.folder, ranks.world_size))
        code = train(options, ranks)
        if lock is not None:
            lock.release()
        return code
    finally:
        cleanup_ddp()


def train(options: argparse.Namespace, ranks: RankInfo) -> int:
    """Run the engine to the end or to a signal, with the run's status kept; return the exit code."""

    def say(state: str, **facts: Any) -> None:
        if ranks.is_main:
            write_status(options.folder, state, **facts)

    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.SiLU(), nn.Linear(32, 1))
    engine = TrainingEngine(
        model,
        torch.device("cpu"),
        distributed=ranks.world_size > 1,
        world_size=ranks.world_size,
        use_amp=False,
        use_ema=True,
        save_dir=options.folder,
        tensorboard=False,
        on_epoch_end=lambda record: say(RUNNING, step=record["global_step"]),
    )
    engine.train(
        SmallLoader(ranks.rank, ranks.world_size, options.step_s),
        SmallLoader(ranks.rank, ranks.world_size, 0),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        nn.functional.mse_loss,
        num_epochs=options.epochs,
        save_best=False,
        save_last=False,
        resume=True,
    )
    step = engine.progress.global_step
    if engine.stopped_by_signal:
        say(STOPPED, step=step)
        return EXIT_STOPPED_BY_SIGNAL
    run_on_main(lambda: _write_result(options.folder, ranks.world_size))
    say(FINISHED, step=step)
    return 0


def hash_of(value: Any) -> str:
    """Return a SHA-256 over nested plain values and tensors, bit by bit."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())


def _write_result(folder: Path, world_size: int) -> None:
    found = load_latest(folder / "checkpoint")
    assert found is not None, "a finished training has a checkpoint"
    state = found[1]
    content = {name: state[name] for name in ("model", "ema", "ema_updates", "optimizer")}
    result = {"hash": hash_of(content), "step": state["progress"]["global_step"], "world_size": world_size}
    write_text_atomic(folder / "result.json", json.dumps(result) + "\n")


def _note_start(folder: Path, world_size: int) -> None:
    found = load_latest(folder / "checkpoint")
    step = found[1]["progress"]["global_step"] if found else 0
    facts = {"time_s": time.time(), "world_size": world_size, "step": step, "pid": os.getpid()}
    folder.mkdir(parents=True, exist_ok=True)
    write_status(folder, RUNNING, step=step)
    with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * SEED + number)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network for a few seconds.")
    parser.add_argument("--folder", "--save-dir", type=Path, required=True, help="the run's folder")
    parser.add_argument("--epochs", type=int, default=8, help=f"epochs of {NUM_BATCHES} steps")
    parser.add_argument("--step-s", type=float, default=0.1, help="seconds to wait for each batch")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
