"""`prepare_data.py`: a training after it reads no photograph, and machines share the work."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.plugin import PROJECT
from tests.support.ranks import run_forked
from tests.test_skip_bad import BAD, write_set
from yolo_seg_ddp.data import blocks, fingerprint, images


def tell_what_is_read() -> None:
    """Tell on stderr which photographs are decoded and which are read for their digests."""
    decode, digest = images.read_image, fingerprint.hashlib.file_digest

    def told_decode(file: Path, *more: Any) -> Any:
        os.write(2, f"read {file}\n".encode())
        return decode(file, *more)

    def told_digest(stream: Any, kind: Any) -> Any:
        os.write(2, f"read {stream.name}\n".encode())
        return digest(stream, kind)

    images.read_image = blocks.read_image = told_decode  # type: ignore[assignment,attr-defined]
    fingerprint.hashlib.file_digest = told_digest  # type: ignore[assignment]


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    return run_forked([str(word) for word in words], known, 240, tell_what_is_read)


def read_in(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return re.findall(r"^read .*/(\w+/images/.*)$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("flags", ["", "--windows 2"])
def test_a_training_after_it_packs_nothing_and_reads_no_photograph(
    flags: str, tmp_path: Path
) -> None:
    data = write_set(tmp_path / "set")
    given: list[str | Path] = [
        "--data",
        data,
        "--img-size",
        "64",
        "--skip-bad",
        "--cache-dir",
        tmp_path / "fast",
        *flags.split(),
    ]
    small = (
        "--model yolov8n-seg.yaml --epochs 1 --batch-size 3 --num-workers 0 --threads 1 "
        "--val-pictures-every 0"
    )
    prepared = run(
        "prepare_data.py",
        *given,
        *small.split(),
        "--save-dir",
        tmp_path / "run",
        "--device",
        "cuda:7",
    )
    assert len(read_in(prepared)) >= 2 * 18  # a digest, and the pixels
    *_, done, line = prepared.stdout.splitlines()
    assert re.match(
        rf"\S+ [KM]iB packed in {tmp_path}/fast/set-\w{{8}}, digest \w{{16}}: ready after \d+\.\d "
        r"s$",
        done,
    )
    assert line.startswith("Next: python train_yolo_ddp.py --data")
    trained = run(*shlex.split(line.replace("cuda:7", "cpu"))[2:], "--no-tensorboard")
    assert "packing" not in trained.stdout + trained.stderr
    # Only those that cannot be read are tried again: the reason may be gone.
    assert {*read_in(trained)} == {f"train/images/{name}" for name in BAD}


def test_two_machines_share_the_packing(tmp_path: Path) -> None:
    """As `srun` starts them: without an address to meet at."""
    data = write_set(tmp_path / "set")
    ranks = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
    }
    words = [
        sys.executable,
        "prepare_data.py",
        "--data",
        str(data),
        "--img-size",
        "64",
        "--skip-bad",
    ]
    machines = [
        subprocess.Popen(
            words, cwd=PROJECT, env={**os.environ, **ranks, **place}, stdout=subprocess.PIPE
        )
        for place in ({"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)} for rank in range(2))
    ]
    said = [machine.communicate(timeout=120)[0].decode() for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0]
    assert said[0].count("Next: ") == 1
    assert said[1].count("Next: ") == 0
    digests = {
        re.findall(r"^\S+: .* packed in .*, digest (\w{16}): ready", text, re.MULTILINE)[0]
        for text in said
    }
    assert len(digests) == 1
    again = run("prepare_data.py", *words[2:])
    assert digests.pop() in again.stdout
    assert {*read_in(again)} == {f"train/images/{name}" for name in BAD}


def test_without_room_it_ends_with_one_line(tmp_path: Path) -> None:
    data = write_set(tmp_path / "set")
    (tmp_path / "set" / ".cache").write_text("in the way")
    done = run("prepare_data.py", "--data", data, "--img-size", "64", "--skip-bad")
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("read ")]
    assert "--cache packed: " in line
