"""Losses that are NaN, damaged photographs, odd numbers of samples and ranks, and two trainings in
one folder.
"""

import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.trainings import skip_records
from benchmarks.jobs import POLL_S, Job, difference, draw_sample, require, run
from tests.chaos.trainings import ENVIRONMENT, SMALL_TRAINING, await_training, position, small, yolo
from yolo_seg_ddp.engine.loading import tensors_in
from yolo_seg_ddp.engine.recovery import all_finite
from yolo_seg_ddp.run.checkpoint import load_latest
from yolo_seg_ddp.utils.errors import EXIT_LOCKED

SAMPLES, EPOCHS = 208, 4  # only full batches: each rank averages over its own samples


@pytest.mark.chaos(1, 1)
# the ranks check every ten steps
@pytest.mark.parametrize(("first", "last"), [(5, 6), (50, 55), (55, 60)])
def test_r19_the_loss_of_one_rank_is_nan(first: int, last: int, tmp_path: Path) -> None:
    steps = list(range(first, last + 1))
    require(
        small(tmp_path, epochs=6, samples=160, nan_steps=",".join(map(str, steps))),
        tmp_path / "log",
    )
    run_folder = tmp_path / "run"
    found = load_latest(run_folder / "checkpoint")
    assert found is not None
    assert all_finite(tensors_in([found[1]["model"], found[1]["ema"]]))
    rolls_back = last == 60
    assert ("Rolled back from" in (tmp_path / "log").read_text()) == rolls_back
    skipped = max((record["skipped"] for record in skip_records(run_folder)), default=0)
    assert rolls_back or skipped >= len(steps), (
        "a roll-back also removes the records of skipped steps"
    )


