"""profile_gpu.py and benchmark_ddp.py, from their flags to their files."""

import csv
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

import benchmark_ddp
import profile_gpu
from tests.measure.made_up import JOB
from tests.support.oracle import draw_data
from tests.support.plugin import read_json
from tests.support.recipes import run_command
from yolo_seg_ddp.measure.scaling import STEP_PARTS
from yolo_seg_ddp.utils.errors import UserError

# --- profile_gpu.py, from its flags to its files --------------------------------------------------


@pytest.fixture(autouse=True)
def plans_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_gpu, "choose_threads_and_workers", lambda *_, **__: (1, 0))


def test_profile_gpu_writes_chart_report_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = (
        "--model",
        "yolov8n-seg.pt",
        "--batch-sizes",
        "2",
        "1",
        "--img-size",
        "64",
        "--steps",
        "1",
    )
    assert (
        run_command(profile_gpu, *flags, "--device", "cpu", "--output", "out/deep", "--trace") == 0
    )
    shown, noise = capfd.readouterr()
    assert noise == ""
    assert "on the CPU (1 threads)" in shown
    assert "yolov8n-seg.pt is not here: built with fresh weights from yolov8n-seg.yaml" in shown
    assert "peak memory is the whole process's so far (RSS)" in shown
    folder = tmp_path / "out" / "deep"
    assert sorted(file.name for file in folder.iterdir()) == [
        *("gpu_profile.png", "profile.json", "profiling_report.txt", "trace.json")
    ]
    record = read_json(folder / "profile.json")
    assert [found["batch_size"] for found in record["profiles"]] == [1, 2]
    for found in record["profiles"]:
        assert found["step_ms"] == pytest.approx(sum(found["phase_ms"].values()))
        assert found["images_per_s"] == pytest.approx(1000 * found["batch_size"] / found["step_ms"])
        assert found["allocated_bytes"] > 50 * 2**20
        assert found["reserved_bytes"] is None
    events = read_json(folder / "trace.json")["traceEvents"]
    assert {"phase: forward", "phase: backward", "aten::convolution_backward"} <= {
        event["name"] for event in events
    }
    assert record["best_batch_size"] in (1, 2)
    assert record["largest_batch_size"] == 2
    report = (folder / "profiling_report.txt").read_text()
    assert "Largest that fits: 2" in report
    assert "aten::convolution_backward" in report
    assert "phase: " not in report
    assert f"torch: {torch.__version__}" in report
    with Image.open(folder / "gpu_profile.png") as picture:
        assert picture.size[0] > 1000


def test_a_device_too_small_for_the_smallest_batch_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(profile_gpu, "profile_batch", full)
    with pytest.raises(UserError, match="--batch-sizes 4: does not fit at 640 pixels"):
        run_command(
            profile_gpu,
            "--model",
            JOB.model,
            "--device",
            "cpu",
            "--output",
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


# --- benchmark_ddp.py, from its flags to its files ------------------------------------------------


def test_counts_double_up_to_the_devices_and_those_beyond_the_machine_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(benchmark_ddp, "usable_cpu_count", lambda: 9)
    config = benchmark_ddp.BenchmarkConfig
    # without a GPU: of the cores, at most 8
    counts = {1: (1,), 2: (1, 2), 6: (1, 2, 4, 6), 0: (1, 2, 4, 8)}
    assert {gpus: benchmark_ddp.choose_counts(config(), gpus) for gpus in counts} == counts
    assert benchmark_ddp.choose_counts(config(processes=(4, 1, 4)), 0) == (1, 4)
    with pytest.raises(UserError, match=r"--processes 10: this machine has 9 usable core"):
        benchmark_ddp.choose_counts(config(processes=(10,)), 0)
    with pytest.raises(UserError, match=r"--processes 4: this machine has 2 visible GPU"):
        benchmark_ddp.choose_counts(config(processes=(4,)), 2)
    with pytest.raises(UserError, match="no CUDA GPU"):
        benchmark_ddp.choose_counts(config(device="cuda"), 0)


def test_benchmark_ddp_trains_on_one_and_two_processes_fed_by_the_trainers_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark_ddp, "usable_cpu_count", lambda: 2)
    flags = (
        "--batch-size",
        "3",
        "--img-size",
        "64",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--device",
        "cpu",
    )
    place = ("--data", draw_data(tmp_path / "data", 6), "--output", tmp_path / "out")
    assert run_command(benchmark_ddp, *flags, *place) == 0
    shown, noise = capfd.readouterr()
    assert "round 1, 2 process(es):" in shown
    assert noise == ""
    names = ["benchmark_results.csv", "benchmark_results.json", "multi_gpu_benchmark.png"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == names
    record = read_json(tmp_path / "out" / "benchmark_results.json")
    alone, together = record["runs"]
    assert (alone["processes"], together["processes"]) == (1, 2)
    assert (alone["global_batch_size"], together["global_batch_size"]) == (3, 6)
    assert (alone["waiting_ms"], alone["communication_ms"]) == (0, 0)
    assert together["communication_ms"] > 0
    for found in (alone, together):
        assert sum(found[name] for name in STEP_PARTS) == pytest.approx(found["step_ms"], rel=0.05)
        assert found["data_ms"] > 1  # without loader processes a batch is made while the step waits
    with (tmp_path / "out" / "benchmark_results.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["processes"] for row in rows] == ["1", "2"]
    assert float(rows[1]["images_per_s"]) == together["images_per_s"]
    with Image.open(tmp_path / "out" / "multi_gpu_benchmark.png") as picture:
        assert picture.size[0] > 1000
