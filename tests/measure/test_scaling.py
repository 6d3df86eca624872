"""Scaling from one process to several: what runs, what is concluded, and how the benchmark's ranks end."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.measure.made_up import JOB
from tests.support.plugin import PROJECT
from tests.support.processes import is_running, wait_until
from utils.common.errors import UserError
from utils.distributed import rank_processes
from utils.measure import scaling
from utils.measure.scaling_rank import RankJob
from utils.measure.step_ranges import RANGES

# --- what is concluded -----------------------------------------------------------------------------------------------


def answer(**values: Any) -> dict[str, Any]:
    """What a rank that trained two steps of 100 ms might answer."""
    ranges = {**dict.fromkeys(RANGES, 0.0), "data": 5.0, "forward": 50.0, "backward": 25.0, "communication": 20.0}
    blank = {
        "ranges_ms": [list(ranges.values())] * 2,
        "collectives": [[(4.0, 8), (16.0, 1000)]] * 2,
        "wall_ms": 200.0,
        "num_images": 8,
        "allreduces": [{"bytes": 1000, "ms": [20.0]}],
        "gradient_bytes": 1000,
        "batch_size": 4,
    }
    return {**blank, **values}


def run(count: int, repeat: int, images_per_s: float, scaling_kind: str = "weak", **values: Any) -> dict[str, Any]:
    blank = dict.fromkeys(scaling._MEDIANS, 1.0)
    place = {"scaling": scaling_kind, "processes": count, "repeat": repeat, "global_batch_size": 4 * count}
    return {**blank, **place, "images_per_s": images_per_s, **values}


def test_process_counts_double_up_to_the_devices() -> None:
    counts = {0: (1,), 1: (1,), 2: (1, 2), 6: (1, 2, 4, 6), 8: (1, 2, 4, 8)}
    assert {devices: scaling.process_counts(devices) for devices in counts} == counts


def test_a_run_is_split_into_compute_communication_data_and_waiting() -> None:
    slow = {**dict.fromkeys(RANGES, 0.0), "data": 5.0, "forward": 50.0, "backward": 35.0, "communication": 10.0}
    late = answer(ranges_ms=[list(slow.values())] * 2, collectives=[[(1.0, 8), (9.0, 1000)]] * 2)
    found = scaling.summarise_run([answer(), late])
    assert found["global_batch_size"] == 8
    assert found["images_per_s"] == pytest.approx(80)
    parts = (found["compute_ms"], found["communication_ms"], found["data_ms"], found["waiting_ms"])
    # The rank that came last spent 1 + 9 in collectives, the other 10 more.
    assert parts == pytest.approx((80, 10, 5, 5))
    assert found["ranges_share"] == pytest.approx(1)
    assert found["imbalance"] == pytest.approx(85 / 80 - 1)
    assert found["gradient_communication_ms"] == pytest.approx(9)
    assert (found["other_collectives"], found["other_bytes"]) == (1, 8)
    assert found["overlap"] == pytest.approx(1 - 9 / 20)


def test_bandwidth_counts_the_slowest_rank() -> None:
    first = answer(allreduces=[{"bytes": 10**9, "ms": [100.0, 400.0, 90.0]}])
    second = answer(allreduces=[{"bytes": 10**9, "ms": [90.0, 90.0, 200.0]}])
    (point,) = scaling.allreduce_points([first, second])
    assert point["ms"] == pytest.approx(200)  # the slower rank of each try, then the median
    assert point["gb_per_s"] == pytest.approx(5)
    assert point["bus_gb_per_s"] == pytest.approx(5)  # 2 (2 - 1) / 2 * 1 GB in 0.2 s


def test_speed_up_compares_runs_of_the_same_round() -> None:
    # The machine becomes slower from round to round: only a comparison within a round gives 1.8.
    runs = [
        run(count, repeat, speed * factor)
        for repeat, speed in ((1, 100.0), (2, 50.0), (3, 10.0))
        for count, factor in ((2, 1.0), (4, 1.8))
    ]
    rows = scaling.summarise(runs)
    assert [row["processes"] for row in rows] == [2, 4]
    assert rows[0]["speed_up"] == 1
    assert rows[1]["speed_up"] == pytest.approx(1.8)
    assert rows[1]["efficiency"] == pytest.approx(0.9)
    assert (rows[1]["images_per_s_min"], rows[1]["images_per_s_max"]) == pytest.approx((18, 180))
    alone = scaling.summarise([run(1, 1, 10.0, overlap=None, ranges_share=1.0)])
    assert scaling.scaling_table(alone).splitlines()[-1].split()[-2:] == ["100.0%", "-"]


def test_the_work_of_others_is_noticed() -> None:
    code = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    start = scaling.busy_s()
    subprocess.run([sys.executable, "-c", code.replace("20", "0.4")], check=True)  # our own child
    assert scaling.other_load(start, scaling.busy_s()) is not None
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.2)
        start = scaling.busy_s()
        time.sleep(0.8)  # not waited for yet: nobody counts it as ours
        loud = scaling.other_load(start, scaling.busy_s())
    finally:
        other.kill()
        other.wait()
    assert loud is not None
    assert loud > 0.5 / (os.cpu_count() or 1)
    rows: list[dict[str, Any]] = [{"other_load": 0.01}, {"other_load": None}]
    assert scaling.noise_note(rows) is None
    assert "up to 12% of this machine's cores" in str(scaling.noise_note([*rows, {"other_load": 0.12}]))


def test_every_round_runs_every_count_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int]] = []

    def train(job: RankJob, world_size: int) -> list[dict[str, Any]]:
        started.append((world_size, job.global_batch_size))
        return [answer(collectives=[[(20.0, 1000)]] * 2)] * world_size

    monkeypatch.setattr(scaling, "run_job", train)
    job = replace(JOB, global_batch_size=4)
    runs = scaling.run_benchmark(job, (1, 2), ("weak", "strong"), 2, lambda _: None)
    assert started == [(1, 4), (2, 8), (2, 4)] * 2  # with one process both kinds are the same run
    assert [found["repeat"] for found in runs] == [1] * 4 + [2] * 4
    assert [found["scaling"] for found in runs] == ["weak", "strong"] * 4
    started.clear()
    scaling.run_benchmark(replace(JOB, global_batch_size=1), (1, 2), ("weak", "strong"), 1, lambda _: None)
    assert started == [(1, 1), (2, 2)]  # one image cannot be shared


# --- the benchmark's own ranks ---------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Collect the processes which `utils.distributed.rank_processes` starts."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def remember(*args: Any, **keywords: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **keywords))
        return processes[-1]

    monkeypatch.setattr(rank_processes.subprocess, "Popen", remember)
    return processes


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("error: nothing.pt: no such file\nwarning: no destroy_process_group", "nothing.pt: no such file"),
        ("Traceback\n  File ...\nRuntimeError: NCCL error: no route", "RuntimeError: NCCL error: no route"),
        ("[rank 1] error: no GPU", "no GPU"),
        ("Killed", "Killed"),
        ("", "it printed nothing"),
    ],
)
def test_a_failing_rank_is_one_line_and_ends_the_others(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    code = f"import os, sys, time; os.environ['RANK'] == '1' or time.sleep(60); sys.stderr.write({says!r}); sys.exit(1)"
    monkeypatch.setattr(scaling, "_RANK_CODE", code)
    with pytest.raises(UserError) as caught:
        scaling.run_job(JOB, 2)
    assert str(caught.value) == f"rank 1 of 2 process(es) failed (code 1): {reason}"
    assert [process.returncode for process in started] == [-9, 1]


def test_ranks_that_take_too_long_are_ended(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(UserError, match=r"rank 0, 1 of 2 process\(es\) not done after 0.3 s; raise --timeout-s"):
        scaling.run_job(replace(JOB, timeout_s=0.3), 2)
    assert [process.returncode for process in started] == [-9, -9]


def is_a_rank(process_id: str) -> bool:
    with suppress(OSError):  # it is gone
        return "_rank import" in Path(f"/proc/{process_id}/cmdline").read_text()
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc (run them on Linux)")
def test_a_killed_benchmark_leaves_no_rank_behind() -> None:
    job = asdict(replace(JOB, steps=100_000, timeout_s=600))
    code = f"from utils.measure.scaling import RankJob, run_job; run_job(RankJob(**{job!r}), 1)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        # Python has hardly started in it: most often the parent is dead before the rank can tie itself to it.
        (rank,) = wait_until(lambda: [int(one) for one in children.read_text().split() if is_a_rank(one)], 30)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not is_running(rank), 10), f"rank {rank} outlived the benchmark"
