"""A run's log: metrics.jsonl, results.csv, TensorBoard and the console."""

import csv
import json
import math
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from yolo_seg_ddp.run.log import RunLog


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_every_record_is_on_the_disk_before_the_next_one(tmp_path: Path) -> None:
    with RunLog(tmp_path / "runs" / "a", is_main=True, tensorboard=False) as log:
        for step in range(3):
            log.metrics({"global_step": step, "loss": 0.5})
            assert lines_of(tmp_path / "runs" / "a")[-1] == {"global_step": step, "loss": 0.5}


def test_numbers_of_every_kind_become_json_and_what_is_not_finite_becomes_null(
    tmp_path: Path,
) -> None:
    written: dict[str, tuple[object, object]] = {  # and read
        "nan": (math.nan, None),
        "nested": ({"inf": [1.0, -math.inf]}, {"inf": [1.0, None]}),
        "numpy": (np.float32(0.5), 0.5),
        "numpy_nan": (np.float64("nan"), None),
        "array": (np.arange(3), [0, 1, 2]),
        "tensor": (torch.tensor(2.5), 2.5),
        "flag": (np.bool_(True), True),
        "path": (tmp_path, str(tmp_path)),
        "name": ("Mast – Größe", "Mast – Größe"),
        "none": (None, None),
    }
    with RunLog(tmp_path, is_main=True, tensorboard=False) as log:
        log.metrics({name: value for name, (value, _) in written.items()})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.count("\n") == 1
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == {name: value for name, (_, value) in written.items()}


@pytest.mark.parametrize(
    ("ending", "steps"),
    [('{"global_step": 2, "lo', [1, 3]), ('{"global_step": 2}', [1, 2, 3])],
    ids=["cut", "whole"],
)
def test_a_line_without_its_end_does_not_spoil_the_next(
    tmp_path: Path, ending: str, steps: list[int]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 1}\n' + ending, encoding="utf-8")
    with RunLog(tmp_path, is_main=True, tensorboard=False) as log:
        log.metrics({"global_step": 3})
    assert [line["global_step"] for line in lines_of(tmp_path)] == steps


def epoch(number: int, **values: float) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": number, "total_epoch_time_s": 1.5, **values}


def test_results_csv_has_ultralytics_columns_first_four_digits_and_each_epoch_once(
    tmp_path: Path,
) -> None:
    log = RunLog(tmp_path, True, tensorboard=False, columns={"box_map50": "metrics/mAP50(B)"})
    log.metrics(epoch(1, train_loss=2.5))
    log.metrics(epoch(2, train_loss=2.0, box_map50=0.25))
    log.close()
    log.metrics(epoch(2, train_loss=1.23456, box_map50=math.nan))
    log.metrics(epoch(3, box_map50=0.5))
    assert rows_of(tmp_path) == [
        {
            "epoch": "1",
            "time": "1.5",
            "metrics/mAP50(B)": "",
            "total_epoch_time_s": "1.5",
            "train_loss": "2.5",
        },
        {
            "epoch": "2",
            "time": "3.0",
            "metrics/mAP50(B)": "",
            "total_epoch_time_s": "1.5",
            "train_loss": "1.235",
        },
        {
            "epoch": "3",
            "time": "4.5",
            "metrics/mAP50(B)": "0.5",
            "total_epoch_time_s": "1.5",
            "train_loss": "",
        },
    ]
    assert list(rows_of(tmp_path)[0])[:3] == ["epoch", "time", "metrics/mAP50(B)"]


