"""Machines that differ are refused before the first step, in one line that names the first
difference.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import train_yolo_ddp
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.training import agreement
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UserError

LABELS = "0 0.1 0.1 0.6 0.1 0.6 0.6\n1 0.5 0.5 0.8 0.5 0.8 0.8\n"
FLAGS = (
    "--model",
    "yolov8n-seg.yaml",
    "--img-size",
    "64",
    "--batch-size",
    "1",
    "--device",
    "cpu",
    "--threads",
    "1",
)


class Agreed(Exception):
    """The training would begin."""


def write_set(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / split / kind).mkdir(parents=True)
        for number in range(3):
            picture = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            (folder / split / f"images/{number}.jpg").write_bytes(encode_jpeg(picture))
            (folder / split / f"labels/{number}.txt").write_text(LABELS)
    (folder / "data.yaml").write_text("train: train/images\nval: val/images\nnames: [wire, pole]\n")
    return folder


def lose(folder: Path) -> None:
    (folder / "train/images/1.jpg").unlink()
    (folder / "train/labels/1.txt").unlink()


def add(folder: Path) -> None:
    for file in ("images/0.jpg", "labels/0.txt"):
        shutil.copy(folder / "train" / file, folder / "train" / file.replace("0", "9"))


def rename(folder: Path) -> None:
    (folder / "data.yaml").write_text("train: train/images\nval: val/images\nnames: [pole, wire]\n")


def change_all(folder: Path) -> None:
    for file in folder.glob("val/labels/*.txt"):
        file.write_text(LABELS.splitlines()[0])


# What is different on machine 2, and what is said. {1} and {2} are the machines.
DIFFERENCES: dict[str, tuple[Callable[[Path], object] | None, str, str]] = {
    "nothing": (None, "", ""),
    "missing": (
        lose,
        "",
        "{2} lacks train/images/1.jpg, which {1} has (1 of 6 photographs): copy the data set again",
    ),
    "more": (
        add,
        "",
        "{1} lacks train/images/9.jpg, which {2} has (1 of 7 photographs): copy the data set again",
    ),
    "content": (
        lambda folder: shutil.copy(folder / "val/images/1.jpg", folder / "val/images/2.jpg"),
        "",
        "val/images/2.jpg has another content on {2} than on {1} (1 of 6 photographs): copy the "
        "data set again",
    ),
    "labels": (
        change_all,
        "",
        "val/images/0.jpg has other labels on {2} than on {1} (3 of 6 photographs): copy the data",
    ),
    "classes": (
        rename,
        "",
        "class 0 is pole on {2} and wire on {1}: copy the data set's YAML file again",
    ),
    "unreadable": (
        lambda folder: (folder / "train/images/0.jpg").write_bytes(b"no picture"),
        "--skip-bad",
        "train/images/0.jpg has another content on {2} than on {1} (1 of 6 photographs): copy the "
        "data set again",
    ),
    "options": (
        None,
        "--lr 0.02",
        "{2} has --lr 0.02 and {1} has --lr unset: all machines need the same options",
    ),
    "version": (None, "torch 2.11.0", "{2} has torch 2.11.0 and {1} has torch "),
    "run-folder": (
        None,
        "--save-dir {own}/run",
        "{2} writes to another run folder ({own}/run) than {1} ({shared}/run): name",
    ),
    "name": (
        None,
        "--save-dir {shared}/run-2",
        "{2} writes to another run folder ({shared}/run-2) than {1} ({shared}/run)",
    ),
}


def start_each(folder: Path) -> dict[str, Any]:
    """Start a training for each difference, as one of two machines; return how each ended."""
    ranks = distributed.read_rank_environment()
    os.environ |= {
        "GROUP_RANK": str(ranks.rank),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "INIT_TIMEOUT": "60",
    }
    agreement.SHOWS_LATE_S = 1.0
    package_version = agreement.package_version

    def agreed(*_: Any, **__: Any) -> None:
        raise Agreed

    train_yolo_ddp.OwnedRun = agreed  # type: ignore[misc,assignment] # what follows the agreement
    ends = {}
    for name, (change, flags, _) in DIFFERENCES.items():
        data = shutil.copytree(folder / "set", folder / name / f"machine{ranks.rank}")
        places = {"own": folder / name / "own", "shared": folder / name}
        words: list[str] = []
        if ranks.rank == 1:
            if change:
                change(data)
            if flags.startswith("torch"):
                agreement.package_version = lambda name: (
                    "2.11.0" if name == "torch" else package_version(name)
                )
            else:
                words = flags.format(**places).split()
        given = (
            "--data",
            str(data / "data.yaml"),
            "--save-dir",
            str(folder / name / "run"),
            *FLAGS,
            *words,
        )
        try:
            train_yolo_ddp.train(parse_config(TrainConfig, "", [*given]))
        except (UserError, SystemExit, Agreed) as error:
            ends[name] = f"{type(error).__name__}: {error}"
        distributed.cleanup_ddp()
        agreement.package_version = package_version
        # Each start finds the launcher's store as the one before has left it.
        (folder / f"{name} ended on {ranks.rank}").touch()
        wait_until((folder / f"{name} ended on {1 - ranks.rank}").exists, 60)
    return ends


def test_machines_that_differ_are_refused_in_one_line_that_names_the_first_difference(
    tmp_path: Path,
) -> None:
    """A machine without a photograph, with other labels or with a run folder of its own trained on
    without a word.
    """
    write_set(tmp_path / "set")
    first, second = run_ranks(start_each, 2, tmp_path, join=False, timeout_s=240)
    host = os.uname().nodename
    machines = ("", f"{host}/1", f"{host}/2")
    for name, (_, _, said) in DIFFERENCES.items():
        places = {"own": tmp_path / name / "own", "shared": tmp_path / name}
        if not said:
            assert (first[name], second[name]) == ("Agreed: ", "Agreed: ")
            continue
        assert first[name].startswith("UserError: " + said.format(*machines, **places)), first[name]
        assert second[name] == "SystemExit: 1"
        assert not (tmp_path / name / "run").exists()
        assert not [*(tmp_path / name).glob("**/.start-*")]
