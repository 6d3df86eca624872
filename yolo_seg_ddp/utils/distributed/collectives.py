"""The collectives of this project. Without a process group each works as on a single rank.

They send plain numbers, JSON and files only, never pickled objects: unpickling can run code.
"""

import io
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from yolo_seg_ddp.utils.errors import EXIT_FAILED

T = TypeVar("T")
PIECE_BYTES = 2**21  # of each rank's file, sent at a time
# between two questions whether somebody is at work; longer for longer work
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.002, 0.2


class RankDisagreement(RuntimeError):
    """Values that must be equal on all ranks differ: a bug or a hardware fault, never a user's
    error.
    """


def is_distributed() -> bool:
    """Return whether there is more than one rank."""
    return world_size() > 1


def rank() -> int:
    """Return the global rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def communication_device() -> torch.device:
    """Return the device that collectives need their tensors on: the GPU for NCCL, else the CPU."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of `tensor` over all ranks.

    Every rank must reach this. Does not change `tensor`.
    """
    if not is_distributed():
        return tensor
    total = tensor.detach().clone()
    dist.all_reduce(total)
    return total


def any_rank(flag: bool) -> bool:
    """Return on every rank whether `flag` is true on any rank. Every rank must reach this."""
    return bool(max_over_ranks([flag])[0])


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the maximum over all ranks of each number or flag, by one collective.

    Every rank must reach this.
    """
    if not is_distributed():
        return list(values)
    largest = torch.tensor(
        [float(value) for value in values], dtype=torch.float64, device=communication_device()
    )
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    maxima: list[float] = largest.tolist()
    return maxima


def broadcast_from_main(value: T) -> T:
    """Return rank 0's value, which must be valid JSON, on every rank.

    Every rank must reach this.
    """
    return gather_json(value)[0]


def gather_json(value: T) -> list[T]:
    """Return every rank's value, which must be valid JSON, in rank order.

    Every rank must reach this.
    """
    parts = gather_arrays({"json": np.frombuffer(json.dumps(value).encode(), np.uint8)})
    return [json.loads(part["json"].tobytes()) for part in parts]


def run_on_main(action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 and return its result there; the others wait, however long it takes,
    and return None.

    Every rank must reach this. `action` runs in a thread, because rank 0 answers the others all the
    time that it is at work. When it raises, rank 0 raises the error and the other ranks exit
    without a message.
    """
    return _run_while_others_wait(action, rank() == 0)


def run_once_per_machine(action: Callable[[], T], local_rank: int) -> T | None:
    """Run `action` on local rank 0 of each machine, as `run_on_main` does on rank 0.

    Every rank must reach this.
    """
    return _run_while_others_wait(action, local_rank == 0)


def _run_while_others_wait(action: Callable[[], T], is_worker: bool) -> T | None:
    if not is_distributed():
        return action() if is_worker else None
    device = communication_device()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            # Each thread has its own current GPU.
            if device.type == "cuda":
                torch.cuda.set_device(device)
            results.append(action())
        except BaseException as raised:  # noqa: BLE001 # raised below, after the other ranks know
            errors.append(raised)

    worker = threading.Thread(target=work, daemon=True)
    if is_worker:
        worker.start()
    pause_s = FIRST_PAUSE_S
    while any_rank(worker.is_alive()):
        worker.join(pause_s) if worker.is_alive() else time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)
    failed = any_rank(bool(errors))
    if errors:
        raise errors[0]
    if failed:
        raise SystemExit(EXIT_FAILED)
    return results[0] if results else None


def barrier() -> None:
    """Wait until every rank has reached this."""
    any_rank(False)


@torch.no_grad()
def average_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Replace floating-point tensors by their mean over the ranks, by one collective.

    Every rank must reach this.
    """
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if is_distributed() and floats:
        # Most have one dimension, like BatchNorm's. A view of each would cost more time than the
        # arithmetic.
        rows = [tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in floats]
        parts = (all_reduce_sum(torch.cat(rows)) / world_size()).split([len(row) for row in rows])
        shaped = [
            part if tensor.dim() == 1 else part.view_as(tensor)
            for tensor, part in zip(floats, parts, strict=True)
        ]
        torch._foreach_copy_(floats, shaped)


@torch.no_grad()
def check_ranks_agree(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise RankDisagreement on every rank unless all hold the same bits. Every rank must reach
    this, with equal names.

    Compares a checksum of each tensor, by one collective.
    """
    if not is_distributed() or not tensors:
        return
    sums = torch.stack([_checksum(tensor) for tensor in tensors.values()]).to(
        communication_device()
    )
    extremes = torch.stack([sums, -sums])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    different = (extremes[0] != -extremes[1]).tolist()
    if any(different):
        names = [name for name, differs in zip(tensors, different, strict=True) if differs]
        raise RankDisagreement(
            f"{len(names)} of {len(different)} tensors differ between the ranks, the first is "
            f"{names[0]}; nothing was saved"
        )


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, read as integers: int64 ()."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (flat.view(torch.int32) if flat.numel() % 4 == 0 else flat).sum(dtype=torch.int64)


def gather_arrays(arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return every rank's dictionary of numeric arrays, in rank order, on every rank. Every rank
    must reach this.

    Arrays may differ in shape between ranks. Raises TypeError for object arrays: they would need
    pickle.
    """
    if not is_distributed():
        return [arrays]
    payload = _encode(arrays)
    device = communication_device()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=device))
    lengths = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(payload)] = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy()).to(
        device
    )
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    return [
        _decode(part[:length].cpu().numpy().tobytes())
        for part, length in zip(received, lengths, strict=True)
    ]


