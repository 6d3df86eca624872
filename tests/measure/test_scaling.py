"""Scaling from one process to several: what runs, and what is concluded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.measure.made_up import JOB, answer, run
from utils.measure import scaling
from utils.measure.scaling_rank import RankJob
from utils.measure.step_ranges import RANGES


@pytest.mark.parametrize(
    ("devices", "counts"), [(0, (1,)), (1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_process_counts_double_up_to_the_devices(devices: int, counts: tuple[int, ...]) -> None:
    assert scaling.process_counts(devices) == counts


def test_a_run_is_split_into_compute_communication_data_and_waiting() -> None:
    slow = {**dict.fromkeys(RANGES, 0.0), "data": 5.0, "forward": 50.0, "backward": 35.0, "communication": 10.0}
    late = answer(ranges_ms=[list(slow.values())] * 2, collectives=[[(1.0, 8), (9.0, 1000)]] * 2)
    found = scaling.summarise_run([answer(), late])
    assert found["global_batch_size"] == 8
    assert found["images_per_s"] == pytest.approx(80)
    parts = (found["compute_ms"], found["communication_ms"], found["data_ms"], found["waiting_ms"])
    assert parts == pytest.approx(
        (80, 10, 5, 5)
    )  # the rank that came last spent 1 + 9 in collectives, the other 10 more
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


def test_the_work_of_others_is_noticed() -> None:
    code = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    with scaling.OtherLoad() as quiet:
        subprocess.run([sys.executable, "-c", code.replace("20", "0.4")], check=True)  # our own child
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.2)
        with scaling.OtherLoad() as loud:
            time.sleep(0.8)  # not waited for yet: nobody counts it as ours
    finally:
        other.kill()
        other.wait()
    assert quiet.share is not None
    assert loud.share is not None
    assert loud.share > 0.5 / (os.cpu_count() or 1)
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


def test_one_process_has_no_overlap_in_the_table() -> None:
    rows = scaling.summarise([run(1, 1, 10.0, overlap=None, ranges_share=1.0)])
    assert scaling.scaling_table(rows).splitlines()[-1].split()[-2:] == ["100.0%", "-"]
