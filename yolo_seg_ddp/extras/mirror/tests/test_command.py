"""A training of two ranks with a copy in object storage, killed; its folder is lost."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.noise_data import write_noise_data
from tests.support.plugin import PROJECT, must_run, torchrun
from tests.support.processes import wait_until
from tests.support.s3_server import SECRET, S3Server, s3_server, use_server
from yolo_seg_ddp.run.checkpoint import latest_manifest, load_latest
from yolo_seg_ddp.run.records import read_status

FLAGS = (
    *(
        "--model",
        "yolov8n-seg.yaml",
        "--img-size",
        "64",
        "--batch-size",
        "2",
        "--num-workers",
        "0",
        "--cache",
        "none",
    ),
    *("--no-tensorboard", "--val-pictures-every", "0", "--amp", "off", "--epochs", "6"),
)


def command(data: Path, run: Path, *flags: str) -> list[str]:
    return [
        *torchrun(2),
        "train_yolo_ddp.py",
        "--data",
        str(data),
        "--save-dir",
        str(run),
        *FLAGS,
        *flags,
    ]


def saved_step(server: S3Server) -> int:
    """Return the step of the newest complete checkpoint in the bucket; 0 without one."""
    names = [
        name for name in server.names("mine/run/checkpoint/") if name.endswith("manifest.json")
    ]
    return max((int(name.split("/")[3].removeprefix("step-")) for name in names), default=0)


def final_state(run: Path) -> dict[str, Any]:
    """Return the tensors at the end of a run, and its losses."""
    loaded = load_latest(run / "checkpoint")
    assert loaded is not None
    state = loaded[1]
    losses = {
        name: values for name, values in state["progress"]["history"].items() if "loss" in name
    }
    parts = {name: state[name] for name in ("model", "ema")}
    return {
        **parts,
        "optimizer": state["optimizer"]["state"],
        "losses": losses,
        "step": state["progress"]["global_step"],
    }


def test_a_killed_training_whose_folder_is_lost_goes_on_from_its_copy_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_noise_data(tmp_path / "data")
    must_run(*command(data, tmp_path / "undisturbed"), OMP_NUM_THREADS="1")
    run, log = tmp_path / "run", tmp_path / "log.txt"
    with s3_server("runs") as server:
        use_server(server, monkeypatch)
        words = command(data, run, "--mirror", "s3://runs/mine")
        with log.open("wb") as file:
            training = subprocess.Popen(
                [sys.executable, *words[1:]],
                cwd=PROJECT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=file,
                stderr=file,
            )
        # `requests` cost nothing to look at.
        wait_until(
            lambda: "manifest.json" in str(server.requests) or training.poll() is not None,
            timeout_s=200,
        )
        # The storage vanishes, and the training goes on meanwhile.
        server.stop()
        last = int(latest_manifest(run / "checkpoint")["step"])
        wait_until(
            lambda: (
                latest_manifest(run / "checkpoint").get("step", 0) > last
                or training.poll() is not None
            ),
            60,
        )
        os.kill(read_status(run)["pid"], signal.SIGKILL)
        assert training.wait(timeout=60) == 1, log.read_text()[-3000:]
        server.start()
        step = saved_step(server)
        shutil.rmtree(run)

        said = must_run(*command(data, run, "--mirror", "s3://runs/mine"), OMP_NUM_THREADS="1")
        assert f"{run} has no checkpoint: fetching step-{step:08d} from s3://runs/mine/run" in said
        assert f"Resumed from {run}/checkpoint/step-{step:08d}" in said
        for name in (
            "best.pt",
            "last.pt",
            "metrics.jsonl",
            "config.yaml",
            "data.json",
            "status.json",
            "results.csv",
        ):
            assert server.content(f"mine/run/{name}") == (run / name).read_bytes(), name
    undisturbed, resumed = final_state(tmp_path / "undisturbed"), final_state(run)
    assert 0 < step < resumed["step"]
    torch.testing.assert_close(resumed, undisturbed, rtol=0, atol=0)
    assert not any(
        SECRET.encode() in file.read_bytes() for file in run.rglob("*") if file.is_file()
    )
