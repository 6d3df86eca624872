"""Parts that check this machine: its tests, its collectives, and what happens
when memory runs out.
"""

from __future__ import annotations

import math
import os
import re
import sys
from pathlib import Path

from benchmarks.gpu.plan import Finding, Json, NeedsGpu, PartFailed, Setting
from benchmarks.jobs import Job, draw_sample
from yolo_seg_ddp.data.dataset_yaml import is_photograph
from yolo_seg_ddp.utils.distributed.rank_processes import run_ranks
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER

RANK_CODE = "from benchmarks.gpu.ranks import check_ranks; run_script(check_ranks)"
# Of a training step with yolov8m at 1280 px in 16 bits, about: four times docs/research/gpu.md's
# figure for 640 px.
BYTES_PER_LARGE_IMAGE = 1.4 * 2**30
LARGE_PX = 1280
TOO_MUCH = 2.0  # times the memory of the largest GPU


def make_data(setting: Setting) -> Finding:
    """Draw the built-in sample, and a second data set with each training photograph several times
    (hard links).
    """
    sizes = setting.sizes
    folder = setting.data.parent
    if not setting.data.exists():
        draw_sample(folder.parent, sizes.photos, long_side=sizes.full_px, line_width=14)
        for kind in ("images", "labels"):
            many = folder / "many" / kind
            many.mkdir(parents=True, exist_ok=True)
            for file in (folder / "train" / kind).iterdir():
                for number in range(sizes.copies):
                    os.link(file, many / f"{number}-{file.name}")
        text = setting.data.read_text(encoding="utf-8")
        long_epoch = re.sub(r"^train: .*$", "train: many/images", text, flags=re.MULTILINE)
        setting.data.with_name("long_epoch.yaml").write_text(long_epoch, encoding="utf-8")
    counts = {
        split: sum(is_photograph(file.name) for file in (folder / split / "images").iterdir())
        for split in ("train", "val")
    }
    return Finding(
        f"{counts['train']} photographs for training, {counts['val']} for validation", dict(counts)
    )


def check_machine(setting: Setting) -> Finding:
    """Run test_ddp.py."""
    log = setting.folder / "machine" / "log"
    with Job([sys.executable, "test_ddp.py", "--data", setting.data], log) as job:
        code = job.wait(300)
    lines = [line.strip() for line in job.output().splitlines() if line.strip()]
    bad = [line for line in lines if line.startswith("✗")]
    if code:
        raise PartFailed("; ".join(bad[:3]) or f"test_ddp.py ended with {code}", lines=lines)
    warnings = [line for line in lines if line.startswith("!")]
    return Finding(
        f"{lines[-1]} {len(lines) - 1} checks, {len(warnings)} warnings", {"lines": lines}
    )


def run_gpu_tests(setting: Setting) -> Finding:
    """Run the tests marked `gpu`. On a CPU they are collected, and all skipped."""
    files = [
        file
        for file in (PROJECT_FOLDER / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in file.read_text()
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        *map(str, sorted(files)),
    ]
    with Job(command, setting.folder / "tests" / "log") as job:
        code = job.wait(300)
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", job.output())
    }
    said = (
        ", ".join(f"{number} {word}" for word, number in counts.items())
        or job.output().strip()[-300:]
    )
    if code:
        raise PartFailed(said, **counts)
    if not setting.is_gpu:
        raise NeedsGpu(said, **counts)
    return Finding(said, dict(counts))


def check_nccl(setting: Setting) -> Finding:
    """Use NCCL on all GPUs. With one GPU, its single rank still calls NCCL for everything."""
    if not setting.is_gpu:
        figures = figures_of_ranks(setting, ["cpu"], "gloo", ["off"])
        raise NeedsGpu(f"over gloo instead: {said_of(figures)}", **figures)
    devices = [f"cuda:{number}" for number in range(setting.num_gpus)]
    figures = figures_of_ranks(setting, devices, "nccl", ["off", "auto", "fp16"])
    return Finding(said_of(figures), figures)


def check_two_ranks(setting: Setting) -> Finding:
    """Let two ranks share one device. NCCL refuses that, so they talk over gloo."""
    device = "cuda:0" if setting.is_gpu else "cpu"
    figures = figures_of_ranks(
        setting, [device, device], "gloo", ["auto"] if setting.is_gpu else ["off"]
    )
    return Finding(said_of(figures), figures)


def figures_of_ranks(
    setting: Setting, devices: list[str], backend: str, precisions: list[str]
) -> Json:
    """Run `check_ranks` on one rank per device.

    Raises UserError when a rank fails, PartFailed when an answer is wrong.
    """
    job = {"devices": devices, "backend": backend, "precisions": precisions, "timeout_s": 120.0}
    answers = run_ranks(
        RANK_CODE, len(devices), {**job, "img_size": setting.sizes.small_px}, timeout_s=280
    )
    figures: Json = {
        "ranks": len(devices),
        "backend": answers[0]["backend"],
        "losses": answers[0]["losses"],
    }
    figures["synchronised_layers"] = answers[0]["synchronised_layers"]
    wrong = sorted({name for answer in answers for name in answer["wrong"]})
    if wrong or figures["backend"] != backend:
        raise PartFailed(
            f"backend {figures['backend']}, wrong answers of {', '.join(wrong) or 'none'}",
            **figures,
        )
    return figures


def said_of(figures: Json) -> str:
    """Return one line about the ranks."""
    layers = f", {figures['synchronised_layers']} layers by synchronised BatchNorm's kernels"
    return (
        f"{figures['ranks']} rank(s) over {figures['backend']}: all collectives right, "
        f"{len(figures['losses'])} trainings equal"
        f"{layers if figures['synchronised_layers'] else ''}"
    )


def exhaust_memory(setting: Setting) -> Finding:
    """Train with far too large a batch: it must end with its one line and a non-zero code, and
    nobody may wait.
    """
    if not setting.is_gpu:
        raise NeedsGpu("a batch that no GPU holds")
    import torch

    memory_bytes = max(
        torch.cuda.get_device_properties(number).total_memory for number in range(setting.num_gpus)
    )
    batch_size = math.ceil(TOO_MUCH * memory_bytes / BYTES_PER_LARGE_IMAGE)
    folder = setting.folder / "out_of_memory"
    data = setting.data.with_name("long_epoch.yaml")
    flags = [
        "--model=yolov8m-seg.yaml",
        f"--data={data}",
        f"--save-dir={folder / 'run'}",
        "--mosaic=0",
    ]
    flags += [f"--batch-size={batch_size}", f"--img-size={LARGE_PX}", "--prefetch=1"]
    flags += ["--no-tensorboard", "--device=cuda"]
    if setting.num_gpus == 1:
        command: list[str | Path] = [sys.executable, "train_yolo_ddp.py", *flags]
    else:
        command = ["bash", "train_ddp.sh", str(setting.num_gpus), "--", *flags]
    with Job(command, folder / "log", PYTHON=sys.executable) as job:
        code = job.wait(200)
    lines = [line for line in job.output().splitlines() if "does not fit its memory" in line]
    figures = {"batch_size": batch_size, "exit_code": code, "ranks_that_said_so": len(lines)}
    if code == 0 or not lines:
        raise PartFailed(
            f"exit code {code}, {len(lines)} lines about memory; see {folder / 'log'}", **figures
        )
    return Finding(
        f"batch {batch_size} at {LARGE_PX} px: exit code {code}, {lines[0].strip()[:90]}…", figures
    )
