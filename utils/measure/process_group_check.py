"""Let a few processes train one step together, and compare it with the step of a single process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.distributed import read_rank_environment
from utils.distributed.rank_processes import join_ranks, read_job, run_ranks

_RANK_CODE = "from utils.measure.process_group_check import take_part; run_script(take_part)"


def check_common_step(world_size: int, backend: str, timeout_s: float) -> None:
    """Start `world_size` ranks that `take_part`. Raises UserError with one line when they fail or need too long."""
    run_ranks(_RANK_CODE, world_size, {"backend": backend, "timeout_s": timeout_s}, timeout_s)


def take_part() -> None:
    """Be one rank: all-reduce a number, then take a DDP step. Raises RuntimeError when a result is wrong."""
    job, ranks = read_job(), read_rank_environment()
    device = torch.device("cuda", ranks.local_rank) if job["backend"] == "nccl" else torch.device("cpu")
    join_ranks(device, job["timeout_s"], job["backend"])
    total = torch.tensor([float(ranks.rank) + 1], device=device)
    dist.all_reduce(total)
    expected = ranks.world_size * (ranks.world_size + 1) / 2
    if total.item() != expected:
        raise RuntimeError(f"all-reduce returned {total.item()} instead of {expected}")
    _compare_training_step(ranks.rank, ranks.world_size, device)
    dist.destroy_process_group()


def _compare_training_step(rank: int, world_size: int, device: torch.device) -> None:
    """Take DDP's step on shards and one process's step on the whole batch. Raises RuntimeError when they differ."""
    per_rank = 4
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(per_rank * world_size, 3, 8, 8, generator=generator).to(device)  # (N, 3, 8, 8)
    alone, together = _small_net().to(device), _small_net().to(device)
    _take_step(alone, batch)
    shard = batch[rank * per_rank : (rank + 1) * per_rank]
    _take_step(DistributedDataParallel(together, device_ids=[device.index] if device.type == "cuda" else None), shard)
    for mine, reference in zip(together.parameters(), alone.parameters(), strict=True):
        if not torch.allclose(mine, reference, rtol=1e-3, atol=1e-4):
            raise RuntimeError("the step of all processes together differs from one process's step on the same batch")


def _small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 1))


def _take_step(model: nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch).square().mean().backward()
    optimizer.step()
