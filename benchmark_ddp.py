"""Measure what more processes bring: the same training on 1, 2, 4, … GPUs (or CPU cores) of this machine.

    python benchmark_ddp.py
    python benchmark_ddp.py --processes 1 4 --scaling both --batch-size 8

Start it plainly, without torchrun: it starts the processes itself. Loading is not measured.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from utils.config import option, parse_config, to_dict
from utils.errors import UsageError, UserError, run_script
from utils.images import write_bytes_atomic
from utils.plots.speed import plot_scaling
from utils.runtime import (
    PRECISION_CHOICES,
    choose_precision,
    environment_report,
    usable_cpu_count,
    visible_gpu_count,
)
from utils.scaling import MOST_CPU_PROCESSES, Run, noise_note, process_counts, run_benchmark, scaling_table, summarise
from utils.scaling_rank import RankJob
from utils.synthetic import weights_or_description

SCALINGS = {"weak": ("weak",), "strong": ("strong",), "both": ("weak", "strong")}


@dataclass(frozen=True)
class BenchmarkConfig:
    """Options of `benchmark_ddp.py`."""

    model: str = option("yolov8n-seg.yaml", "model to train; what its weights are does not matter")
    batch_size: int = option(16, "images per process (weak scaling) or over all processes (strong scaling)")
    img_size: int = option(640, "side of the square network input in pixels, a multiple of 32")
    objects_per_image: int = option(20, "labelled objects in each synthetic image")
    steps: int | None = option(None, "training steps measured per run; unset: 20 on GPUs, 5 on a CPU")
    warmup: int | None = option(None, "training steps before them; unset: 5 on GPUs, 2 on a CPU")
    repeats: int = option(3, "rounds over all process counts")
    processes: tuple[int, ...] | None = option(
        None, f"process counts; unset: 1 2 4 ... up to the GPUs, or up to the cores, at most {MOST_CPU_PROCESSES}"
    )
    scaling: str = option("weak", "which batch stays the same, see --batch-size", choices=tuple(SCALINGS))
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))
    timeout_s: float = option(600.0, "seconds that one run may take", metavar="SECONDS")
    output: str = option("outputs/benchmarks", "folder for the results", metavar="DIR")

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats", "steps", "warmup", "timeout_s"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.objects_per_image < 0:
            raise UsageError(f"--objects-per-image {self.objects_per_image}: must not be negative")
        if self.img_size < 64 or self.img_size % 32:
            raise UsageError(f"--img-size {self.img_size}: must be a multiple of 32 and at least 64")
        if self.processes is not None and min(self.processes) < 1:
            raise UsageError(f"--processes {min(self.processes)}: must be at least 1")


def main() -> int:
    """Run the benchmark; return the exit code."""
    config = parse_config(BenchmarkConfig, "Measure how training scales with the number of processes")
    gpus = 0 if config.device == "cpu" else visible_gpu_count()
    counts = choose_counts(config, gpus)
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    source, note = weights_or_description(config.model)
    job = RankJob(
        model=source,
        global_batch_size=config.batch_size,
        img_size=config.img_size,
        objects_per_image=config.objects_per_image,
        warmup_steps=config.warmup or (5 if gpus else 2),
        steps=config.steps or (20 if gpus else 5),
        amp=config.amp,
        device=device.type,
        timeout_s=config.timeout_s,
    )
    place = f"up to {max(counts)} x {torch.cuda.get_device_name(0)}" if gpus else "CPU cores, one for each process"
    precision = choose_precision(config.amp, device).name
    heading = f"Training {Path(config.model).stem} at {config.img_size} pixels, precision {precision}, on {place}"
    print("\n".join([heading, *([note] if note else [])]), flush=True)
    runs = run_benchmark(job, counts, SCALINGS[config.scaling], config.repeats, announce)
    rows = summarise(runs)
    noise = noise_note(rows)
    print("\n".join(["", scaling_table(rows), "", *([noise] if noise else [])]))
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    record = {"config": to_dict(config), "environment": environment_report(), "summary": rows, "runs": runs}
    write_bytes_atomic(folder / "benchmark_results.json", (json.dumps(record, indent=2) + "\n").encode())
    write_bytes_atomic(folder / "benchmark_results.csv", to_csv(runs).encode())
    plot_scaling(rows, heading, folder / "multi_gpu_benchmark.png")
    names = ("multi_gpu_benchmark.png", "benchmark_results.csv", "benchmark_results.json")
    print(f"Written: {', '.join(str(folder / name) for name in names)}")
    return 0


def choose_counts(config: BenchmarkConfig, gpus: int) -> tuple[int, ...]:
    """Return the process counts in ascending order. Raises UserError for what this machine cannot run."""
    if config.device == "cuda" and not gpus:
        raise UserError("--device cuda: PyTorch sees no CUDA GPU; use --device cpu or see python test_ddp.py")
    cores = usable_cpu_count()
    counts = config.processes or process_counts(gpus or min(cores, MOST_CPU_PROCESSES))
    limit, kind = (gpus, "visible GPU(s)") if gpus else (cores, "usable core(s)")
    if max(counts) > limit:
        raise UserError(f"--processes {max(counts)}: this machine has {limit} {kind}, and each process needs its own")
    if config.scaling != "weak" and max(counts) > config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size}: strong scaling cannot share it between {max(counts)} processes"
        )
    return tuple(sorted(set(counts)))


def announce(run: Run) -> None:
    """Say that a run is done."""
    where = f"round {run['repeat']}, {run['scaling']} scaling, {run['processes']} process(es)"
    print(f"  {where}: {run['images_per_s']:.1f} images/s", flush=True)


def to_csv(runs: list[Run]) -> str:
    """Return one line a run, with every single number of it."""
    columns = [name for name, value in runs[0].items() if not isinstance(value, list)]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(runs)
    return buffer.getvalue()


if __name__ == "__main__":
    run_script(main)