def test_truncation_forgets_later_steps_everywhere(tmp_path: Path) -> None:
    with RunLog(tmp_path, is_main=True) as log:
        log.metrics({"kind": "start"})
        for step in range(1, 7):
            log.metrics({"kind": "batch", "global_step": step})
            log.scalars("batch", {"loss": float(step)}, step)
        for epoch in (1, 2):
            log.metrics({"kind": "epoch", "epoch": epoch, "global_step": 3 * epoch})
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"global_step": 7, "lo')
    # TensorBoard reads event files in the order of their names, which hold the second and then a
    # counter
    time.sleep(1.01)
    with RunLog(tmp_path, is_main=True) as log:
        log.truncate_after(4)
        assert [line.get("global_step") for line in lines_of(tmp_path)] == [None, 1, 2, 3, 4, 3]
        assert rows_of(tmp_path) == [{"epoch": "1", "time": "0.0", "global_step": "3"}]
        for step in (5, 6):
            log.metrics({"kind": "batch", "global_step": step})
            log.scalars("batch", {"loss": 10.0 * step}, step)
        log.metrics({"kind": "epoch", "epoch": 2, "global_step": 6})
    assert [line.get("global_step") for line in lines_of(tmp_path)] == [
        None,
        1,
        2,
        3,
        4,
        3,
        5,
        6,
        6,
    ]
    assert [row["global_step"] for row in rows_of(tmp_path)] == ["3", "6"]
    losses = events_of(tmp_path).Scalars("batch/loss")
    assert [(event.step, event.value) for event in losses] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (5, 50),
        (6, 60),
    ]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "results.csv",
        "tensorboard",
    ]
    log.truncate_after(0)
    assert rows_of(tmp_path) == []
    log.metrics({"kind": "epoch", "epoch": 1, "global_step": 4})
    assert rows_of(tmp_path) == [{"epoch": "1", "time": "0.0", "global_step": "4"}]


def test_an_interrupted_truncation_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = RunLog(tmp_path, is_main=True, tensorboard=False)
    for step in (1, 2):
        log.metrics({"global_step": step})
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        log.truncate_after(1)
    assert [line["global_step"] for line in lines_of(tmp_path)] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_other_ranks_write_and_say_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path / "run", is_main=False) as log:
        log.print("hello")
        log.metrics({"loss": 1})
        log.scalars("train", {"loss": 1.0}, 1)
        log.image("batch", np.zeros((4, 4, 3), np.uint8), 1)
        log.truncate_after(0)
    with RunLog(tmp_path / "run", is_main=True) as log:  # which has nothing to write
        log.truncate_after(5)
        log.print("Epoch 1", "-" * 3)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("Epoch 1\n---\n", "")


def test_tensorboard_gets_numbers_and_pictures(tmp_path: Path) -> None:
    with RunLog(tmp_path, is_main=True) as log:
        log.scalars(
            "epoch", {"loss": np.float32(0.5), "lr": 1, "kind": "epoch", "bad": math.nan}, 3
        )
        log.image("batch", np.zeros((6, 8, 3), np.uint8), 3)
    events = events_of(tmp_path)
    assert sorted(events.Tags()["scalars"]) == ["epoch/loss", "epoch/lr"]
    assert [(event.step, event.value) for event in events.Scalars("epoch/loss")] == [(3, 0.5)]
    picture = events.Images("batch")[0]
    assert (picture.step, picture.width, picture.height) == (3, 8, 6)


def test_without_tensorboard_the_run_goes_on_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # makes the import fail
    with RunLog(tmp_path, is_main=True) as log:
        for step in range(3):
            log.scalars("train", {"loss": 1.0}, step)
            log.metrics({"global_step": step})
    assert capsys.readouterr().out.count("TensorBoard is not installed") == 1
    assert len(lines_of(tmp_path)) == 3
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (run them on Linux)")
def test_a_training_nobody_can_hear_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = Path("/dev/full").open("w")  # noqa: SIM115 # closing it fails as well
    monkeypatch.setattr(sys, "stdout", deaf)
    with RunLog(tmp_path, is_main=True, tensorboard=False) as log:
        for step in range(3):
            log.print("A line for a terminal that is closed")
            log.metrics({"step": step})
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space left"):
        deaf.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
