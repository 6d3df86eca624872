"""The comparison of ways to read a window: all of them read the same pixels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import windows as benchmark
from benchmarks.windows import Ways
from tests.conftest import run_main
from utils.data.dataset import read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.images import read_image, write_jpeg
from utils.data.windows import WindowConfig, open_windows


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
