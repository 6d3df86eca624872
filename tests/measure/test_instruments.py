"""profile_gpu.py and benchmark_ddp.py: what they time, what they conclude, and how they end."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import benchmark_ddp
import profile_gpu
from tests.conftest import PROJECT
from tests.oracle import draw_photos
from tests.ranks import run_ranks as run_test_ranks
from utils.common.devices import choose_precision
from utils.common.errors import UsageError, UserError
from utils.measure import rank_processes, scaling, scaling_report, step_timer
from utils.measure.plots import plot_scaling
from utils.measure.profiling import (
    BatchProfile,
    TooLarge,
    available_memory_bytes,
    best_profile,
    forecast_on_cpu,
    profile_until_full,
)
from utils.measure.profiling_report import missing_lines, profile_table, verdict_lines
from utils.measure.scaling_model import fit_model
from utils.measure.scaling_rank import RankJob, _alone
from utils.measure.step_ranges import RANGES
from utils.measure.step_timer import PHASES, StepTimer, build_training, middle_half, time_training_steps
from utils.measure.synthetic import synthetic_batch
from utils.yolo.model import build_model, weights_or_description

CPU = torch.device("cpu")
JOB = RankJob(
    model="yolov8n-seg.yaml",
    global_batch_size=1,
    img_size=64,
    objects_per_image=3,
    warmup_steps=1,
    steps=1,
    amp="off",
    device="cpu",
    timeout_s=60,
)


def profile(batch_size: int, images_per_s: float, reserved_bytes: int | None = None) -> BatchProfile:
    step_ms = batch_size / images_per_s * 1000
    shares = dict(zip(PHASES, (0.0, 0.3, 0.1, 0.5, 0.1), strict=True))
    phase_ms = {phase: share * step_ms for phase, share in shares.items()}
    return BatchProfile(batch_size, 3, phase_ms, 0.5, batch_size * 2**20, reserved_bytes)


def answer(**values: Any) -> dict[str, Any]:
    """What a rank that trained two steps of 100 ms might answer."""
    ranges = {**dict.fromkeys(RANGES, 0.0), "data": 5.0, "forward": 50.0, "backward": 25.0, "communication": 20.0}
    blank = {
        "ranges_ms": [list(ranges.values())] * 2,
        "collectives": [[(4.0, 8), (16.0, 1000)]] * 2,
        "wall_ms": 200.0,
        "num_images": 8,
        "alone_ms": [80.0, 80.0],
        "allreduces": [{"bytes": 1000, "ms": [20.0]}],
        "gradient_bytes": 1000,
        "batch_size": 4,
    }
    return {**blank, **values}


def run(count: int, repeat: int, images_per_s: float, scaling_kind: str = "weak", **values: Any) -> dict[str, Any]:
    blank = dict.fromkeys(scaling._MEDIANS, 1.0)
    place = {"scaling": scaling_kind, "processes": count, "repeat": repeat, "global_batch_size": 4 * count}
    return {**blank, **place, "images_per_s": images_per_s, **values}


# --- synthetic batches ---------------------------------------------------------------------------------------------


def test_a_synthetic_batch_is_what_the_loader_would_give() -> None:
    batch = synthetic_batch(2, 160, 5, objects_per_image=12)
    assert batch.images.shape == (2, 160, 160, 3)
    assert batch.images.dtype == torch.uint8
    assert batch.masks.shape == (2, 40, 40)
    assert batch.masks.dtype == torch.int32
    assert batch.batch_index.tolist() == [0] * 12 + [1] * 12
    assert batch.boxes.dtype == torch.float32
    low, high = batch.boxes[:, :2], batch.boxes[:, 2:]
    assert (low >= 0).all()
    assert (high <= 160).all()
    assert (high > low).all()
    assert set(batch.class_ids.tolist()) <= set(range(5))
    seen = {int(value) for value in batch.masks[0].unique()}
    assert 6 < len(seen) <= 13  # background, and most of the twelve; the largest lie below
    assert max(seen) == 12


def test_a_synthetic_batch_follows_from_its_arguments() -> None:
    first, again = (synthetic_batch(1, 64, 3, seed=4) for _ in range(2))
    other = synthetic_batch(1, 64, 3, seed=5)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.boxes, again.boxes)
    assert not torch.equal(first.boxes, other.boxes)


def test_images_without_objects_can_be_asked_for() -> None:
    batch = synthetic_batch(2, 64, 3, objects_per_image=0)
    assert batch.boxes.shape == (0, 4)
    assert not batch.masks.any()


def test_missing_official_weights_become_their_description(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source, note = weights_or_description("yolov8m-seg.pt")
    assert source == "yolov8m-seg.yaml"
    assert note is not None
    assert "yolov8m-seg.pt is not here" in note
    Path("yolov8m-seg.pt").touch()
    for model in ("yolov8m-seg.pt", "best.pt", "yolov8n-seg.yaml"):
        assert weights_or_description(model) == (model, None)


# --- the timer -----------------------------------------------------------------------------------------------------


def test_a_phase_lasts_until_the_next_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    moments_s = iter([0.0, 1, 3, 6, 10, 15, 21, 28, 36, 45, 55])
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: next(moments_s))
    timer = StepTimer(CPU)
    for phase in (*PHASES, *PHASES, PHASES[0]):
        timer.mark(phase)
    np.testing.assert_allclose(timer.phases_ms(), [[1e3, 2e3, 3e3, 4e3, 5e3], [6e3, 7e3, 8e3, 9e3, 10e3]])


def test_a_step_without_all_phases_is_refused() -> None:
    timer = StepTimer(CPU)
    for phase in (*PHASES[:3], *PHASES):
        timer.mark(phase)
    with pytest.raises(ValueError, match="but input, forward, loss, input, forward were marked"):
        timer.phases_ms()


def test_real_steps_are_timed_and_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = build_training(build_model(JOB.model, ("a", "b")), CPU, choose_precision("off", CPU))
    before = next(training.state.model.parameters()).detach().clone()
    batch = synthetic_batch(1, 64, 2, objects_per_image=3)
    start_s = time.perf_counter()
    phases_ms = time_training_steps(training, batch, 1, 2)
    elapsed_ms = (time.perf_counter() - start_s) * 1000
    assert phases_ms.shape == (2, 5)
    assert (phases_ms > 0).all()
    assert phases_ms.sum() < elapsed_ms
    assert training.progress.global_step == 4  # the warm-up step, two timed ones, and the one that ends them
    assert not torch.equal(next(training.state.model.parameters()), before)
    assert time_training_steps(training, batch, 1, 1).shape == (1, 5)  # it can be asked again
    assert list(tmp_path.iterdir()) == []


# --- profile_gpu.py ------------------------------------------------------------------------------------------------


def test_the_sweep_ascends_and_stops_where_memory_ends() -> None:
    tried: list[int] = []
    announced: list[int] = []

    def measure(batch_size: int) -> BatchProfile:
        tried.append(batch_size)
        if batch_size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return profile(batch_size, 10.0 * batch_size)

    profiles, too_large = profile_until_full((32, 8, 4, 16, 8), measure, lambda done: announced.append(done.batch_size))
    assert tried == [4, 8, 16]
    assert announced == [found.batch_size for found in profiles] == [4, 8]
    assert too_large == TooLarge(16, "ran out of memory")
    assert verdict_lines(profiles, too_large)[1] == "Largest that fits: 8 (batch 16 ran out of memory)"


@pytest.mark.parametrize(
    ("words", "ends_the_sweep"), [("CUDNN_STATUS_ALLOC_FAILED", True), ("illegal memory access", False)]
)
def test_libraries_that_lack_memory_end_the_sweep_and_nothing_else_does(words: str, ends_the_sweep: bool) -> None:
    def measure(batch_size: int) -> BatchProfile:
        if batch_size > 4:
            raise RuntimeError(f"cuDNN error: {words}")
        return profile(batch_size, 10.0)

    if not ends_the_sweep:
        with pytest.raises(RuntimeError, match="illegal"):
            profile_until_full((4, 8), measure, lambda _: None)
        return
    profiles, too_large = profile_until_full((4, 8), measure, lambda _: None)
    assert len(profiles) == 1
    assert too_large == TooLarge(8, "ran out of memory")


def test_a_batch_beyond_the_machines_memory_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def measure(batch_size: int) -> BatchProfile:
        tried.append(batch_size)
        return replace(profile(batch_size, 10.0), allocated_bytes=batch_size * 2**30, memory_bytes={"process": 2**30})

    monkeypatch.setattr("utils.measure.profiling.available_memory_bytes", lambda: 10 * 2**30)
    profiles, too_large = profile_until_full((4, 8, 32), measure, lambda _: None, forecast_on_cpu)
    assert tried == [4, 8]  # 8 takes 3 GiB more than 4, 32 would take 21 more than 8
    assert too_large is not None
    assert verdict_lines(profiles, too_large)[1] == (
        "Largest that fits: 8 (batch 32 was not tried: about 21.0 GiB more than batch 8, 10.0 GiB available)"
    )


def test_available_memory_is_read_where_linux_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       1000 kB\nMemAvailable:    512 kB\n")
    assert available_memory_bytes(file) == 512 * 1024
    assert available_memory_bytes(tmp_path / "nothing") is None


def test_the_best_batch_leaves_headroom() -> None:
    profiles = [profile(4, 60.0, 40), profile(8, 97.0, 80), profile(16, 120.0, 95)]
    assert best_profile(profiles).batch_size == 16
    assert best_profile(profiles, capacity_bytes=100).batch_size == 8
    tight = best_profile(profiles, capacity_bytes=42)
    assert tight.batch_size == 4
    assert "none leaves 10% of the memory free" in verdict_lines(profiles, None, 42)[0]


def test_what_no_tensor_holds_is_said_beyond_a_tenth_of_the_peak() -> None:
    whole = replace(profile(1, 10.0), allocated_bytes=100, memory_bytes={"weights": 30, "activations": 65})
    assert missing_lines([whole]) == []
    lines = missing_lines([replace(whole, allocated_bytes=200, reserved_bytes=300)])
    assert lines == [
        "Missing: 105 B at batch 1 (52% of the peak) in no tensor: workspaces of kernels and gaps between blocks"
    ]


def test_the_middle_half_of_the_steps_leaves_out_what_was_disturbed() -> None:
    steps = np.array([[1.0, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 7], [1, 2, 3, 4, 900]])
    np.testing.assert_allclose(middle_half(steps), [1, 2, 3, 4, 6])
    np.testing.assert_allclose(middle_half(steps[1:]), steps[2])  # of three the middle one
    np.testing.assert_allclose(middle_half(steps[:1]), steps[0])


def test_the_best_batch_is_the_smallest_near_the_fastest() -> None:
    profiles = [profile(4, 60.0), profile(8, 97.5), profile(16, 100.0), profile(32, 98.0)]
    assert best_profile(profiles).batch_size == 8
    assert best_profile(profiles[:1]).batch_size == 4
    assert verdict_lines(profiles, None)[0].startswith("Best: --batch-size 8 (97.5 images/s")


def test_the_table_shows_reserved_memory_only_where_there_is_any() -> None:
    assert "peak RSS" in profile_table([profile(4, 60.0)])
    table = profile_table([profile(4, 60.0, reserved_bytes=3 * 2**30)])
    assert "tensors" in table
    assert "3.0 GiB" in table
    assert "peak RSS" not in table


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_gpu, "choose_threads_and_workers", lambda *_, **__: (1, 0))


def run_main(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    return int(module.main())


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
        memory = found["memory_bytes"]
        assert memory["process"] > 2 * sum(size for kind, size in memory.items() if kind != "process")
        assert memory["optimizer"] == pytest.approx(2 * memory["weights"], rel=0.02)  # AdamW's two moments
        assert 0.2 < found["readings"]["cpu_util"] < 1.3
    assert record["profiles"][1]["flop"] == pytest.approx(2 * record["profiles"][0]["flop"], rel=0.01)
    assert 0 < record["roofline"]["of_peak"] < 1
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
    ("config", "values", "message"),
    [
        (profile_gpu.ProfileConfig, {"batch_sizes": (4, 0)}, "--batch-sizes 0"),
        (profile_gpu.ProfileConfig, {"img_size": 100}, "--img-size 100"),
        (profile_gpu.ProfileConfig, {"steps": 0}, "--steps 0"),
        (benchmark_ddp.BenchmarkConfig, {"repeats": 0}, "--repeats 0"),
        (benchmark_ddp.BenchmarkConfig, {"timeout_s": 0.5}, "--timeout-s 0.5"),
        (benchmark_ddp.BenchmarkConfig, {"processes": (1, -2)}, "--processes -2"),
        (benchmark_ddp.BenchmarkConfig, {"predict": (8, 0)}, "--predict 0"),
        (benchmark_ddp.BenchmarkConfig, {"num_workers": -1}, "--num-workers -1"),
    ],
)
def test_impossible_numbers_are_refused(config: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**values)


# --- benchmark_ddp.py: arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "counts"), [(0, (1,)), (1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_process_counts_double_up_to_the_devices(devices: int, counts: tuple[int, ...]) -> None:
    assert scaling.process_counts(devices) == counts


def test_a_run_is_split_into_compute_communication_data_and_waiting() -> None:
    slow = {**dict.fromkeys(RANGES, 0.0), "data": 5.0, "forward": 50.0, "backward": 35.0, "communication": 10.0}
    late = answer(ranges_ms=[list(slow.values())] * 2, collectives=[[(1.0, 8), (9.0, 1000)]] * 2, alone_ms=[84.0, 86.0])
    found = scaling.summarise_run([answer(), late])
    assert found["global_batch_size"] == 8
    assert found["images_per_s"] == pytest.approx(80)
    parts = (found["compute_ms"], found["communication_ms"], found["data_ms"], found["waiting_ms"])
    assert parts == pytest.approx(
        (80, 10, 5, 5)
    )  # the rank that came last spent 1 + 9 in collectives, the other 10 more
    assert found["ranges_share"] == pytest.approx(1)
    assert found["imbalance"] == pytest.approx(85 / 80 - 1)
    assert found["gradient_communication_ms"] == pytest.approx(9)
    assert (found["other_collectives"], found["other_bytes"]) == (1, 8)
    assert found["overlap"] == pytest.approx(1 - 9 / 20)
    # 100 ms with communication, 85 without, 1 + 5 of it in what cannot overlap: 9 of the gradients' 20 ms were not hidden.
    assert found["net_overlap"] == pytest.approx(1 - 9 / 20)


def test_bandwidth_counts_the_slowest_rank() -> None:
    first = answer(allreduces=[{"bytes": 10**9, "ms": [100.0, 400.0, 90.0]}])
    second = answer(allreduces=[{"bytes": 10**9, "ms": [90.0, 90.0, 200.0]}])
    (point,) = scaling.allreduce_points([first, second])
    assert point["ms"] == pytest.approx(200)  # the slower rank of each try, then the median
    assert point["gb_per_s"] == pytest.approx(5)
    assert point["bus_gb_per_s"] == pytest.approx(5)  # 2 (2 - 1) / 2 * 1 GB in 0.2 s


def test_speed_up_compares_runs_of_the_same_round() -> None:
    # The machine becomes slower from round to round: only a comparison within a round gives 1.8.
    runs = [
        run(count, repeat, speed * factor)
        for repeat, speed in ((1, 100.0), (2, 50.0), (3, 10.0))
        for count, factor in ((2, 1.0), (4, 1.8))
    ]
    rows = scaling.summarise(runs)
    assert [row["processes"] for row in rows] == [2, 4]
    assert rows[0]["speed_up"] == 1
    assert rows[1]["speed_up"] == pytest.approx(1.8)
    assert rows[1]["efficiency"] == pytest.approx(0.9)
    assert (rows[1]["images_per_s_min"], rows[1]["images_per_s_max"]) == pytest.approx((18, 180))


def test_one_process_has_no_overlap_in_the_table() -> None:
    rows = scaling.summarise([run(1, 1, 10.0, overlap=None, net_overlap=None, ranges_share=1.0)])
    line = scaling_report.scaling_table(rows).splitlines()[-1].split()
    assert line[-3:] == ["100.0%", "-", "-"]


def test_one_device_alone_gets_a_chart_and_predictions_without_a_measured_link(tmp_path: Path) -> None:
    rows = scaling.summarise(
        [
            {
                "scaling": "weak",
                "processes": 1,
                "repeat": 1,
                "other_load": None,
                **scaling.summarise_run([answer(collectives=[[], []], allreduces=[])]),
            }
        ]
    )
    config = benchmark_ddp.BenchmarkConfig()
    predicted, notes = benchmark_ddp.make_predictions(config, fit_model(rows, []), rows)
    assert [row["link"] for row in predicted] == ["-", "100gbe", "100gbe", "100gbe"]
    assert "a single process measures no link" in notes[1]
    assert "none is assumed" in notes[2]
    plot_scaling(rows, [], predicted, "one device", tmp_path / "chart.png")
    with Image.open(tmp_path / "chart.png") as picture:
        assert picture.size[0] > 1000


def test_the_work_of_others_is_noticed() -> None:
    code = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    with scaling.OtherLoad() as quiet:
        subprocess.run([sys.executable, "-c", code.replace("20", "0.4")], check=True)  # our own child
    other = subprocess.Popen([sys.executable, "-c", code])
    try:
        time.sleep(0.2)
        with scaling.OtherLoad() as loud:
            time.sleep(0.8)  # not waited for yet: nobody counts it as ours
    finally:
        other.kill()
        other.wait()
    assert quiet.share is not None
    assert loud.share is not None
    assert loud.share > 0.5 / (os.cpu_count() or 1)
    rows = [{"other_load": 0.01}, {"other_load": None}]
    assert scaling_report.noise_note(rows) is None
    assert "up to 12% of this machine's cores" in str(scaling_report.noise_note([*rows, {"other_load": 0.12}]))


def test_every_round_runs_every_count_with_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int]] = []

    def train(job: RankJob, world_size: int) -> list[dict[str, Any]]:
        started.append((world_size, job.global_batch_size))
        return [answer(collectives=[[(20.0, 1000)]] * 2)] * world_size

    monkeypatch.setattr(scaling, "run_job", train)
    job = replace(JOB, global_batch_size=4)
    runs = scaling.run_benchmark(job, (1, 2), ("weak", "strong"), 2, lambda _: None)
    assert started == [(1, 4), (2, 8), (2, 4)] * 2  # with one process both kinds are the same run
    assert [found["repeat"] for found in runs] == [1] * 4 + [2] * 4
    assert [found["scaling"] for found in runs] == ["weak", "strong"] * 4
    started.clear()
    scaling.run_benchmark(replace(JOB, global_batch_size=1), (1, 2), ("weak", "strong"), 1, lambda _: None)
    assert started == [(1, 1), (2, 2)]  # one image cannot be shared


def test_counts_beyond_the_machine_or_the_batch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_ddp, "usable_cpu_count", lambda: 4)
    config = benchmark_ddp.BenchmarkConfig
    assert benchmark_ddp.choose_counts(config(), 0) == (1, 2, 4)
    assert benchmark_ddp.choose_counts(config(), 2) == (1, 2)
    assert benchmark_ddp.choose_counts(config(processes=(4, 1, 4)), 0) == (1, 4)
    with pytest.raises(UserError, match=r"--processes 8: this machine has 4 usable core"):
        benchmark_ddp.choose_counts(config(processes=(8,)), 0)
    with pytest.raises(UserError, match=r"--processes 4: this machine has 2 visible GPU"):
        benchmark_ddp.choose_counts(config(processes=(4,)), 2)
    with pytest.raises(UserError, match="cannot share it between 4 processes"):
        benchmark_ddp.choose_counts(config(scaling="strong", batch_size=2), 0)
    with pytest.raises(UserError, match="no CUDA GPU"):
        benchmark_ddp.choose_counts(config(device="cuda"), 0)


# --- benchmark_ddp.py: processes -----------------------------------------------------------------------------------


def weights_after_each_kind_of_step() -> list[np.ndarray]:
    """Train a step with communication, then one without; return a weight after each."""
    model = build_model(JOB.model, ("a", "b"))
    weight = next(model.parameters())
    rank = torch.distributed.get_rank()
    training = build_training(model, CPU, choose_precision("off", CPU))
    batch = synthetic_batch(1, 64, 2, objects_per_image=3, seed=rank)
    time_training_steps(training, batch, 1, 1)
    after = [weight.detach().numpy().copy()]
    with training.model.no_sync():  # type: ignore[operator]
        time_training_steps(_alone(training), batch, 1, 1)
    return [*after, weight.detach().numpy().copy()]


def test_steps_without_communication_leave_the_ranks_alone() -> None:
    first, second = run_test_ranks(weights_after_each_kind_of_step, 2)
    np.testing.assert_array_equal(first[0], second[0])
    assert not np.array_equal(first[1], second[1])


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
    assert "rows marked PREDICTION were not measured" in shown
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
    rows = record["prediction"]["rows"]
    assert [(row["processes"], row["kind"]) for row in rows] == [
        (8, "PREDICTION"),
        (16, "PREDICTION"),
        (64, "PREDICTION"),
    ]
    assert rows[-1]["link"] == "100gbe"
    with (tmp_path / "out" / "benchmark_results.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["processes"] for row in rows] == ["1", "2"]
    assert float(rows[1]["images_per_s"]) == together["images_per_s"]
    with Image.open(tmp_path / "out" / "multi_gpu_benchmark.png") as picture:
        assert picture.size[0] > 1000


def test_the_trainers_loader_can_feed_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "images" / "train").mkdir(parents=True)
    draw_photos(tmp_path / "images" / "train", 5)
    data = tmp_path / "dataset.yaml"
    data.write_text("path: .\ntrain: images/train\nval: images/train\nnames: [pole, wire, insulator]\n")
    (answered,) = scaling.run_job(replace(JOB, data=str(data), global_batch_size=2, steps=3), 1)
    assert answered["num_images"] in (5, 6)  # three batches of an epoch's 2, 2 and 1
    found = scaling.summarise_run([answered])
    assert found["data_ms"] > 1  # without loader processes a batch is made while the step waits
    assert found["ranges_share"] == pytest.approx(1, abs=0.05)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Collect the processes which `utils.measure.rank_processes` starts."""
    processes: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def remember(*args: Any, **keywords: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args, **keywords))
        return processes[-1]

    monkeypatch.setattr(rank_processes.subprocess, "Popen", remember)
    return processes


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("error: nothing.pt: no such file\nwarning: no destroy_process_group", "nothing.pt: no such file"),
        ("Traceback\n  File ...\nRuntimeError: NCCL error: no route", "RuntimeError: NCCL error: no route"),
        ("[rank 1] error: no GPU", "no GPU"),
        ("Killed", "Killed"),
        ("", "it printed nothing"),
    ],
)
def test_a_failing_rank_is_one_line_and_ends_the_others(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, says: str, reason: str
) -> None:
    code = f"import os, sys, time; os.environ['RANK'] == '1' or time.sleep(60); sys.stderr.write({says!r}); sys.exit(1)"
    monkeypatch.setattr(scaling, "_RANK_CODE", code)
    with pytest.raises(UserError) as caught:
        scaling.run_job(JOB, 2)
    assert str(caught.value) == f"rank 1 of 2 process(es) failed (code 1): {reason}"
    assert [process.returncode for process in started] == [-9, 1]


def test_ranks_that_take_too_long_are_ended(started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(UserError, match=r"rank 0, 1 of 2 process\(es\) not done after 0.3 s; raise --timeout-s"):
        scaling.run_job(replace(JOB, timeout_s=0.3), 2)
    assert [process.returncode for process in started] == [-9, -9]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ties a process to its parent")
def test_a_killed_benchmark_leaves_no_rank_behind() -> None:
    job = asdict(replace(JOB, steps=100_000, timeout_s=600))
    code = f"from utils.measure.scaling import RankJob, run_job; run_job(RankJob(**{job!r}), 1)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT)
    children_file = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        children = wait_for(lambda: children_file.read_text().split(), 30)
        # Its own tie to the parent comes within the first moments: wait until it imports PyTorch.
        maps = Path(f"/proc/{children[0]}/maps")
        wait_for(lambda: "libtorch" in maps.read_text(), 30)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not is_running(int(children[0])), 10)
    assert not is_running(int(children[0]))


def wait_for(condition: Any, timeout_s: float) -> Any:
    """Return the first true answer of `condition`; fail when none comes."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        answer = condition()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s")


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than an entry nobody has collected yet."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
