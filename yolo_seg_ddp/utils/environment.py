"""Environment variables for Ultralytics, and the versions and hardware that a run records."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from yolo_seg_ddp.utils.cores import read_words, usable_cpu_count

_GPU_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, NVIDIA under WSL, AMD
_PACKAGE = Path(__file__).resolve().parent.parent
PROJECT_FOLDER = _PACKAGE.parent
# Of the scripts and dataset.yaml: in an installed package, or in a checkout.
SCRIPTS_FOLDER = (
    _PACKAGE / "scripts" if (_PACKAGE / "scripts" / "dataset.yaml").exists() else PROJECT_FOLDER
)


def prepare_environment() -> None:
    """Make Ultralytics quiet and offline, and keep PyTorch's thread count. Call it before
    Ultralytics is imported.

    Does not change variables that are already set.
    """
    os.environ.setdefault("YOLO_OFFLINE", "1")
    os.environ.setdefault("YOLO_AUTOINSTALL", "0")
    os.environ.setdefault("ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS", "1")
    os.environ.setdefault("MPLBACKEND", "Agg")
    if "YOLO_CONFIG_DIR" not in os.environ:
        os.environ["YOLO_CONFIG_DIR"] = str(user_folder("ultralytics"))
    # Ultralytics sets OMP_NUM_THREADS=1 if it is unset. PyTorch reads it only when imported: import
    # it first.
    import torch  # noqa: F401


def user_folder(name: str) -> Path:
    """Return a folder for files that are kept between runs; this user owns it and can write there.

    Makes it.
    """
    user = os.getuid() if hasattr(os, "getuid") else "user"
    cache = Path.home() / ".cache" if "HOME" in os.environ or os.name == "nt" else None
    candidates = [cache / "yolo-seg-ddp" / name] if cache else []
    candidates.append(Path(tempfile.gettempdir()) / f"yolo-seg-ddp-{user}" / name)
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            continue
        # In the temporary folder, another user may have made it to plant files there.
        is_owned = user == "user" or all(
            path.stat().st_uid == user for path in (folder, folder.parent)
        )
        if is_owned and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="yolo-seg-ddp-"))


def visible_gpu_count() -> int:
    """Return the number of GPUs PyTorch can use.

    Does not import PyTorch where there is no driver.
    """
    if not any(Path(file).exists() for file in _GPU_DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def python_path() -> str:
    """Return PYTHONPATH for a process that imports the project: the project's folder, then what
    this process has.
    """
    return os.pathsep.join([str(PROJECT_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment_report() -> dict[str, str]:
    """Return versions and hardware for a run's records, without host or user names."""
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
    # An installed package may lie in the repository of another project.
    is_checkout = SCRIPTS_FOLDER == PROJECT_FOLDER
    report["git_revision"] = (
        git_revision() if is_checkout else f"version {package_version('yolo-seg-ddp')}"
    )
    return report


def package_version(name: str) -> str | None:
    """Return an installed package's version without importing it, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the processor's name."""
    for line in read_words(Path("/proc/cpuinfo"), separator="\n"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def git_revision(folder: Path = PROJECT_FOLDER) -> str:
    """Return the commit of `folder`, followed by `+changes` if tracked files differ from it; or
    `unknown`.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if changes else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
