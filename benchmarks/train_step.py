"""Time training steps of this project and of Ultralytics in turn, on the same batch, from the same
kind of model.

    python benchmarks/train_step.py --img-size 256 --threads 1
    python benchmarks/train_step.py --objects 60 --img-size 640 --batch-size 4
    python benchmarks/train_step.py --data data/processed/dataset.yaml

Each side takes steps as its trainer does by default. On a CPU, Ultralytics computes in float32, and
this project in bf16 where the processor supports it. With --data the batch is the first one of this
project's loader. The last line is this project's images/s divided by Ultralytics'.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# started by its path: Python would search this folder instead of the project's
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from benchmarks.results import write_results
from benchmarks.train_step_sides import OurSide, Side, TheirSide
from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.measure.step_ranges import training_loader
from yolo_seg_ddp.measure.step_timer import PHASES
from yolo_seg_ddp.measure.synthetic import synthetic_batch, training_colours
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import (
    choose_device,
    choose_precision,
    keep_freed_memory,
    seed_everything,
)
from yolo_seg_ddp.utils.errors import run_script
from yolo_seg_ddp.utils.options import INPUT_SIZE, PRECISION_CHOICES, Options, option
from yolo_seg_ddp.utils.text import format_table
from yolo_seg_ddp.yolo.model import build_model, weights_or_description

OURS, THEIRS = "project", "ultralytics"

Json = dict[str, Any]


@dataclass(frozen=True)
class StepConfig(Options):
    model: str = option(
        "yolov8n-seg.yaml",
        "model to train: a .pt file, or yolov8, yolo11, yolo12 or yolo26{n,s,m,l,x}-seg.yaml",
    )
    img_size: int = option(
        640, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE
    )
    batch_size: int = option(16, "images per step", at_least=1)
    objects: int = option(
        20, "labelled objects in each image; without --data", at_least=0, needs="not data"
    )
    steps: int = option(5, "steps of each side per round", at_least=1)
    warmup: int = option(1, "steps before them in each round", at_least=1)
    rounds: int = option(3, "rounds; the median of all steps counts", at_least=1)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    optimizer: str = option("musgd", "optimizer of both sides", choices=("musgd", "adamw"))
    amp: str = option("auto", "this project's mixed precision", choices=PRECISION_CHOICES)
    threads: int | None = option(
        None, "compute threads; unset: as many as the trainer takes", at_least=1
    )
    data: str | None = option(None, "data-set YAML: train on its first batch", metavar="YAML")
    json: str | None = option(None, "write the results here", metavar="FILE")


def main() -> int:
    """Run the measurement; return the exit code."""
    config = parse_config(StepConfig, "Time training steps of this project and of Ultralytics")
    device = choose_device(config.device, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        # For both sides, which share the process.
        keep_freed_memory()
    torch.set_num_threads(
        config.threads or choose_threads_and_workers(1, device_type=device.type)[0]
    )
    seed_everything(0)
    precision = choose_precision(config.amp, device)
    names = load_dataset_yaml(Path(config.data or DEFAULT_DATASET_YAML)).names
    source, note = weights_or_description(config.model)
    model = build_model(source, names)
    if config.data:
        pin_memory = device.type == "cuda"
        batch = next(
            iter(training_loader(config.data, config.img_size, config.batch_size, 0, pin_memory))
        )
    else:
        objects = config.objects
        colours = training_colours(device)
        batch = synthetic_batch(
            config.batch_size,
            config.img_size,
            len(names),
            objects_per_image=objects,
            colours=colours,
        )
    if note:
        print(note)
    print(
        f"{len(batch)} images of {config.img_size} px with {len(batch.boxes) / len(batch):.1f} "
        f"objects each, on {device} "
        f"({torch.get_num_threads()} threads); this project in {precision.name}",
        flush=True,
    )
    ours = OurSide(copy.deepcopy(model), batch, device, precision, config.optimizer)
    figures = measure(
        {OURS: ours, THEIRS: TheirSide(model, batch, device, config.optimizer)}, len(batch), config
    )
    ratio = figures[OURS]["images_per_s"] / figures[THEIRS]["images_per_s"]
    if config.json:
        write_results(config.json, config, sides=figures, ratio=ratio)
    print(f"{report(figures)}\nratio {ratio:.2f}")
    return 0


def measure(sides: dict[str, Side], num_images: int, config: StepConfig) -> dict[str, Json]:
    """Train with both sides in turn; return each side's medians: ms per
    phase and step, images/s.
    """
    steps: dict[str, list[np.ndarray]] = {name: [] for name in sides}
    for number in range(config.rounds):
        # The sides take turns in going first, so that a drift of the machine's speed favours
        # neither.
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            steps[name].append(sides[name].phases_ms(config.warmup, config.steps))
    figures: dict[str, Json] = {}
    for name in sides:
        phases_ms = np.concatenate(steps[name])
        step_ms = float(np.median(phases_ms.sum(1)))
        medians = dict(zip(PHASES, np.median(phases_ms, 0).tolist(), strict=True))
        figures[name] = {
            "phase_ms": medians,
            "step_ms": step_ms,
            "loss_share": float(np.median(phases_ms[:, PHASES.index("loss")] / phases_ms.sum(1))),
            "images_per_s": 1000 * num_images / step_ms,
        }
    return figures


def report(figures: dict[str, Json]) -> str:
    """Return the figures as a table, one row per side; times are ms per step."""
    header = ["", *PHASES, "step", "loss share", "images/s"]
    rows = []
    for name, side in figures.items():
        times = [*side["phase_ms"].values(), side["step_ms"]]
        last = [f"{side['loss_share']:.1%}", f"{side['images_per_s']:.1f}"]
        rows.append([name, *(f"{value:.1f}" for value in times), *last])
    return format_table(header, rows)


if __name__ == "__main__":
    run_script(main)
