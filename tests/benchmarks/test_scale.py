"""The law of growth and the extrapolation of scale.py, and its measurements of a small command."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scale
from benchmarks.scale import NATIVE, SHRUNK, START, Rows
from tests.support.recipes import run_command

NUMBERS = (500, 2000, 8000)


def measured(command: str, power: float = 1.0) -> Rows:
    """2 s to start, 0.01 s x N^power, 0.5 s and 30 MB for a photograph of 20 megapixels."""
    times_s = {str(number): 2 + 0.01 * number**power for number in NUMBERS}
    times_s |= {START: 2.0, SHRUNK: 2.0 + 20 * 0.1, NATIVE: 2.0 + 20 * 0.5}
    rows: Rows = {}
    for name, time_s in times_s.items():
        number = int(name) if name.isdecimal() else 20
        traffic_mb = 5.0 + 20 * 30 * (name == NATIVE)
        row = {"number": number, "cpu_s": time_s, "peak_mib": 300, "traffic_mb": traffic_mb}
        rows[command, name] = {"command": command, "set": name, **row}
    return rows


@pytest.mark.parametrize("power", [1.0, 1.1, 2.0])
def test_the_law_of_growth_is_found_behind_the_cost_of_a_start(power: float) -> None:
    time_s, exponent = scale.predict(measured("parse", power), "parse", 30_000)
    assert exponent == pytest.approx(power)
    assert time_s == pytest.approx(2 + 0.01 * 30_000**power)


def test_threads_share_pixels_only_ranks_share_all_and_no_disk_is_outrun() -> None:
    def native_s(command: str, cluster: str, disk: str = "3 GB/s") -> float:
        return scale.extrapolate(measured(command), command, NATIVE, cluster, disk)

    python_s, pixels_s, disk_s = 2 + 296.2, 29_620 * 0.5, 29_620 * 30e6 / 3e9
    assert native_s("parse", "1 core") == pytest.approx(python_s + pixels_s)
    assert native_s("parse", "16 cores") == pytest.approx(python_s + pixels_s / 16)
    # parsing is one process
    assert native_s("parse", "4 x 64 cores") == pytest.approx(python_s + pixels_s / 64)
    assert native_s("prepare", "4 x 64 cores") == pytest.approx(python_s + pixels_s / 256)
    assert native_s("inference", "16 cores") == pytest.approx(python_s + pixels_s)  # one GPU
    assert native_s("inference", "4 x 64 cores") == pytest.approx((python_s + pixels_s) / 32)
    assert native_s("inference", "4 x 64 cores", "200 MB/s") == pytest.approx(15 * disk_s)


def measure(folder: Path, *words: str) -> list[Any]:
    options = ["--only", "near_duplicates", "--megapixels", "0", "--output", str(folder)]
    assert run_command(scale, *options, *words) == 0
    return [json.loads(line) for line in (folder / "measured.jsonl").read_text().splitlines()]


def test_finished_measurements_are_kept_and_a_size_that_takes_too_long_is_left_out(
    tmp_path: Path,
) -> None:
    rows = measure(tmp_path, "--sizes", "100", "110")
    assert [row["set"] for row in rows] == [START, "100", "110"]
    assert all(row["cpu_s"] > 0 and row["peak_mib"] > 0 for row in rows)
    more = measure(tmp_path, "--sizes", "100", "110", "120", "--most-minutes", "0.0001")
    assert more[:-1] == rows
    assert more[-1]["left_out"] == "about 0 min"
    assert "| `near_duplicates` |" in (tmp_path / "tables.md").read_text()
    about, record = map(json.loads, (tmp_path / "records.jsonl").read_text().splitlines())
    assert about["id"] == "scale"
    assert record["values"]["100"] == [round(rows[1]["cpu_s"], 1)]
