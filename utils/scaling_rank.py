"""One rank of the scaling benchmark, started by `utils.scaling` alone.

The command line names a folder that holds job.json; the answer is rank<N>.json beside it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from utils.dataset import Batch
from utils.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.distributed import RankInfo, barrier, read_rank_environment
from utils.engine import TrainingEngine
from utils.errors import UserError
from utils.images import write_bytes_atomic
from utils.loss import SegmentationLoss
from utils.model import build_model
from utils.parallel import tune_device
from utils.runtime import choose_device, choose_precision, seed_everything
from utils.step_timer import PHASES, Training, build_training, time_training_steps
from utils.synthetic import synthetic_batch

REDUCE_WARMUP, REDUCE_REPEATS = 3, 10


@dataclass(frozen=True)
class RankJob:
    """What every rank of one run is told. `global_batch_size` is dealt out as evenly as it goes."""

    model: str
    global_batch_size: int
    img_size: int
    objects_per_image: int
    warmup_steps: int
    steps: int
    amp: str
    device: str
    timeout_s: float


def main() -> None:
    """Be one rank."""
    folder = Path(sys.argv[1])
    job = RankJob(**json.loads((folder / "job.json").read_text(encoding="utf-8")))
    ranks = read_rank_environment()
    torch.set_num_threads(1)  # alike for every number of processes, or one process would own all the cores
    device = choose_device(job.device, ranks.local_rank)
    tune_device(device, deterministic=False, fixed_shapes=True)
    try:
        _join(folder, job, ranks, device)
        answer = measure(job, ranks, device)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{job.global_batch_size} images over {ranks.world_size} process(es) do not fit the GPU; "
            "use a smaller --batch-size"
        ) from error
    # Not after a failure: leaving the group may wait for the others, and the benchmark would learn of it late.
    if dist.is_initialized():
        dist.destroy_process_group()
    write_bytes_atomic(folder / f"rank{ranks.rank}.json", json.dumps(answer).encode())


def measure(job: RankJob, ranks: RankInfo, device: torch.device) -> dict[str, Any]:
    """Train with all communication and with none, then time the all-reduce alone. Every rank must reach this.

    Returns ms of each step in `step_ms` and `compute_ms`, the mean `phase_ms` of the former, and `allreduce_ms` for a
    buffer of `gradient_bytes`; with one process `compute_ms` is `step_ms` and `allreduce_ms` is empty.
    """
    seed_everything(0)
    share = len(range(ranks.rank, job.global_batch_size, ranks.world_size))
    model = build_model(job.model, load_dataset_yaml(DEFAULT_DATASET_YAML).names)
    batch = synthetic_batch(share, job.img_size, model.nc, objects_per_image=job.objects_per_image, seed=ranks.rank)
    precision = choose_precision(job.amp, device)
    training = build_training(model, device, precision, local_rank=ranks.local_rank, world_size=ranks.world_size)
    num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters() if parameter.requires_grad)
    if ranks.world_size > 1:
        phases_ms, compute_ms = _time_with_and_without(training, batch, job)
        allreduce_ms = _time_allreduce(num_bytes, device)
    else:
        phases_ms = time_training_steps(training, batch, job.warmup_steps, job.steps)
        compute_ms, allreduce_ms = phases_ms.sum(1), np.zeros(0)
    return {
        "step_ms": phases_ms.sum(1).tolist(),
        "compute_ms": compute_ms.tolist(),
        "phase_ms": dict(zip(PHASES, phases_ms.mean(0).tolist(), strict=True)),
        "allreduce_ms": allreduce_ms.tolist(),
        "gradient_bytes": num_bytes,
        "batch_size": share,
    }


def _time_with_and_without(training: Training, batch: Batch, job: RankJob) -> tuple[np.ndarray, np.ndarray]:
    """Return the phases of steps with communication in ms (steps, 5), and the ms of steps without any (steps,).

    Two halves of each, with the ones without in the middle: a machine that grows slower or faster meanwhile does so
    for both alike.
    """
    alone = _alone(training)
    halves: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for communicates in (True, False, False, True):
        barrier()
        # The engine's model is DDP: under no_sync its hooks leave the gradients where they are.
        quiet = contextlib.nullcontext() if communicates else training.engine.model.no_sync()  # type: ignore[operator]
        with quiet:
            chosen = training if communicates else alone
            halves[communicates].append(time_training_steps(chosen, batch, job.warmup_steps, -(-job.steps // 2)))
    return np.concatenate(halves[True]), np.concatenate(halves[False]).sum(1)


class LocalLoss:
    """The training loss of one rank by itself: the same arithmetic, its normalisers not reduced over the ranks."""

    def __init__(self, criterion: SegmentationLoss) -> None:
        self.criterion = criterion

    def __call__(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Return the loss to differentiate."""
        sums = self.criterion.sums(outputs, targets)
        return sums.normalised(sums.normalisers).sum() * self.criterion.loss_scale


def _alone(training: Training) -> Training:
    """Return the same training without any communication: no gradients, no normalisers, no batch statistics."""
    engine = training.engine
    alone = TrainingEngine(
        model=engine.raw_model,
        device=engine.device,
        precision=engine.precision,
        use_ema=True,
        gradient_clip_val=engine.gradient_clip_val,
        tensorboard=False,
    )
    alone.log = engine.log
    return Training(alone, training.optimizer, LocalLoss(training.criterion))


def _time_allreduce(num_bytes: int, device: torch.device) -> np.ndarray:
    """Sum a float32 buffer of `num_bytes` over all ranks several times; return the ms of each."""
    buffer = torch.zeros(num_bytes // 4, device=device)
    durations_ms = []
    for _ in range(REDUCE_WARMUP + REDUCE_REPEATS):
        barrier()  # its answer is read on the host, so the device is idle after it
        start_s = time.perf_counter()
        dist.all_reduce(buffer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations_ms.append((time.perf_counter() - start_s) * 1000)
    return np.array(durations_ms[REDUCE_WARMUP:])


def _join(folder: Path, job: RankJob, ranks: RankInfo, device: torch.device) -> None:
    """Meet the other ranks through a file: no port that could be taken, nothing that listens on the network."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if ranks.world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{folder.resolve() / 'rendezvous'}",
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=job.timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
