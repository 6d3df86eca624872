"""Launching: a set-up that fails, a rank that fails, a command that is stopped, and no process left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import distributed_training_example as example
import launching
import pytest
import training_engine

from tests.recipes.harness import records_of, refused, run_command
from tests.support.processes import is_running, wait_until
from utils.common.errors import EXIT_DONE, EXIT_STOPPED_BY_SIGNAL

NEEDS = "needs the packages of the recipe (pip install -r recipes/training_engine/requirements.txt)"
pytest.importorskip("cloudpickle", reason=NEEDS)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Give the signals back that torchrun's agent takes in this process."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


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


def test_one_process_trains_here() -> None:
    calls = []
    for world_size in (0, 1):
        training_engine.launch_distributed_training(
            lambda *place, **others: calls.append((place, others)), world_size, x=1
        )
    assert calls == [((0, 1), {"x": 1})] * 2


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(rank: int, world_size: int, **kwargs: Any) -> None:
        (kwargs["folder"] / f"{rank}-{world_size}").write_text(str(os.getpid()))
        if rank == 1:
            while not (kwargs["folder"] / "0-2").exists():
                time.sleep(0.05)
            raise ValueError("the pictures are upside down")
        time.sleep(60)

    before = dict(os.environ)
    with refused("failed on a rank"):
        training_engine.launch_distributed_training(fail, 2, backend="gloo", folder=tmp_path)
    assert "ValueError: the pictures are upside down" in capfd.readouterr().err
    processes = noted(tmp_path)
    assert processes.keys() == {"0-2", "1-2"}
    assert os.getpid() not in processes.values()
    wait_until(lambda: not any(is_running(process) for process in processes.values()))
    assert dict(os.environ) == before


def test_a_stopped_command_continues_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn", reason=NEEDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = ("--distributed", "--world-size", "2", "--epochs", "1", "--batch-size", "64", "--use-ema")
    run = tmp_path / "cifar10_training"

    def stop() -> None:
        wait_until((run / "metrics.jsonl").exists, timeout_s=60)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    arguments = (*command, "--dataset", "digits", "--save-dir", tmp_path)
    assert run_command(example, monkeypatch, *arguments) == EXIT_STOPPED_BY_SIGNAL
    stopper.join()
    assert "run the same command again to resume" in capfd.readouterr().out
    assert run_command(example, monkeypatch, *arguments) == EXIT_DONE
    printed = capfd.readouterr().out
    assert "Resumed from" in printed
    assert "Training complete after 1 epochs" in printed
    assert [record["epoch"] for record in records_of(run, "epoch")] == [1]


def test_processes_of_torchrun_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with refused("without torchrun"):
        training_engine.launch_distributed_training(print, 2)


def test_fewer_gpus_than_asked_for_are_all_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert launching.plan_ranks(4, "nccl") == (2, "nccl")
    assert "4 processes but 2 visible GPU(s): starting 2" in capsys.readouterr().out
    assert launching.plan_ranks(2, "gloo") == (2, "gloo")
