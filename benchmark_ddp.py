"""Measure how training scales: the same training on 1, 2, 4, … GPUs (or CPU cores) of this machine.

    python benchmark_ddp.py
    python benchmark_ddp.py --processes 1 4 --batch-size 8
    python benchmark_ddp.py --data data/processed/dataset.yaml

Start it plainly, without torchrun: it starts the processes itself. Without --data one synthetic batch is trained again and
again.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from utils.common.config import CONFIG_HELP, INPUT_SIZE, Options, option, parse_config, to_dict
from utils.common.cores import choose_threads_and_workers, usable_cpu_count
from utils.common.devices import PRECISION_CHOICES, choose_precision
from utils.common.environment import environment_report, visible_gpu_count
from utils.common.errors import UserError, run_script
from utils.common.files import output_folder, write_text_atomic
from utils.common.text import csv_text
from utils.measure.plots import plot_scaling
from utils.measure.scaling import (
    MAX_CPU_PROCESSES,
    Run,
    allreduce_table,
    median_points,
    noise_note,
    process_counts,
    run_benchmark,
    scaling_table,
    summarise,
)
from utils.measure.scaling_rank import RankJob
from utils.measure.step_ranges import training_loader
from utils.yolo.model import weights_or_description

SHARES_NOTE = (
    "Shares of a step's time, mean over the ranks, from ranges measured within the steps. Sum: their sum divided by the step's",
    "time on the host's clock. Imbalance: waiting for the slowest rank. Overlap: share of the gradients' all-reduce during which",
    "no rank waited.",
)
SCALINGS = {"weak": ("weak",), "strong": ("strong",), "both": ("weak", "strong")}


@dataclass(frozen=True)
class BenchmarkConfig(Options):
    """Options of `benchmark_ddp.py`."""

    model: str = option("yolov8n-seg.yaml", "model to train; its weights do not matter")
    batch_size: int = option(16, "images per process (weak scaling) or over all processes (strong scaling)", at_least=1)
    img_size: int | None = option(
        None,
        "side of the square network input in pixels, a multiple of 32; unset: 640 on GPUs, 256 on a CPU",
        **INPUT_SIZE,
    )
    objects_per_image: int = option(20, "labelled objects in each synthetic image", at_least=0, needs="not data")
    data: str | None = option(None, "data-set YAML: train on it with the trainer's loader", metavar="YAML")
    num_workers: int | None = option(
        None, "loader processes per rank with --data; unset: as many as the trainer uses", at_least=0, needs="data"
    )
    steps: int | None = option(None, "training steps measured per run; unset: 20 on GPUs, 6 on a CPU", at_least=1)
    warmup: int | None = option(
        None, "training steps before the measured ones; unset: 5 on GPUs, 2 on a CPU", at_least=1
    )
    repeats: int = option(3, "how often every process count is measured", at_least=1)
    processes: tuple[int, ...] | None = option(
        None,
        f"process counts; unset: 1 2 4 ... up to the GPUs, or up to the cores, at most {MAX_CPU_PROCESSES}",
        at_least=1,
    )
    scaling: str = option(
        "both", "weak: the same batch per process; strong: the same batch over all processes", choices=tuple(SCALINGS)
    )
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))
    timeout_s: float = option(600.0, "time limit of one run in seconds", metavar="SECONDS", at_least=1)
    threads: int = option(1, "compute threads per process; a CPU has a core for each", at_least=1)
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")
    output: str = option("outputs/benchmarks", "folder for the results", metavar="DIR")


def main() -> int:
    """Run the benchmark; return the exit code."""
    config = parse_config(BenchmarkConfig, __doc__)
    folder = output_folder(config.output)
    gpus = 0 if config.device == "cpu" else visible_gpu_count()
    config = replace(config, img_size=config.img_size or (640 if gpus else 256))
    counts = choose_counts(config, gpus)
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    source, note = weights_or_description(config.model)
    if config.data:  # builds the packed photographs once, before several ranks need them
        training_loader(config.data, config.img_size or 1, 1, 0, pin_memory=False)
    job = build_job(config, source, device, max(counts))
    heading = describe(config, counts, device)
    print("\n".join([heading, *([note] if note else [])]), flush=True)
    runs = run_benchmark(job, counts, SCALINGS[config.scaling], config.repeats, announce)
    rows, points = summarise(runs), median_points(runs)
    noise = noise_note(rows)
    tables = ["", scaling_table(rows), *SHARES_NOTE, *([noise] if noise else [])]
    if points:
        tables += ["", "All-reduce by itself:", allreduce_table(points)]
    print("\n".join(tables))
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"config": to_dict(config), "environment": environment_report()}
    record |= {"summary": rows, "allreduce": points, "runs": runs}
    write_text_atomic(folder / "benchmark_results.json", json.dumps(record, indent=2) + "\n")
    columns = [name for name, value in runs[0].items() if not isinstance(value, list | dict)]
    table = csv_text(columns, ([run.get(name) for name in columns] for run in runs), "\n")
    write_text_atomic(folder / "benchmark_results.csv", table)
    plot_scaling(rows, points, heading, folder / "multi_gpu_benchmark.png")
    names = ("multi_gpu_benchmark.png", "benchmark_results.csv", "benchmark_results.json")
    print(f"Written: {', '.join(str(folder / name) for name in names)}")
    return 0


def build_job(config: BenchmarkConfig, model: str, device: torch.device, most_processes: int) -> RankJob:
    """Return the job that every rank runs."""
    is_gpu = device.type == "cuda"
    workers = config.num_workers
    if workers is None:
        workers = choose_threads_and_workers(most_processes, device_type=device.type)[1]
    return RankJob(
        model=model,
        global_batch_size=config.batch_size,
        img_size=config.img_size or 1,
        objects_per_image=config.objects_per_image,
        warmup_steps=config.warmup or (5 if is_gpu else 2),
        steps=config.steps or (20 if is_gpu else 6),
        amp=config.amp,
        device=device.type,
        timeout_s=config.timeout_s,
        data=str(Path(config.data).resolve()) if config.data else None,
        num_workers=workers,
        threads=config.threads,
    )


def describe(config: BenchmarkConfig, counts: Sequence[int], device: torch.device) -> str:
    """Return one line with the model, the data, the input size, the precision and the devices."""
    is_gpu = device.type == "cuda"
    of_cores = f"CPU cores, {config.threads} for each process"
    place = f"up to {max(counts)} x {torch.cuda.get_device_name(0)}" if is_gpu else of_cores
    source = f"photographs of {config.data}" if config.data else "synthetic images"
    precision = choose_precision(config.amp, device).name
    computed_in = "fp32" if precision == "off" else precision
    return f"Training {Path(config.model).stem} on {source} at {config.img_size} pixels in {computed_in} on {place}"


def choose_counts(config: BenchmarkConfig, gpus: int) -> tuple[int, ...]:
    """Return the process counts in ascending order. Raises UserError for counts that this machine cannot run."""
    if config.device == "cuda" and not gpus:
        raise UserError("--device cuda: PyTorch sees no CUDA GPU; use --device cpu or see python test_ddp.py")
    cores = usable_cpu_count()
    limit, kind = (gpus, "visible GPU(s)") if gpus else (cores // config.threads, "usable core(s)")
    counts = config.processes or process_counts(gpus or min(limit, MAX_CPU_PROCESSES))
    if max(counts) > limit:
        own = "its own" if gpus or config.threads == 1 else f"{config.threads} of its own"
        raise UserError(
            f"--processes {max(counts)}: this machine has {gpus or cores} {kind}, and each process needs {own}"
        )
    if config.scaling == "strong" and max(counts) > config.batch_size:
        raise UserError(
            f"--batch-size {config.batch_size}: strong scaling cannot share it between {max(counts)} processes"
        )
    return tuple(sorted(set(counts)))


def announce(run: Run) -> None:
    """Print the speed of a run."""
    where = f"round {run['repeat']}, {run['scaling']} scaling, {run['processes']} process(es)"
    print(f"  {where}: {run['images_per_s']:.1f} images/s", flush=True)


if __name__ == "__main__":
    run_script(main)
