"""Devices, precision, seeds, memory, and PyTorch's global settings."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from yolo_seg_ddp.utils.cores import peak_process_bytes, read_words
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.options import PRECISION_CHOICES

DEVICE_CHOICES = "auto, cpu, cuda, cuda:N or N"
_CPU_BF16 = ("amx_bf16", "avx512_bf16")  # CPU features that multiply bf16 matrices in hardware
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt in glibc's malloc.h
_LARGEST = 2**31 - 1  # of a C int


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Turn `auto`, `cpu`, `cuda`, `cuda:N` or `N` into this rank's device, and make it PyTorch's
    current one.

    Raises UserError when there is no such GPU, or when this node has more ranks than GPUs.
    """
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    word = requested.strip().lower()
    no_gpu = (
        f"--device {requested}: PyTorch sees no CUDA GPU; use --device cpu or see python "
        "test_ddp.py"
    )
    if word == "cpu" or (word == "auto" and not gpus):
        return torch.device("cpu")
    if word in ("auto", "cuda"):
        if not gpus:
            raise UserError(no_gpu)
        if ranks > gpus:
            raise UserError(
                f"{ranks} processes but {gpus} visible GPU(s): one GPU takes one process; "
                f"start {gpus} (bash train_ddp.sh {gpus}) or train with --device cpu"
            )
        return _made_current(torch.device("cuda", local_rank))
    index = word.removeprefix("cuda:")
    # Ultralytics writes several like this.
    if "," in index:
        chosen = "".join(letter for letter in index if letter.isdigit() or letter == ",").strip(",")
        number = chosen.count(",") + 1
        raise UserError(
            f"--device {requested}: a process uses one GPU; start one for each: "
            f"CUDA_VISIBLE_DEVICES={chosen} bash train_ddp.sh "
            f"{number}, or torchrun --nproc_per_node={number} for other scripts"
        )
    if not index.isdigit():
        raise UserError(f"--device {requested}: not one of {DEVICE_CHOICES}")
    if not gpus:
        raise UserError(no_gpu)
    if int(index) >= gpus:
        raise UserError(f"--device {requested}: PyTorch sees {gpus} GPU(s), numbered from 0")
    if ranks > 1:
        raise UserError(
            f"--device {requested} names one GPU for {ranks} processes; use --device cuda and "
            "CUDA_VISIBLE_DEVICES"
        )
    return _made_current(torch.device("cuda", int(index)))


def _made_current(device: torch.device) -> torch.device:
    # Otherwise every rank would also open a context on GPU 0.
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class Precision:
    """A training precision: autocast's `dtype` (None: no autocast), and whether gradients need a
    scaler (fp16).
    """

    name: str
    dtype: torch.dtype | None
    use_scaler: bool

    def autocast(self, device: torch.device, *, cache: bool = True) -> AbstractContextManager[None]:
        """Return the context in which forward passes and losses are computed.

        `cache`: convert each weight once.
        """
        return (
            nullcontext()
            if self.dtype is None
            else torch.autocast(device.type, self.dtype, cache_enabled=cache)
        )


def choose_precision(requested: str, device: torch.device) -> Precision:
    """Turn `auto`, `bf16`, `fp16` or `off` into a Precision that `device` supports in hardware,
    else raise UserError.

    `auto` is bf16 if the hardware supports it: GPUs from Ampere on, CPUs with AMX (a step is about
    five times as fast) or AVX512-BF16 (1.3 to 1.5 times as fast). Otherwise fp16 on a GPU, off on a
    CPU. Cost in mAP: docs/research/performance.md.
    """
    if requested not in PRECISION_CHOICES:
        raise UserError(f"--amp {requested}: not one of {', '.join(PRECISION_CHOICES)}")
    is_cpu = device.type == "cpu"
    has_bf16 = (
        _cpu_has_bf16() if is_cpu else torch.cuda.is_bf16_supported(including_emulation=False)
    )
    name = requested
    if requested == "auto":
        name = "bf16" if has_bf16 else "off" if is_cpu else "fp16"
    if name == "fp16" and is_cpu:
        raise UserError("--amp fp16: a CPU does not train in fp16; use --amp auto, bf16 or off")
    if name == "bf16" and not is_cpu and not has_bf16:
        raise UserError("--amp bf16: this GPU only emulates bf16; use --amp fp16 or off")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[name]
    return Precision(name, dtype, use_scaler=name == "fp16")


def _cpu_has_bf16() -> bool:
    if hasattr(torch.cpu, "get_capabilities"):
        capabilities = torch.cpu.get_capabilities()
        return any(capabilities.get(name) for name in _CPU_BF16)
    flags = read_words(Path("/proc/cpuinfo"))
    return any(name in flags for name in _CPU_BF16)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and PyTorch with `seed + rank`, so that ranks draw different numbers."""
    random.seed(seed + rank)
    numpy.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host's memory to the device. The host does not wait for a GPU."""
    if device.type != "cuda":
        return tensor
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def copy_to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host's memory; return a function that waits for the copy, and
    for nothing later.
    """
    if tensor.device.type != "cuda":
        return lambda: tensor
    copy = tensor.to("cpu", non_blocking=True)
    is_done = torch.cuda.Event()
    is_done.record()

    def wait() -> torch.Tensor:
        is_done.synchronize()
        return copy

    return wait


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of PyTorch's tensors on a GPU, of the
    whole process on a CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_process_bytes()


def tune_device(device: torch.device, *, deterministic: bool, fixed_shapes: bool) -> None:
    """Set PyTorch's global settings for a training process.

    GPU: TensorFloat-32 for fp32 operations, and cuDNN's benchmark mode if all batches have the same
    shape. With `deterministic` neither: slower, but equal runs give equal bits (on a CPU they
    always do). cuBLAS reads its variable when it is first used, so call this before any
    computation. CPU: `keep_freed_memory`.
    """
    if device.type != "cuda":
        keep_freed_memory()
        return
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Filling costs time and changes no result.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("highest" if deterministic else "high")
    torch.backends.cudnn.allow_tf32 = not deterministic
    torch.backends.cudnn.benchmark = fixed_shapes and not deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for later tensors on the CPU; return whether it does. Call it
    early.

    By default glibc returns large blocks to the system at once, and the kernel must zero every page
    again in each step. The peak memory stays the same, but the process does not shrink below it.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    # Another C library has no such parameters.
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    never = -1
    return bool(
        library.mallopt(_MMAP_THRESHOLD, _LARGEST) and library.mallopt(_TRIM_THRESHOLD, never)
    )
