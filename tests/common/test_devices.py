"""The choice of device and precision, seeds, and memory."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from tests.conftest import PROJECT
from utils.common import devices
from utils.common.devices import tune_device
from utils.common.errors import UserError

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
    assert [device.index for device in chosen] == [1, 0, 1, 1]  # no rank opens a context on another's GPU


@pytest.mark.usefixtures("two_gpus")
def test_every_rank_refuses_when_ranks_outnumber_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for local_rank in range(4):  # also the ranks that have a GPU: they would wait for the others for ever
        with pytest.raises(UserError, match=r"4 processes but 2 visible GPU\(s\).*train_ddp.sh 2"):
            devices.choose_device("auto", local_rank)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("requested", "ranks", "message"),
    [
        ("0,1", "1", "CUDA_VISIBLE_DEVICES=0,1 bash train_ddp.sh 2"),
        ("cuda:2", "1", "numbered from 0"),
        ("gpu", "1", "not one of"),
        ("cuda:0", "2", "names one GPU for 2 processes"),
    ],
)
def test_wrong_device_is_named(monkeypatch: pytest.MonkeyPatch, requested: str, ranks: str, message: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    with pytest.raises(UserError, match=message):
        devices.choose_device(requested, 0)


def test_without_cuda_auto_is_the_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert devices.choose_device("auto", 3) == torch.device("cpu")
    for requested in ("cuda", "0", "cuda:1"):
        with pytest.raises(UserError, match=f"--device {requested}: PyTorch sees no CUDA GPU; use --device cpu"):
            devices.choose_device(requested, 0)


@pytest.mark.parametrize(
    ("requested", "device", "has_bf16", "expected"),
    [
        ("auto", "cpu", True, ("bf16", torch.bfloat16, False)),
        ("auto", "cpu", False, ("off", None, False)),
        ("bf16", "cpu", False, ("bf16", torch.bfloat16, False)),
        ("auto", "cuda", True, ("bf16", torch.bfloat16, False)),
        ("auto", "cuda", False, ("fp16", torch.float16, True)),
        ("off", "cuda", True, ("off", None, False)),
    ],
)
def test_precision_follows_the_hardware(
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    device: str,
    has_bf16: bool,
    expected: tuple[str, torch.dtype | None, bool],
) -> None:
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert devices.choose_precision(requested, torch.device(device)) == devices.Precision(*expected)


@pytest.mark.parametrize(("requested", "device"), [("fp16", "cpu"), ("bf16", "cuda"), ("half", "cpu")])
def test_impossible_precision_is_refused(monkeypatch: pytest.MonkeyPatch, requested: str, device: str) -> None:
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
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_gpus_switches_follow_the_wish_for_equal_bits(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
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
    code = "from utils.common.cores import peak_process_bytes; print(peak_process_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PROJECT)
    assert int(done.stdout) < 50 * 2**20
