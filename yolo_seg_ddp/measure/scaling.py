"""The scaling benchmark: train on several numbers of processes, each with the same batch, and
summarise the runs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.measure.profiling import OBJECTS_PER_IMAGE
from yolo_seg_ddp.measure.step_ranges import (
    COMMUNICATION,
    DATA,
    MarkedLoader,
    RangeTimer,
    timed_collectives,
    training_loader,
)
from yolo_seg_ddp.measure.step_timer import PHASES, Repeated, build_training, run_training_steps
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.utils.devices import choose_device, choose_precision, seed_everything, tune_device
from yolo_seg_ddp.utils.distributed import barrier, read_rank_environment
from yolo_seg_ddp.utils.distributed.rank_processes import (
    join_ranks,
    read_job,
    run_ranks,
    write_answer,
)
from yolo_seg_ddp.utils.errors import explain_out_of_memory
from yolo_seg_ddp.utils.text import format_table
from yolo_seg_ddp.yolo.model import build_model

_RANK_CODE = "from yolo_seg_ddp.measure.scaling import be_a_rank; run_script(be_a_rank)"
# Column of a run -> its title: the parts that add up to a step's time.
STEP_PARTS = {
    "compute_ms": "compute",
    "communication_ms": "communication",
    "data_ms": "data wait",
    "waiting_ms": "imbalance",
}
Run = dict[str, Any]


@dataclass(frozen=True)
class RankJob:
    """The job of every rank of one run."""

    model: str
    batch_size_per_gpu: int
    img_size: int
    warmup_steps: int
    steps: int
    amp: str
    device: str
    timeout_s: float
    # data-set YAML to train from; unset: the same synthetic batch in every step
    data: str | None = None
    num_workers: int = 0


# --- in the process that starts the ranks ---------------------------------------------------------


def run_benchmark(
    job: RankJob, counts: Sequence[int], repeats: int, on_run: Callable[[Run], None]
) -> list[Run]:
    """Run every process count `repeats` times; return one record per run. Raises UserError when a
    run fails.

    Each round measures every count once, so that other load on the machine affects all counts
    alike.
    """
    runs: list[Run] = []
    for repeat in range(1, repeats + 1):
        for count in counts:
            runs.append(
                {"processes": count, "repeat": repeat, **summarise_run(run_job(job, count))}
            )
            on_run(runs[-1])
    return runs


def run_job(job: RankJob, world_size: int) -> list[dict[str, Any]]:
    """Run a job on `world_size` ranks; return what `be_a_rank` of each wrote. Raises UserError."""
    advice = "raise --timeout-s, or lower --steps or --batch-size"
    return run_ranks(_RANK_CODE, world_size, asdict(job), job.timeout_s, timeout_advice=advice)


def summarise_run(answers: Sequence[dict[str, Any]]) -> Run:
    """Reduce the ranks' answers to one record. Times are ms per step, means over the ranks; a step
    is the slowest rank's.

    Communication is the time that the last rank to arrive spends in a collective. Waiting is the
    time that the other ranks spend in it beyond that.
    """
    num_steps = len(answers[0]["steps"])

    def spent(answer: dict[str, Any], *names: str) -> list[float]:
        return [ms for step in answer["steps"] for name, ms in step if name in names]

    # (ranks, collectives)
    in_collectives = np.array([spent(answer, COMMUNICATION) for answer in answers])
    # The last rank to arrive does not wait.
    transfer = in_collectives.min(0)
    step_ms = (
        max(sum(spent(answer, DATA, *PHASES, COMMUNICATION)) for answer in answers) / num_steps
    )
    global_batch_size = sum(answer["num_images"] for answer in answers) / num_steps
    return {
        "global_batch_size": round(global_batch_size),
        "images_per_s": global_batch_size / step_ms * 1000,
        "step_ms": step_ms,
        "compute_ms": fmean(sum(spent(answer, *PHASES)) for answer in answers) / num_steps,
        "communication_ms": float(transfer.sum()) / num_steps,
        "data_ms": fmean(sum(spent(answer, DATA)) for answer in answers) / num_steps,
        "waiting_ms": float((in_collectives - transfer).sum()) / num_steps / len(answers),
    }


def summarise(runs: Iterable[Run]) -> list[Run]:
    """Return one row per process count: medians over the rounds, speed-up and efficiency.

    Speed-up is images/s divided by that of the fewest processes in the same round. Efficiency is
    speed-up divided by the factor by which the number of processes grew.
    """
    by_count: dict[int, list[Run]] = {}
    for run in runs:
        by_count.setdefault(run["processes"], []).append(run)
    fewest = min(by_count)
    rows = []
    for count, mine in sorted(by_count.items()):
        pairs = zip(mine, by_count[fewest], strict=True)
        speed_up = median(run["images_per_s"] / first["images_per_s"] for run, first in pairs)
        row = {name: median(run[name] for run in mine) for name in mine[0] if name != "repeat"}
        rows.append({**row, "speed_up": speed_up, "efficiency": speed_up * fewest / count})
    return rows


def scaling_table(rows: Sequence[Run]) -> str:
    """Return the rows as a table; the parts of a step are shares of its time."""
    lines = []
    for row in rows:
        cells = [
            f"{row['images_per_s']:.1f}",
            f"{row['speed_up']:.2f}x",
            f"{row['efficiency']:.0%}",
        ]
        cells += [
            f"{row['step_ms']:.1f}",
            *(f"{row[name] / row['step_ms']:.1%}" for name in STEP_PARTS),
        ]
        lines.append([row["processes"], row["global_batch_size"], *cells])
    header = [
        "processes",
        "batch",
        "images/s",
        "speed-up",
        "efficiency",
        "ms/step",
        *STEP_PARTS.values(),
    ]
    return format_table(header, lines, right_from=0)


# --- in a rank ------------------------------------------------------------------------------------


def be_a_rank() -> None:
    """Train the job's steps; write the ranges of each and the number of images.

    Every rank must reach this.
    """
    job = RankJob(**read_job())
    ranks = read_rank_environment()
    # Otherwise a single process would use all cores.
    torch.set_num_threads(1)
    device = choose_device(job.device, ranks.local_rank)
    is_gpu = device.type == "cuda"
    tune_device(device, deterministic=False, fixed_shapes=True)
    with explain_out_of_memory(
        f"{job.batch_size_per_gpu} images do not fit the GPU; use a smaller --batch-size"
    ):
        if ranks.world_size > 1:
            join_ranks(device, job.timeout_s)
        seed_everything(0)
        model = build_model(
            job.model, load_dataset_yaml(Path(job.data) if job.data else DEFAULT_DATASET_YAML).names
        )
        if job.data:
            of_rank = {"rank": ranks.rank, "world_size": ranks.world_size}
            size = (job.img_size, job.batch_size_per_gpu)
            loader: Any = training_loader(job.data, *size, job.num_workers, is_gpu, **of_rank)
        else:
            size = (job.batch_size_per_gpu, job.img_size)
            batch = synthetic_batch(
                *size, model.nc, objects_per_image=OBJECTS_PER_IMAGE, seed=ranks.rank
            )
            loader = Repeated(batch, 1)
        engine = build_training(model, device, choose_precision(job.amp, device))
        barrier()
        timer = RangeTimer(device)
        marked = MarkedLoader(loader, job.warmup_steps + job.steps + 1, timer.mark)
        with timed_collectives(timer, engine.model):
            run_training_steps(engine, marked, timer.mark)
    answer = {
        "steps": timer.steps()[-job.steps :],
        "num_images": sum(marked.num_images[job.warmup_steps : -1]),
    }
    # Not after a failure: leaving the group may wait for the other ranks, which would delay the
    # report.
    if dist.is_initialized():
        dist.destroy_process_group()
    write_answer(answer)
