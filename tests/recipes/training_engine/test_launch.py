"""Launching: a set-up that fails, a rank that fails, and no process left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import launching
import pytest
import training_engine

from tests.support.processes import is_running, wait_until
from utils.common.errors import UserError

pytest.importorskip("cloudpickle", reason="needs cloudpickle (pip install -r recipes/training_engine/requirements.txt)")


def noted(folder: Path) -> dict[str, int]:
    """Return the process ids by the place (rank-world size) of each process that took part."""
    return {file.name: int(file.read_text()) for file in folder.iterdir()}


def test_a_set_up_that_fails_falls_back_to_one_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def note(rank: int, world_size: int, folder: Path) -> None:
        training_engine.TrainingEngine.setup_distributed(rank, world_size)
        (folder / f"{rank}-{world_size}").write_text(str(os.getpid()))
        training_engine.TrainingEngine.cleanup_distributed()

    training_engine.launch_distributed_training(note, 2, backend="mpi", folder=tmp_path)
    assert noted(tmp_path) == {"0-1": os.getpid()}
    errors = capfd.readouterr().err
    assert "mpi: " in errors
    assert "distributed set-up failed (the reason is printed above): training in a single process" in errors


@pytest.mark.parametrize("world_size", [0, 1])
def test_one_process_trains_here(world_size: int) -> None:
    calls = []
    training_engine.launch_distributed_training(lambda *place, **others: calls.append((place, others)), world_size, x=1)
    assert calls == [((0, 1), {"x": 1})]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(rank: int, world_size: int, **kwargs: Any) -> None:
        import time

        (kwargs["folder"] / f"{rank}-{world_size}").write_text(str(os.getpid()))
        if rank == 1:
            while not (kwargs["folder"] / "0-2").exists():
                time.sleep(0.05)
            raise ValueError("the pictures are upside down")
        time.sleep(60)

    before = dict(os.environ)
    with pytest.raises(UserError, match="failed on a rank"):
        training_engine.launch_distributed_training(fail, 2, backend="gloo", folder=tmp_path)
    assert "ValueError: the pictures are upside down" in capfd.readouterr().err
    processes = noted(tmp_path)
    assert processes.keys() == {"0-2", "1-2"}
    assert os.getpid() not in processes.values()
    wait_until(lambda: not any(is_running(process) for process in processes.values()))
    assert dict(os.environ) == before


def test_processes_of_torchrun_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="without torchrun"):
        training_engine.launch_distributed_training(print, 2)


def test_fewer_gpus_than_asked_for_are_all_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launching.plan_ranks(4, "nccl") == (2, "nccl")
    assert "4 processes but 2 visible GPU(s): starting 2" in capsys.readouterr().out
    assert launching.plan_ranks(2, "gloo") == (2, "gloo")
