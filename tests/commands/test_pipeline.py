"""The commands of the quick start, end to end, on the built-in sample and two real processes."""

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.plugin import TRAIN_FLAGS, TrainedRun, free_port, must_run
from tests.support.processes import run_guarded
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.evaluation.metrics.matching import LEVELS
from yolo_seg_ddp.run.checkpoint import latest_manifest
from yolo_seg_ddp.run.records import read_epochs
from yolo_seg_ddp.utils import errors
from yolo_seg_ddp.utils.devices import choose_precision
from yolo_seg_ddp.yolo.model import load_weights

NO_PICTURES = ("--val-pictures-every", "0", "--no-tensorboard")


def test_the_console_shows_what_the_guide_shows(trained: TrainedRun) -> None:
    text = trained.output
    assert re.search(
        r"^={66}\nDistributed YOLOv8 Training\n={66}\nWorld Size: 2\nRank: 0\n={66}$",
        text,
        re.MULTILINE,
    ), text
    assert re.search(
        r"^Epoch 1\n-{60}\n  Batch \[0/\d+\] - Loss: \d+\.\d{4} \| .*images/s", text, re.MULTILINE
    ), text
    assert re.search(r"^  Average Loss: \d+\.\d{4}$", text, re.MULTILINE)
    assert re.search(r"^  Time: \d+\.\ds$", text, re.MULTILINE)
    assert re.search(r"^  Throughput: \d+\.\d batches/sec", text, re.MULTILINE)
    assert len(re.findall(r"^  ✓ Saved checkpoint \(loss: \d+\.\d{4}\)", text, re.MULTILINE)) == 2
    assert "Effective batch: 4 images x 2 processes x 1 batch per step = 8" in text
    assert re.search(
        r"^Class weights: 0\.\d+ \(.+\) to \d+\.?\d* \(.+\), because", text, re.MULTILINE
    )
    assert text.count("Distributed YOLOv8 Training") == 1, "only rank 0 may print"


def test_the_run_folder_holds_everything_promised(trained: TrainedRun) -> None:
    expected = {
        "best.pt",
        "last.pt",
        "checkpoint",
        "metrics.jsonl",
        "results.csv",
        "config.yaml",
        "status.json",
    }
    expected |= {
        "args.yaml",
        "results.png",
        "train_batch0.jpg",
        "labels.jpg",
        "val_batch0_pred.jpg",
    }
    assert expected <= {path.name for path in trained.folder.iterdir()}
    said = (trained.folder / "train.log").read_text()
    assert trained.output.endswith(said)
    assert said.startswith("===")
    status = json.loads((trained.folder / "status.json").read_text())
    assert (status["state"], status["epoch"]) == ("finished", 2)
    assert list(trained.folder.rglob("events.out.tfevents*"))
    records = [
        json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()
    ]
    epochs = read_epochs(trained.folder)
    assert [record["epoch"] for record in epochs] == [1, 2]
    losses, speed = ("train_loss", "val_loss", "lr"), ("images_per_s", "data_wait_share")
    for name in (*losses, *speed, "box_map50", "mask_map50", "mask_map50_95"):
        assert isinstance(epochs[-1][name], float), name
    assert yaml.safe_load((trained.folder / "config.yaml").read_text())["img_size"] == 96
    told = {
        "task": "segment",
        "mode": "train",
        "imgsz": 96,
        "batch": 4,
        "epochs": 2,
        "optimizer": "adamw",
    }
    options = yaml.safe_load((trained.folder / "args.yaml").read_text())
    assert options | told == options
    assert all(
        len(record["ranks"]["own_ms"]) == 2 for record in records if record["kind"] == "batch"
    )
    view = must_run(
        "python", "-m", "yolo_seg_ddp.run.monitor", trained.folder / "best.pt", COLUMNS="80"
    )
    assert "finished" in view
    assert "Epoch 2/2" in view


def test_more_epochs_under_accelerate_launch_and_then_on_one_process_go_on(
    trained: TrainedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained.folder, folder)
    arguments = ("--data", str(trained.data), "--save-dir", str(folder), *TRAIN_FLAGS, *NO_PICTURES)
    launch = (
        "python",
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
    )
    plain = ("--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={free_port()}")
    again = must_run(*launch, *plain, "train_yolo_ddp.py", *arguments, "--epochs", "3")
    assert "World Size: 2" in again
    assert "Resumed from" in again
    assert "Epoch 3" in again
    assert "Epoch 2\n" not in again
    # One process carries on what two began, from the folder alone.
    chosen = latest_manifest(folder / "checkpoint")
    assert (chosen["optimizer"], chosen["amp"]) == (
        "adamw",
        choose_precision("auto", torch.device("cpu")).name,
    )
    resumed = must_run(
        "python", "train_yolo_ddp.py", "--resume", folder / "last.pt", "--epochs", "4"
    )
    assert "Epoch 4" in resumed
    assert "Epoch 3\n" not in resumed
    assert "2 batches per step, so that the run keeps its 8 images per step" in resumed
    epochs = read_epochs(folder)
    assert [record["epoch"] for record in epochs] == [1, 2, 3, 4]
    assert [record["global_step"] for record in epochs] == [
        epochs[0]["global_step"] * epoch for epoch in (1, 2, 3, 4)
    ]


