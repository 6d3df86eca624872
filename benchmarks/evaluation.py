"""Measure the speed-up of an evaluation on several processes: one thread each on a CPU, one device each on GPUs.

    python benchmarks/evaluation.py --model models/demo/best.pt --data data/demo/processed/dataset.yaml

Each process evaluates its share of the same photographs, without loader processes, and the partial results are merged, as
in `evaluate_model.py`. Start-up, a first pass that fills the caches, and writing files are not timed. Each round measures
every number of processes. The last line is the speed-up of the most processes over the fewest.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist

from benchmarks.results import write_results
from utils.common.config import Options, option, parse_config
from utils.common.devices import choose_device, peak_memory_bytes
from utils.common.environment import prepare_environment
from utils.common.errors import run_script
from utils.common.text import format_table
from utils.data.dataset import SegmentationDataset, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.loader import ShardBatches, get_dataloader
from utils.distributed import all_reduce_sum, barrier, read_rank_environment
from utils.distributed.rank_processes import join_ranks, read_job, run_ranks, write_answer
from utils.evaluation.evaluate import evaluate
from utils.yolo.loss26 import loss_for
from utils.yolo.model import class_names, load_weights
from utils.yolo.trained import trained_size_px

RANK_CODE = "from benchmarks.evaluation import measure; run_script(measure)"


@dataclass(frozen=True)
class EvaluationSpeedConfig(Options):
    model: str = option("models/demo/best.pt", "trained model")
    data: str = option("data/demo/processed/dataset.yaml", "data-set YAML", metavar="YAML")
    split: str = option("val", "which split", choices=("train", "val", "test"))
    batch_size: int = option(16, "images per process and pass through the network", at_least=1)
    processes: tuple[int, ...] = option((1, 2), "numbers of processes to compare", at_least=1)
    rounds: int = option(3, "rounds; the median counts", at_least=1)
    timeout_s: int = option(600, "longest time a measurement may take, in seconds", at_least=1)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    json: str | None = option(None, "write the results here", metavar="FILE")


def main() -> int:
    """Measure every number of processes in turn; return the exit code."""
    config = parse_config(EvaluationSpeedConfig, "Measure the speed-up of an evaluation on several processes")
    counts = sorted(set(config.processes))
    times: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for _ in range(config.rounds):
        for count in counts:
            times[count].append(run_ranks(RANK_CODE, count, asdict(config), config.timeout_s)[0])
    rows = [summarise(count, times[count], times[counts[0]]) for count in counts]
    print(format_table(list(rows[0]), [[f"{value:.4g}" for value in row.values()] for row in rows]))
    ratio = rows[-1]["speed-up"]
    if config.json:
        write_results(config.json, config, runs=times, ratio=ratio)
    print(f"ratio {ratio:.2f}")
    return 0


def measure() -> None:
    """Run one rank: evaluate once to fill the caches, then a second time with a clock."""
    prepare_environment()
    config, ranks = EvaluationSpeedConfig(**read_job()), read_rank_environment()
    device = choose_device(config.device, ranks.local_rank)
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    model = load_weights(config.model).to(device, memory_format=torch.channels_last)
    dataset = SegmentationDataset(read_photos(load_dataset_yaml(config.data), config.split), trained_size_px(model))
    batches = ShardBatches(len(dataset), config.batch_size, ranks.rank, ranks.world_size)
    loader = get_dataloader(dataset, batches, 0, device.type == "cuda")
    criterion = loss_for(model)
    join_ranks(device, config.timeout_s)
    for _ in range(2):
        barrier()
        start_s = time.perf_counter()
        evaluation = evaluate(model, loader, class_names(model), criterion, device)
        barrier()
        seconds = time.perf_counter() - start_s
    memory_mb = all_reduce_sum(torch.tensor([peak_memory_bytes(device) / 1e6], device=device)).item()
    found = {"images": evaluation.metrics["num_images"], "mask_map50_95": evaluation.metrics["mask_map50_95"]}
    write_answer({"seconds": seconds, "memory_mb": memory_mb, **found})
    dist.destroy_process_group()


def summarise(count: int, mine: list[dict[str, Any]], fewest: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row: medians over the rounds, and the speed-up over the fewest processes of the same round."""
    return {
        "processes": count,
        "images/s": statistics.median(run["images"] / run["seconds"] for run in mine),
        "speed-up": statistics.median(base["seconds"] / run["seconds"] for run, base in zip(mine, fewest, strict=True)),
        "memory of all, MB": max(run["memory_mb"] for run in mine),
        "mask mAP50-95": mine[0]["mask_map50_95"],
    }


if __name__ == "__main__":
    run_script(main)
