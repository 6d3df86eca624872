"""benchmark_ddp.py, from its flags to its files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import benchmark_ddp
from tests.conftest import run_main
from utils.common.errors import UsageError, UserError


def test_counts_beyond_the_machine_or_the_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_ddp, "usable_cpu_count", lambda: 4)
    config = benchmark_ddp.BenchmarkConfig
    assert benchmark_ddp.choose_counts(config(), 0) == (1, 2, 4)
    assert benchmark_ddp.choose_counts(config(), 2) == (1, 2)
    assert benchmark_ddp.choose_counts(config(processes=(4, 1, 4)), 0) == (1, 4)
    assert benchmark_ddp.choose_counts(config(threads=2), 0) == (1, 2)
    with pytest.raises(UserError, match=r"--processes 4: .* 4 usable core\(s\), and each process needs 2 of its own"):
        benchmark_ddp.choose_counts(config(processes=(4,), threads=2), 0)
    with pytest.raises(UserError, match=r"--processes 8: this machine has 4 usable core"):
        benchmark_ddp.choose_counts(config(processes=(8,)), 0)
    with pytest.raises(UserError, match=r"--processes 4: this machine has 2 visible GPU"):
        benchmark_ddp.choose_counts(config(processes=(4,)), 2)
    with pytest.raises(UserError, match="cannot share it between 4 processes"):
        benchmark_ddp.choose_counts(config(scaling="strong", batch_size=2), 0)
    with pytest.raises(UserError, match="no CUDA GPU"):
        benchmark_ddp.choose_counts(config(device="cuda"), 0)


def test_benchmark_ddp_trains_on_one_and_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark_ddp, "usable_cpu_count", lambda: 2)
    flags = ("--batch-size", "3", "--img-size", "64", "--steps", "2", "--warmup", "1", "--repeats", "1")
    place = ("--device", "cpu", "--scaling", "strong", "--output", tmp_path / "out")
    assert run_main(benchmark_ddp, monkeypatch, *flags, *place) == 0
    shown, noise = capfd.readouterr()
    assert "round 1, strong scaling, 2 process(es):" in shown
    assert "All-reduce by itself:" in shown
    assert noise == ""
    names = ["benchmark_results.csv", "benchmark_results.json", "multi_gpu_benchmark.png"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    record = json.loads((tmp_path / "out" / "benchmark_results.json").read_text())
    alone, together = record["runs"]
    assert (alone["processes"], together["processes"]) == (1, 2)
    assert alone["global_batch_size"] == together["global_batch_size"] == 3  # dealt out as 2 and 1
    assert (alone["waiting_ms"], alone["communication_ms"], alone["allreduce_ms"]) == (0, 0, None)
    assert len(together["compute_ms_by_rank"]) == 2
    assert together["gradient_communication_ms"] > 0
    assert together["other_collectives"] >= 2  # the loss's normalisers and the batch statistics
    assert together["allreduce_gb_per_s"] > 0
    for found in (alone, together):
        assert found["ranges_share"] == pytest.approx(1, abs=0.05)
    assert together["allreduces"][0]["bytes"] == 1024
    with (tmp_path / "out" / "benchmark_results.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["processes"] for row in rows] == ["1", "2"]
    assert float(rows[1]["images_per_s"]) == together["images_per_s"]
    with Image.open(tmp_path / "out" / "multi_gpu_benchmark.png") as picture:
        assert picture.size[0] > 1000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repeats": 0}, "--repeats 0"),
        ({"timeout_s": 0.5}, "--timeout-s 0.5"),
        ({"processes": (1, -2)}, "--processes -2"),
        ({"num_workers": -1}, "--num-workers -1"),
    ],
)
def test_impossible_numbers_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        benchmark_ddp.BenchmarkConfig(**values)
