"""Who am I among the ranks, and the few collectives the project needs. Every function works without a process group too.

All tensors exchanged here are plain numbers: no pickled objects cross the network (a pickle is code).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock

from utils.errors import EXIT_FAILED, UserError
from utils.rank_environment import variables_from_launcher
from utils.rendezvous import Meeting, startup_watchdog

DEFAULT_TIMEOUT_S = 300.0
DEFAULT_STARTUP_TIMEOUT_S = 900.0

_made_the_group = False  # by this module, and not by whoever started us

T = TypeVar("T")
Say = Callable[[str], None]  # prints on rank 0, does nothing elsewhere


class RankDisagreement(RuntimeError):
    """What must be equal on all ranks is not: a fault of the program or of the hardware, never of the user."""


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
    with startup_watchdog(startup_s), Meeting(ranks.rank, is_one_machine, startup_s) as store:
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


def is_distributed() -> bool:
    """Whether more than one rank takes part."""
    return world_size() > 1


def rank() -> int:
    """Return the global rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def communication_device() -> torch.device:
    """Return the device collectives need their tensors on: the GPU for NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over all ranks. Every rank must reach this; the argument is left as it is."""
    if not is_distributed():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def any_rank(flag: bool) -> bool:
    """Return whether `flag` is true on any rank, the same answer everywhere. Every rank must reach this."""
    return bool(largest_of_each([flag])[0])


def largest_of_each(values: Sequence[float]) -> list[float]:
    """Return, for each number or flag, the largest over the ranks, by one collective. Every rank must reach this."""
    if not is_distributed():
        return list(values)
    largest = torch.tensor([float(value) for value in values], dtype=torch.float64, device=communication_device())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    found: list[float] = largest.tolist()
    return found


def least_over_ranks(number: int) -> int:
    """Return the smallest of all ranks' numbers. Every rank must reach this."""
    if not is_distributed():
        return number
    value = torch.tensor([number], device=communication_device())
    dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return int(value.item())


def from_main(value: T) -> T:
    """Return rank 0's value, made of what JSON holds, on every rank. Every rank must reach this."""
    parts = gather_arrays({"json": np.frombuffer(json.dumps(value).encode(), np.uint8)})
    found: T = json.loads(parts[0]["json"].tobytes())
    return found


def on_main(action: Callable[[], T]) -> T | None:
    """Do something on rank 0 while the others wait; return its result there, None elsewhere. Every rank must reach this.

    When it raises, the error stays rank 0's to report, and the other ranks leave without a word.
    """
    result, error = None, None
    if rank() == 0:
        try:
            result = action()
        except Exception as raised:  # noqa: BLE001 # the others must hear of it, whatever it is; raised again below
            error = raised
    failed = any_rank(error is not None)
    if error is not None:
        raise error
    if failed:
        raise SystemExit(EXIT_FAILED)
    return result


def barrier() -> None:
    """Wait until every rank is here."""
    if is_distributed():
        any_rank(False)


@torch.no_grad()
def average_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the mean over ranks of floating-point tensors, in place, by one collective. All must reach this."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if is_distributed() and floats:
        mean = all_reduce_sum(torch.cat([tensor.reshape(-1) for tensor in floats])) / world_size()
        for tensor, part in zip(floats, mean.split([tensor.numel() for tensor in floats]), strict=True):
            tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def check_ranks_agree(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise RankDisagreement on every rank unless all hold the same bits. Every rank must reach this, with equal names.

    One collective over a checksum of each tensor; the tensors stay where they are.
    """
    if not is_distributed() or not tensors:
        return
    sums = torch.stack([_checksum(tensor) for tensor in tensors.values()]).to(communication_device())
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    different = (extremes[0] != -extremes[1]).tolist()
    if any(different):
        names = [name for name, differs in zip(tensors, different, strict=True) if differs]
        raise RankDisagreement(
            f"{len(names)} of {len(different)} tensors differ between the ranks, the first is {names[0]}; nothing was saved"
        )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, read as integers: int64 ()."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (flat.view(torch.int32) if flat.numel() % 4 == 0 else flat).sum(dtype=torch.int64)


def gather_arrays(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return every rank's dictionary of numeric arrays, in rank order, on every rank. Every rank must reach this.

    Arrays may differ in shape between ranks; object arrays are refused (they would need pickle).
    """
    if not is_distributed():
        return [arrays]
    payload = _encode(arrays)
    device = communication_device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=device))
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(payload)] = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy()).to(device)
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    return [_decode(part[:length].cpu().numpy().tobytes()) for part, length in zip(received, lengths, strict=True)]


@contextlib.contextmanager
def local_rank_first(lock_file: Path) -> Iterator[None]:
    """Let one process per machine do a job first (the others find it done), without needing a process group."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(lock_file)):
        yield


def _seconds_of(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UserError(f"{variable}={text}: expected seconds, such as 1800")
    return seconds


def _encode(arrays: dict[str, np.ndarray]) -> bytes:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if any(array.dtype.hasobject for array in contiguous.values()):
        raise TypeError("only numeric arrays can be gathered")
    header = json.dumps([[name, array.dtype.str, array.shape] for name, array in contiguous.items()]).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in contiguous.values())])


def _decode(payload: bytes) -> dict[str, np.ndarray]:
    start = 8 + int.from_bytes(payload[:8], "little")
    arrays = {}
    for name, dtype, shape in json.loads(payload[8:start]):
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(payload, dtype=np.dtype(dtype), count=count, offset=start).reshape(shape).copy()
        start += arrays[name].nbytes
    return arrays
