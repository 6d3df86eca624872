"""The program of each rank in the parts `nccl` and `two_ranks`: every collective, then training
steps under DDP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu.all_collectives import wrong_collectives
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.measure.synthetic import synthetic_batch
from yolo_seg_ddp.utils.devices import choose_precision, tune_device
from yolo_seg_ddp.utils.distributed import collectives, rank, read_rank_environment, world_size
from yolo_seg_ddp.utils.distributed.rank_processes import join_ranks, read_job, write_answer
from yolo_seg_ddp.utils.environment import prepare_environment
from yolo_seg_ddp.yolo.loss import SegmentationLoss
from yolo_seg_ddp.yolo.model import build_model
from yolo_seg_ddp.yolo.optimizer import parameter_groups
from yolo_seg_ddp.yolo.training_step import SegmentationStep

NAMES = tuple("abcdefgh")
STEPS = 4
# of one rank's losses with and without synchronised BatchNorm, which are the same but for rounding
WITHIN = 0.02


def check_ranks() -> None:
    """Run one rank of the job: `devices` (one per rank), `backend`, `precisions`, `img_size`,
    `timeout_s`.

    The answer holds the wrong collectives, the losses of each training, and how many layers
    PyTorch's kernels of synchronised BatchNorm computed.
    """
    prepare_environment()
    job = read_job()
    device = torch.device(job["devices"][read_rank_environment().local_rank])
    join_ranks(device, job["timeout_s"], job["backend"])
    # the collectives are shortcuts then; here the one rank goes through the backend
    if world_size() == 1:
        collectives.is_distributed = lambda: True
    wrong = wrong_collectives()
    losses: dict[str, Sequence[float]] = {}
    with patch.object(torch, "batch_norm_stats", wraps=torch.batch_norm_stats) as kernel:
        for precision in job["precisions"]:
            is_exact = precision == "off"
            tune_device(device, deterministic=is_exact, fixed_shapes=True)
            plain, synced = (
                train(device, precision, job["img_size"], sync) for sync in (False, True)
            )
            losses |= {precision: plain, f"{precision} with synchronised BatchNorm": synced}
            # in 16 bits the steps' rounding grows to 10 %
            compared = slice(STEPS if is_exact else 1)
            if world_size() == 1 and not np.allclose(
                plain[compared], synced[compared], rtol=WITHIN
            ):
                wrong.append(f"synchronised BatchNorm in {precision}")
    layers = kernel.call_count
    if device.type == "cuda" and not layers:
        wrong.append("synchronised BatchNorm, which used no kernel")
    write_answer(
        {
            "backend": dist.get_backend(),
            "wrong": wrong,
            "losses": losses,
            "synchronised_layers": layers,
        }
    )
    dist.destroy_process_group()


def train(device: torch.device, precision: str, img_size: int, sync: bool) -> Sequence[float]:
    """Train a few steps under DDP, each rank on its own batch; return this rank's losses.

    Raises RankDisagreement when weights or statistics differ between the ranks, Diverged when they
    are not finite.
    """
    # Each rank begins with other weights: DDP must copy rank 0's.
    torch.manual_seed(rank())
    options = EngineOptions(
        precision=choose_precision(precision, device).name,
        clip_norm=10.0,
        sync_batchnorm=sync,
        static_graph=True,
        quiet=True,
    )
    model = build_model("yolov8n-seg.yaml", NAMES).to(device, memory_format=torch.channels_last)
    engine = TrainingEngine(model, device, options, task=SegmentationStep(), distributed=True)
    optimizer: Any = torch.optim.SGD(
        parameter_groups(engine.state.model, 5e-4), lr=1e-3, momentum=0.9, fused=True
    )
    engine.begin(optimizer, SegmentationLoss(model))
    engine.model.train()
    batch = synthetic_batch(4, img_size, len(NAMES), objects_per_image=3 + 9 * rank(), seed=rank())
    losses = []
    for _ in range(STEPS):
        values, _ = engine.forward_backward(batch)
        engine.update()
        losses.append(float(values["loss"]))
    engine.recovery.require_agreement()
    if not all(map(math.isfinite, losses)):
        raise ValueError(f"the losses are {losses}")
    return losses
