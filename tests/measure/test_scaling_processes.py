"""The benchmark's own ranks: their answers, failures, time limits, and ends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from tests.measure.made_up import JOB
from tests.support.oracle import draw_photos
from tests.support.processes import is_running, wait_until
from utils.common.errors import UserError
from utils.distributed import rank_processes
from utils.measure import scaling


def test_the_trainers_loader_can_feed_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    draw_photos(tmp_path / "images" / "train", 5)
    data = tmp_path / "dataset.yaml"
    data.write_text("path: .\ntrain: images/train\nval: images/train\nnames: [pole, wire, insulator]\n")
    (answered,) = scaling.run_job(replace(JOB, data=str(data), global_batch_size=2, steps=3), 1)
    assert answered["num_images"] in (5, 6)  # three batches of an epoch's 2, 2 and 1
    found = scaling.summarise_run([answered])
    assert found["data_ms"] > 1  # without loader processes a batch is made while the step waits
    assert found["ranges_share"] == pytest.approx(1, abs=0.05)


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


def command_of(process_id: str) -> str:
    """Return a process's command line, or nothing once it is gone."""
    try:
        return Path(f"/proc/{process_id}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux ties a process to its parent (run them there)"
)
def test_a_killed_benchmark_leaves_no_rank_behind() -> None:
    job = asdict(replace(JOB, steps=100_000, timeout_s=600))
    code = f"from utils.measure.scaling import RankJob, run_job; run_job(RankJob(**{job!r}), 1)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        # Python has hardly started in it: most often the parent is dead before the rank can tie itself to it.
        ranks = wait_until(
            lambda: [one for one in children.read_text().split() if "_rank import" in command_of(one)], 30
        )
        (rank,) = map(int, ranks)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(rank), 10)
