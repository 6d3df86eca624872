"""Ranks that hang, that die while the others wait for them at the start, or that need long for a valid reason."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.jobs import Job, difference, is_alive, run
from tests.chaos.trainings import LOOPBACK, await_training, small
from utils.common.errors import EXIT_STARTUP_TIMEOUT

GROUP_TIMEOUT_S = 10
MAX_DETECTION_S = GROUP_TIMEOUT_S + 10  # in which the other rank must notice the hang and exit, even on a busy machine
# torchrun waits 30 s for a rank that does not react to SIGTERM; --shutdown-timeout does not apply here (PyTorch 2.15).
MAX_RECOVERY_S = 90
START_TIMEOUT_S = 20
VALIDATION_TIMEOUT_S = 4

# A rank of two. Rank 1 dies inside `init_process_group`: at once (a negative delay), or after a delay.
PEER = """
import os, signal, sys, threading
import torch
import torch.distributed as dist
from utils.distributed import setup_ddp
from utils.common.errors import run_script
real, delay_s = dist.init_process_group, float(sys.argv[1])
def die(): os.kill(os.getpid(), signal.SIGKILL)
def deadly(*arguments, **options):
    if delay_s < 0: die()
    threading.Timer(delay_s, die).start()
    real(*arguments, **options)
if os.environ["RANK"] == "1": dist.init_process_group = deadly
run_script(lambda: setup_ddp(torch.device("cpu")) and 0)
"""


@pytest.mark.chaos(5, 1)
def test_r9_a_rank_stands_still(
    trial: int, undisturbed: Callable[..., Path], rng: random.Random, tmp_path: Path, record_property: Any
) -> None:
    reference = undisturbed(epochs=8)
    command = small(tmp_path, epochs=8, launcher=[*LOOPBACK, "--max-restarts=3"])
    with Job(command, tmp_path / "log", NCCL_TIMEOUT=str(GROUP_TIMEOUT_S)) as job:
        await_training(job, 0)
        time.sleep(rng.uniform(0, 1.0))
        victim, other = rng.sample(job.ranks(0, 2), 2)
        victim.send_signal(signal.SIGSTOP)
        start_s = time.monotonic()
        detected_s = job.wait_until(lambda: not is_alive(other), "the other rank's end", 120)
        await_training(job, 1)
        recovered_s = time.monotonic() - start_s
        assert job.wait(300) == 0
    record_property("detected s", detected_s)
    record_property("training again s", recovered_s)
    assert difference(tmp_path / "run", reference) == ""
    assert detected_s <= MAX_DETECTION_S
    assert recovered_s <= MAX_RECOVERY_S


@pytest.mark.chaos(10, 2)
def test_r10_a_peer_dies_inside_the_groups_start(
    trial: int, rng: random.Random, tmp_path: Path, record_property: Any
) -> None:
    delay_s = -1.0 if trial % 2 == 0 else rng.uniform(0, 0.02)
    code, seconds = start_two(tmp_path, delay_s)
    while code == 0:  # the group had started before the peer died
        delay_s /= 2
        code, seconds = start_two(tmp_path, delay_s)
    record_property("exit code", code)
    record_property("start to exit s", seconds)
    assert code in (1, EXIT_STARTUP_TIMEOUT)
    assert seconds <= START_TIMEOUT_S + 15


def start_two(folder: Path, delay_s: float) -> tuple[int, float]:
    """Start two ranks; return rank 0's exit code and its lifetime in seconds. Raises TooSlow."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "INIT_TIMEOUT": str(START_TIMEOUT_S)}
    command = [sys.executable, "-c", PEER, str(delay_s)]
    start_s = time.monotonic()
    with (
        Job(command, folder / "log-0", RANK="0", LOCAL_RANK="0", **shared) as survivor,
        Job(command, folder / "log-1", RANK="1", LOCAL_RANK="1", **shared) as victim,
    ):
        victim.wait(120)
        return survivor.wait(120), time.monotonic() - start_s


@pytest.mark.chaos(2, 1)
def test_r22_validation_takes_three_times_the_groups_timeout(trial: int, tmp_path: Path) -> None:
    batches = 2  # of each rank
    command = small(tmp_path, epochs=1, val_samples=8 * batches, validation_s=3 * VALIDATION_TIMEOUT_S / batches)
    assert run(command, tmp_path / "log", NCCL_TIMEOUT=str(VALIDATION_TIMEOUT_S)) == 0
