"""The comparison of the two loaders: it runs and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.input_pipeline import InputConfig, choose_data
from benchmarks.input_pipeline_sides import ORIGINAL_LONG_SIDE_PX, parse_raw
from tests.conftest import PROJECT, must_run
from utils.common.errors import UserError
from utils.data.images import upright_size
from utils.sources.sample import write_sample

SCRIPT = PROJECT / "benchmarks" / "input_pipeline.py"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write ten photographs as download_data.py would."""
    folder = tmp_path_factory.mktemp("photographs") / "raw"
    write_sample(folder, 10)
    return folder


def test_it_compares_parsed_photographs_and_their_originals(raw: Path, tmp_path: Path) -> None:
    results, output = tmp_path / "some" / "results.json", tmp_path / "out"
    data = parse_raw(raw, tmp_path / "small", 64)
    sizes = ("--img-size", "64", "--batch-size", "2", "--batches", "2", "--rounds", "2")
    places = ("--data", data, "--raw", raw, "--output", output, "--json", results)
    printed = must_run("python", SCRIPT, *sizes, *places)
    record = json.loads(results.read_text())
    word, number = printed.splitlines()[-1].split()
    assert word == "ratio"
    assert number == f"{record['ratio']:.2f}"
    assert [(case["case"], case["has_colour_jitter"]) for case in record["cases"]] == [
        ("small files", True),
        ("small files", False),
        ("originals", True),
        ("originals", False),
    ]
    assert record["ratio"] == record["cases"][0]["ratio"]
    assert record["config"]["img_size"] == 64
    assert record["environment"]["cpu"]
    for case in record["cases"]:
        times = case["cpu_ms_per_sample"]
        assert case["ratio"] == pytest.approx(times["theirs"] / times["ours"])
        assert case["files_decoded_per_sample_by_theirs"] == pytest.approx(1, abs=0.5)
        assert min(case["targets_per_sample"].values()) > 0
        assert len(case["cpu_ms_per_sample_by_round"]["ours"]) == 2
    assert "CPU ms per sample" in printed


def test_originals_keep_their_size_and_are_parsed_once(raw: Path, tmp_path: Path) -> None:
    data = parse_raw(raw, tmp_path / "originals", ORIGINAL_LONG_SIDE_PX)
    kept = {upright_size(file.read_bytes()) for file in data.parent.rglob("*.[jJ][pP][gG]")}
    assert kept
    assert kept <= {upright_size(file.read_bytes()) for file in raw.rglob("*.[jJ][pP][gG]")}
    written = data.stat().st_mtime_ns
    assert parse_raw(raw, tmp_path / "originals", ORIGINAL_LONG_SIDE_PX).stat().st_mtime_ns == written
    with pytest.raises(UserError, match=r"parse_labels.py failed \(code 1\): .*nowhere"):
        parse_raw(tmp_path / "nowhere", tmp_path / "none", None)


def test_the_originals_of_a_yaml_are_read_by_both(tmp_path: Path) -> None:
    cases = choose_data(InputConfig(data="small.yaml", originals="large.yaml"), tmp_path)
    assert cases == [
        ("small files", Path("small.yaml"), Path("small.yaml")),
        ("originals", Path("large.yaml"), Path("large.yaml")),
    ]
