"""Records of a run, the view of a running training, and the rank that is slower than the others."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.made_up import NOW_S, RANKS, batch, epoch_record, write_run
from yolo_seg_ddp.run.records import RunState, SlowRank
from yolo_seg_ddp.run.view import sparkline, view_lines


def view(folder: Path, columns: int = 80, later_s: float = 0.0, is_unicode: bool = True) -> str:
    state = RunState(folder).read()
    assert state.last_write_s is not None
    lines = view_lines(state, columns, state.last_write_s + later_s, is_unicode=is_unicode)
    assert max(map(len, lines)) <= columns
    return "\n".join(lines)


def test_a_running_run_shows_place_speed_losses_epochs_and_the_slow_rank(tmp_path: Path) -> None:
    records = [batch(1, number) for number in range(0, 20, 5)] + [epoch_record(1)]
    write_run(tmp_path, [*records, batch(2, 4), batch(2, 9, ranks=RANKS, slow_rank=1, left_s=30)])
    text = view(tmp_path, later_s=7)
    assert "running, last written 7s ago" in text
    assert "yolov8n-seg.yaml, 96 px, batch 4 x 3 ranks, seed 7" in text
    assert "Epoch 2/4, batch 10/20, step 30" in text
    assert " 38%, 30s left" in text  # (1 + 10/20) of 4 epochs; as the console said
    assert "27.3 images/s, 500 ms/batch, data wait 4%, GPU 92%, 580 W, 75 °C" in text
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("loss")).split()[1:] == [
        "0.3333",
        "█▂▁▁▁▁",
    ]
    assert next(line for line in lines if line.startswith("    1*")).split()[:2] == ["1*", "3.0000"]
    marked = [line for line in lines if line.startswith("slow ")]
    assert [line.split()[1:4] for line in marked] == [["1", "240", "30%"]]
    assert marked[0].endswith(" 1200")  # the last column is still seen
    assert "rank 1 slows the others down: 240 ms per batch, the others 151 ms (median)" in text
    assert "data wait  cores     memory  GPU  GPU mem    W  °C   MHz" in text
    assert view(tmp_path, is_unicode=False).isascii()
    assert view(tmp_path, columns=50)


def test_the_best_epoch_stays_in_sight(tmp_path: Path) -> None:
    write_run(tmp_path, [epoch_record(number) for number in range(1, 20)], "finished")
    text = view(tmp_path)
    assert "\n    2*" in text  # val_loss is lowest there
    assert "\n   19 " in text
    assert "\n    3 " not in text
    assert "finished" in text


def test_a_run_whose_process_is_gone_looks_dead(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_run(tmp_path, [batch(1, 0)], pid=ended.pid)
    assert f"LOOKS DEAD: process {ended.pid} is gone" in view(tmp_path)
    write_run(tmp_path, [batch(1, 0)], "finished", pid=ended.pid)
    assert "DEAD" not in view(tmp_path)
    # This process is younger: it was given the number since.
    write_run(tmp_path, [batch(1, 0)], updated="2020-01-01T00:00:00+00:00")
    assert f"LOOKS DEAD: process {os.getpid()} is gone" in view(tmp_path)


def test_a_silent_run_on_another_machine_looks_dead_after_a_while(tmp_path: Path) -> None:
    write_run(tmp_path, [batch(1, 0), batch(1, 5)], host="gpu-07", pid=12)
    assert "LOOKS DEAD" not in view(tmp_path, later_s=200)
    text = view(tmp_path, later_s=900)
    assert (
        "LOOKS DEAD: nothing written for 15 minutes; is process 12 on gpu-07 still there?" in text
    )
    # a run whose records lie ten minutes apart
    slow = [batch(1, 0), batch(1, 5, time_s=NOW_S + 600)]
    write_run(tmp_path, slow, host="gpu-07", pid=12)
    assert "LOOKS DEAD" not in view(tmp_path, later_s=900)


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    write_run(tmp_path, [batch(1, 0)], "failed", reason="ValueError: of no use\x1b[31m")
    text = view(tmp_path)
    # nothing from a file commands the terminal
    assert "failed: ValueError: of no use\\x1b[31m" in text


def test_records_of_an_older_version_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    old = {
        "kind": "batch",
        "epoch": 1,
        "batch": 0,
        "global_step": 1,
        "loss": 2.0,
        "images_per_s": 5.0,
    }
    write_run(tmp_path, [old, {"kind": "skip", "global_step": 1}, {"epoch": None}])
    assert "Epoch 1/4, batch 1, step 1" in view(tmp_path)
    assert "nan" not in view(tmp_path)


def test_a_sparkline_is_as_long_as_asked_and_follows_the_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(1000)), 4) == "▁▃▆█"
    assert sparkline([2.0, 2.0], 5) == "▅▅"
    assert sparkline([], 5) == ""


@pytest.mark.parametrize("ending", ['{"kind": "ba', '{"kind": "epoch", "epoch": 9}', "\x00\x00"])
def test_a_half_written_line_is_left_for_later(tmp_path: Path, ending: str) -> None:
    write_run(tmp_path, [batch(1, 0)])
    reader = RunState(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(ending)
        file.flush()
        assert (len(reader.read().batches), reader.read().epochs) == (1, [])
        file.write("\n" + json.dumps(batch(1, 5)) + "\n")
    assert [record["batch"] for record in reader.read().batches] == [0, 5]


def test_a_file_that_was_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    write_run(tmp_path, [batch(1, number) for number in range(10)])
    reader = RunState(tmp_path)
    assert len(reader.read().batches) == 10
    (tmp_path / "metrics.jsonl").write_text(json.dumps(batch(1, 0)) + "\n")
    assert len(reader.read().batches) == 1
    (tmp_path / "new").write_text(
        "".join(json.dumps(batch(2, number)) + "\n" for number in range(4))
    )
    os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
    assert [record["epoch"] for record in reader.read().batches] == [2] * 4


def test_a_rank_is_slow_once_it_was_so_in_two_laps() -> None:
    slow_rank = SlowRank()
    assert slow_rank.update([100, 150, 101], 300, 10) is None
    assert slow_rank.update([100, 150, 101], 300, 10) == 1
    assert slow_rank.update([100, 150, 101], 300, 1) == 1  # too short a lap to change anything
    assert slow_rank.update([100, 101, 150], 300, 10) is None  # another one: perhaps chance
    assert slow_rank.update([100, 101, 150], 300, 10) == 2
    assert slow_rank.update([100, 101, 110], 300, 10) is None


@pytest.mark.parametrize(
    ("own_ms", "step_ms"),
    [([100.0], 300), ([100.0, 115.0], 300), ([1.0, 3.0], 300), ([100.0, math.nan, 200.0], 300)],
    ids=["alone", "little", "little of the step", "unknown"],
)
def test_nobody_is_slow(own_ms: list[float], step_ms: float) -> None:
    slow_rank = SlowRank()
    assert [slow_rank.update(own_ms, step_ms, 10) for _ in range(3)] == [None] * 3
