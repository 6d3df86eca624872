"""On a machine with exactly one GPU the demo starts one process, and the commands of the tests see no GPU."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT, run_script
from tests.support.oracle import draw_photos

# Python imports it at its start. PyTorch's stand-in counts the GPUs in CUDA_VISIBLE_DEVICES, or one without it.
ONE_GPU = """
import importlib.machinery, os, pathlib, sys, types
has_file = pathlib.Path.exists
pathlib.Path.exists = lambda self: str(self) == "/dev/nvidiactl" or has_file(self)
torch = types.ModuleType("torch")
torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
count = lambda: len([word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if word])
torch.cuda = types.SimpleNamespace(device_count=count, is_available=lambda: count() > 0)
sys.modules["torch"] = torch
"""
COUNT = "from utils.common.environment import visible_gpu_count; print(visible_gpu_count())"


@pytest.fixture
def one_gpu(tmp_path: Path) -> str:
    """Return a PYTHONPATH with which Python believes that the machine has one GPU."""
    folder = tmp_path / "one gpu"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ONE_GPU)
    return str(folder)


def test_the_demo_starts_one_process_for_one_gpu(tmp_path: Path, one_gpu: str) -> None:
    project = tmp_path / "project"
    for data in ("processed", "large"):
        images = project / "data/demo" / data / "images"
        images.mkdir(parents=True)
        draw_photos(images, 2)
        yaml = "path: .\ntrain: images\nval: images\nnames: [pole, wire, insulator]\n"
        (images.parent / "dataset.yaml").write_text(yaml)
    for name in ("demo.sh", "train_ddp.sh", "train_yolo_ddp.py"):
        shutil.copy(PROJECT / name, project)
    (project / "utils").symlink_to(PROJECT / "utils")
    python = project / "python"  # skips the demo's other scripts
    python.write_text(f'#!/bin/sh\ncase $1 in -*) exec "{sys.executable}" "$@";; *) echo "$1";; esac\n')
    python.chmod(0o755)
    for gpus, expected in (("0", "Starting 1 process(es) on cuda"), ("", "Starting 2 process(es) on cpu")):
        done = run_script(
            "bash",
            project / "demo.sh",
            CUDA_VISIBLE_DEVICES=gpus,
            PYTHON=str(python),
            PYTHONPATH=one_gpu,
            DRY_RUN="1",
        )
        assert done.stdout.count(expected) == 2, done.stdout + done.stderr  # the demo trains twice
        assert done.returncode == 0


def test_commands_of_the_tests_see_no_gpu_unless_they_ask(one_gpu: str) -> None:
    assert run_script("python", "-c", COUNT, PYTHONPATH=one_gpu).stdout == "0\n"
    assert run_script("python", "-c", COUNT, PYTHONPATH=one_gpu, CUDA_VISIBLE_DEVICES="0").stdout == "1\n"
