"""Ranks and launchers that are killed or hang, and a long training: the result is that of an
undisturbed one.
"""

import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from benchmarks.jobs import POLL_S, Job, difference, is_alive, require, run
from tests.chaos.trainings import ENVIRONMENT, LOOPBACK, await_training, position, small, yolo
from tests.support.plugin import free_port
from yolo_seg_ddp.run.records import read_status
from yolo_seg_ddp.utils.errors import EXIT_STARTUP_TIMEOUT

# --- SIGKILL for ranks and launchers. After the launcher's restarts the result must be the same as
# without a kill ----

Sample = Callable[..., Path]


def kill_a_rank(job: Job, attempt: int, window_s: float, rng: random.Random) -> float:
    """Kill a random rank at a random moment after a start; return the seconds from the kill to the
    next batch.
    """
    time.sleep(rng.uniform(0, window_s))
    victims = job.ranks(attempt, 2)
    assert victims, (
        f"the ranks of start {attempt} were gone before their kill: too short a training"
    )
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
        # each start prints the banner once
        starts = job.output().count("Distributed YOLOv8 Training")
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
    meeting = (
        LOOPBACK
        if rendezvous == "c10d"
        else ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
    )
    command = small(tmp_path, launcher=[*meeting, "--max-restarts=3"], epochs=8)
    # The variable must be absent, as in a user's shell: an empty value would count as set.
    with Job(
        ["env", "--unset=TORCH_DISABLE_SHARE_RDZV_TCP_STORE", *command], tmp_path / "log"
    ) as job:
        await_training(job, 0)
        record_property("recovery s", kill_a_rank(job, 0, 1.0, rng))
        assert job.wait(300) == 0
    assert difference(tmp_path / "run", reference) == ""


@pytest.mark.chaos(10, 1, always=True)
def test_r13_no_process_outlives_its_launcher(
    trial: int, tmp_path: Path, record_property: Any
) -> None:
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
    assert read_status(tmp_path / "run").get("state") == "running"


@pytest.mark.chaos(5, 1)
def test_r26_a_rank_is_killed_in_mid_epoch_of_a_training_on_windows(
    times: int, sample: Sample, rng: random.Random, tmp_path: Path, record_property: Any
) -> None:
    data, reference, folder = (
        sample(40, long_side="native"),
        tmp_path / "reference",
        tmp_path / "killed",
    )
    run = folder / "run"
    # Minutes between checkpoints: one after every few batches.
    options: dict[str, Any] = {
        "epochs": times + 2,
        "windows": 3,
        "save_every_minutes": 0.01,
        "mosaic": 0.5,
    }
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


# --- Ranks that hang, that die while the others wait for them at the start, or that need long for a
# valid reason

GROUP_TIMEOUT_S = 10
# in which the other rank must notice the hang and exit, even on a busy machine
MAX_DETECTION_S = GROUP_TIMEOUT_S + 10
# torchrun waits 30 s for a rank that does not react to SIGTERM; --shutdown-timeout does not apply
# here (PyTorch 2.15).
MAX_RECOVERY_S = 90
START_TIMEOUT_S = 20
VALIDATION_TIMEOUT_S = 4

# A rank of two. Rank 1 dies inside `init_process_group`: at once (a negative delay), or after a
# delay.
PEER = """
import os, signal, sys, threading
import torch
import torch.distributed as dist
from yolo_seg_ddp.utils.distributed import setup_ddp
from yolo_seg_ddp.utils.errors import run_script
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
    trial: int,
    undisturbed: Callable[..., Path],
    rng: random.Random,
    tmp_path: Path,
    record_property: Any,
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
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
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
    command = small(
        tmp_path, epochs=1, val_samples=8 * batches, validation_s=3 * VALIDATION_TIMEOUT_S / batches
    )
    assert run(command, tmp_path / "log", NCCL_TIMEOUT=str(VALIDATION_TIMEOUT_S)) == 0


# --- A long training: the resources that it holds must not grow -----------------------------------

WARM_UP = 0.2  # share of the time after which the reference is taken
MAX_GROWTH = 0.05


@pytest.mark.chaos(1, 1)
@pytest.mark.timeout(0)
def test_r25_nothing_grows_in_a_long_training(
    request: Any, tmp_path: Path, record_property: Any
) -> None:
    config = request.config
    minutes = 0.5 if config.getoption("quick") else config.getoption("minutes")
    history = []
    with Job(
        small(tmp_path, epochs=1_000_000, num_workers=1, step_s=0.005), tmp_path / "log"
    ) as job:
        await_training(job, 0)
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s and job.popen.poll() is None:
            time.sleep(minutes / 2)
            history.append(holdings(job))
        job.process.send_signal(signal.SIGTERM)
        job.wait(60)
    record_property("epochs", read_status(tmp_path / "run").get("epoch", 0))
    warm = history[int(WARM_UP * len(history))]
    last = history[-max(len(history) // 10, 1) :]
    for name, before in warm.items():
        # The minimum of the last measurements: saving a checkpoint holds a few more for a moment.
        after = min(entry[name] for entry in last)
        record_property(f"{name} before", before)
        record_property(f"{name} after", after)
        assert after <= before * (1 + MAX_GROWTH), name


def holdings(job: Job) -> dict[str, float]:
    held = dict.fromkeys(("memory MiB", "files", "threads"), 0.0)
    for process in job.family():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if process != job.process:
                held["memory MiB"] += process.memory_info().rss / 2**20
                held["files"] += process.num_fds()
                held["threads"] += process.num_threads()
    return {**held, "shared segments": sum(1 for _ in Path("/dev/shm").iterdir())}
