"""Prove the GPU path on this machine's NVIDIA GPUs and measure it, in one command without a
network.

    make gpu                                          # all parts, under 9 minutes on one GPU
    DEVICE=cpu make gpu                               # a dry run with small sizes on a CPU
    PYTHON=python3 WHEELS=wheels make gpu             # another Python, and packages from a folder
    python -m benchmarks.gpu --only nccl profile      # some parts, and those that they need

The last lines are a table with one row per part. Parts that ended well are kept in --output and not
run again while code, GPU and versions stay the same; --again runs them all. docs/research/gpu.md
says more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.gpu.wheels import missing_modules, start_again_with, unpack

# Before the first import that may need them.
if os.environ.get("WHEELS"):
    _site = Path("outputs/gpu/site")
    print(
        "Unpacked:", ", ".join(unpack(Path(os.environ["WHEELS"]), _site)) or "no wheels", flush=True
    )
    start_again_with(_site, "benchmarks.gpu", sys.argv[1:])
if __name__ == "__main__" and (_missing := missing_modules()):
    sys.exit(
        f"error: {sys.executable} cannot import {'; '.join(_missing)}: install requirements.txt "
        "and pytest, or set WHEELS to a folder with wheels for this Python"
    )

import hashlib
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.comparison import source_digest
from benchmarks.gpu.parts import PARTS, with_needed
from benchmarks.gpu.plan import BAD, Outcome, Part, Setting
from benchmarks.gpu.report import hardware, table, verdict, write_results
from benchmarks.gpu.runner import Runner, Store, run_parts
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.environment import prepare_environment
from yolo_seg_ddp.utils.errors import EXIT_DONE, EXIT_FAILED, UsageError, run_script
from yolo_seg_ddp.utils.options import Options, option

MINUTES = {"cuda": 9.0, "cpu": 10.0}


@dataclass(frozen=True)
class GpuConfig(Options):
    device: str = option(
        "auto",
        "auto: the GPUs, which must be there; cpu: a dry run",
        choices=("auto", "cuda", "cpu"),
    )
    minutes: float | None = option(None, "time for everything; unset: 9, on a CPU 10", above=0)
    only: tuple[str, ...] = option(
        (), "parts to run, with those that they need; unset: all", metavar="PART"
    )
    again: bool = option(False, "also run what is finished")
    output: str = option("outputs/gpu", "folder for data, logs and finished parts", metavar="DIR")
    json: str | None = option(
        None, "folder for all results; unset: results in --output", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = set(self.only) - {part.name for part in PARTS}
        if unknown:
            raise UsageError(
                f"--only {' '.join(sorted(unknown))}: there is "
                f"{' '.join(part.name for part in PARTS)}"
            )


def main() -> int:
    """Run the parts; return 1 when one failed."""
    start_s = time.monotonic()
    config = parse_config(GpuConfig, "Prove and measure the GPU path on this machine's NVIDIA GPUs")
    prepare_environment()
    num_gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device != "cpu" and not num_gpus:
        raise UsageError(
            f"--device {config.device}: PyTorch sees no GPU; DEVICE=cpu make gpu is a dry run "
            "without one"
        )
    root = Path(config.output).resolve()
    setting = Setting("cuda" if num_gpus else "cpu", num_gpus, root / "work")
    machine = hardware(setting)
    names = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU: a dry run"
    print(
        f"{names}; driver {machine['driver']}, torch {machine['torch']}, CUDA {machine['cuda']}",
        flush=True,
    )
    store = Store(root / "state", key_of(machine, setting))
    parts = with_needed(config.only) if config.only else PARTS
    for part in parts:
        if config.again and (not config.only or part.name in config.only):
            store.forget(part)
    kept = {part.name: earlier for part in PARTS if (earlier := store.finished(part))}
    ended = {part.name: kept[part.name] for part in parts if part.name in kept}
    prepare_folders(setting.folder, [part for part in parts if part.name not in ended])
    total_s = 60 * (config.minutes or MINUTES[setting.device]) - 5  # a few for the table
    folder = Path(config.json) if config.json else root / "results"
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])

    def write() -> None:
        minutes = round((time.monotonic() - start_s) / 60, 2)
        write_results(
            folder, root, {**machine, "minutes": minutes}, command, PARTS, {**kept, **ended}
        )

    def on_end(part: Part, outcome: Outcome) -> None:
        store.keep(part, outcome)
        ended[part.name] = outcome
        elapsed_s = time.monotonic() - start_s
        print(
            f"[{elapsed_s:3.0f} s] {part.name}: {outcome.status}, {outcome.seconds:.0f} s",
            flush=True,
        )
        write()

    slots = min(max(usable_cpu_count() // 2, 2), 8)
    runner = Runner(setting, root / "logs")
    outcomes = run_parts(
        parts, ended, runner, lambda: total_s - (time.monotonic() - start_s), slots, on_end
    )
    write()
    print(
        f"\n{table(parts, outcomes)}\n\n{verdict(outcomes)}. All results, with logs and the "
        f"trace: {folder}"
    )
    return EXIT_FAILED if any(outcome.status in BAD for outcome in outcomes.values()) else EXIT_DONE


def prepare_folders(folder: Path, parts: Sequence[Part]) -> None:
    """Remove what an earlier start left of the parts that run now; without the data nothing of it
    counts.
    """
    names = {part.name for part in parts}
    for place in [folder] if "data" in names else [folder / name for name in names]:
        shutil.rmtree(place, ignore_errors=True)


def key_of(machine: dict[str, object], setting: Setting) -> str:
    """Return a digest of what finished parts depend on: code, device, versions, sizes."""
    named = {name: machine[name] for name in ("gpus", "driver", "torch", "ultralytics")}
    sources = [
        file.read_bytes() for file in sorted(Path(__file__).resolve().parent.parent.rglob("*.py"))
    ]
    digest = hashlib.sha256(b"".join(sources)).hexdigest()
    return hashlib.sha256(
        f"{source_digest()} {digest} {named} {setting.sizes}".encode()
    ).hexdigest()[:16]


if __name__ == "__main__":
    # SIGTERM becomes SystemExit, so that every running part is ended with its trainings.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    run_script(main)
