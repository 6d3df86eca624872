"""Scaling from one process to several: what runs, what is concluded, and how the benchmark's ranks
end.
"""

import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.measure.made_up import JOB
from tests.support.plugin import PROJECT
from tests.support.processes import is_running, wait_until
from yolo_seg_ddp.measure import scaling
from yolo_seg_ddp.utils.distributed import rank_processes
from yolo_seg_ddp.utils.errors import UserError

# --- what is concluded ----------------------------------------------------------------------------


def answer(**changed: float) -> dict[str, Any]:
    """What a rank that trained two steps might answer: 100 ms each,
    unless a range has `changed`.
    """
    ranges = [
        ("data", 5.0),
        ("forward", 50.0),
        ("communication", 4.0),
        ("backward", 25.0),
        ("communication", 16.0),
    ]
    return {"steps": [[(name, changed.get(name, ms)) for name, ms in ranges]] * 2, "num_images": 8}


def test_a_run_is_split_into_compute_communication_data_and_waiting() -> None:
    late = answer(backward=43.0, communication=1.0)
    found = scaling.summarise_run([answer(), late])
    assert found["global_batch_size"] == 8
    assert found["images_per_s"] == pytest.approx(80)
    # The rank that came last spent 1 + 1 in collectives, the other 18 more.
    assert [found[name] for name in scaling.STEP_PARTS] == pytest.approx([84, 2, 5, 9])
    assert sum(found[name] for name in scaling.STEP_PARTS) == pytest.approx(found["step_ms"])
    alone = scaling.summarise_run(
        [{"steps": [[("data", 5.0), ("forward", 50.0)]], "num_images": 4}]
    )
    assert [alone[name] for name in scaling.STEP_PARTS] == [50, 0, 5, 0]


def test_speed_up_compares_runs_of_the_same_round() -> None:
    # The machine becomes slower from round to round: only a comparison within a round gives 1.8.
    runs = [
        {"processes": count, "repeat": repeat, "images_per_s": speed * factor}
        for repeat, speed in ((1, 100.0), (2, 50.0), (3, 10.0))
        for count, factor in ((2, 1.0), (4, 1.8))
    ]
    rows = scaling.summarise(runs)
    assert [row["processes"] for row in rows] == [2, 4]
    assert [row["speed_up"] for row in rows] == [1, pytest.approx(1.8)]
    assert rows[1]["efficiency"] == pytest.approx(0.9)
    assert rows[1]["images_per_s"] == pytest.approx(90)


def test_every_round_runs_every_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "run_job", lambda job, world_size: [answer()] * world_size)
    runs = scaling.run_benchmark(JOB, (1, 2), 2, lambda _: None)
    assert [(found["repeat"], found["processes"]) for found in runs] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]


# --- the benchmark's own ranks --------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Collect the processes which `yolo_seg_ddp.utils.distributed.rank_processes` starts."""
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
        (
            "[rank 1] error: nothing.pt: no such file\nwarning: no destroy_process_group",
            "nothing.pt: no such file",
        ),
        (
            "Traceback\n  File ...\nRuntimeError: NCCL error: no route",
            "RuntimeError: NCCL error: no route",
        ),
        ("Killed", "Killed"),
        ("", "it printed nothing"),
    ],
)
def test_a_failing_rank_is_one_line_and_ends_the_others(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    code = (
        "import os, sys, time; os.environ['RANK'] == '1' or time.sleep(60); "
        f"sys.stderr.write({says!r}); sys.exit(1)"
    )
    monkeypatch.setattr(scaling, "_RANK_CODE", code)
    with pytest.raises(UserError) as caught:
        scaling.run_job(JOB, 2)
    assert str(caught.value) == f"rank 1 of 2 process(es) failed (code 1): {reason}"
    assert [process.returncode for process in started] == [-9, 1]


def test_ranks_that_take_too_long_are_ended(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(
        UserError, match=r"rank 0, 1 of 2 process\(es\) not done after 0.3 s; raise --timeout-s"
    ):
        scaling.run_job(replace(JOB, timeout_s=0.3), 2)
    assert [process.returncode for process in started] == [-9, -9]


def is_a_rank(process_id: str) -> bool:
    with suppress(OSError):  # it is gone
        return "import be_a_rank" in Path(f"/proc/{process_id}/cmdline").read_text()
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc (run them on Linux)")
def test_a_killed_benchmark_leaves_no_rank_behind() -> None:
    job = asdict(replace(JOB, steps=100_000, timeout_s=600))
    code = (
        f"from yolo_seg_ddp.measure.scaling import RankJob, run_job; run_job(RankJob(**{job!r}), 1)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        # Python has hardly started in it: most often the parent is dead before the rank can tie
        # itself to it.
        (rank,) = wait_until(
            lambda: [int(one) for one in children.read_text().split() if is_a_rank(one)], 30
        )
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: not is_running(rank), 10), f"rank {rank} outlived the benchmark"
