"""benchmarks/evaluation.py: the same judgement on any number of processes, and how fast it comes."""

import json
from pathlib import Path

import pytest

from benchmarks import evaluation
from tests.conftest import TrainedRun, run_main


def test_all_numbers_of_processes_judge_the_same(
    trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    results, flags = tmp_path / "results.json", ("--rounds", "1", "--device", "cpu")
    place = ("--model", trained.folder / "best.pt", "--data", trained.data, "--json", results)
    assert run_main(evaluation, monkeypatch, *flags, *place) == 0
    record = json.loads(results.read_text())
    one, two = record["runs"]["1"][0], record["runs"]["2"][0]
    assert one["images"] == two["images"] > 0
    assert abs(one["mask_map50_95"] - two["mask_map50_95"]) < 1e-6
    assert two["memory_mb"] > one["memory_mb"] > 50
    assert capfd.readouterr().out.splitlines()[-1] == f"ratio {one['seconds'] / two['seconds']:.2f}"
