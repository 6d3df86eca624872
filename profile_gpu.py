"""Measure how fast one device trains, and with how much memory, at several batch sizes.

    python profile_gpu.py --model yolov8m-seg.pt --batch-sizes 4 8 16 32 64

Real training steps on synthetic images: loading is not measured. Without a GPU the CPU is profiled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from utils.config import option, parse_config, to_dict
from utils.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.errors import UsageError, UserError, run_script
from utils.images import write_bytes_atomic
from utils.logs import format_bytes
from utils.model import build_model
from utils.parallel import tune_device
from utils.plots.speed import plot_profile
from utils.profiling import (
    BatchProfile,
    profile_batch,
    profile_table,
    profile_until_full,
    to_record,
    verdict_lines,
)
from utils.runtime import (
    PRECISION_CHOICES,
    choose_device,
    choose_precision,
    environment_report,
    seed_everything,
    usable_cpu_count,
)
from utils.step_timer import build_training
from utils.synthetic import weights_or_description


@dataclass(frozen=True)
class ProfileConfig:
    """Options of `profile_gpu.py`."""

    model: str = option("yolov8m-seg.pt", "model to train: a .pt file or yolov8{n,s,m,l,x}-seg.yaml")
    batch_sizes: tuple[int, ...] = option((4, 8, 16, 32, 64), "batch sizes to try, in ascending order", metavar="N")
    img_size: int = option(640, "side of the square network input in pixels, a multiple of 32")
    objects_per_image: int = option(20, "labelled objects in each synthetic image")
    steps: int | None = option(None, "training steps measured per batch size; unset: 20 on a GPU, 3 on a CPU")
    warmup: int | None = option(None, "training steps before them; unset: 5 on a GPU, 1 on a CPU")
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    output: str = option("outputs/profiling", "folder for the results", metavar="DIR")

    def __post_init__(self) -> None:
        for name in ("steps", "warmup"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"--{name} {getattr(self, name)}: must be at least 1")
        if min(self.batch_sizes) < 1:
            raise UsageError(f"--batch-sizes {min(self.batch_sizes)}: must be at least 1")
        if self.objects_per_image < 0:
            raise UsageError(f"--objects-per-image {self.objects_per_image}: must not be negative")
        if self.img_size < 64 or self.img_size % 32:
            raise UsageError(f"--img-size {self.img_size}: must be a multiple of 32 and at least 64")


def main() -> int:
    """Profile; return the exit code."""
    config = parse_config(ProfileConfig, "Measure the speed and memory of training at several batch sizes")
    device = choose_device(config.device, 0)
    tune_device(device, deterministic=False, fixed_shapes=True)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(usable_cpu_count())
    seed_everything(0)
    precision = choose_precision(config.amp, device)
    source, note = weights_or_description(config.model)
    model = build_model(source, load_dataset_yaml(DEFAULT_DATASET_YAML).names)
    introduction = [describe(config, device, precision.name), *([note] if note else [])]
    if not is_gpu:
        introduction.append("No GPU is profiled: memory is the peak of the whole process so far (RSS)")
    print("\n".join(introduction), flush=True)

    measure = partial(
        profile_batch,
        build_training(model, device, precision),
        size_px=config.img_size,
        objects_per_image=config.objects_per_image,
        warmup_steps=config.warmup or (5 if is_gpu else 1),
        steps=config.steps or (20 if is_gpu else 3),
    )
    profiles, too_large = profile_until_full(config.batch_sizes, measure, announce)
    if not profiles:
        raise UserError(f"--batch-sizes {too_large}: does not fit at {config.img_size} pixels; try a smaller one")
    report = [profile_table(profiles), "", *verdict_lines(profiles, too_large)]
    print("\n".join(["", *report]))
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    environment = environment_report()
    facts = [f"{name}: {value}" for name, value in environment.items()]
    text = "\n".join([*introduction, "Times are ms per step.", "", *report, "", *facts, ""])
    write_bytes_atomic(folder / "profiling_report.txt", text.encode())
    record = {"config": to_dict(config), "environment": environment, **to_record(profiles, too_large)}
    write_bytes_atomic(folder / "profile.json", (json.dumps(record, indent=2) + "\n").encode())
    capacity = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
    plot_profile(profiles, record["best_batch_size"], introduction[0], capacity, folder / "gpu_profile.png")
    print(f"Written: {folder / 'gpu_profile.png'}, {folder / 'profiling_report.txt'}, {folder / 'profile.json'}")
    return 0


def describe(config: ProfileConfig, device: torch.device, precision: str) -> str:
    """Return one line: what is profiled, and on which device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        place = f"{properties.name} ({format_bytes(properties.total_memory)})"
    else:
        place = f"the CPU ({torch.get_num_threads()} threads)"
    return f"Training {Path(config.model).stem} at {config.img_size} pixels, precision {precision}, on {place}"


def announce(profile: BatchProfile) -> None:
    """Say that a batch size is done."""
    print(f"  batch {profile.batch_size}: {profile.images_per_s:.1f} images/s", flush=True)


if __name__ == "__main__":
    run_script(main)
