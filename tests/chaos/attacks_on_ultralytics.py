"""Three attacks on Ultralytics' trainer: does a resumed run equal an undisturbed one, and is damage detected?

    python -m pytest tests/chaos/attacks_on_ultralytics.py -m chaos

Not part of `make chaos`: most of these trials fail (docs/reliability.md).
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.jobs import Job, require, run


def command(how: str, data: Path, folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.chaos.their_run", how, str(data), str(folder)]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a run's last.pt. Raises whatever Ultralytics' loader raises."""
    from ultralytics import YOLO

    model = YOLO(folder / "run" / "weights" / "last.pt").model
    assert isinstance(model, torch.nn.Module)
    return model.state_dict()


def num_different(first: Path, second: Path) -> int:
    theirs = weights(second)
    return sum(not torch.equal(value, theirs[name]) for name, value in weights(first).items())


@pytest.fixture(scope="module")
def whole(sample: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    require(command("whole", sample(16), folder), folder / "log")
    return folder


@pytest.mark.chaos(1, 1)
def test_u1_two_undisturbed_runs_are_equal(whole: Path, sample: Callable[..., Path], tmp_path: Path) -> None:
    require(command("whole", sample(16), tmp_path), tmp_path / "log")
    assert num_different(tmp_path, whole) == 0


@pytest.mark.chaos(1, 1)
def test_u1_a_killed_run_is_resumed(whole: Path, sample: Callable[..., Path], tmp_path: Path) -> None:
    assert run(command("killed", sample(16), tmp_path), tmp_path / "log") == -signal.SIGKILL
    require(command("resumed", sample(16), tmp_path), tmp_path / "log-resumed")
    assert num_different(tmp_path, whole) == 0


@pytest.mark.chaos(50, 3)
def test_u6_the_trainer_is_killed_while_it_saves(
    trial: int, sample: Callable[..., Path], rng: random.Random, tmp_path: Path
) -> None:
    with Job(command("saves", sample(16), tmp_path), tmp_path / "log") as job:
        job.wait_until(lambda: "saving 2\n" in job.output(), "a save", 300)
        save_s = job.wait_until(lambda: "saving 3\n" in job.output(), "a save", 300)
        time.sleep(rng.uniform(0, 1.2 * save_s))
        job.kill()
    weights(tmp_path)  # opens


@pytest.mark.chaos(100, 10)
def test_u8_damage_is_detected(trial: int, whole: Path, rng: random.Random, tmp_path: Path) -> None:
    file = tmp_path / "run" / "weights" / "last.pt"
    file.parent.mkdir(parents=True)
    content = bytearray((whole / "run" / "weights" / "last.pt").read_bytes())
    position = rng.randrange(len(content))
    if trial % 4 == 3:
        content = content[:position]
    else:
        content[position] ^= rng.randrange(1, 256)
    file.write_bytes(content)
    with pytest.raises(Exception):  # noqa: B017 # damage can cause any error
        weights(tmp_path)
