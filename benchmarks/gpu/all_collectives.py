"""Calls every collective of `yolo_seg_ddp.utils.distributed` and checks its answer."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from yolo_seg_ddp.utils.distributed import (
    RankDisagreement,
    all_reduce_sum,
    any_rank,
    average_tensors,
    barrier,
    broadcast_from_main,
    check_ranks_agree,
    communication_device,
    gather_arrays,
    gather_files,
    gather_json,
    max_over_ranks,
    rank,
    run_on_main,
    run_once_per_machine,
    world_size,
)


def wrong_collectives() -> list[str]:
    """Return the names of COLLECTIVES that give this rank a wrong answer.

    Every rank must reach this.
    """
    return [name for name, is_right in COLLECTIVES.items() if not is_right(rank(), world_size())]


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
    return [(len(part["x"]), part["y"].shape) for part in parts] == [
        (3 + other, (other, 2)) for other in range(world)
    ]


def _files(rank: int, world: int) -> bool:
    """Gather files of different lengths, the first of them empty; others have several pieces."""
    content = [bytes([other]) * 3_000_000 * other for other in range(world)]
    with tempfile.TemporaryFile() as mine:
        mine.write(content[rank])
        files = gather_files(mine, Path(tempfile.gettempdir()))
        return [file.read() for file in files] == (content if rank == 0 else [])


def _reached(rank: int, world: int) -> bool:
    barrier()
    return True


# Every function of yolo_seg_ddp.utils.distributed that all ranks must reach, and whether this rank
# gets the right answer.
COLLECTIVES: dict[str, Callable[[int, int], bool]] = {
    "all_reduce_sum": lambda rank, world: (
        all_reduce_sum(_values(rank, 1)).tolist() == [world * (world - 1) / 2, world]
    ),
    "any_rank": lambda rank, world: any_rank(rank == world - 1) and not any_rank(False),
    "max_over_ranks": lambda rank, world: max_over_ranks([rank, True, -rank]) == [world - 1, 1, 0],
    "broadcast_from_main": lambda rank, world: (
        broadcast_from_main({"a": [1, rank]}) == {"a": [1, 0]}
    ),
    "gather_json": lambda rank, world: gather_json([rank]) == [[each] for each in range(world)],
    "run_on_main": lambda rank, world: (
        run_on_main(lambda: "done") == ("done" if rank == 0 else None)
    ),
    "run_once_per_machine": lambda rank, world: (
        run_once_per_machine(lambda: 1, rank) == (1 if rank == 0 else None)
    ),
    "barrier": _reached,
    "average_tensors": _average,
    "check_ranks_agree": _agreement,
    "gather_arrays": _gathered,
    "gather_files": _files,
}
