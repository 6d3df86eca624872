"""Benchmarks of reading windows, of the two loaders and of the evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import evaluation
from benchmarks import windows as benchmark
from benchmarks.input_pipeline import InputConfig, choose_data
from benchmarks.input_pipeline_sides import ORIGINAL_LONG_SIDE_PX, parse_raw
from benchmarks.windows import Ways
from tests.conftest import PROJECT, TrainedRun, must_run, run_main
from utils.common.errors import UserError
from utils.data.dataset import read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.images import read_image, upright_size, write_jpeg
from utils.data.windows import WindowConfig, open_windows
from utils.sources.sample import write_sample

# --- The comparison of ways to read a window: all of them read the same pixels ---------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("images", "labels"):
        (tmp_path / name).mkdir()
    for number in range(2):
        rows, columns = np.mgrid[:400, :600]
        image = np.stack([columns / 3, rows / 2, np.full((400, 600), 90 * number)], axis=-1).astype(np.uint8)
        write_jpeg(tmp_path / "images" / f"{number}.jpg", image)
        (tmp_path / "labels" / f"{number}.txt").write_text("0 0.2 0.2 0.8 0.2 0.8 0.8\n")
    (tmp_path / "data.yaml").write_text("train: images\nnames: [one]\n")
    return tmp_path / "data.yaml"


def test_all_ways_read_the_same_window(data: Path, tmp_path: Path) -> None:
    photos = read_photos(load_dataset_yaml(data), "train")
    windowed = open_windows(photos, 96, WindowConfig(2, 0.5, 1), 0, tmp_path / "cache", "train", print)
    raw = tmp_path / "raw"
    raw.write_bytes(b"".join(read_image(photo.file).tobytes() for photo in photos))
    ways = Ways(photos, windowed, raw).by_name()
    assert len(ways) >= 5
    for photo in range(2):
        whole = read_image(photos[photo].file).astype(float)
        for name, read in ways.items():
            np.testing.assert_allclose(
                read(photo, (112, 64, 208, 160), 1.0), whole[64:160, 112:208], atol=6, err_msg=name
            )
            assert read(photo, (100, 100, 292, 292), 0.5).shape == (96, 96, 3), name


def test_the_command_prints_a_ratio(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = ["--photographs=2", "--rounds=1", "--samples=2", "--img-size=64", f"--output={output}"]
    assert run_main(benchmark, monkeypatch, "--data", data, *options) == 0
    record = json.loads((output / "results.json").read_text())
    assert capsys.readouterr().out.splitlines()[-1] == f"ratio {record['ratio']:.2f}"
    assert record["cpu_ms_per_sample"].keys() >= {"windows, mosaic of four", "whole photographs, one alone"}
    assert not (output / "uncompressed").exists()


# --- The comparison of the two loaders: it runs and says what it measured --------------------------------------------

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
    sizes = ("--img-size", "64", "--batch-size", "2", "--batches", "2", "--rounds", "1")
    places = ("--data", data, "--raw", raw, "--output", output, "--json", results)
    printed = must_run("python", SCRIPT, *sizes, *places)
    record = json.loads(results.read_text())
    word, number = printed.splitlines()[-1].split()
    assert word == "ratio"
    assert number == f"{record['ratio']:.2f}"
    cases = [(name, has_jitter) for name in ("small files", "originals") for has_jitter in (True, False)]
    assert [(case["case"], case["has_colour_jitter"]) for case in record["cases"]] == cases
    assert record["ratio"] == record["cases"][0]["ratio"]
    assert record["config"]["img_size"] == 64
    assert record["environment"]["cpu"]
    for case in record["cases"]:
        times = case["cpu_ms_per_sample"]
        assert case["ratio"] == pytest.approx(times["theirs"] / times["ours"])
        assert case["files_decoded_per_sample_by_theirs"] == pytest.approx(1, abs=0.5)
        assert min(case["targets_per_sample"].values()) > 0
        assert len(case["cpu_ms_per_sample_by_round"]["ours"]) == 1
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
    small, large = Path("small.yaml"), Path("large.yaml")
    cases = choose_data(InputConfig(data=str(small), originals=str(large)), tmp_path)
    assert cases == [("small files", small, small), ("originals", large, large)]


# --- benchmarks/evaluation.py: the same judgement on any number of processes, and how fast it comes ------------------


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
