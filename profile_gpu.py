"""Measure the training speed and memory of one device at several batch sizes.

    python profile_gpu.py --model yolov8m-seg.pt --batch-sizes 4 8 16 32 64

The steps are real training steps on synthetic images, so data loading is not measured. Without a GPU the CPU is
profiled. The most expensive operators at the best batch size are listed.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from utils.common.config import CONFIG_HELP, INPUT_SIZE, Options, option, parse_config, to_dict
from utils.common.cores import choose_threads_and_workers
from utils.common.devices import PRECISION_CHOICES, choose_device, choose_precision, seed_everything, tune_device
from utils.common.environment import environment_report
from utils.common.errors import UserError, run_script
from utils.common.files import output_folder, write_text_atomic
from utils.common.text import format_bytes
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.engine import TrainingEngine
from utils.measure.operators import profile_operators
from utils.measure.plots import plot_profile
from utils.measure.profiling import (
    BatchProfile,
    Space,
    TooLarge,
    batch_for,
    best_profile,
    forecast_on_cpu,
    memory_of,
    operator_table,
    profile_batch,
    profile_table,
    profile_until_full,
    to_record,
    verdict_lines,
)
from utils.yolo.model import build_model, weights_or_description
from utils.yolo.training_step import build_training

PROFILED_STEPS = {"cuda": 3, "cpu": 1}  # for the table of operators


@dataclass(frozen=True)
class ProfileConfig(Options):
    """Options of `profile_gpu.py`."""

    model: str = option(
        "yolov8m-seg.pt", "model to train: a .pt file, or yolov8, yolo11, yolo12 or yolo26{n,s,m,l,x}-seg.yaml"
    )
    batch_sizes: tuple[int, ...] = option(
        (4, 8, 16, 32, 64), "batch sizes to try, in ascending order", metavar="N", at_least=1
    )
    img_size: int = option(640, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE)
    objects_per_image: int = option(20, "labelled objects in each synthetic image", at_least=0)
    steps: int | None = option(
        None, "training steps measured per batch size; unset: 20 on a GPU, 4 on a CPU", at_least=1
    )
    warmup: int | None = option(
        None, "training steps before the measured ones; unset: 5 on a GPU, 1 on a CPU", at_least=1
    )
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int | None = option(None, "compute threads; unset: as many as the trainer uses", at_least=1)
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")
    trace: bool = option(False, "also write trace.json: steps at the best batch size, for chrome://tracing or Perfetto")
    output: str = option("outputs/profiling", "folder for the results", metavar="DIR")


def main() -> int:
    """Profile; return the exit code."""
    config = parse_config(ProfileConfig, __doc__)
    folder = output_folder(config.output)
    device = choose_device(config.device, 0)
    tune_device(device, deterministic=False, fixed_shapes=True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads or choose_threads_and_workers(1, device_type=device.type)[0])
    seed_everything(0)
    precision = choose_precision(config.amp, device)
    space = memory_of(device)
    source, note = weights_or_description(config.model)
    model = build_model(source, load_dataset_yaml(DEFAULT_DATASET_YAML).names)
    introduction = [describe(config, device, precision.name), *([note] if note else [])]
    if device.type == "cpu":
        introduction.append("No GPU is profiled: peak memory is the whole process's so far (RSS)")
    print("\n".join(introduction), flush=True)

    engine = build_training(model, device, precision)
    profiles, too_large = measure_batch_sizes(config, engine, space)
    folder.mkdir(parents=True, exist_ok=True)
    best = best_profile(profiles, space.capacity_bytes)
    batch = batch_for(engine, best.batch_size, config.img_size, config.objects_per_image)
    trace = folder / "trace.json" if config.trace else None
    operators = profile_operators(engine, batch, PROFILED_STEPS[device.type], trace)
    report = [profile_table(profiles), "", *verdict_lines(profiles, too_large, space.capacity_bytes), ""]
    report += [f"Most expensive operators at batch {best.batch_size}, own time:", operator_table(operators)]
    print("\n".join(["", *report]))
    record = {
        "config": to_dict(config),
        **to_record(profiles, too_large, space.capacity_bytes),
        "operators": [asdict(operator) for operator in operators],
    }
    write_report(folder, [*introduction, "Times are ms per step.", "", *report, ""], record)
    capacity_bytes = space.capacity_bytes if device.type == "cuda" else None
    plot_profile(profiles, best.batch_size, introduction[0], capacity_bytes, folder / "gpu_profile.png")
    names = ("gpu_profile.png", "profiling_report.txt", "profile.json", *(("trace.json",) if config.trace else ()))
    print(f"Written: {', '.join(str(folder / name) for name in names)}")
    return 0


def measure_batch_sizes(
    config: ProfileConfig, engine: TrainingEngine, space: Space
) -> tuple[list[BatchProfile], TooLarge | None]:
    """Measure the batch sizes until one does not fit. Raises UserError if the first does not."""
    is_gpu = engine.device.type == "cuda"
    measure = partial(
        profile_batch,
        engine,
        size_px=config.img_size,
        objects_per_image=config.objects_per_image,
        warmup_steps=config.warmup or (5 if is_gpu else 1),
        steps=config.steps or (20 if is_gpu else 4),
        space=space,
    )
    forecast = {} if is_gpu else {"forecast": forecast_on_cpu}
    profiles, too_large = profile_until_full(config.batch_sizes, measure, announce, **forecast)
    if not profiles:
        failed = too_large.batch_size if too_large else min(config.batch_sizes)
        raise UserError(f"--batch-sizes {failed}: does not fit at {config.img_size} pixels; try a smaller one")
    return profiles, too_large


def write_report(folder: Path, lines: list[str], record: dict[str, Any]) -> None:
    """Write profiling_report.txt and profile.json, each with versions and hardware."""
    environment = environment_report()
    text = "\n".join([*lines, *(f"{name}: {value}" for name, value in environment.items()), ""])
    write_text_atomic(folder / "profiling_report.txt", text)
    write_text_atomic(folder / "profile.json", json.dumps({"environment": environment, **record}, indent=2) + "\n")


def describe(config: ProfileConfig, device: torch.device, precision: str) -> str:
    """Return one line with the model, the input size, the precision and the device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        place = f"{properties.name} ({format_bytes(properties.total_memory)})"
    else:
        place = f"the CPU ({torch.get_num_threads()} threads)"
    computed_in = "fp32" if precision == "off" else precision
    return f"Training {Path(config.model).stem} at {config.img_size} pixels in {computed_in} on {place}"


def announce(profile: BatchProfile) -> None:
    """Print the speed at a batch size."""
    print(f"  batch {profile.batch_size}: {profile.images_per_s:.1f} images/s", flush=True)


if __name__ == "__main__":
    run_script(main)
