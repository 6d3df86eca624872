"""One rank of the scaling benchmark; `utils.measure.scaling.run_job` starts it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from utils.common.devices import choose_device, choose_precision, seed_everything, tune_device
from utils.common.errors import explain_out_of_memory
from utils.data.dataset import Batch
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.distributed import RankInfo, barrier, read_rank_environment
from utils.distributed.ddp import gradient_bytes
from utils.distributed.rank_processes import join_ranks, read_job, write_answer
from utils.engine import TrainingEngine
from utils.measure.step_ranges import DATA, MarkedLoader, RangeTimer, StepRanges, timed_collectives, training_loader
from utils.measure.step_timer import (
    Repeated,
    SegmentationStep,
    build_training,
    criterion_of,
    run_training_steps,
    time_training_steps,
)
from utils.measure.synthetic import synthetic_batch
from utils.yolo.loss import SegmentationLoss
from utils.yolo.model import build_model

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


@dataclass(frozen=True)
class Timed:
    """Steps with communication: their ranges, their total duration by the host's clock, and the images trained."""

    ranges: StepRanges
    wall_ms: float
    num_images: int


def main() -> None:
    """Be one rank."""
    job = RankJob(**read_job())
    ranks = read_rank_environment()
    torch.set_num_threads(1)  # otherwise a single process would use all cores
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
    """Train with and without communication, then time the all-reduce by itself. Every rank must reach this.

    Returns for the steps with communication `ranges_ms` (steps, 7), `collectives` as in `StepRanges`, and their total
    duration `wall_ms` by the host's clock; `alone_ms` of each step without communication (with one process: the same
    steps); and `allreduces`: bytes and the ms of each repeat.
    """
    seed_everything(0)
    share = len(range(ranks.rank, job.global_batch_size, ranks.world_size))
    names = load_dataset_yaml(Path(job.data) if job.data else DEFAULT_DATASET_YAML).names
    model = build_model(job.model, names)
    loader: Any = None
    if job.data:
        loader = training_loader(
            job.data,
            job.img_size,
            -(-job.global_batch_size // ranks.world_size),
            job.num_workers,
            device.type == "cuda",
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        batch = next(iter(loader))
    else:
        batch = synthetic_batch(share, job.img_size, model.nc, objects_per_image=job.objects_per_image, seed=ranks.rank)
    precision = choose_precision(job.amp, device)
    engine = build_training(model, device, precision)
    num_bytes = gradient_bytes(model)
    if ranks.world_size > 1:
        found, alone_ms = _time_with_and_without(engine, loader, batch, job)
        sizes = sorted({*REDUCE_BYTES, num_bytes})
        allreduces = [{"bytes": size, "ms": _time_allreduce(size, device).tolist()} for size in sizes]
    else:
        found = [_time_ranges(engine, loader, batch, job, job.steps)]
        alone_ms, allreduces = found[0].ranges.ranges_ms.sum(1), []
    return {
        "ranges_ms": np.concatenate([timed.ranges.ranges_ms for timed in found]).tolist(),
        "collectives": [step for timed in found for step in timed.ranges.collectives],
        "wall_ms": sum(timed.wall_ms for timed in found),
        "num_images": sum(timed.num_images for timed in found),
        "alone_ms": alone_ms.tolist(),
        "allreduces": allreduces,
        "gradient_bytes": num_bytes,
        "batch_size": share,
    }


def _time_with_and_without(
    engine: TrainingEngine, loader: Any, batch: Batch, job: RankJob
) -> tuple[list[Timed], np.ndarray]:
    """Return the ranges of two halves of steps with communication, and the ms of steps without, (steps,).

    The steps without communication run between the two halves: a drift of the machine's speed affects both kinds alike.
    """
    alone = _alone(engine)
    found: list[Timed] = []
    alone_ms: list[np.ndarray] = []
    half = -(-job.steps // 2)
    for communicates in (True, False, False, True):
        barrier()
        if communicates:
            found.append(_time_ranges(engine, loader, batch, job, half))
            continue
        # The engine's model is DDP: under no_sync it does not reduce the gradients.
        with engine.model.no_sync():  # type: ignore[operator]
            alone_ms.append(time_training_steps(alone, batch, job.warmup_steps, half).sum(1))
    return found, np.concatenate(alone_ms)


def _time_ranges(engine: TrainingEngine, loader: Any, batch: Batch, job: RankJob, steps: int) -> Timed:
    """Train `steps` steps after the warm-up and return their times."""
    timer = RangeTimer(engine.device)
    wall = _WallClock(timer, job.warmup_steps, steps)
    marked = MarkedLoader(loader or Repeated(batch, 1), job.warmup_steps + steps + 1, wall)
    with timed_collectives(timer, engine.model):
        run_training_steps(engine, marked, wall)
    ranges = timer.ranges()
    return Timed(
        StepRanges(ranges.ranges_ms[-steps:], ranges.collectives[-steps:]),
        wall.elapsed_ms,
        sum(marked.num_images[job.warmup_steps : -1]),
    )


class _WallClock:
    """Forwards marks, and times by the host's clock from the first to the last measured step."""

    def __init__(self, timer: RangeTimer, warmup_steps: int, steps: int) -> None:
        self.timer = timer
        self.elapsed_ms = 0.0
        self._ends = (warmup_steps, warmup_steps + steps)
        self._steps = 0

    def mark(self, phase: str) -> None:
        """See `utils.measure.step_timer.Marker`."""
        if phase == DATA:
            if self._steps in self._ends:
                if self.timer.device.type == "cuda":
                    torch.cuda.synchronize(self.timer.device)
                self.elapsed_ms = time.perf_counter() * 1000 - self.elapsed_ms
            self._steps += 1
        self.timer.mark(phase)


class LocalLoss:
    """The training loss of one rank by itself: its normalisers are not reduced over the ranks."""

    def __init__(self, criterion: SegmentationLoss) -> None:
        self.criterion = criterion

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss to differentiate."""
        sums = self.criterion.sums(outputs, targets)
        return sums.normalised(sums.normalisers).sum() * self.criterion.loss_scale


def _alone(engine: TrainingEngine) -> TrainingEngine:
    """Return the same training without any communication: no gradients, no normalisers, no batch statistics."""
    alone = TrainingEngine(
        engine.state.model, engine.device, engine.options, task=SegmentationStep(), distributed=False
    )
    alone.begin(engine.state.optimizer, LocalLoss(criterion_of(engine)))
    return alone


def _time_allreduce(num_bytes: int, device: torch.device) -> np.ndarray:
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
    return np.array(durations_ms[REDUCE_WARMUP:])
