"""The size, memory and speed of the networks: `python benchmarks/models.py`, one row for each
family and size.

Each network, with fresh weights of 8 classes and BatchNorm folded into the convolutions, computes
one square picture in float32 with one thread, in its own process. Time is the processor's, the
least of `--rounds`; memory is the process's peak above an idle one.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# started by its path: Python would search this folder instead of the project's
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from benchmarks.results import results_file, write_results
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.cores import peak_process_bytes
from yolo_seg_ddp.utils.errors import run_script
from yolo_seg_ddp.utils.options import INPUT_SIZE, Options, option
from yolo_seg_ddp.utils.text import format_table
from yolo_seg_ddp.yolo.model import build_model, copy_for_prediction


@dataclass(frozen=True)
class ModelsConfig(Options):
    models: tuple[str, ...] = option(
        tuple(
            f"{family}{size}-seg.yaml"
            for family in ("yolov8", "yolo11", "yolo12", "yolo26")
            for size in "nsml"
        ),
        "descriptions of networks",
    )
    img_size: int = option(
        640, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE
    )
    rounds: int = option(5, "pictures of each network", at_least=1)
    output: str = option("outputs/benchmarks/models", "folder for results.json", metavar="DIR")
    json: str | None = option(
        None, "write the results here; unset: results.json in --output", metavar="FILE"
    )


def measure(name: str, img_size: int, rounds: int) -> dict[str, Any]:
    """Return the parameters of a network, and what one picture takes."""
    torch.set_num_threads(1)
    model = build_model(name, tuple("abcdefgh"))
    parameters = sum(weight.numel() for weight in model.parameters())
    before_bytes = peak_process_bytes()
    network = copy_for_prediction(model.eval())
    picture = torch.rand(1, 3, img_size, img_size).to(memory_format=torch.channels_last)
    times_s = []
    with torch.inference_mode():
        for _ in range(rounds + 1):  # the first one prepares
            start_s = time.process_time()
            network(picture)
            times_s.append(time.process_time() - start_s)
    memory_bytes = peak_process_bytes() - before_bytes
    return {
        "model": name,
        "parameters": parameters,
        "ms": 1000 * min(times_s[1:]),
        "memory_bytes": memory_bytes,
    }


def main() -> int:
    """Measure each network in a new process; return the exit code."""
    config = parse_config(
        ModelsConfig, "Measure the networks' sizes, memory and speed on one CPU core"
    )
    rows = []
    for name in config.models:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (name, config.img_size, config.rounds)))
        write_results(results_file(config), config, rows=rows)
    lines = [
        [
            row["model"],
            f"{row['parameters'] / 1e6:.1f}",
            f"{row['memory_bytes'] / 2**20:.0f}",
            f"{row['ms']:.0f}",
        ]
        for row in rows
    ]
    print(format_table(["model", "million parameters", "MiB", "ms per picture"], lines))
    return 0


if __name__ == "__main__":
    run_script(main)
