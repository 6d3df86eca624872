"""What only one rank meets, both must answer alike: a long validation, a refused file.

Otherwise they wait for ever.
"""

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.engine.small import Record, ScriptedTask, classifier, fit, loader_of, points
from tests.support.ranks import run_ranks
from yolo_seg_ddp.engine import Epoch, recovery
from yolo_seg_ddp.utils import distributed


class Crooked(ScriptedTask):
    """The validation takes long on rank 1 only; the second best.pt is refused, which only rank 0
    sees.
    """

    def evaluate(self, model: nn.Module, loader: Any, epoch: Epoch) -> Record:
        time.sleep(0.2 * distributed.rank())
        return super().evaluate(model, loader, epoch)

    def save(self, path: Path, model: nn.Module, info: Record) -> None:
        if path.name == "best.pt" and info["epoch"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save(path, model, info)


def on_two_ranks(folder: Path) -> Record:
    recovery.LONG_VALIDATION_S = 0.1
    num_collectives = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_collectives
        num_collectives += 1
        return all_reduce(*arguments, **options)

    all_reduce, dist.all_reduce = dist.all_reduce, counted
    task = Crooked("val_loss", [1.0, 0.5, 1.2, 1.3, 1.4])
    loaders = loader_of(points(16), 4), loader_of(points(8), 4)
    engine = fit(classifier(), folder, *loaders, task=task, epochs=5, patience=2)
    return {"progress": vars(engine.progress), "collectives": num_collectives}


def test_what_one_rank_meets_alone_is_answered_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_TIMEOUT", "60")
    first, second = run_ranks(on_two_ranks, 2, tmp_path)
    assert first["progress"]["epoch"] == 3, (
        "stopped two epochs after the last best.pt that could be written"
    )
    assert first["progress"]["best_epoch"] == second["progress"]["best_epoch"] == 0
    for rank_answers in (first, second):
        rank_answers["progress"]["history"] = {
            name: values
            for name, values in rank_answers["progress"]["history"].items()
            if "loss" in name
        }
    assert first == second
