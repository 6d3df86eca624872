"""What a process needs to know about its machine: cores, devices, precision, seeds, signals.

PyTorch is imported inside the functions that need it, so that the launcher can ask for core counts cheaply.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import math
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from utils.errors import EXIT_DONE, UserError

if TYPE_CHECKING:
    import torch

PROJECT_FOLDER = Path(__file__).resolve().parent.parent
DEVICE_CHOICES = "auto, cpu, cuda, cuda:N or N"
PRECISION_CHOICES = ("auto", "bf16", "fp16", "off")
_CPU_BF16 = ("amx_bf16", "avx512_bf16")  # what multiplies bf16 matrices in hardware
_GPU_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL, AMD
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
_SAME_KEY_PRESS_S = 0.5


def prepare_environment() -> None:
    """Make Ultralytics quiet and offline, and keep PyTorch's threads. Call it before Ultralytics is imported.

    Variables that are set already stay as they are.
    """
    os.environ.setdefault("YOLO_OFFLINE", "1")
    os.environ.setdefault("YOLO_AUTOINSTALL", "0")
    os.environ.setdefault("ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS", "1")
    os.environ.setdefault("MPLBACKEND", "Agg")
    if "YOLO_CONFIG_DIR" not in os.environ:
        os.environ["YOLO_CONFIG_DIR"] = str(_settings_folder())
    # Ultralytics sets OMP_NUM_THREADS=1 where it is unset; PyTorch reads it once, when it is first imported.
    import torch  # noqa: F401


def _settings_folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else "user"
    cache = Path.home() / ".cache" if "HOME" in os.environ or os.name == "nt" else None
    candidates = [cache / "yolo-seg-ddp" / "ultralytics"] if cache else []
    candidates.append(Path(tempfile.gettempdir()) / f"yolo-seg-ddp-{user}" / "ultralytics")
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="yolo-seg-ddp-"))


# --- cores ---------------------------------------------------------------------------------------------------------


def usable_cpu_count(
    cgroup_folder: Path = Path("/sys/fs/cgroup"), membership_file: Path = Path("/proc/self/cgroup")
) -> int:
    """Count the cores this process may really use: its affinity, cut by the container's CPU quota (at least 1)."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _cgroup_quotas(cgroup_folder, membership_file)]
    return max(1, min([cores, *quotas]))


def _cgroup_quotas(cgroup_folder: Path, membership_file: Path) -> list[float]:
    """Read every CPU quota on the way up from our own group: cgroup v2's `cpu.max`, v1's `cpu.cfs_*`."""
    quotas = []
    for folder in _cgroup_folders(cgroup_folder, membership_file):
        words = _read_words(folder / "cpu.max")
        if not words:
            words = _read_words(folder / "cpu.cfs_quota_us") + _read_words(folder / "cpu.cfs_period_us")
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[0]) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))  # "max" and -1 mean no quota
    return quotas


def _cgroup_folders(cgroup_folder: Path, membership_file: Path) -> list[Path]:
    folders = [cgroup_folder, cgroup_folder / "cpu", cgroup_folder / "cpu,cpuacct"]
    for line in _read_words(membership_file, separator="\n"):
        controllers, _, group = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = cgroup_folder / controllers if controllers else cgroup_folder
        parts = [part for part in group.split("/") if part and part != ".."]
        folders += [base.joinpath(*parts[:depth]) for depth in range(1, len(parts) + 1)]
    return folders


def _read_words(file: Path, separator: str | None = None) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split(separator)
    except (OSError, UnicodeDecodeError):
        return []


def choose_threads_and_workers(
    local_world_size: int, requested_workers: int = 8, device_type: str = "cpu", cores: int | None = None
) -> tuple[int, int]:
    """Share the usable cores: return (compute threads, loader workers) for each of this node's ranks.

    `requested_workers` is a ceiling. Ranks x (threads + workers) stays within the cores; the exceptions are more ranks
    than cores, and a GPU rank, which always keeps one thread and, unless 0 are asked for, one worker.
    """
    share = (cores or usable_cpu_count()) // max(1, local_world_size)
    if device_type == "cpu":
        # On a CPU the arithmetic takes most of the time: a loader process earns its core from the fourth core on.
        workers = min(requested_workers, share // 4)
    else:
        workers = min(requested_workers, max(1, share - 1))
    return max(1, share - workers), workers


# --- devices -------------------------------------------------------------------------------------------------------


def visible_gpu_count() -> int:
    """Count the GPUs PyTorch may use. Does not import PyTorch where there is no driver."""
    if not any(Path(file).exists() for file in _GPU_DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose_device(requested: str, local_rank: int) -> torch.device:
    """Turn `auto`, `cpu`, `cuda`, `cuda:N` or `N` into this rank's device.

    Raises UserError when there is no such GPU, or when this node has more ranks than GPUs.
    """
    import torch

    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), local_rank + 1)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    word = requested.strip().lower()
    if word == "cpu" or (word == "auto" and not gpus):
        return torch.device("cpu")
    if word in ("auto", "cuda"):
        if not gpus:
            raise UserError(
                f"--device {requested}: PyTorch sees no CUDA GPU; use --device cpu or see python test_ddp.py"
            )
        if ranks > gpus:
            raise UserError(
                f"{ranks} processes but {gpus} visible GPU(s): one GPU takes one process; "
                f"start {gpus} (bash train_ddp.sh {gpus}) or train with --device cpu"
            )
        return torch.device("cuda", local_rank)
    index = word.removeprefix("cuda:")
    if not index.isdigit():
        raise UserError(f"--device {requested}: not one of {DEVICE_CHOICES}")
    if int(index) >= gpus:
        raise UserError(f"--device {requested}: PyTorch sees {gpus} GPU(s), numbered from 0")
    if ranks > 1:
        raise UserError(
            f"--device {requested} names one GPU for {ranks} processes; use --device cuda and CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", int(index))


