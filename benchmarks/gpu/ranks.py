"""What each rank of the parts `nccl` and `two_ranks` does: every collective, then training steps under DDP."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from utils.common.devices import choose_precision, tune_device
from utils.common.environment import prepare_environment
from utils.distributed import (
    RankDisagreement,
    all_reduce_sum,
    any_rank,
    average_tensors,
    barrier,
    broadcast_from_main,
    check_ranks_agree,
    collectives,
    communication_device,
    gather_arrays,
    max_over_ranks,
    min_over_ranks,
    rank,
    read_rank_environment,
    run_on_main,
    world_size,
)
from utils.engine import EngineOptions, TrainingEngine
from utils.measure.rank_processes import join_ranks, read_job, write_answer
from utils.measure.step_timer import SegmentationStep
from utils.measure.synthetic import synthetic_batch
from utils.yolo.loss import SegmentationLoss
from utils.yolo.model import build_model
from utils.yolo.optimizer import parameter_groups

NAMES = tuple("abcdefgh")
STEPS = 4


def check_ranks() -> None:
    """Be one rank of the job: `devices` (one per rank), `backend`, `precisions`, `img_size`, `timeout_s`.

    The answer holds the wrong collectives and the losses of each training.
    """
    prepare_environment()
    job = read_job()
    device = torch.device(job["devices"][read_rank_environment().local_rank])
    join_ranks(device, job["timeout_s"], job["backend"])
    if world_size() == 1:  # the collectives are shortcuts then; here the one rank goes through the backend
        collectives.is_distributed = lambda: True
    tune_device(device, deterministic=False, fixed_shapes=True)
    wrong = [name for name, is_right in COLLECTIVES.items() if not is_right(rank(), world_size())]
    losses = {
        f"{precision}{' with synchronised BatchNorm' if sync else ''}": train(device, precision, job["img_size"], sync)
        for precision in job["precisions"]
        for sync in (False, True)
    }
    write_answer({"backend": dist.get_backend(), "wrong": wrong, "losses": losses})
    dist.destroy_process_group()


def _values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, device=communication_device())


def _average(rank: int, world: int) -> bool:
    mine = [_values(rank, 1.0), _values(2.0 * rank)]
    average_tensors(mine)
    mean = (world - 1) / 2
    return mine[0].tolist() == [mean, 1.0] and mine[1].tolist() == [2 * mean]


def _agreement(rank: int, world: int) -> bool:
    check_ranks_agree({"equal": _values(1.0, math.nan)})
    try:
        check_ranks_agree({"equal": _values(1.0), "different": _values(float(rank))})
    except RankDisagreement:
        return world > 1
    return world == 1


def _gathered(rank: int, world: int) -> bool:
    parts = gather_arrays({"x": np.arange(3 + rank), "y": np.ones((rank, 2), np.float32)})
    return [(len(part["x"]), part["y"].shape) for part in parts] == [(3 + other, (other, 2)) for other in range(world)]


def _reached(rank: int, world: int) -> bool:
    barrier()
    return True


# Every function of utils.distributed that all ranks must reach, and whether this rank gets the right answer.
COLLECTIVES: dict[str, Callable[[int, int], bool]] = {
    "all_reduce_sum": lambda rank, world: all_reduce_sum(_values(rank, 1)).tolist() == [world * (world - 1) / 2, world],
    "any_rank": lambda rank, world: any_rank(rank == world - 1) and not any_rank(False),
    "max_over_ranks": lambda rank, world: max_over_ranks([rank, True, -rank]) == [world - 1, 1, 0],
    "min_over_ranks": lambda rank, world: min_over_ranks(rank + 7) == 7,
    "broadcast_from_main": lambda rank, world: broadcast_from_main({"a": [1, rank]}) == {"a": [1, 0]},
    "run_on_main": lambda rank, world: run_on_main(lambda: "done") == ("done" if rank == 0 else None),
    "barrier": _reached,
    "average_tensors": _average,
    "check_ranks_agree": _agreement,
    "gather_arrays": _gathered,
}


def train(device: torch.device, precision: str, img_size: int, sync: bool) -> Sequence[float]:
    """Train a few steps under DDP, each rank on its own batch; return this rank's losses.

    Raises RankDisagreement when weights or statistics differ between the ranks, Diverged when they are not finite.
    """
    torch.manual_seed(rank())  # DDP must copy rank 0's weights
    options = EngineOptions(
        precision=choose_precision(precision, device).name,
        ema_decay=0.9999,
        clip_norm=10.0,
        sync_batchnorm=sync,
        static_graph=True,
        quiet=True,
    )
    model = build_model("yolov8n-seg.yaml", NAMES).to(device, memory_format=torch.channels_last)
    engine = TrainingEngine(model, device, options, task=SegmentationStep(), distributed=True)
    optimizer: Any = torch.optim.SGD(parameter_groups(engine.state.model, 5e-4), lr=1e-3, momentum=0.9, fused=True)
    engine.begin(optimizer, SegmentationLoss(model))
    engine.model.train()
    batch = synthetic_batch(4, img_size, len(NAMES), objects_per_image=3 + 9 * rank(), seed=rank())
    losses = []
    for _ in range(STEPS):
        values, _ = engine.step.forward_backward(batch)
        engine.step.update()
        losses.append(float(values["loss"]))
    engine.recovery.require_agreement()
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"the losses are {losses}")
    return losses
