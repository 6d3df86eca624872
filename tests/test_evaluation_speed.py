"""benchmarks/evaluation.py: the same judgement on any number of processes, and how fast it comes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import TrainedRun, must_run, run_script

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


def test_what_a_process_complains_of_is_said_in_one_line(trained: TrainedRun, tmp_path: Path) -> None:
    done = run_script(*BENCHMARK, "--model", tmp_path / "none.pt", "--data", trained.data, "--processes", "1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: 1 process(es) failed: ")
    assert "none.pt" in done.stderr
    assert len(done.stderr.splitlines()) == 1
