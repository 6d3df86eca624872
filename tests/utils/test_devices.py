"""This machine: the choice of device and precision, seeds, memory, and how many cores this process
may use.
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy
import psutil
import pytest
import torch

from tests.support.plugin import must_run
from yolo_seg_ddp.utils import cores, devices
from yolo_seg_ddp.utils.devices import tune_device
from yolo_seg_ddp.utils.errors import UserError

chosen: list[torch.device] = []  # what was made PyTorch's current device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    chosen.clear()


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_gets_its_own_gpu() -> None:
    assert devices.choose_device("auto", 1) == torch.device("cuda", 1)
    assert devices.choose_device("cuda", 0) == torch.device("cuda", 0)
    assert devices.choose_device("cuda:1", 0) == torch.device("cuda", 1)
    assert devices.choose_device("1", 0) == torch.device("cuda", 1)
    assert devices.choose_device("cpu", 5) == torch.device("cpu")
    # no rank opens a context on another's GPU
    assert [device.index for device in chosen] == [1, 0, 1, 1]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("requested", "ranks", "message"),
    [
        ("0,1", 1, "CUDA_VISIBLE_DEVICES=0,1 bash train_ddp.sh 2"),
        ("cuda:2", 1, "numbered from 0"),
        ("gpu", 1, "not one of"),
        ("cuda:0", 2, "names one GPU for 2 processes"),
        ("auto", 4, r"4 processes but 2 visible GPU\(s\).*train_ddp.sh 2"),
    ],
)
def test_wrong_device_is_named(
    monkeypatch: pytest.MonkeyPatch, requested: str, ranks: int, message: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    # also those that have a GPU: they would wait for the others for ever
    for local_rank in range(ranks):
        with pytest.raises(UserError, match=message):
            devices.choose_device(requested, local_rank)


def test_without_cuda_auto_is_the_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.choose_device("auto", 3) == torch.device("cpu")
    for requested in ("cuda", "0", "cuda:1"):
        with pytest.raises(
            UserError, match=f"--device {requested}: PyTorch sees no CUDA GPU; use --device cpu"
        ):
            devices.choose_device(requested, 0)


BF16, OFF = devices.Precision("bf16", torch.bfloat16, False), devices.Precision("off", None, False)


@pytest.mark.parametrize(
    ("requested", "device", "has_bf16", "expected"),
    [
        ("auto", "cpu", True, BF16),
        ("auto", "cpu", False, OFF),
        ("bf16", "cpu", False, BF16),
        ("auto", "cuda", True, BF16),
        ("auto", "cuda", False, devices.Precision("fp16", torch.float16, True)),
        ("off", "cuda", True, OFF),
    ],
)
def test_precision_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    device: str,
    has_bf16: bool,
    expected: devices.Precision,
) -> None:
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert devices.choose_precision(requested, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("requested", "device"), [("fp16", "cpu"), ("bf16", "cuda"), ("half", "cpu")]
)
def test_impossible_precision_is_refused(
    monkeypatch: pytest.MonkeyPatch, requested: str, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UserError, match=f"--amp {requested}"):
        devices.choose_precision(requested, torch.device(device))


def _draw(seed: int, rank: int) -> tuple[float, float, float]:
    devices.seed_everything(seed, rank)
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_seeding_repeats_and_differs_between_ranks() -> None:
    assert _draw(3, 0) == _draw(3, 0)
    assert all(mine != other for mine, other in zip(_draw(3, 0), _draw(3, 1), strict=True))


CPU = torch.device("cpu")


def test_the_switches_of_a_gpu_leave_a_cpu_alone() -> None:
    before = (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    tune_device(CPU, deterministic=True, fixed_shapes=True)
    assert (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ) == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_gpus_switches_follow_the_wish_for_equal_bits(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        tune_device(torch.device("cuda", 0), deterministic=deterministic, fixed_shapes=True)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.backends.cudnn.benchmark != deterministic
        assert torch.backends.cudnn.allow_tf32 != deterministic
        assert torch.get_float32_matmul_precision() == ("highest" if deterministic else "high")
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if deterministic else None)
        assert torch.utils.deterministic.fill_uninitialized_memory != deterministic  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc (run it on Linux)")
def test_a_small_process_does_not_report_the_memory_of_the_large_one_that_started_it() -> None:
    own_bytes = devices.peak_memory_bytes(CPU)
    assert own_bytes > 50 * 2**20, "PyTorch alone is larger"
    code = "from yolo_seg_ddp.utils.cores import peak_process_bytes; print(peak_process_bytes())"
    assert int(must_run("python", "-c", code)) < 50 * 2**20


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", 16),
        ({"cpu.max": "max 100000"}, "0::/\n", 16),
        ({"cpu.max": "250000 100000"}, "0::/\n", 3),
        ({"cpu.max": "1000 100000"}, "0::/\n", 1),
        ({"cpu.max": "6400000 100000"}, "0::/\n", 16),
        ({"job/cpu.max": "400000 100000", "job/step/cpu.max": "max 100000"}, "0::/job/step\n", 4),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, "3:memory:/x\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/\n", 16),
        (
            {"cpu/box/cpu.cfs_quota_us": "500000", "cpu/box/cpu.cfs_period_us": "100000"},
            "1:cpu:/box\n",
            5,
        ),
        ({"cpu.max": "nonsense"}, "garbage", 16),
    ],
)
def test_container_quota_limits_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    membership: str,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    membership_file = tmp_path / "membership"
    membership_file.write_text(membership)
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content)
    assert cores.usable_cpu_count(tmp_path / "cgroup", membership_file) == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("requested", [0, 1, 8])
def test_threads_and_workers_never_oversubscribe_the_cores(
    device_type: str, requested: int
) -> None:
    for num_cores in range(1, 65):
        for ranks in range(1, 9):
            threads, workers = cores.choose_threads_and_workers(
                ranks, requested, device_type, num_cores
            )
            assert threads >= 1
            assert 0 <= workers <= requested
            if num_cores // ranks >= 2:
                assert ranks * (threads + workers) <= num_cores
            elif device_type == "cpu":
                assert (threads, workers) == (1, 0)
            else:
                assert workers == min(1, requested)


def test_unless_told_a_gpu_rank_does_not_stop_at_8_workers_while_it_has_more_cores() -> None:
    assert cores.choose_threads_and_workers(1, None, "cuda", cores=16) == (1, 15)
    assert cores.choose_threads_and_workers(8, None, "cuda", cores=64) == (1, 7)
    assert cores.choose_threads_and_workers(2, 8, "cuda", cores=32) == (8, 8)
    assert cores.choose_threads_and_workers(1, None, "cuda", cores=64) == (48, 16)
    assert cores.choose_threads_and_workers(1, None, "cpu", cores=64) == (56, 8)


BEFORE = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 100 0 50 1000 10 0 0 0 0 0
cpu1 100 0 50 1000 10 0 0 0 0 0
cpu2 100 0 50 1000 10 0 0 0 0 0
intr 12345
"""
AFTER = """cpu  900 0 0 900 0 0 0 0 0 0
cpu0 102 0 50 1036 12 0 0 0 2 0
cpu1 140 0 60 1000 10 0 0 0 0 0
cpu2 100 10 50 1010 10 0 5 15 0 0
intr 12345
"""


