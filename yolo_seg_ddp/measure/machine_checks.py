"""The checks of `python test_ddp.py`: is this machine ready to train, and if not, how to fix it?

Each check is a function that returns one Result. PyTorch is imported inside the checks, so that a
machine without PyTorch gets an instruction instead of a traceback.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from yolo_seg_ddp.data.dataset_yaml import label_file_for, load_dataset_yaml
from yolo_seg_ddp.utils.cores import (
    choose_threads_and_workers,
    shared_memory_free_bytes,
    usable_cpu_count,
)
from yolo_seg_ddp.utils.environment import package_version, visible_gpu_count
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.text import counted

MIN_PYTHON = (3, 11)
# before 2.10 a file can make torch.load(weights_only=True) corrupt memory: CVE-2026-24747
MIN_TORCH = (2, 11)
INSTALL_CURE = "python -m pip install -r requirements.txt"
DATA_CURE = "python download_data.py && python parse_labels.py"
GIB = 1024**3
# 16 pictures as uint8, the trainer's default batch and size
_DEFAULT_BATCH_BYTES = 16 * 640 * 640 * 3
_RANK_CODE = (
    "from yolo_seg_ddp.measure.machine_checks import compute_mean_gradient; "
    "run_script(compute_mean_gradient)"
)
_MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}


@dataclass(frozen=True)
class Result:
    """One line of the report. A warning does not stop training from working; a failure does."""

    status: Literal["ok", "warn", "fail"]
    text: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{_MARKS[self.status]} {self.text}"
        return f"{line}\n    → {self.cure}" if self.cure else line


def run_checks(data: str | Path, timeout_s: float) -> Iterator[Result]:
    """Run all checks, those that need PyTorch first; yield each result at once."""
    torch_result = guarded(check_torch)
    if torch_result.status == "fail":
        yield torch_result
    else:
        for check in (
            check_cuda,
            check_nccl,
            check_distributed,
            check_sync_batch_norm,
            check_mixed_precision,
        ):
            yield guarded(check)
        yield guarded(partial(check_process_group, timeout_s))
        yield torch_result
    for check in (check_python, check_ultralytics, check_opencv, check_cores, check_shared_memory):
        yield guarded(check)
    yield guarded(partial(check_data, data))


def guarded(check: Callable[[], Result]) -> Result:
    """Run a check and turn errors of libraries and the system into a
    failed Result with the reason.
    """
    try:
        return check()
    except UserError as error:
        # The message says how to fix it.
        return Result("fail", str(error))
    except (ImportError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        function = check.func if isinstance(check, partial) else check
        name = getattr(function, "__name__", "check").removeprefix("check_").replace("_", " ")
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return Result(
            "fail", f"{name}: {reason}", "python -m torch.utils.collect_env shows what is installed"
        )


def check_torch() -> Result:
    """Is PyTorch installed, and new enough?"""
    try:
        import torch
    # OSError: a shared library that it needs is missing.
    except (ImportError, OSError) as error:
        return Result("fail", f"PyTorch cannot be imported: {error}", INSTALL_CURE)
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        return Result(
            "fail", f"PyTorch {torch.__version__} is older than {_dotted(MIN_TORCH)}", INSTALL_CURE
        )
    return Result("ok", f"PyTorch {torch.__version__}")


def check_cuda() -> Result:
    """Can PyTorch use a GPU? A missing GPU is only a warning, because training also works on the
    CPU.
    """
    import torch

    gpus = visible_gpu_count()
    if gpus:
        return Result("ok", f"CUDA is available with {gpus} GPU(s)")
    if torch.version.cuda is None and torch.version.hip is None:
        reason = "this PyTorch is built without CUDA"
        cure = "pick a CUDA build at https://pytorch.org/get-started"
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        reason, cure = "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES"
    elif shutil.which("nvidia-smi"):
        reason = "PyTorch cannot use the driver"
        cure = f"run nvidia-smi; this PyTorch needs a driver for CUDA {torch.version.cuda}"
    else:
        reason, cure = "no NVIDIA driver found", "in a container: start it with --gpus all"
    return Result("warn", f"CUDA is not available: training will run on the CPU ({reason})", cure)


def check_nccl() -> Result:
    """Does this PyTorch include NCCL, and which version?"""
    import torch
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return Result("ok", f"NCCL version: {torch.cuda.nccl.version()}")
    if visible_gpu_count() > 1:
        return Result("fail", "this PyTorch has no NCCL, which several GPUs need", INSTALL_CURE)
    return Result("warn", "this PyTorch has no NCCL: processes will communicate with gloo")


def check_distributed() -> Result:
    """Does this PyTorch include torch.distributed with gloo?"""
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return Result("fail", "this PyTorch is built without torch.distributed", INSTALL_CURE)
    return Result("ok", "torch.distributed imported successfully")


def check_sync_batch_norm() -> Result:
    """Does the conversion replace a nested BatchNorm?"""
    from torch import nn

    from yolo_seg_ddp.utils.distributed.sync_bn import SyncBatchNorm2d, convert_sync_batchnorm

    converted = convert_sync_batchnorm(nn.Sequential(nn.Sequential(nn.BatchNorm2d(4))))
    if not any(isinstance(module, SyncBatchNorm2d) for module in converted.modules()):
        return Result("fail", "SyncBatchNorm conversion does nothing", INSTALL_CURE)
    return Result("ok", "SyncBatchNorm conversion successful")


def check_mixed_precision() -> Result:
    """Does the loss of a small network fall under autocast, in the precision that the trainer would
    choose here?
    """
    import torch
    from torch import nn

    from yolo_seg_ddp.utils.devices import choose_precision

    device = torch.device("cuda", 0) if visible_gpu_count() else torch.device("cpu")
    precision = choose_precision("auto", device)
    if precision.dtype is None:
        return Result(
            "warn", "Mixed precision is off: this CPU has no bf16 arithmetic, training uses float32"
        )
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)
    )
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device.type, enabled=precision.use_scaler)
    losses = []
    for _ in range(10):
        with torch.autocast(device.type, dtype=precision.dtype):
            loss = (model(torch.ones(4, 3, 8, 8, device=device)).float() - 9).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    # This also catches NaN.
    if not losses[-1] < losses[0]:
        return Result(
            "fail",
            f"Mixed precision ({precision.name}): loss went from {losses[0]:.4g} to "
            f"{losses[-1]:.4g}",
        )
    return Result("ok", f"Mixed precision training works ({precision.name} on {device.type})")


def check_process_group(timeout_s: float) -> Result:
    """Can one process per GPU (two on the CPU, where there is at most one GPU) compute a gradient
    together?
    """
    from yolo_seg_ddp.utils.distributed.rank_processes import run_ranks

    gpus = visible_gpu_count()
    world_size, backend = (gpus, "nccl") if gpus > 1 else (2, "gloo")
    try:
        run_ranks(_RANK_CODE, world_size, {"backend": backend, "timeout_s": timeout_s}, timeout_s)
    except UserError as error:
        cure = (
            "look for a firewall on the loopback interface, or a slow machine: python test_ddp.py "
            "--timeout-s 300"
        )
        if backend == "nccl":
            cure = "run again with NCCL_DEBUG=INFO; try NCCL_P2P_DISABLE=1"
        return Result("fail", f"{world_size} processes over {backend}: {error}", cure)
    return Result("ok", f"{world_size} processes trained together over {backend}")


def compute_mean_gradient() -> None:
    """Be one rank: let DDP average the gradients 1, 2, 3, ... of the ranks.

    Raises RuntimeError when the mean is wrong.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from yolo_seg_ddp.utils.distributed import read_rank_environment
    from yolo_seg_ddp.utils.distributed.rank_processes import join_ranks, read_job

    job, ranks = read_job(), read_rank_environment()
    device = (
        torch.device("cuda", ranks.local_rank) if job["backend"] == "nccl" else torch.device("cpu")
    )
    join_ranks(device, job["timeout_s"], job["backend"])
    model = torch.nn.Linear(1, 1, bias=False, device=device)
    together = DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None
    )
    together(torch.full((1, 1), ranks.rank + 1.0, device=device)).backward()
    gradient = model.weight.grad
    expected = (ranks.world_size + 1) / 2
    if gradient is None or gradient.item() != expected:
        raise RuntimeError(f"the mean of the gradients is {gradient} instead of {expected}")
    dist.destroy_process_group()