def gather_files(file: io.BufferedRandom, folder: Path) -> list[io.BufferedRandom]:
    """Return on rank 0 every rank's file, in rank order, to be read from its start; on other ranks
    nothing.

    Every rank must reach this. Rank 0 copies the files to its own disk: into files without a name
    in `folder`, which vanish when they are closed. Memory does not grow with the files: a piece of
    each is on its way at a time.
    """
    length = file.seek(0, 2)
    file.seek(0)
    if not is_distributed():
        return [file]
    lengths = gather_json(length)
    copies: list[io.BufferedRandom] = []
    pieces: list[torch.Tensor] | None = None
    piece = np.empty(PIECE_BYTES, np.uint8)
    device = communication_device()
    if rank() == 0:
        # the caller reads them
        copies = [tempfile.TemporaryFile(dir=folder) for _ in lengths]  # noqa: SIM115
        pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device) for _ in lengths]
    for start in range(0, max(lengths), PIECE_BYTES):
        # Behind a file's end the piece holds what it held before; rank 0 leaves it out.
        file.readinto(piece.data)
        dist.gather(torch.from_numpy(piece).to(device), pieces)
        for copy, received, whole in zip(copies, pieces or (), lengths, strict=False):
            copy.write(received[: max(whole - start, 0)].cpu().numpy().data)
    for copy in copies:
        copy.seek(0)
    return copies


def _encode(arrays: dict[str, np.ndarray]) -> bytes:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    if any(array.dtype.hasobject for array in contiguous.values()):
        raise TypeError("only numeric arrays can be gathered")
    header = json.dumps(
        [[name, array.dtype.str, array.shape] for name, array in contiguous.items()]
    ).encode()
    return b"".join(
        [
            len(header).to_bytes(8, "little"),
            header,
            *(array.tobytes() for array in contiguous.values()),
        ]
    )


def _decode(payload: bytes) -> dict[str, np.ndarray]:
    start = 8 + int.from_bytes(payload[:8], "little")
    arrays = {}
    for name, dtype, shape in json.loads(payload[8:start]):
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = (
            np.frombuffer(payload, dtype=np.dtype(dtype), count=count, offset=start)
            .reshape(shape)
            .copy()
        )
        start += arrays[name].nbytes
    return arrays
