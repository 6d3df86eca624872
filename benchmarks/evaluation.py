"""Measure what more processes bring to an evaluation: one thread each on a CPU, one device each on GPUs.

    python benchmarks/evaluation.py --model models/demo/best.pt --data data/demo/processed/dataset.yaml

Each process evaluates its share of the same photographs, without loader processes, and the partial results are merged, as in
`evaluate_model.py`; start-up, decoding into the page cache and the written files are not timed. The numbers of processes
take turns. The last line is the speed-up of the most processes over one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path: this folder stands where the project's should
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from utils.common.config import Options, option, parse_config, to_dict
from utils.common.devices import choose_device, peak_memory_bytes
from utils.common.environment import environment_report, prepare_environment
from utils.common.errors import UserError, run_script
from utils.common.files import write_text_atomic
from utils.common.signals import die_with_parent
from utils.common.text import format_table
from utils.data.dataset import SegmentationDataset, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.loader import ShardBatches, get_dataloader
from utils.distributed import all_reduce_sum, barrier, cleanup_ddp, read_rank_environment, setup_ddp
from utils.evaluation.evaluate import evaluate
from utils.yolo.loss import SegmentationLoss
from utils.yolo.model import class_names, load_weights, trained_size_px

JOB = "EVALUATION_BENCHMARK_JOB"  # in a rank's environment: the file with its options, beside which it answers


@dataclass(frozen=True)
class EvaluationSpeedConfig(Options):
    """Options of `benchmarks/evaluation.py`."""

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
    """Measure, or be one of the measured; return the exit code."""
    prepare_environment()
    if JOB in os.environ:
        return measure(Path(os.environ[JOB]))
    config = parse_config(EvaluationSpeedConfig, "Measure what more processes bring to an evaluation")
    counts = sorted(set(config.processes))
    times: dict[int, list[dict[str, Any]]] = {count: [] for count in counts}
    for _ in range(config.rounds):
        for count in counts:
            times[count].append(run_ranks(config, count))
    rows = [summarise(count, times[count], times[counts[0]]) for count in counts]
    print(format_table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]))
    ratio = rows[-1]["speed-up"]
    if config.json:
        record = {"config": to_dict(config), "environment": environment_report(), "runs": times, "ratio": ratio}
        write_text_atomic(Path(config.json), json.dumps(record, indent=2) + "\n")
    print(f"ratio {ratio:.2f}")
    return 0


def run_ranks(config: EvaluationSpeedConfig, count: int) -> dict[str, Any]:
    """Evaluate once on `count` processes. Raises UserError with the last words of the one that failed."""
    with tempfile.TemporaryDirectory(prefix="benchmark-evaluation-") as name:
        job = Path(name, "job.json")
        job.write_text(json.dumps(asdict(config)), encoding="utf-8")
        launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        done = subprocess.run(
            [sys.executable, "-m", *launcher, str(Path(__file__).resolve())],
            env={**os.environ, JOB: str(job), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=config.timeout_s,
            check=False,
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error: " in line.lower()]
            raise UserError(f"{count} process(es) failed: {(errors or done.stderr.splitlines() or ['?'])[0]}")
        answer: dict[str, Any] = json.loads(Path(name, "answer.json").read_text(encoding="utf-8"))
        return answer


def measure(job: Path) -> int:
    """Be one rank: evaluate once to fill caches, once to be timed; rank 0 writes what all took."""
    config = EvaluationSpeedConfig(**json.loads(job.read_text(encoding="utf-8")))
    ranks = read_rank_environment()
    die_with_parent()
    device = choose_device(config.device, ranks.local_rank)
    torch.set_num_threads(1 if device.type == "cpu" else torch.get_num_threads())
    model = load_weights(config.model).to(device, memory_format=torch.channels_last)
    dataset = SegmentationDataset(read_photos(load_dataset_yaml(config.data), config.split), trained_size_px(model))
    batches = ShardBatches(len(dataset), config.batch_size, ranks.rank, ranks.world_size)
    loader = get_dataloader(dataset, batches, 0, device.type == "cuda")
    criterion = SegmentationLoss(model)
    setup_ddp(device, ranks)
    try:
        for _ in range(2):
            barrier()
            start_s = time.perf_counter()
            evaluation = evaluate(model, loader, class_names(model), criterion, device)
            barrier()
            seconds = time.perf_counter() - start_s
        memory_mb = all_reduce_sum(torch.tensor([peak_memory_bytes(device) / 1e6], device=device))
        answer = {
            "seconds": seconds,
            "memory_mb": memory_mb.item(),
            "images": evaluation.metrics["num_images"],
            "mask_map50_95": evaluation.metrics["mask_map50_95"],
        }
        if ranks.is_main:
            write_text_atomic(job.with_name("answer.json"), json.dumps(answer))
    finally:
        cleanup_ddp()
    return 0


def summarise(count: int, mine: list[dict[str, Any]], fewest: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row: medians over the rounds, and the speed-up against the fewest processes of the same round."""
    return {
        "processes": count,
        "images/s": statistics.median(run["images"] / run["seconds"] for run in mine),
        "speed-up": statistics.median(base["seconds"] / run["seconds"] for run, base in zip(mine, fewest, strict=True)),
        "memory of all, MB": max(run["memory_mb"] for run in mine),
        "mask mAP50-95": mine[0]["mask_map50_95"],
    }


def _cell(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


if __name__ == "__main__":
    run_script(main)
