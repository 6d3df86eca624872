"""One rank of the scaling benchmark; `utils.measure.scaling.run_job` starts it."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.common.devices import choose_device, choose_precision, seed_everything, tune_device
from utils.common.errors import explain_out_of_memory
from utils.data.dataset import Batch
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.data.synthetic import synthetic_batch
from utils.distributed import RankInfo, barrier, read_rank_environment
from utils.distributed.ddp import gradient_bytes
from utils.distributed.rank_processes import join_ranks, read_job, write_answer
from utils.engine import TrainingEngine
from utils.engine.step_timer import Repeated, run_training_steps
from utils.measure.step_ranges import DATA, MarkedLoader, RangeTimer, timed_collectives, training_loader
from utils.yolo.model import build_model
from utils.yolo.training_step import build_training

REDUCE_WARMUP, REDUCE_REPEATS = 3, 10
REDUCE_BYTES = tuple(2**power for power in range(10, 27, 2))  # 1 KiB to 64 MiB; the gradients' size is added


@dataclass(frozen=True)
class RankJob:
    """The job of every rank of one run. The ranks share `global_batch_size` as evenly as possible."""

    model: str
    global_batch_size: int
    img_size: int
    objects_per_image: int
    warmup_steps: int
    steps: int
    amp: str
    device: str
    timeout_s: float
    data: str | None = None  # data-set YAML to train from; unset: the same synthetic batch in every step
    num_workers: int = 0
    threads: int = 1


def main() -> None:
    """Be one rank."""
    job = RankJob(**read_job())
    ranks = read_rank_environment()
    torch.set_num_threads(job.threads)  # otherwise a single process would use all cores
    device = choose_device(job.device, ranks.local_rank)
    tune_device(device, deterministic=False, fixed_shapes=True)
    too_large = f"{job.global_batch_size} images over {ranks.world_size} process(es) do not fit the GPU; use a smaller --batch-size"
    with explain_out_of_memory(too_large):
        if ranks.world_size > 1:
            join_ranks(device, job.timeout_s)
        answer = measure(job, ranks, device)
    # Not after a failure: leaving the group may wait for the other ranks, which would delay the report.
    if dist.is_initialized():
        dist.destroy_process_group()
    write_answer(answer)


def measure(job: RankJob, ranks: RankInfo, device: torch.device) -> dict[str, Any]:
    """Train, then time the all-reduce by itself. Every rank must reach this.

    Returns for the steps `ranges_ms` (steps, 7), `collectives` as of `RangeTimer.ranges`, and their total duration `wall_ms` by the
    host's clock; and `allreduces`: bytes and the ms of each repeat.
    """
    seed_everything(0)
    share = len(range(ranks.rank, job.global_batch_size, ranks.world_size))
    names = load_dataset_yaml(Path(job.data) if job.data else DEFAULT_DATASET_YAML).names
    model = build_model(job.model, names)
    loader: Any = None
    if job.data:
        largest_share, is_gpu = -(-job.global_batch_size // ranks.world_size), device.type == "cuda"
        of_rank = {"rank": ranks.rank, "world_size": ranks.world_size}
        loader = training_loader(job.data, job.img_size, largest_share, job.num_workers, is_gpu, **of_rank)
        batch = next(iter(loader))
    else:
        batch = synthetic_batch(share, job.img_size, model.nc, objects_per_image=job.objects_per_image, seed=ranks.rank)
    engine = build_training(model, device, choose_precision(job.amp, device))
    num_bytes = gradient_bytes(model)
    answer = _train(engine, loader, batch, job)
    sizes = sorted({*REDUCE_BYTES, num_bytes}) if ranks.world_size > 1 else []
    return {
        **answer,
        "allreduces": [{"bytes": size, "ms": _time_allreduce(size, device)} for size in sizes],
        "gradient_bytes": num_bytes,
    }


def _train(engine: TrainingEngine, loader: Any, batch: Batch, job: RankJob) -> dict[str, Any]:
    """Train the job's steps after the warm-up; return their part of the answer."""
    barrier()
    timer = RangeTimer(engine.device)
    wall = _WallClock(timer, job.warmup_steps, job.steps)
    marked = MarkedLoader(loader or Repeated(batch, 1), job.warmup_steps + job.steps + 1, wall.mark)
    with timed_collectives(timer, engine.model):
        run_training_steps(engine, marked, wall.mark)
    ranges_ms, collectives = timer.ranges()
    return {
        "ranges_ms": ranges_ms[-job.steps :].tolist(),
        "collectives": collectives[-job.steps :],
        "wall_ms": wall.elapsed_ms,
        "num_images": sum(marked.num_images[job.warmup_steps : -1]),
    }


class _WallClock:
    """Forwards marks, and times by the host's clock from the first to the last measured step."""

    def __init__(self, timer: RangeTimer, warmup_steps: int, steps: int) -> None:
        self.timer = timer
        self.elapsed_ms = 0.0
        self._ends = (warmup_steps, warmup_steps + steps)
        self._steps = 0

    def mark(self, phase: str) -> None:
        """Begin `phase`."""
        if phase == DATA:
            if self._steps in self._ends:
                if self.timer.device.type == "cuda":
                    torch.cuda.synchronize(self.timer.device)
                self.elapsed_ms = time.perf_counter() * 1000 - self.elapsed_ms
            self._steps += 1
        self.timer.mark(phase)


def _time_allreduce(num_bytes: int, device: torch.device) -> list[float]:
    """Sum a float32 buffer of `num_bytes` over all ranks several times; return the ms of each."""
    buffer = torch.zeros(num_bytes // 4, device=device)
    durations_ms = []
    for _ in range(REDUCE_WARMUP + REDUCE_REPEATS):
        barrier()  # the host reads its result, so the device is idle afterwards
        start_s = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations_ms.append((time.perf_counter() - start_s) * 1000)
    return durations_ms[REDUCE_WARMUP:]
