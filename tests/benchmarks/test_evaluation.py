"""benchmarks/evaluation.py: the same judgement on any number of processes, and how fast it comes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import TrainedRun, must_run

BENCHMARK = ("python", "benchmarks/evaluation.py", "--rounds", "1", "--device", "cpu")


def test_all_numbers_of_processes_judge_the_same(trained: TrainedRun, tmp_path: Path) -> None:
    model, results = trained.folder / "best.pt", tmp_path / "results.json"
    output = must_run(*BENCHMARK, "--model", model, "--data", trained.data, "--json", results)
    record = json.loads(results.read_text())
    one, two = record["runs"]["1"][0], record["runs"]["2"][0]
    assert one["images"] == two["images"] > 0
    assert abs(one["mask_map50_95"] - two["mask_map50_95"]) < 1e-6
    assert two["memory_mb"] > one["memory_mb"] > 50
    assert output.splitlines()[-1] == f"ratio {one['seconds'] / two['seconds']:.2f}"
