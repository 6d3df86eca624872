"""The attacked trainings, YOLOv8n-seg on a small sample and a small network, and what they left."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.jobs import Job
from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER
from yolo_seg_ddp.utils.options import words_of

LOOPBACK = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
SMALL_TRAINING = PROJECT_FOLDER / "tests" / "chaos" / "small_training.py"
START_TIMEOUT_S = 240.0  # imports are slow on a busy machine
ENVIRONMENT = {"PYTHON": sys.executable}  # `train_ddp.sh` uses this interpreter


def yolo(
    data: Path,
    folder: Path,
    *,
    batch: int = 2,
    epochs: int = 4,
    launcher: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Return the command that trains YOLOv8n-seg at 64 px on 2 CPU ranks, through the project's own
    launcher.
    """
    chosen = {
        "model": "yolov8n-seg.yaml",
        "num_workers": 0,
        "threads": 1,
        "device": "cpu",
        **options,
    }
    files = [f"--data={data}", f"--save-dir={folder / 'run'}", "--no-tensorboard"]
    shape = map(str, (2, batch, epochs, 64))
    return [
        "bash",
        "train_ddp.sh",
        *shape,
        f"--log-dir={folder / 'logs'}",
        *launcher,
        "--",
        *files,
        *words_of(chosen),
    ]


def small(
    folder: Path, *, ranks: int = 2, launcher: Sequence[str] = LOOPBACK, **options: Any
) -> list[str]:
    """Return the command that trains the small network (small_training.py) under plain torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", *launcher, f"--nproc-per-node={ranks}"]
    return [
        *start,
        f"--log-dir={folder / 'logs'}",
        str(SMALL_TRAINING),
        *small_flags(folder, **options),
    ]


def small_flags(folder: Path, **options: Any) -> list[str]:
    return [f"--save-dir={folder / 'run'}", *words_of({"epochs": 4, "step_s": 0.02, **options})]


def train_undisturbed(arguments: Sequence[str]) -> int:
    """Run the small training in this process, a rank that no launcher watches; return its exit
    code.
    """
    sys.argv = [str(SMALL_TRAINING), *arguments]
    return int(importlib.import_module("tests.chaos.small_training").main())


def await_training(job: Job, attempt: int, world_size: int = 2) -> float:
    """Wait until the ranks of start number `attempt` train; return the seconds. Raises TooSlow."""
    started_s = job.wait_until(
        lambda: job.ranks(attempt, world_size), f"start {attempt}", START_TIMEOUT_S
    )
    before = len(job.output())  # earlier ranks have ended and print nothing more
    return started_s + job.wait_until(
        lambda: "  Batch [" in job.output()[before:], f"a batch of start {attempt}", START_TIMEOUT_S
    )


def position(run: Path) -> tuple[int, int, int]:
    """Return (epoch, batch, optimizer step) of a run's newest checkpoint; zeros
    if there is none.
    """
    found = load_latest(run / "checkpoint")
    progress = found[1]["progress"] if found else {"epoch": 0, "batch": 0, "global_step": 0}
    return progress["epoch"], progress["batch"], progress["global_step"]
