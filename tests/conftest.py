"""Shared by all tests: Ultralytics offline and quiet, the marker for GPU tests, and one small trained run."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from utils.common.environment import prepare_environment

PROJECT = Path(__file__).resolve().parent.parent
LONGEST_SUITE_S = 30 * 60
prepare_environment()
# What a terminal hands on. A shell's `&` and nohup leave these ignored, and the tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
faulthandler.dump_traceback_later(LONGEST_SUITE_S, exit=True)  # a suite that hangs says where, even at its very end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let a module's own computations use one thread, as its ranks do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class TrainedRun:
    """What the pipeline left: the data set's YAML, the run folder, and what the trainer printed."""

    raw: Path
    processed: Path
    data: Path
    folder: Path
    output: str


def free_port() -> int:
    """Return a TCP port of this machine that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(num_processes: int) -> tuple[str, ...]:
    """Return the launcher as the guide writes it."""
    return (
        "python",
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={num_processes}",
        f"--master_port={free_port()}",
    )


def run_script(*arguments: str | Path, timeout_s: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of the project's commands from its folder; `python` is this interpreter."""
    command = [sys.executable if argument == "python" else str(argument) for argument in arguments]
    return subprocess.run(
        command,
        cwd=PROJECT,
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def must_run(*arguments: str | Path, timeout_s: float = 240, **environment: str) -> str:
    """Run a command that has to succeed; return what it printed."""
    done = run_script(*arguments, timeout_s=timeout_s, **environment)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


TRAIN_FLAGS = (
    "--model",
    "yolov8n-seg.yaml",
    "--img-size",
    "96",
    "--batch-size",
    "4",
    "--lr",
    "0.002",
    "--optimizer",
    "adamw",
    "--close-mosaic",
    "0",  # mosaic to the end: the losses of epochs with and without it do not compare
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Run sample, parse and a 2-rank training of two epochs once for all tests that look at their results."""
    root = tmp_path_factory.mktemp("pipeline")
    raw, processed, folder = root / "raw", root / "processed", root / "run"
    must_run("python", "download_data.py", "--sample", "26", "--output", raw)
    must_run(
        "python", "parse_labels.py", "--input", raw, "--output", processed, "--long-side", "320", "--line-width", "14"
    )
    data = processed / "dataset.yaml"
    extra = ("--", "--data", str(data), "--save-dir", str(folder), *TRAIN_FLAGS[:2], *TRAIN_FLAGS[6:])
    output = must_run("bash", "train_ddp.sh", "2", "4", "2", "96", *extra)
    return TrainedRun(raw, processed, data, folder, output)
