"""Measure how training scales: the same training on 1, 2, 4, … GPUs (or CPU cores) of this machine.

    python benchmark_ddp.py
    python benchmark_ddp.py --processes 1 4 --batch-size 8
    python benchmark_ddp.py --data data/processed/dataset.yaml

Start it plainly, without torchrun: it starts the processes itself, each with a batch of its own.
Without --data one synthetic batch is trained again and again.
"""

from dataclasses import replace

from yolo_seg_ddp.measure.options import MAX_CPU_PROCESSES, BenchmarkConfig
from yolo_seg_ddp.utils.config import parse_config, show_help
from yolo_seg_ddp.utils.options import to_dict

if __name__ == "__main__":
    show_help(BenchmarkConfig, __doc__)

# --- the command, which needs PyTorch

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from yolo_seg_ddp.measure.plots import plot_scaling
from yolo_seg_ddp.measure.scaling import RankJob, Run, run_benchmark, scaling_table, summarise
from yolo_seg_ddp.measure.step_ranges import training_loader
from yolo_seg_ddp.utils.cores import choose_threads_and_workers, usable_cpu_count
from yolo_seg_ddp.utils.devices import choose_precision
from yolo_seg_ddp.utils.environment import environment_report, visible_gpu_count
from yolo_seg_ddp.utils.errors import UserError, run_script
from yolo_seg_ddp.utils.files import output_folder, write_text_atomic
from yolo_seg_ddp.utils.text import csv_text
from yolo_seg_ddp.yolo.model import weights_or_description

SHARES_NOTE = (
    "The last four columns are shares of a step's time. Imbalance: waiting for the slowest process."
)


def main() -> int:
    """Run the benchmark; return the exit code."""
    config = parse_config(BenchmarkConfig, __doc__)
    folder = output_folder(config.output)
    gpus = 0 if config.device == "cpu" else visible_gpu_count()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    img_size = config.img_size or (640 if gpus else 256)
    counts = choose_counts(config, gpus)
    source, note = weights_or_description(config.model)
    # Build the packed photographs once, before several ranks need them.
    if config.data:
        training_loader(config.data, img_size, 1, 0, pin_memory=False)
    workers = config.num_workers
    if workers is None:
        workers = choose_threads_and_workers(max(counts), device_type=device.type)[1]
    job = RankJob(
        model=source,
        batch_size_per_gpu=config.batch_size,
        img_size=img_size,
        warmup_steps=5 if gpus else 2,
        steps=config.steps or (20 if gpus else 6),
        amp=config.amp,
        device=device.type,
        timeout_s=config.timeout_s,
        data=str(Path(config.data).resolve()) if config.data else None,
        num_workers=workers,
    )
    heading = describe(config, img_size, counts, device)
    print("\n".join([heading, *([note] if note else [])]), flush=True)
    runs = run_benchmark(job, counts, config.repeats, announce)
    rows = summarise(runs)
    print("\n".join(["", scaling_table(rows), SHARES_NOTE]))
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "config": to_dict(replace(config, img_size=img_size)),
        "environment": environment_report(),
        "summary": rows,
        "runs": runs,
    }
    write_text_atomic(folder / "benchmark_results.json", json.dumps(record, indent=2) + "\n")
    table = csv_text(list(runs[0]), (list(run.values()) for run in runs), "\n")
    write_text_atomic(folder / "benchmark_results.csv", table)
    plot_scaling(rows, heading, folder / "multi_gpu_benchmark.png")
    names = ("multi_gpu_benchmark.png", "benchmark_results.csv", "benchmark_results.json")
    print(f"Written: {', '.join(str(folder / name) for name in names)}")
    return 0


def describe(
    config: BenchmarkConfig, img_size: int, counts: Sequence[int], device: torch.device
) -> str:
    """Return one line with the model, the data, the input size, the precision and the devices."""
    is_gpu = device.type == "cuda"
    place = (
        f"up to {max(counts)} x {torch.cuda.get_device_name(0)}"
        if is_gpu
        else "CPU cores, 1 for each process"
    )
    source = f"photographs of {config.data}" if config.data else "synthetic images"
    precision = choose_precision(config.amp, device).name
    computed_in = "fp32" if precision == "off" else precision
    return (
        f"Training {Path(config.model).stem} on {source} at {img_size} pixels in {computed_in} on "
        f"{place}"
    )


def choose_counts(config: BenchmarkConfig, gpus: int) -> tuple[int, ...]:
    """Return the process counts in ascending order: 1, 2, 4, … up to the number of devices, and
    that number itself.

    Raises UserError for counts that this machine cannot run.
    """
    if config.device == "cuda" and not gpus:
        raise UserError(
            "--device cuda: PyTorch sees no CUDA GPU; use --device cpu or see python test_ddp.py"
        )
    limit, kind = (gpus, "visible GPU(s)") if gpus else (usable_cpu_count(), "usable core(s)")
    most = gpus or min(limit, MAX_CPU_PROCESSES)
    counts = config.processes or (*(2**power for power in range(most.bit_length())), most)
    if max(counts) > limit:
        raise UserError(
            f"--processes {max(counts)}: this machine has {limit} {kind}, and each process needs "
            "its own"
        )
    return tuple(sorted(set(counts)))


def announce(run: Run) -> None:
    """Print the speed of a run."""
    print(
        f"  round {run['repeat']}, {run['processes']} process(es): {run['images_per_s']:.1f} "
        "images/s",
        flush=True,
    )


if __name__ == "__main__":
    run_script(main)
