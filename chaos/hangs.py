"""Ranks that hang, that die while the others wait for them at the start, or that need long for a valid reason."""

from __future__ import annotations

import random
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist

from chaos.jobs import Job, TooSlow, require, run
from chaos.kills import await_training, ranks_of_attempt
from chaos.scenario import Result, Setting, spread
from chaos.trainers import LOOPBACK, difference, small
from utils.common.errors import EXIT_STARTUP_TIMEOUT

GROUP_TIMEOUT_S = 10
MAX_DETECTION_S = GROUP_TIMEOUT_S + 10  # in which the other rank must notice the hang and exit, even on a busy machine
# torchrun waits 30 s for a rank that does not react to SIGTERM; --shutdown-timeout does not apply here (PyTorch 2.15).
MAX_RECOVERY_S = 90
START_TIMEOUT_S = 20

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


def standing_still(setting: Setting) -> Result:
    """R9: a random rank gets SIGSTOP; the others wait `NCCL_TIMEOUT` seconds for it."""
    result, rng = Result(), random.Random(setting.seed)
    detections: list[float] = []
    recoveries: list[float] = []
    reference = setting.folder / "reference"
    require(small(reference, epochs=8), reference / "log")
    launcher = [*LOOPBACK, "--max-restarts=3"]
    for number in range(setting.count(5, 1)):
        folder = setting.folder / str(number)
        problems = []
        with Job(small(folder, epochs=8, launcher=launcher), folder / "log", NCCL_TIMEOUT=str(GROUP_TIMEOUT_S)) as job:
            try:
                detected_s, recovered_s = _stop_a_rank(job, rng)
                detections.append(detected_s)
                recoveries.append(recovered_s)
                code = job.wait(300)
                problems.append(f"exit code {code}" if code else difference(folder / "run", reference / "run"))
                problems.append(f"detected after {detected_s:.0f} s" if detected_s > MAX_DETECTION_S else "")
                problems.append(f"recovered after {recovered_s:.0f} s" if recovered_s > MAX_RECOVERY_S else "")
            except TooSlow as error:
                problems.append(str(error))
        result.trial("hang", *problems)
    result.figures = {"detected": spread(detections), "training again": spread(recoveries)}
    return result


def _stop_a_rank(job: Job, rng: random.Random) -> tuple[float, float]:
    await_training(job, 0)
    time.sleep(rng.uniform(0, 1.0))
    victims = ranks_of_attempt(job, 0, 2)
    rng.shuffle(victims)
    victims[0].send(signal.SIGSTOP)
    start_s = time.monotonic()
    detected_s = job.wait_until(lambda: not victims[1].is_alive(), "the other rank's end", 120)
    await_training(job, 1)
    return detected_s, time.monotonic() - start_s


def death_at_the_start(setting: Setting) -> Result:
    """R10: a peer dies while the process group starts; the other rank must not wait forever."""
    result, rng, times = Result(), random.Random(setting.seed), []
    codes: dict[int, int] = {}
    for number in range(setting.count(10, 2)):
        folder = setting.folder / str(number)
        delay_s = -1.0 if number % 2 == 0 else rng.uniform(0, 0.02)
        code, seconds = _one_start(folder, delay_s)
        while code == 0:  # the group had started before the peer died
            delay_s /= 2
            code, seconds = _one_start(folder, delay_s)
        times.append(seconds)
        codes[code] = codes.get(code, 0) + 1
        result.trial(
            "start",
            f"exit code {code}" if code not in (1, EXIT_STARTUP_TIMEOUT) else "",
            f"ended after {seconds:.0f} s" if seconds > START_TIMEOUT_S + 15 else "",
        )
    counts = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
    result.figures = {"exit codes": counts, "start to exit": spread(times)}
    return result


def _one_start(folder: Path, delay_s: float) -> tuple[int, float]:
    """Start two ranks; return rank 0's exit code and its lifetime in seconds, (-1, 999) if it did not end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "INIT_TIMEOUT": str(START_TIMEOUT_S)}
    command = [sys.executable, "-c", PEER, str(delay_s)]
    start_s = time.monotonic()
    with (
        Job(command, folder / "log-0", RANK="0", LOCAL_RANK="0", **shared) as survivor,
        Job(command, folder / "log-1", RANK="1", LOCAL_RANK="1", **shared) as victim,
    ):
        try:
            victim.wait(120)
            return survivor.wait(120), time.monotonic() - start_s
        except TooSlow:
            return -1, 999.0


def long_validation(setting: Setting) -> Result:
    """R22: each rank's share of the validation takes three times the group's timeout."""
    result = Result()
    timeout_s = 4
    for number in range(setting.count(2, 1)):
        folder = setting.folder / str(number)
        batches = 2
        command = small(folder, epochs=1, val_samples=8 * batches, validation_s=3 * timeout_s / batches)
        code = run(command, folder / "log", NCCL_TIMEOUT=str(timeout_s))
        result.trial("validation", f"exit code {code}" if code else "")
    result.figures = {"group timeout": f"{timeout_s} s", "validation": f"{3 * timeout_s} s"}
    return result
