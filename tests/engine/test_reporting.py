"""What a training says: lines and records of batches, and the stacks of a stalled rank."""

import contextlib
import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.small import classifier, fit, loader_of, points
from tests.support.ranks import run_ranks
from yolo_seg_ddp.engine import Task
from yolo_seg_ddp.engine.meters import FIELDS, EpochMeter
from yolo_seg_ddp.engine.reporting import BatchLog
from yolo_seg_ddp.engine.state import Progress
from yolo_seg_ddp.engine.stopping import StallWatch, Watched
from yolo_seg_ddp.run.log import RunLog
from yolo_seg_ddp.utils import distributed


def train_with_a_slow_rank(folder: Path) -> tuple[str, int]:
    """Train one epoch of 31 batches while rank 1 takes 30 ms longer to prepare each.

    Return what this rank prints, and the number of collectives of one logged batch.
    """

    class Slow(Task):
        def prepare(self, batch: Any, device: torch.device) -> Any:
            time.sleep(0.03 if distributed.rank() == 1 else 0.001)
            return super().prepare(batch, device)

    with contextlib.redirect_stdout(io.StringIO()) as said:
        fit(
            classifier(),
            folder,
            loader_of(points(248), 4),
            loader_of(points(8), 4),
            task=Slow(),
            epochs=1,
        )
    return said.getvalue(), count_collectives()


def test_a_slow_rank_is_named_twice_and_a_logged_batch_takes_one_collective(
    tmp_path: Path,
) -> None:
    (said, first), (nothing, second) = run_ranks(train_with_a_slow_rank, 2, tmp_path)
    assert first == second == 1
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    batches = [record for record in records if record["kind"] == "batch"]
    assert [record["batch"] for record in batches] == [0, 10, 20, 30]
    assert [record["slow_rank"] for record in batches] == [None, None, 1, 1]
    last = batches[-1]
    fast_ms, slow_ms = last["ranks"]["own_ms"]
    assert slow_ms > 30 > fast_ms
    assert last["step_ms"] > 30
    assert len(last["ranks"]["cpu_cores"]) == len(last["ranks"]["rss_bytes"]) == 2
    assert not any(name.startswith("gpu") for name in last["ranks"])
    assert said.count("rank 1 is slow (") == 2
    assert nothing == ""


def count_collectives() -> int:
    """Log one batch on two ranks; return how many collectives that took."""
    calls = []
    original = dist.all_reduce

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return original(*arguments, **keywords)

    dist.all_reduce = counted
    batch_log, meter = BatchLog(torch.device("cpu"), 2), EpochMeter()
    loss = torch.tensor(float(distributed.rank()))
    meter.add({"loss": loss}, 4)
    batch_log.write(RunLog(Path(), is_main=False), {"loss": loss}, Progress(), 0, meter, (1, 0))
    dist.all_reduce = original
    return len(calls)


def test_gpu_readings_reach_line_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch_log, meter = BatchLog(torch.device("cpu"), 1), EpochMeter()
    reading = dict(zip(FIELDS, [12.0, 0.0, 1.0, 1e9, 0.931, 5e9, 250.4, 61.0, 1410.0], strict=True))
    monkeypatch.setattr(batch_log.rank_meter, "lap", lambda share: list(reading.values()))
    meter.add({"loss": torch.tensor(2.4532)}, 4)
    with RunLog(tmp_path, is_main=True) as log:
        batch_log.write(log, {"loss": torch.tensor(2.4532)}, Progress(), 0, meter, (1234, 0))
    line = capsys.readouterr().out
    assert line.startswith("  Batch [0/1234] - Loss: 2.4532 | ")
    assert line.rstrip().endswith(", GPU 93% 250 W 61 °C")
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record["ranks"]["gpu_util"] == [pytest.approx(0.931)]
    assert (record["num_batches"], record["slow_rank"]) == (1234, None)
    assert abs(record["time_s"] - time.time()) < 60


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_one_bar_below_the_lines_and_the_best_epoch_in_colour(
    is_terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    fit(classifier(), tmp_path, loader_of(points(80), 4), loader_of(points(8), 4), epochs=1)
    said, bar = capsys.readouterr()
    assert re.search(r"\n(\x1b\[1;32m)?  Epoch 1/1: val_loss \d\.\d{4}(\x1b\[0m)?\n", said)
    assert ("\x1b" in said, "epoch 1, 0s left" in bar) == (is_terminal, is_terminal)
    assert not bar.rpartition("\r")[2].strip()  # it is gone
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    left = re.findall(r", (\d+)s left\n", said)
    # the monitor's
    assert left == [str(record["left_s"]) for record in records if record["kind"] == "batch"]


def test_a_stall_shows_the_stacks_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with StallWatch(tmp_path, rank=3, limit_s=0.1) as watch:
        time.sleep(0.5)
        watch.beat()
    told = (tmp_path / "stacks-rank3.txt").read_text(encoding="utf-8")
    assert told.count("[rank 3] no progress for 0 s") == 1
    assert "test_a_stall_shows_the_stacks_once" in told
    assert "test_a_stall_shows_the_stacks_once" in capfd.readouterr().err


def test_who_goes_on_is_left_alone(tmp_path: Path) -> None:
    with StallWatch(tmp_path, rank=0, limit_s=0.4) as watch:
        for _ in Watched(watch, range(8)):
            time.sleep(0.1)
    assert not watch.file.exists()
