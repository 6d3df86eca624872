"""This process's rank, and joining and leaving the process group."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from utils.common.errors import UserError
from utils.distributed.collectives import barrier
from utils.distributed.launchers import variables_from_launcher
from utils.distributed.rendezvous import Rendezvous, startup_watchdog

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_STARTUP_TIMEOUT_S = 900.0
_made_the_group = False  # by this module, and not by whoever started us
Say = Callable[[str], None]  # prints on rank 0, does nothing elsewhere


@dataclass(frozen=True)
class RankInfo:
    """A process's place among the ranks, as its launcher's environment variables give it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes files and talks to the console (global rank 0)."""
        return self.rank == 0


def read_rank_environment() -> RankInfo:
    """Read RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE; without any of them this is the only process.

    Where none is set but `srun` or `mpirun` started several tasks, their variables are first given torchrun's names, in
    the environment: everything that follows reads those. Raises UserError when only some are set: guessing would start
    N silent, independent trainings.
    """
    required = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if not any(name in os.environ for name in required):
        os.environ.update(variables_from_launcher(os.environ))
    missing = [name for name in required if name not in os.environ]
    if len(missing) == len(required):
        return RankInfo()
    if missing:
        raise UserError(
            f"{', '.join(missing)} is not set but other rank variables are; launch with torchrun, or unset them"
        )
    world_size = int(os.environ["WORLD_SIZE"])
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    info = RankInfo(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), world_size, local_world_size)
    if not (0 <= info.rank < world_size and 0 <= info.local_rank < local_world_size):
        raise UserError(f"RANK={info.rank} LOCAL_RANK={info.local_rank} do not fit WORLD_SIZE={world_size}")
    return info


def setup_ddp(device: torch.device, ranks: RankInfo | None = None) -> RankInfo:
    """Join the process group: NCCL for a CUDA device, gloo for the CPU; nothing to do for a single process.

    `NCCL_TIMEOUT` (seconds) sets how long a collective may take, else 300 s; `INIT_TIMEOUT` how long the ranks may take
    to come together, else 900 s, after which the process ends with code 76. A group that somebody else has made, such
    as Ray Train, is used as it is. An error here is fatal on purpose.
    """
    global _made_the_group
    ranks = ranks or read_rank_environment()
    if dist.is_initialized() or (ranks.world_size == 1 and "RANK" not in os.environ):
        return ranks
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif ranks.local_world_size == ranks.world_size and Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: nothing listens on a real interface
    startup_s = _seconds_of("INIT_TIMEOUT", DEFAULT_STARTUP_TIMEOUT_S)
    is_one_machine = ranks.local_world_size == ranks.world_size
    with startup_watchdog(startup_s), Rendezvous(ranks.rank, is_one_machine, startup_s) as store:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=collective_timeout_s()),
            device_id=device if device.type == "cuda" else None,
        )
        _made_the_group = True
        barrier()
    return ranks


def collective_timeout_s() -> float:
    """Return how long a collective may take, in seconds: `NCCL_TIMEOUT`, else 300."""
    return _seconds_of("NCCL_TIMEOUT", DEFAULT_TIMEOUT_S)


def join_process_group(rank: int, world_size: int, backend: str | None = None) -> None:
    """Join a process group from explicit facts instead of torchrun's variables; nothing to do when already a member.

    Without a `backend`: NCCL where there is a GPU, else gloo.
    """
    global _made_the_group
    if not dist.is_initialized():
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        timeout = timedelta(seconds=collective_timeout_s())
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout)
        _made_the_group = True


def cleanup_ddp() -> None:
    """Leave the process group, if `setup_ddp` or `join_process_group` made one; another's is theirs to end."""
    global _made_the_group
    if _made_the_group and dist.is_initialized():
        dist.destroy_process_group()
    _made_the_group = False


def _seconds_of(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{variable}={text}: expected seconds, such as 1800")
    return seconds
