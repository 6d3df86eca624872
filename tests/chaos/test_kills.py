"""SIGKILL for ranks and launchers. After the launcher's restarts the result must be the same as without a kill."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs import POLL_S, Job, difference, is_alive, require
from tests.chaos.trainings import ENVIRONMENT, LOOPBACK, await_training, position, small, state_of, yolo
from tests.conftest import free_port

Sample = Callable[..., Path]


def kill_a_rank(job: Job, attempt: int, window_s: float, rng: random.Random) -> float:
    """Kill a random rank at a random moment after a start; return the seconds from the kill to the next batch."""
    time.sleep(rng.uniform(0, window_s))
    victims = job.ranks(attempt, 2)
    assert victims, f"the ranks of start {attempt} were gone before their kill: too short a training"
    rng.choice(victims).kill()
    return await_training(job, attempt + 1)


@pytest.mark.chaos(20, 2)
def test_r1_a_random_rank_is_killed_again_and_again(
    times: int, sample: Sample, rng: random.Random, tmp_path: Path, record_property: Any
) -> None:
    epochs, window_s = (60, 2.5) if times > 3 else (12, 2.0)
    data, reference, folder = sample(12), tmp_path / "reference", tmp_path / "killed"
    options: dict[str, Any] = {"epochs": epochs, "launcher": ["--max-restarts=25"]}
    require(yolo(data, reference, **options), reference / "log", **ENVIRONMENT)
    with Job(yolo(data, folder, **options), folder / "log", **ENVIRONMENT) as job:
        await_training(job, 0)
        for attempt in range(times):
            record_property("recovery s", kill_a_rank(job, attempt, window_s, rng))
        assert job.wait(600) == 0
        starts = job.output().count("Distributed YOLOv8 Training")  # each start prints the banner once
    assert starts == times + 1, "one restart for each kill"
    assert difference(folder / "run", reference / "run") == ""


@pytest.mark.chaos(10, 1)
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_r2_a_rank_is_killed_under_plain_torchrun(
    rendezvous: str,
    trial: int,
    undisturbed: Callable[..., Path],
    rng: random.Random,
    tmp_path: Path,
    record_property: Any,
) -> None:
    reference = undisturbed(epochs=8)
    meeting = LOOPBACK if rendezvous == "c10d" else ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
    command = small(tmp_path, launcher=[*meeting, "--max-restarts=3"], epochs=8)
    # The variable must be absent, as in a user's shell: an empty value would count as set.
    with Job(["env", "--unset=TORCH_DISABLE_SHARE_RDZV_TCP_STORE", *command], tmp_path / "log") as job:
        await_training(job, 0)
        record_property("recovery s", kill_a_rank(job, 0, 1.0, rng))
        assert job.wait(300) == 0
    assert difference(tmp_path / "run", reference) == ""


@pytest.mark.chaos(10, 1, always=True)
def test_r13_no_process_outlives_its_launcher(trial: int, tmp_path: Path, record_property: Any) -> None:
    with Job(small(tmp_path, epochs=1000, num_workers=1), tmp_path / "log") as job:
        await_training(job, 0)
        family = job.family()
        assert len(family) >= 5, "a launcher, two ranks, two loader processes"
        job.process.send_signal(signal.SIGKILL)
        start_s = time.monotonic()
        while any(map(is_alive, family)) and time.monotonic() < start_s + 10:
            time.sleep(POLL_S)
        gone_s = time.monotonic() - start_s
    record_property("gone s", gone_s)
    assert gone_s <= 2
    assert state_of(tmp_path / "run") == "running"


@pytest.mark.chaos(5, 1)
def test_r26_a_rank_is_killed_in_mid_epoch_of_a_training_on_windows(
    times: int, sample: Sample, rng: random.Random, tmp_path: Path, record_property: Any
) -> None:
    data, reference, folder = sample(40, long_side="native"), tmp_path / "reference", tmp_path / "killed"
    run = folder / "run"
    # Minutes between checkpoints: one after every few batches.
    options: dict[str, Any] = {"epochs": times + 2, "windows": 3, "save_every_minutes": 0.01, "mosaic": 0.5}
    options["launcher"] = ["--max-restarts=10"]
    require(yolo(data, reference, **options), reference / "log", **ENVIRONMENT)
    with Job(yolo(data, folder, **options), folder / "log", **ENVIRONMENT) as job:
        for attempt in range(times):
            await_training(job, attempt)
            before = position(run)
            job.wait_until(
                lambda before=before: position(run)[1] > 0 and position(run) != before,  # type: ignore[misc]
                "a checkpoint of mid-epoch",
                120,
            )
            rng.choice(job.ranks(attempt, 2)).kill()
            batch = position(run)[1]
            assert batch > 0
            record_property("resumed at batch", batch)
        assert job.wait(600) == 0
    assert difference(run, reference / "run") == ""