def check_python() -> Result:
    """Is the interpreter new enough?"""
    version = sys.version_info[:3]
    if version < MIN_PYTHON:
        return Result(
            "fail",
            f"Python {_dotted(version)}",
            f"a virtual environment with Python {_dotted(MIN_PYTHON)}",
        )
    return Result("ok", f"Python {_dotted(version)}")


def check_ultralytics() -> Result:
    """Is Ultralytics installed? The models come from it. It is not imported here."""
    version = package_version("ultralytics")
    if version is None:
        return Result("fail", "Ultralytics is not installed", INSTALL_CURE)
    return Result("ok", f"Ultralytics {version}")


def check_opencv() -> Result:
    """Can OpenCV be imported?"""
    try:
        import cv2
    except ImportError as error:
        reason = str(error).splitlines()[0]
        cure = (
            "apt-get install libgl1 libglib2.0-0, or pip install opencv-python-headless in place "
            "of opencv-python"
        )
        return Result(
            "fail",
            f"OpenCV cannot be imported: {reason}",
            cure if ".so" in reason else INSTALL_CURE,
        )
    return Result("ok", f"OpenCV {cv2.__version__}")


def check_cores() -> Result:
    """Are there enough CPU cores to load images for every GPU?"""
    cores, gpus = usable_cpu_count(), visible_gpu_count()
    threads, workers = choose_threads_and_workers(
        max(gpus, 1), device_type="cuda" if gpus else "cpu"
    )
    text = f"{cores} usable CPU core(s)"
    if gpus and cores < 4 * gpus:
        return Result(
            "warn",
            f"{text} for {gpus} GPU(s): loading images may slow training down",
            "four or more cores per GPU",
        )
    return Result(
        "ok", f"{text}: {threads} thread(s) and {workers} loader worker(s) for each process"
    )


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Result:
    """Is there enough shared memory for the batches that loader workers pass to the trainer?"""
    free_bytes = shared_memory_free_bytes(folder)
    if free_bytes is None:
        return Result("ok", "Shared memory is not limited here")
    gpus = visible_gpu_count()
    _, workers = choose_threads_and_workers(max(gpus, 1), device_type="cuda" if gpus else "cpu")
    prefetched = 2 * workers * max(gpus, 1)
    need_bytes = max(GIB // 4, 2 * prefetched * _DEFAULT_BATCH_BYTES)
    text = f"{free_bytes / GIB:.1f} GiB of shared memory"
    if free_bytes < need_bytes:
        cure = (
            f"docker run --shm-size={2 * need_bytes // GIB + 1}g (or --ipc=host), or train with "
            "--num-workers 0"
        )
        return Result("warn", f"{text}: loader workers may need {need_bytes / GIB:.1f} GiB", cure)
    return Result("ok", text)


def check_data(data: str | Path) -> Result:
    """Are there training and validation images with labels? Missing images are only a warning."""
    spec = load_dataset_yaml(data)
    try:
        counts = {split: spec.image_files(split) for split in ("train", "val")}
    except UserError as error:
        return Result("warn", f"No data set yet: {str(error).split(';')[0]}", DATA_CURE)
    for split, files in counts.items():
        sample = files[:: max(1, len(files) // 200)]
        if not any(label_file_for(file).is_file() for file in sample):
            expected = label_file_for(files[0])
            return Result(
                "fail",
                f"No labels for the {split} pictures, such as {expected}",
                "python parse_labels.py",
            )
    numbers = ", ".join(f"{len(files)} {split}" for split, files in counts.items())
    return Result(
        "ok",
        f"Data set {spec.yaml_file.name}: {numbers} pictures, {counted(len(spec.names), 'class')}",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
