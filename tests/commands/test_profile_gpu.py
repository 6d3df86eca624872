"""profile_gpu.py, from its flags to its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import profile_gpu
from tests.conftest import run_main
from tests.measure.made_up import JOB
from utils.common.errors import UsageError, UserError
from utils.measure.profiling import BatchProfile

WEIGHTS_BYTES = 4 * 3_260_000  # YOLOv8n-seg's


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_gpu, "choose_threads_and_workers", lambda *_, **__: (1, 0))


@pytest.mark.usefixtures("one_thread")
def test_profile_gpu_writes_chart_report_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--model", "yolov8n-seg.pt", "--batch-sizes", "2", "1", "--img-size", "64", "--steps", "1")
    assert run_main(profile_gpu, monkeypatch, *flags, "--device", "cpu", "--output", "out/deep", "--trace") == 0
    shown, noise = capfd.readouterr()
    assert noise == ""
    assert "on the CPU (1 threads)" in shown
    assert "yolov8n-seg.pt is not here: built with fresh weights from yolov8n-seg.yaml" in shown
    assert "peak memory is the whole process's so far (RSS)" in shown
    folder = tmp_path / "out" / "deep"
    assert sorted(file.name for file in folder.iterdir()) == [
        *("gpu_profile.png", "profile.json", "profiling_report.txt", "trace.json")
    ]
    record = json.loads((folder / "profile.json").read_text())
    assert [found["batch_size"] for found in record["profiles"]] == [1, 2]
    for found in record["profiles"]:
        assert found["step_ms"] == pytest.approx(sum(found["phase_ms"].values()))
        assert found["images_per_s"] == pytest.approx(1000 * found["batch_size"] / found["step_ms"])
        assert found["allocated_bytes"] > 50 * 2**20
        assert found["reserved_bytes"] is None
        assert 3 * WEIGHTS_BYTES < found["fixed_bytes"] < found["allocated_bytes"]
        assert 0.2 < found["readings"]["cpu_util"] < 1.3
    assert len(record["operators"]) == 10
    assert sum(found["share"] for found in record["operators"]) < 1.0001
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {"phase: forward", "phase: backward", "aten::convolution_backward"} <= {event["name"] for event in events}
    assert record["best_batch_size"] in (1, 2)
    assert record["largest_batch_size"] == 2
    report = (folder / "profiling_report.txt").read_text()
    assert "Largest that fits: 2" in report
    assert f"torch: {torch.__version__}" in report
    with Image.open(folder / "gpu_profile.png") as picture:
        assert picture.size[0] > 1000


@pytest.mark.usefixtures("one_thread")
def test_a_device_too_small_for_the_smallest_batch_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any, **__: Any) -> BatchProfile:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profile_gpu, "profile_batch", out_of_memory)
    with pytest.raises(UserError, match="--batch-sizes 4: does not fit at 640 pixels"):
        run_main(profile_gpu, monkeypatch, "--model", JOB.model, "--device", "cpu", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_sizes": (4, 0)}, "--batch-sizes 0"),
        ({"img_size": 100}, "--img-size 100"),
        ({"steps": 0}, "--steps 0"),
    ],
)
def test_impossible_numbers_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile_gpu.ProfileConfig(**values)