BAD_INPUT = [
    ("train_yolo_ddp.py --learning-rate 0.1", 2, "unknown argument --learning-rate"),
    ("train_yolo_ddp.py --img-size 100", 2, "multiple of 32"),
    ("train_yolo_ddp.py --data nowhere.yaml", 1, "nowhere.yaml"),
    ("train_yolo_ddp.py --resume nowhere", 1, "no run to continue"),
    ("train_yolo_ddp.py --freeze -1", 2, "--freeze -1: must be at least 0"),
    ("train_yolo_ddp.py --mixup 1.5", 2, "--mixup 1.5: must be at least 0 and at most 1"),
    (
        "train_yolo_ddp.py --copy-paste -0.1",
        2,
        "--copy-paste -0.1: must be at least 0 and at most 1",
    ),
    ("train_yolo_ddp.py --shear 45", 2, "--shear 45.0: must be at least 0 and below 45"),
    ("evaluate_model.py --model nowhere.pt", 1, "nowhere.pt"),
    ("evaluate_model.py", 2, "--model is required"),
    ("inference.py --model x.pt --source nowhere", 1, "no such file or folder"),
    ("download_data.py --max-images 0", 2, "--max-images 0"),
    ("download_data.py --sample 0", 2, "--sample 0"),
    ("download_data.py --keep-zips --max-images 3", 2, "--keep-zips"),
    ("download_data.py --sample --max-images 3", 2, "--max-images"),
    ("download_data.py --sample-size 5472", 2, "--sample-size"),
    ("parse_labels.py --val-fraction 1", 2, "--val-fraction 1"),
    ("parse_labels.py --line-width 0", 2, "--line-width 0"),
    ("parse_labels.py --long-side 3", 2, "--long-side 3"),
    ("parse_labels.py --workers -1", 2, "--workers -1"),
    ("parse_labels.py --split-by coin", 2, "coin"),
    ("profile_gpu.py --batch-sizes 4 0", 2, "--batch-sizes 0"),
    ("benchmark_ddp.py --repeats 0", 2, "--repeats 0"),
]


Leave = Callable[..., tuple[int, str]]


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Leave:
    """Run a command in this process until it exits; return its code and what it wrote to stderr."""

    def run(*command: str | Path) -> tuple[int, str]:
        script = importlib.import_module(str(command[0]).removesuffix(".py"))
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as left:
            errors.run_script(script.main)
        return int(left.value.code or 0), capsys.readouterr().err

    return run


@pytest.mark.parametrize(("command", "code", "words"), BAD_INPUT)
def test_bad_input_gets_one_line_and_a_code(
    command: str, code: int, words: str, leave: Leave
) -> None:
    left_with, said = leave(*command.split())
    assert left_with == code, said
    assert words in said
    assert len(said.splitlines()) == 1, said


def test_a_broken_label_is_named_with_its_line(
    trained: TrainedRun, tmp_path: Path, leave: Leave
) -> None:
    shutil.copytree(trained.processed, tmp_path / "processed")
    label = next(
        path
        for path in sorted((tmp_path / "processed/train/labels").iterdir())
        if path.stat().st_size
    )
    lines = label.read_text().splitlines()
    label.write_text("\n".join([lines[0], "99 0.1 0.1 0.2 0.2 0.3 0.1"]) + "\n")
    data, run = tmp_path / "processed/dataset.yaml", tmp_path / "run"
    code, said = leave("train_yolo_ddp.py", "--data", data, *TRAIN_FLAGS, "--save-dir", run)
    assert code == 1
    assert f"{label.name}:2" in said
    assert not run.exists()


def test_another_run_in_the_same_folder_loses_nothing_and_opens_no_socket_to_the_outside(
    trained: TrainedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained.folder, folder)
    before = (folder / "best.pt").read_bytes()
    arguments = (
        "--data",
        trained.data,
        "--save-dir",
        folder,
        *TRAIN_FLAGS,
        "--epochs",
        "1",
        "--seed",
        "7",
    )
    done = run_guarded(
        "train_yolo_ddp.py", *arguments, "--best-metric", "mean_map", "--no-mask-score"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Set the earlier run aside" in done.stdout
    (epoch,) = read_epochs(folder)
    assert epoch["mean_map50_95"] == pytest.approx(
        (epoch["mask_map50_95"] + epoch["box_map50_95"]) / 2
    )
    assert f"best is epoch 1, by mean_map50_95 {epoch['mean_map50_95']:.4f}:" in done.stdout
    assert (tmp_path / "run-1" / "best.pt").read_bytes() == before
    assert (folder / "best.pt").read_bytes() != before
    options = [load_weights(str(run / "best.pt")).args for run in (trained.folder, folder)]
    assert [each["mask_score"] for each in options] == [True, False]

    # Both hold how many detections were right at which confidence.
    num_classes = len(load_dataset_yaml(trained.data).names)
    for each in options:
        assert len(each["precision"]) == num_classes * 2 * len(LEVELS)


def test_the_guard_of_these_tests_stops_a_command_that_looks_up_another_machine(
    tmp_path: Path,
) -> None:
    # Evaluation and inference are guarded in test_evaluate_model.py and test_inference.py.
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import urllib.request; urllib.request.urlopen('http://example.org', timeout=3)\n"
    )
    assert run_guarded(probe).stderr == "looked up example.org\n"


@pytest.mark.gpu
def test_training_on_a_gpu(trained: TrainedRun, tmp_path: Path) -> None:
    flags = (
        "--data",
        trained.data,
        "--save-dir",
        tmp_path / "run",
        *TRAIN_FLAGS,
        "--epochs",
        "1",
        "--device",
        "cuda",
    )
    assert "cuda" in must_run("python", "train_yolo_ddp.py", *flags, CUDA_VISIBLE_DEVICES="0")
