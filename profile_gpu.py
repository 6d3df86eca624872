"""Measure the training speed and memory of one device at several batch sizes.

    python profile_gpu.py --model yolov8m-seg.pt --batch-sizes 4 8 16 32 64

The steps are real training steps on synthetic images, so data loading is not measured. Without a
GPU the CPU is profiled. The most expensive operators at the best batch size are listed.
"""

from dataclasses import asdict

from yolo_seg_ddp.measure.options import ProfileConfig
from yolo_seg_ddp.utils.config import parse_config, show_help
from yolo_seg_ddp.utils.options import to_dict

if __name__ == "__main__":
    show_help(ProfileConfig, __doc__)

# --- the command, which needs PyTorch

import json
from pathlib import Path

import torch

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.measure.plots import plot_profile
from yolo_seg_ddp.measure.profiling import (
    BatchProfile,
    batch_for,
    best_profile,
    memory_of,
    profile_batch,
    profile_operators,
    profile_table,
    profile_until_full,
    verdict_lines,
)
from yolo_seg_ddp.measure.step_timer import build_training
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import choose_device, choose_precision, seed_everything, tune_device
from yolo_seg_ddp.utils.environment import environment_report
from yolo_seg_ddp.utils.errors import UserError, run_script
from yolo_seg_ddp.utils.files import output_folder, write_text_atomic
from yolo_seg_ddp.utils.text import format_bytes
from yolo_seg_ddp.yolo.model import build_model, weights_or_description


def main() -> int:
    """Profile; return the exit code."""
    config = parse_config(ProfileConfig, __doc__)
    folder = output_folder(config.output)
    device = choose_device(config.device, 0)
    is_gpu = device.type == "cuda"
    tune_device(device, deterministic=False, fixed_shapes=True)
    if is_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(
        config.threads or choose_threads_and_workers(1, device_type=device.type)[0]
    )
    seed_everything(0)
    precision = choose_precision(config.amp, device)
    capacity_bytes = memory_of(device)
    source, note = weights_or_description(config.model)
    model = build_model(source, load_dataset_yaml(DEFAULT_DATASET_YAML).names)
    introduction = [describe(config, device, precision.name), *([note] if note else [])]
    if not is_gpu:
        introduction.append("No GPU is profiled: peak memory is the whole process's so far (RSS)")
    print("\n".join(introduction), flush=True)

    engine = build_training(model, device, precision)
    warmup = 5 if is_gpu else 1
    steps = config.steps or (20 if is_gpu else 4)

    def measure(batch_size: int) -> BatchProfile:
        return profile_batch(engine, batch_size, config.img_size, warmup, steps)

    profiles, ended = profile_until_full(config.batch_sizes, measure, announce)
    if not profiles:
        smallest = min(config.batch_sizes)
        raise UserError(
            f"--batch-sizes {smallest}: does not fit at {config.img_size} pixels; try a smaller one"
        )
    best = best_profile(profiles, capacity_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.json" if config.trace else None
    operators = profile_operators(
        engine, batch_for(engine, best.batch_size, config.img_size), 3 if is_gpu else 1, trace
    )
    report = [profile_table(profiles), "", *verdict_lines(profiles, ended, capacity_bytes), ""]
    report += [f"Most expensive operators at batch {best.batch_size}, by own time:", operators]
    print("\n".join(["", *report]))

    environment = environment_report()
    machine = [f"{name}: {value}" for name, value in environment.items()]
    text = "\n".join([*introduction, "Times are ms per step.", "", *report, *machine, ""])
    write_text_atomic(folder / "profiling_report.txt", text)
    record = {
        "environment": environment,
        "config": to_dict(config),
        "best_batch_size": best.batch_size,
        "largest_batch_size": profiles[-1].batch_size,
        "ended_because": ended,
        "capacity_bytes": capacity_bytes,
        "profiles": [
            {**asdict(one), "step_ms": one.step_ms, "images_per_s": one.images_per_s}
            for one in profiles
        ],
    }
    write_text_atomic(folder / "profile.json", json.dumps(record, indent=2) + "\n")
    plot_profile(profiles, best, introduction[0], folder / "gpu_profile.png")
    names = (
        "gpu_profile.png",
        "profiling_report.txt",
        "profile.json",
        *(("trace.json",) if trace else ()),
    )
    print(f"Written: {', '.join(str(folder / name) for name in names)}")
    return 0


def describe(config: ProfileConfig, device: torch.device, precision: str) -> str:
    """Return one line with the model, the input size, the precision and the device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        place = f"{properties.name} ({format_bytes(properties.total_memory)})"
    else:
        place = f"the CPU ({torch.get_num_threads()} threads)"
    computed_in = "fp32" if precision == "off" else precision
    return (
        f"Training {Path(config.model).stem} at {config.img_size} pixels in {computed_in} on "
        f"{place}"
    )


def announce(profile: BatchProfile) -> None:
    """Print the speed at a batch size."""
    print(f"  batch {profile.batch_size}: {profile.images_per_s:.1f} images/s", flush=True)


if __name__ == "__main__":
    run_script(main)