@dataclass(frozen=True)
class Precision:
    """How to train: `dtype` is what autocast computes in (None: no autocast); fp16 needs a gradient scaler."""

    name: str
    dtype: torch.dtype | None
    use_scaler: bool


def choose_precision(requested: str, device: torch.device) -> Precision:
    """Turn `auto`, `bf16`, `fp16` or `off` into a Precision that `device` computes natively.

    `auto` is bf16 where the hardware multiplies in it: GPUs from Ampere on, CPUs with AMX (about five times the speed of
    a step) or AVX512-BF16 (1.3 to 1.5 times; what it costs in mAP: docs/performance.md). Else fp16 on a GPU, off on a CPU.
    """
    import torch

    if requested not in PRECISION_CHOICES:
        raise UserError(f"--amp {requested}: not one of {', '.join(PRECISION_CHOICES)}")
    is_cpu = device.type == "cpu"
    has_bf16 = _cpu_has_bf16() if is_cpu else torch.cuda.is_bf16_supported(including_emulation=False)
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
    import torch

    if hasattr(torch.cpu, "get_capabilities"):
        has = torch.cpu.get_capabilities()
        return any(has.get(name) for name in _CPU_BF16)
    flags = _read_words(Path("/proc/cpuinfo"))
    return any(name in flags for name in _CPU_BF16)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and PyTorch with `seed + rank`, so that ranks draw different numbers."""
    import numpy
    import torch

    random.seed(seed + rank)
    numpy.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory used so far: PyTorch's tensors on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def shared_memory_free_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Return what is free where loader workers hand over batches, or None where there is no such place."""
    return shutil.disk_usage(folder).free if folder.is_dir() else None


# --- signals -------------------------------------------------------------------------------------------------------


class StopFlag:
    """Turns SIGTERM, SIGINT, SIGUSR1 and SIGHUP (unless ignored) into a flag which the training loop reads between steps.

    Use it as a context manager; the old handlers come back at its end. Signals reach the main thread only: in another,
    such as Ray Train's, nothing sets the flag. A second Ctrl-C raises KeyboardInterrupt; one that follows within half a
    second is the same key press, passed on by the launcher.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.reason = ""
        self._first_interrupt_s: float | None = None
        self._old_handlers: dict[int, Any] = {}

    def __enter__(self) -> StopFlag:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in _stop_signals():
            if number.name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
                continue  # `nohup`: the training shall outlive its terminal
            self._old_handlers[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old_handlers.items():
            # None: the handler was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._old_handlers.clear()

    def set(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        if not self.is_set:
            self.reason = reason
        self.is_set = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.set(signal.Signals(number).name)
        if number != signal.SIGINT:
            return
        now_s = time.monotonic()
        if self._first_interrupt_s is None:
            self._first_interrupt_s = now_s
        elif now_s - self._first_interrupt_s > _SAME_KEY_PRESS_S:
            raise KeyboardInterrupt


def heed_only_the_parent() -> None:
    """Let a StopFlag's signals end this process only if its parent sends them; anybody else's are ignored.

    To be called in a helper process's main thread before it starts others. A process that ignored its parent too would
    keep it waiting for ever: at its end, Python sends SIGTERM to what it started and waits. Where the system doesn't
    say who sent a signal (outside Linux), nothing changes.
    """
    if not hasattr(signal, "sigwaitinfo"):
        return
    numbers = _stop_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # held back in every thread: they reach only who waits for them

    def wait() -> None:
        while signal.sigwaitinfo(numbers).si_pid != os.getppid():
            pass
        os._exit(EXIT_DONE)

    threading.Thread(target=wait, name="stop signals", daemon=True).start()


def _stop_signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in STOP_SIGNALS if name in signal.Signals.__members__]  # Windows lacks one


def die_with_parent(*, only_under_torchrun: bool = True) -> bool:
    """Ask Linux to kill this process when its parent dies, so that a killed launcher leaves no rank behind.

    Returns whether that was arranged. By default it does nothing outside torchrun: `nohup python train_yolo_ddp.py`
    must outlive its shell.
    """
    if not sys.platform.startswith("linux") or (only_under_torchrun and "TORCHELASTIC_RUN_ID" not in os.environ):
        return False
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in <linux/prctl.h>
    parent = os.getppid()
    arranged = ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0) == 0
    if os.getppid() != parent:  # it died between the two lines, and no signal will come
        os.kill(os.getpid(), signal.SIGKILL)
    return arranged


# --- report --------------------------------------------------------------------------------------------------------


def environment_report() -> dict[str, str]:
    """Describe versions and hardware for a run's records. Holds no host or user name."""
    import torch

    report = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("torchvision", "ultralytics"):
        report[package] = package_version(package) or "not installed"
    gpus = [torch.cuda.get_device_name(index) for index in range(visible_gpu_count())]
    report["cuda"] = torch.version.cuda or "none"
    report["cudnn"] = str(torch.backends.cudnn.version() or "none")
    report["nccl"] = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none"
    report["gpus"] = ", ".join(gpus) or "none"
    report["cpu"] = cpu_model()
    report["usable_cores"] = str(usable_cpu_count())
    report["git_revision"] = git_revision()
    return report


def package_version(name: str) -> str | None:
    """Return an installed package's version without importing it, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Name the processor."""
    for line in _read_words(Path("/proc/cpuinfo"), separator="\n"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def git_revision(folder: Path = PROJECT_FOLDER) -> str:
    """Return the commit of `folder`, with `+changes` where files differ from it, or `unknown`."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changes else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
