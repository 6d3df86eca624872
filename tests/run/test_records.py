"""Records read from files that are written at the same time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.run.made_up import batch, write_run
from utils.run.records import RunReader


@pytest.mark.parametrize("ending", ['{"kind": "ba', '{"kind": "epoch", "epoch": 9}', "\x00\x00"])
def test_a_half_written_line_is_left_for_later(tmp_path: Path, ending: str) -> None:
    write_run(tmp_path, [batch(1, 0)])
    reader = RunReader(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(ending)
        file.flush()
        assert (len(reader.read().batches), reader.read().epochs) == (1, [])
        file.write("\n" + json.dumps(batch(1, 5)) + "\n")
    assert [record["batch"] for record in reader.read().batches] == [0, 5]


def test_a_file_that_was_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    write_run(tmp_path, [batch(1, number) for number in range(10)])
    reader = RunReader(tmp_path)
    assert len(reader.read().batches) == 10
    (tmp_path / "metrics.jsonl").write_text(json.dumps(batch(1, 0)) + "\n")
    assert len(reader.read().batches) == 1
    (tmp_path / "new").write_text("".join(json.dumps(batch(2, number)) + "\n" for number in range(4)))
    os.replace(tmp_path / "new", tmp_path / "metrics.jsonl")
    assert [record["epoch"] for record in reader.read().batches] == [2] * 4
