"""Starts a few processes which train one step together, within a time limit and without leaving the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from utils.common.environment import PROJECT_FOLDER
from utils.common.signals import die_with_parent

if TYPE_CHECKING:
    import torch
    from torch import nn

_POLL_S = 0.05


def run_ranks(world_size: int, backend: str, folder: Path, timeout_s: float) -> str | None:
    """Let `world_size` processes `take_part`; return what went wrong in one line, or None.

    `folder` holds their logs and the file they meet through. No process is left when this returns.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT_FOLDER)}
    if sys.platform.startswith("linux"):
        environment.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    # run_script: a rank that leaves by the interpreter's teardown may abort there, its work done.
    code = "from utils.common.errors import run_script; from utils.measure.process_group_check import take_part; run_script(take_part)"
    processes: list[subprocess.Popen[bytes]] = []
    logs: list[TextIO] = []
    deadline_s = time.monotonic() + timeout_s
    try:
        for rank in range(world_size):
            arguments = [str(rank), str(world_size), backend, str(folder / "rendezvous"), str(timeout_s)]
            logs.append(_log_file(folder, rank).open("w", encoding="utf-8"))
            command = [sys.executable, "-c", code, *arguments]
            place = {"RANK": str(rank)}
            processes.append(subprocess.Popen(command, env={**environment, **place}, stdout=logs[-1], stderr=logs[-1]))
        return _first_problem(processes, folder, deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()


def _first_problem(processes: list[subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> str | None:
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                lines = _log_file(folder, rank).read_text(encoding="utf-8", errors="replace").split("\n")
                last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing on its log")
                return f"rank {rank} left with code {code}: {last}"
        if not any(code is None for code in codes):
            return None
        if time.monotonic() > deadline_s:
            waiting = [str(rank) for rank, code in enumerate(codes) if code is None]
            return f"no answer from rank {', '.join(waiting)} within the time limit"
        time.sleep(_POLL_S)


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def take_part() -> None:
    """Be one rank: all-reduce, one DDP step, and a comparison with the step that one process would take.

    The command line gives rank, world size, backend, rendezvous file and time limit in seconds.
    """
    die_with_parent(only_under_torchrun=False)
    import torch
    import torch.distributed as dist

    rank, world_size, backend, rendezvous, timeout_s = sys.argv[1:]
    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # A file instead of a port: nothing listens on the network, and nothing can be in use already.
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=int(rank),
        world_size=int(world_size),
        timeout=timedelta(seconds=float(timeout_s)),
    )
    total = torch.tensor([float(rank) + 1], device=device)
    dist.all_reduce(total)
    expected = int(world_size) * (int(world_size) + 1) / 2
    if total.item() != expected:
        raise RuntimeError(f"all-reduce gave {total.item()} in place of {expected}")
    _compare_training_step(int(rank), int(world_size), device)
    dist.destroy_process_group()


def _compare_training_step(rank: int, world_size: int, device: torch.device) -> None:
    """Raise RuntimeError unless DDP's step on shards equals one process's step on the whole batch."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    per_rank = 4
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(per_rank * world_size, 3, 8, 8, generator=generator).to(device)  # (N, 3, 8, 8)
    alone, together = _small_net().to(device), _small_net().to(device)
    _take_step(alone, batch)
    shard = batch[rank * per_rank : (rank + 1) * per_rank]
    _take_step(DistributedDataParallel(together, device_ids=[device.index] if device.type == "cuda" else None), shard)
    for mine, reference in zip(together.parameters(), alone.parameters(), strict=True):
        if not torch.allclose(mine, reference, rtol=1e-3, atol=1e-4):
            raise RuntimeError("the processes' common step differs from one process's step on the same batch")


def _small_net() -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 1))


def _take_step(model: nn.Module, batch: torch.Tensor) -> None:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch).square().mean().backward()
    optimizer.step()