@pytest.mark.chaos(100, 24)
def test_r20_photographs_are_cut_off_empty_or_random_bytes(
    times: int, rng: random.Random, tmp_path: Path
) -> None:
    raw, processed, log = tmp_path / "raw", tmp_path / "processed", tmp_path / "parse.log"
    count = max(times, 24)
    require(
        [sys.executable, "download_data.py", "--sample", str(count), "--output", raw],
        tmp_path / "sample.log",
    )
    victims = rng.sample(sorted(raw.rglob("*.JPG")), max(count // 100, 3))
    for number, photo in enumerate(victims):
        content = photo.read_bytes()
        photo.write_bytes((content[: len(content) // 3], b"", rng.randbytes(5000))[number % 3])
    require(
        [
            sys.executable,
            "parse_labels.py",
            "--input",
            raw,
            "--output",
            processed,
            "--long-side=128",
        ],
        log,
    )
    reports = log.read_text() + "".join(file.read_text() for file in processed.glob("*.json"))
    assert [photo.name for photo in victims if photo.name not in reports] == []
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        require(yolo(processed / "dataset.yaml", folder, epochs=1), folder / "log", **ENVIRONMENT)
    assert difference(folders[0] / "run", folders[1] / "run") == ""


@pytest.mark.chaos(1, 1)
def test_r20_a_photograph_damaged_after_parsing_is_named(tmp_path: Path) -> None:
    data, log = draw_sample(tmp_path, 12), tmp_path / "log"
    photo = sorted((data.parent / "train" / "images").iterdir())[0]
    photo.write_bytes(photo.read_bytes()[:500])
    # whether or not it continues
    run(yolo(data, tmp_path, epochs=1), log, timeout_s=300, **ENVIRONMENT)
    assert photo.name in log.read_text()


def uneven_epochs(run_folder: Path, split: str, samples: int, epochs: int) -> list[int]:
    """Return the epochs in which a sample was not used exactly once, over all ranks and starts."""
    seen = [Counter[int]() for _ in range(epochs)]
    for file in run_folder.glob("samples-*.jsonl"):
        for facts in map(json.loads, file.read_text().splitlines()):
            if facts["split"] == split:
                seen[facts["epoch"]].update(facts["indices"])
    return [epoch for epoch in range(epochs) if seen[epoch] != Counter(range(samples))]


def last_loss(run_folder: Path) -> float:
    found = load_latest(run_folder / "checkpoint")
    assert found is not None
    return float(found[1]["progress"]["history"]["val_loss"][-1])


@pytest.mark.chaos(3, 1)
def test_r5_two_ranks_then_one_then_two_with_one_global_batch(
    trial: int,
    undisturbed: Callable[..., Path],
    rng: random.Random,
    tmp_path: Path,
    record_property: Any,
) -> None:
    options: dict[str, Any] = {"samples": SAMPLES, "epochs": EPOCHS, "sync_bn": True}
    reference = undisturbed(**options)
    for ranks in (2, 1):
        with Job(small(tmp_path, ranks=ranks, **options), tmp_path / f"log-{ranks}") as job:
            await_training(job, 0, ranks)
            time.sleep(rng.uniform(0, 1.0))
            job.process.send_signal(signal.SIGTERM)
            job.wait(30)
    require(small(tmp_path, **options), tmp_path / "log-end")
    assert uneven_epochs(tmp_path / "run", "train", SAMPLES, EPOCHS) == []
    assert position(tmp_path / "run") == position(reference)
    off = abs(last_loss(tmp_path / "run") / last_loss(reference) - 1)
    record_property("validation loss differs by", off)
    assert off <= 0.02


@pytest.mark.chaos(1, 1)
@pytest.mark.parametrize(
    ("samples", "val_samples"), [(2, 1), (3, 2), (5, 1), (7, 3), (9, 7), (33, 5)]
)
def test_r21_the_batch_does_not_divide_the_data_set(
    samples: int, val_samples: int, tmp_path: Path
) -> None:
    command = small(tmp_path, samples=samples, val_samples=val_samples, epochs=2)
    assert run(command, tmp_path / "log", timeout_s=180) == 0
    assert uneven_epochs(tmp_path / "run", "train", samples, 2) == []
    assert uneven_epochs(tmp_path / "run", "val", val_samples, 2) == []


HOLDER = """
import sys, time
from pathlib import Path
from yolo_seg_ddp.utils.errors import run_script
from yolo_seg_ddp.run.status import RunLock
def main():
    lock = RunLock(Path(sys.argv[1]), wait_s=1.0)
    print("held", flush=True)
    time.sleep(120)
run_script(main)
"""


@pytest.mark.chaos(10, 2)
def test_r23_of_two_processes_in_one_folder_one_wins(
    trial: int, tmp_path: Path, record_property: Any
) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with Job(command, tmp_path / "log-0") as first, Job(command, tmp_path / "log-1") as second:
        deadline_s = time.monotonic() + 60
        while first.popen.poll() is None and second.popen.poll() is None:
            assert time.monotonic() < deadline_s, "both continued"
            time.sleep(POLL_S)
        loser, winner = (first, second) if first.popen.poll() is not None else (second, first)
        assert loser.popen.returncode == EXIT_LOCKED
        assert "held" in winner.output()
        assert winner.popen.poll() is None
        assert f"process {winner.popen.pid} on " in loser.output()
        winner.kill()
    with Job(command, tmp_path / "log-next") as successor:
        held_s = successor.wait_until(lambda: "held" in successor.output(), "the folder", 60)
    record_property("held again, start included, s", held_s)


@pytest.mark.chaos(1, 1)
def test_r23_a_second_trainer_leaves(tmp_path: Path) -> None:
    alone = [sys.executable, str(SMALL_TRAINING), f"--save-dir={tmp_path / 'run'}"]
    with Job(small(tmp_path, epochs=100_000), tmp_path / "log-owner") as owner:
        owner.wait_until(lambda: "Batch [" in owner.output(), "a batch", 120)
        # It waits a minute for the lock.
        assert run(alone, tmp_path / "log-second", timeout_s=100) == EXIT_LOCKED
