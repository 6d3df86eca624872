"""Tests of test_ddp.py and the checks behind it."""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.plugin import PROJECT, must_run
from yolo_seg_ddp.measure import machine_checks as checks
from yolo_seg_ddp.utils.errors import UserError


def make_dataset(folder: Path, with_labels: bool) -> Path:
    for split in ("train", "val"):
        for kind, name in (("images", "a.jpg"), ("labels", "a.txt")):
            (folder / split / kind).mkdir(parents=True)
            if kind == "images" or with_labels:
                (folder / split / kind / name).write_bytes(b"")
    data = folder / "data.yaml"
    data.write_text("train: train/images\nval: val/images\nnames: [pole, crossarm]\n")
    return data


def test_the_whole_check_passes_here_with_the_guide_s_lines_in_order(tmp_path: Path) -> None:
    data = make_dataset(tmp_path, with_labels=True)
    printed = must_run("python", "test_ddp.py", "--data", data)
    lines = [line for line in printed.splitlines() if not line.startswith("    ")]
    assert "CUDA is" in lines[0]
    assert "NCCL" in lines[1]
    assert lines[2:4] == [
        "✓ torch.distributed imported successfully",
        "✓ SyncBatchNorm conversion successful",
    ]
    assert lines[4].startswith(("✓ Mixed precision training works", "! Mixed precision is off"))
    assert "processes trained together over" in lines[5]
    assert "✓ Data set data.yaml: 1 train, 1 val pictures, 2 classes" in lines
    assert lines[-1] == "✓ All tests passed!"
    assert all(line[0] in "✓!" for line in lines)


def test_failures_are_counted_and_leave_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(PROJECT))
    import test_ddp

    results = [
        checks.Result("ok", "good"),
        checks.Result("warn", "so-so"),
        checks.Result("fail", "bad", "mend it"),
    ]
    monkeypatch.setattr(test_ddp, "run_checks", lambda data, timeout_s: iter(results))
    monkeypatch.setattr(sys, "argv", ["test_ddp.py"])
    assert test_ddp.main() == 1
    assert (
        capsys.readouterr().out == "✓ good\n! so-so\n✗ bad\n    → mend it\n✗ 1 of 3 checks failed\n"
    )


@pytest.mark.parametrize(
    ("error", "text"),
    [
        *(
            (kind("reason"), "something odd: reason")
            for kind in (ImportError, OSError, RuntimeError, ValueError)
        ),
        # a user's mistake keeps its own cure
        (UserError("x is wrong; use y"), "x is wrong; use y"),
    ],
)
def test_what_a_check_raises_becomes_its_reason_but_a_bug_is_not_hidden(
    error: Exception, text: str
) -> None:
    def check_something_odd(error: Exception) -> checks.Result:
        raise error

    result = checks.guarded(partial(check_something_odd, error))
    assert (result.status, result.text) == ("fail", text)
    assert bool(result.cure) != isinstance(error, UserError)
    with pytest.raises(TypeError):
        checks.guarded(partial(check_something_odd, TypeError("bug")))


def test_data_set_missing_is_a_warning_and_labels_missing_a_failure(tmp_path: Path) -> None:
    data = make_dataset(tmp_path / "unlabelled", with_labels=False)
    unlabelled = checks.check_data(data)
    assert unlabelled.status == "fail"
    assert str(tmp_path / "unlabelled" / "train" / "labels" / "a.txt") in unlabelled.text
    shutil.rmtree(tmp_path / "unlabelled" / "val")
    missing = checks.check_data(data)
    assert missing.status == "warn"
    assert missing.cure == "python download_data.py && python parse_labels.py"
    with pytest.raises(UserError):
        checks.check_data(tmp_path / "no.yaml")


@pytest.mark.parametrize(("free_bytes", "status"), [(64 * 2**20, "warn"), (64 * 2**30, "ok")])
def test_little_shared_memory_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_bytes: int, status: str
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=2**50, free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    result = checks.check_shared_memory(tmp_path)
    assert result.status == status
    assert bool(result.cure) == (status != "ok")


@pytest.mark.parametrize(("version", "status"), [("2.6.0+cu124", "fail"), ("2.15.0a0+git", "ok")])
def test_old_pytorch_is_named(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    result = checks.check_torch()
    assert result.status == status
    assert version in result.text


def test_without_pytorch_one_failure_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # makes `import torch` fail
    monkeypatch.setattr(checks, "visible_gpu_count", lambda: 0)
    results = list(checks.run_checks(make_dataset(tmp_path, with_labels=True), timeout_s=1))
    failures = [result for result in results if result.status == "fail"]
    assert len(failures) == 1
    assert "PyTorch cannot be imported" in failures[0].text
    assert failures[0].cure == "python -m pip install -r requirements.txt"


def test_gpus_are_counted_their_absence_explained_and_nccl_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "visible_gpu_count", lambda: 4)
    assert str(checks.check_cuda()) == "✓ CUDA is available with 4 GPU(s)"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 18, 3))
    assert str(checks.check_nccl()) == "✓ NCCL version: (2, 18, 3)"
    monkeypatch.setattr(checks, "visible_gpu_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = checks.check_cuda()
    assert hidden.status == "warn"
    assert "training will run on the CPU" in hidden.text
    assert hidden.cure == "unset CUDA_VISIBLE_DEVICES"


def test_few_cores_for_the_gpus_and_no_hardware_for_16_bits_are_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "visible_gpu_count", lambda: 4)
    for cores, status in ((8, "warn"), (32, "ok")):
        monkeypatch.setattr(checks, "usable_cpu_count", lambda cores=cores: cores)
        assert checks.check_cores().status == status
    monkeypatch.setattr(checks, "visible_gpu_count", lambda: 0)
    monkeypatch.setattr("yolo_seg_ddp.utils.devices._cpu_has_bf16", lambda: False)
    assert checks.check_mixed_precision().status == "warn"
