"""The comparison of the two loaders: it runs, says what it measured, books time where it is spent, refuses nonsense."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks.input_pipeline import STAGES, InputConfig, choose_data
from benchmarks.input_pipeline_sides import ORIGINAL_LONG_SIDE_PX, StageClock, parse_raw
from tests.conftest import PROJECT, must_run, run_script
from utils.common.config import parse_config
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
        for who, stages in case["stages_cpu_ms_per_sample"].items():
            assert tuple(stages) == STAGES
            assert min(stages.values()) >= 0
            assert stages["mosaic and warp"] > 0
            assert case["targets_per_sample"][who] > 0
        assert len(case["cpu_ms_per_sample_by_round"]["ours"]) == 2
    assert "CPU ms per sample" in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--img-size", "100"], "--img-size 100"),
        (["--rounds", "0"], "--rounds 0"),
        (["--originals", "a.yaml", "--raw", "b"], "--originals and --raw"),
        (["--sample-image", "20"], "did you mean --sample-images"),
    ],
)
def test_wrong_arguments_are_one_line_and_code_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse_config(InputConfig, "Compare", flags)
    error = capsys.readouterr().err
    assert leaving.value.code == 2
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_missing_data_set_is_one_line_from_any_folder(tmp_path: Path) -> None:
    data = tmp_path / "missing.yaml"
    done = run_script("env", "-C", tmp_path, sys.executable, SCRIPT, "--data", data, "--output", tmp_path / "out")
    assert done.returncode == 1
    assert str(data) in done.stderr
    assert len(done.stderr.splitlines()) == 1


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


def test_the_clock_books_what_lies_inside_once_and_lets_go() -> None:
    def spend(seconds: float) -> None:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            pass

    class Work:
        def inner(self) -> None:
            spend(0.04)

        def outer(self) -> None:
            spend(0.02)
            self.inner()

    work, clock = Work(), StageClock()
    with clock.watching([(work, "inner", "in"), (work, "outer", "out")]):
        work.outer()
        work.outer()
    assert clock.seconds["in"] == pytest.approx(0.08, rel=0.2)
    assert clock.seconds["out"] == pytest.approx(0.04, rel=0.2)
    before = dict(clock.seconds)
    work.outer()
    assert clock.seconds == before
