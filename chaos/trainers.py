"""Commands of the attacked trainings, YOLOv8n-seg on a small sample and a small network, and comparison of their runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from chaos.jobs import PROJECT, require
from utils.common.errors import UserError
from utils.run.checkpoint import load_latest

LOOPBACK = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
COMPARED = ("model", "ema", "ema_updates", "optimizer", "scheduler", "scaler", "progress")
NOT_COMPARED = "history"  # holds the epochs' times


def draw_sample(folder: Path, num_photos: int, **choices: object) -> Path:
    """Make a small data set from the built-in sample; return its dataset.yaml."""
    raw, processed = folder / "raw", folder / "processed"
    log = folder / "sample.log"
    require([sys.executable, "download_data.py", "--sample", str(num_photos), "--output", raw], log)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {"long_side": 128, **choices}.items()]
    require([sys.executable, "parse_labels.py", "--input", raw, "--output", processed, *options], log)
    return processed / "dataset.yaml"


def yolo(
    data: Path,
    folder: Path,
    *,
    ranks: int = 2,
    batch: int = 2,
    epochs: int = 4,
    launcher: Sequence[str] = (),
    **options: Any,
) -> list[str]:
    """Return the command that trains YOLOv8n-seg at 64 px on the CPU, through the project's own launcher."""
    chosen = {"model": "yolov8n-seg.yaml", "num_workers": 0, "threads": 1, "device": "cpu", **options}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    files = [f"--data={data}", f"--save-dir={folder / 'run'}", "--no-tensorboard"]
    numbers = map(str, (ranks, batch, epochs, 64))
    return ["bash", "train_ddp.sh", *numbers, f"--log-dir={folder / 'logs'}", *launcher, "--", *files, *flags]


def yolo_environment(**more: str) -> dict[str, str]:
    """Return the environment variables with which `train_ddp.sh` uses this interpreter."""
    return {"PYTHON": sys.executable, **more}


def small(folder: Path, *, ranks: int = 2, launcher: Sequence[str] = LOOPBACK, **options: Any) -> list[str]:
    """Return the command that trains the small network (chaos/small_training.py) under plain torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", *launcher, f"--nproc-per-node={ranks}"]
    chosen = {"epochs": 4, "step_s": 0.02, **options}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    script = str(PROJECT / "chaos" / "small_training.py")
    return [*start, f"--log-dir={folder / 'logs'}", script, f"--save-dir={folder / 'run'}", *flags]


def status(run: Path) -> dict[str, Any]:
    """Return a run's status.json; empty if there is none."""
    try:
        content = json.loads((run / "status.json").read_text())
    except OSError:
        return {}
    return content if isinstance(content, dict) else {}


def place(run: Path) -> tuple[int, int, int]:
    """Return (epoch, batch, optimizer step) of a run's newest checkpoint; zeros if there is none."""
    found = load_latest(run / "checkpoint")
    progress = found[1]["progress"] if found else {"epoch": 0, "batch": 0, "global_step": 0}
    return progress["epoch"], progress["batch"], progress["global_step"]


def difference(run: Path, reference: Path) -> str:
    """Return how two runs' newest checkpoints differ; empty when they are bitwise equal."""
    try:
        states = [load_latest(folder / "checkpoint") for folder in (run, reference)]
    except UserError as error:
        return str(error)
    if None in states:
        return "there is no checkpoint"
    first, second = (
        {name: value for part in COMPARED for name, value in _flat(part, found[1][part])} for found in states if found
    )
    if first.keys() != second.keys():
        return f"the checkpoints hold different values: {sorted(first.keys() ^ second.keys())[:3]}"
    names = [name for name in first if not _is_same(first[name], second[name])]
    return f"{len(names)} of {len(first)} values differ, the first is {names[0]}" if names else ""


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    items: list[tuple[Any, Any]]
    if isinstance(value, dict):
        items = [(key, part) for key, part in value.items() if key != NOT_COMPARED]
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        return [(name, value)]
    return [entry for key, part in items for entry in _flat(f"{name}.{key}", part)]


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and _bits_equal(first, second)
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return type(first) is type(second) and bool(first == second)


def _bits_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare bits: a NaN equals itself, and -0 differs from 0."""
    if not first.numel():
        return True
    one, two = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(one, two)