@pytest.mark.parametrize(
    ("mine", "expected"), [({0}, 0.95), ({1}, 0.0), ({2}, 0.25), ({0, 1, 2}, 1.2), ({0, 7}, 2.0)]
)
def test_free_cores_are_those_that_idle(
    mine: set[int], expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: mine)
    file = tmp_path / "stat"
    file.write_text(BEFORE)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    monkeypatch.setattr(time, "sleep", lambda seconds: file.write_text(AFTER))
    assert cores.free_cores() == pytest.approx(expected)
    file.unlink()
    assert cores.free_cores() == len(mine)


def test_a_busy_program_on_one_of_our_cores_is_noticed() -> None:
    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            assert cores.free_cores(0.2) < len(os.sched_getaffinity(0)) - 0.9
        finally:
            other.kill()


@pytest.mark.parametrize(
    ("threads", "free", "expected"),
    [
        *((1, 0.0, 1), (2, 2.0, 2), (2, 1.75, 2), (2, 1.6, 1), (2, 1.0, 1)),
        *((2, 0.1, 1), (8, 6.5, 6), (8, 6.8, 7), (4, 64, 4)),
    ],
)
def test_threads_leave_the_cores_of_other_programs(
    threads: int, free: float, expected: int
) -> None:
    assert cores.threads_beside_others(threads, free) == expected


def test_free_shared_memory_is_reported_in_bytes(tmp_path: Path) -> None:
    free = cores.shared_memory_free_bytes(tmp_path)
    assert free is not None
    assert free > 0
    assert cores.shared_memory_free_bytes(tmp_path / "missing") is None
