"""The line that says how many cores the loader needs."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from yolo_seg_ddp.training import loader_cost
from yolo_seg_ddp.training.loader_cost import LoaderCost, worker_processor_s

LINE = (
    "  3 GPUs need about 60 cores for 1600 images/s each; this machine has 4, so 75% of the time "
    "waits for photographs"
)
# Computes for 0.3 s, says how long, and waits.
BURN = """
import time
while time.process_time() < 0.3: pass
print(time.process_time(), flush=True)
input()
"""


def lines_of(
    cost: LoaderCost, batches: tuple[int, ...], waits: list[float], epoch: int = 1
) -> list[str]:
    """Log these batches; return the lines that are not empty."""
    records: list[dict[str, Any]] = [
        {"epoch": epoch, "batch": batch, "ranks": {"data_wait_share": waits}} for batch in batches
    ]
    return [line for line in map(cost.line, records) if line]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let each logged batch take 0.1 s, in which the workers compute for 0.475 s, on a machine with
    4 cores.
    """
    machine = SimpleNamespace(count=4, wall_s=0.0, processor_s=0.0)

    def perf_counter() -> float:
        machine.wall_s += 0.1
        return machine.wall_s

    def workers_s() -> float:
        machine.processor_s += 0.475
        return machine.processor_s

    monkeypatch.setattr(loader_cost, "time", SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(loader_cost, "worker_processor_s", workers_s)
    monkeypatch.setattr(loader_cost, "usable_cpu_count", lambda: machine.count)
    return machine


def test_gpus_that_wait_hear_once_how_many_cores_they_need(cores: SimpleNamespace) -> None:
    cost = LoaderCost(2, batch_size=4, processes=3)
    # The slowest rank waits for 75 % of the time: without a wait there were four times as many
    # images, 4.75 cores became 19 for each GPU, and each process needs one for itself.
    assert lines_of(cost, (0, 10, 20, 30), [0.5, 0.75, 0.25]) == [LINE]
    assert not lines_of(cost, (40, 50, 60, 70), [0.75])
    # The time between two epochs is no loading.
    cost = LoaderCost(2, batch_size=4, processes=3)
    assert not lines_of(cost, (0, 10, 20), [0.75])
    assert not lines_of(cost, (0, 10), [0.75], epoch=2)
    assert lines_of(cost, (20, 30), [0.75], epoch=2) == [LINE]


@pytest.mark.parametrize(
    ("count", "workers", "wait", "batches"),
    [
        (60, 2, 0.75, (0, 10, 20, 30)),  # enough cores: the disk is slow, or --num-workers low
        (4, 2, 0.05, (0, 10, 20, 30)),  # nobody waits
        (4, 0, 0.75, (0, 10, 20, 30)),  # no workers, or no GPU
        (4, 15, 0.75, (0, 10, 20, 30)),  # workers deliver in bursts
        (4, 2, 0.75, (0, 10, 20)),
    ],
)
def test_there_is_no_line_without_a_need_or_a_measurement(
    cores: SimpleNamespace, count: int, workers: int, wait: float, batches: tuple[int, ...]
) -> None:
    cores.count = count
    assert not lines_of(LoaderCost(workers, batch_size=4, processes=3), batches, [wait])


def test_the_workers_processor_time_is_that_of_the_children() -> None:
    before_s = worker_processor_s()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        burnt_s = float(process.stdout.readline())
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        assert worker_processor_s() - before_s >= burnt_s - 2 * tick_s
        process.stdin.write(b"\n")
