"""The commands as users type them: the shell script once, then what reads its model; flags and
environment.
"""

import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from crowd_bt import evaluate, infer, make_data
from crowd_bt.model import build_scorer
from crowd_bt.options import adopt_launch_flags, read_options

from recipes.crowd_bt.tests.small import photographs, write_data
from tests.support.plugin import free_port, read_json, run_script
from tests.support.recipes import RANK_NAMES, RECIPES, assert_refused, run_command
from yolo_seg_ddp.utils.errors import UsageError

NEEDS = "needs the packages of the recipe (pip install -r recipes/crowd_bt/requirements.txt)"
SCRIPT = RECIPES / "crowd_bt" / "train_distributed.sh"
for package in ("timm", "scipy"):
    pytest.importorskip(package, reason=NEEDS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("commands"), reliability=1.0)


@pytest.fixture(scope="module")
def trained(data: Path) -> tuple[Path, str]:
    """Train by the guide's script on two processes; return the run's folder
    and what was printed.
    """
    run = data / "run"
    small = (
        "--backbone",
        "test_resnet",
        "--no-pretrained",
        "--input-size",
        "32",
        "--grad-checkpointing",
        "--amp",
    )
    places = (
        "--data-dir",
        data,
        "--image-dir",
        data / "images",
        "--checkpoint-dir",
        run,
        "--num-workers",
        "1",
    )
    environment: Any = {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    done = run_script(
        SCRIPT, "2", "--epochs", "1", "--batch-size", "16", *small, *places, **environment
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run, done.stdout


def test_the_script_prints_the_guides_lines_once(trained: tuple[Path, str]) -> None:
    lines = trained[1].splitlines()
    for line in (
        "Model wrapped with DistributedDataParallel",
        "Batch size per GPU: 16, effective batch size: 32",
    ):
        assert lines.count(line) == 1, trained[1]
    first = ["Distributed training initialized with 2 processes", "Using device: cpu (rank 0)"]
    assert [line for line in lines if line in first] == first, trained[1]
    assert not any("rank 1" in line for line in lines)


def test_the_script_asks_for_the_number_of_processes() -> None:
    for arguments in ((), ("--epochs", "3"), ("0",), ("four",)):
        done = run_script(SCRIPT, *arguments)
        assert done.returncode == 2
        assert "usage: ./train_distributed.sh N" in done.stderr
        assert done.stderr.count("\n") == 1


def test_without_data_the_script_ends_with_one_line_and_no_report_of_torchrun(
    tmp_path: Path,
) -> None:
    done = run_script(SCRIPT, "2", "--data-dir", tmp_path, MASTER_PORT=str(free_port()))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "has a comparison; python make_data.py makes an example" in line


def test_evaluate_reads_the_model(
    trained: tuple[Path, str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = trained[0], data / "evaluation.json"
    arguments = (
        "--checkpoint",
        run / "best_model.pt",
        "--data-dir",
        data,
        "--image-dir",
        data / "images",
    )
    assert run_command(evaluate, *arguments, "--output", output) == 0
    found = read_json(output)
    during_training = read_json(run / "evaluation_results.json")
    for name in ("gold_gold_accuracy", "overall_accuracy", "correct", "total"):
        # bf16 in training may turn a pair that is nearly equal.
        assert found[name] == pytest.approx(during_training[name], abs=2), name
    assert found["total"] == during_training["total"]
    assert "Gold-gold accuracy" in capsys.readouterr().out
    with assert_refused("--backbone resnet18: ", "holds test_resnet"):
        run_command(evaluate, *arguments, "--backbone", "resnet18")


def test_infer_scores_ranks_and_compares(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = tmp_path / "photos", tmp_path / "result.json"
    folder.mkdir()
    files = [folder / f"{number}.png" for number in range(3)]
    for number, file in enumerate(files):
        cv2.imwrite(str(file), photographs()[0][1][number * 20 :])
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff not a photograph")
    (folder / "notes.txt").write_text("no image")

    def inferred(*arguments: str | Path) -> dict[str, Any]:
        checkpoint = trained[0] / "best_model.pt"
        assert run_command(infer, "--checkpoint", checkpoint, *arguments, "--output", result) == 0
        return dict(read_json(result))

    found = inferred("--image-dir", folder, "--batch-size", "2")
    scores = {row["image"]: row["score"] for row in found["ranking"]}
    assert set(scores) == set(map(str, files))
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert found["unreadable"] == [str(folder / "broken.jpg")]
    assert inferred("--image", files[1])["score"] == pytest.approx(scores[str(files[1])], abs=1e-4)
    found = inferred("--compare", files[0], files[2])
    difference = scores[str(files[0])] - scores[str(files[2])]
    assert found["difference"] == pytest.approx(difference, abs=1e-4)
    assert found["probability_first_is_better"] == pytest.approx(
        1 / (1 + np.exp(-difference)), abs=1e-4
    )
    assert found["better"] == str(files[0 if difference >= 0 else 2])
    capsys.readouterr()
    with assert_refused("absent.png: No such file"):
        inferred("--image", folder / "absent.png")
    with pytest.raises(SystemExit):
        inferred()
    assert (
        "name one of --image FILE, --image-dir DIR and --compare FILE FILE"
        in capsys.readouterr().err
    )


def test_make_data_damages_photographs_of_a_folder(tmp_path: Path) -> None:
    source, output = tmp_path / "photos", tmp_path / "data"
    source.mkdir()
    with assert_refused("0 usable photographs; at least 2 are needed"):
        run_command(make_data, "--output", output, "--images", source)
    for number in range(3):
        cv2.imwrite(str(source / f"{number}.jpg"), np.roll(photographs()[number % 2][1], number, 0))
    counts = (
        "--num-pictures",
        "42",
        "--num-unseen",
        "14",
        "--comparisons",
        "60",
        "--per-annotator",
        "30",
    )
    assert (
        run_command(make_data, "--images", source, "--output", output, "--size", "32", *counts) == 0
    )
    seen = {file.name.split("_")[1] for file in (output / "images").iterdir()}
    unseen = {file.name.split("_")[1] for file in (output / "unseen" / "images").iterdir()}
    assert (seen, unseen) == ({"0", "2"}, {"1"})
    true = read_json(output / "annotators.json")
    assert sorted(true.values()) == [0.5] * 4 + [0.975] * 8
    measured = read_json(output / "simulated" / "user_reliabilities.json")
    assert min(measured[user] for user, value in true.items() if value > 0.5) > 0.7
    assert (output / "users" / "user00" / "comparison_data.json").is_file()
    with assert_refused("not empty; remove it, or name another folder"):
        run_command(make_data, "--output", output)


def test_both_spellings_of_the_local_rank_and_a_file_with_sections(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("training: {epochs: 7, lr: 3e-4}\ndata: {data_source: s3, image_dir: x}\n")
    for spelling in (
        ["--local_rank", "1"],
        ["--local-rank", "1"],
        ["--local_rank=1"],
        ["--local-rank=1"],
    ):
        found = read_options([*spelling, "--config", str(file), "--epochs", "9"])
        assert (found.local_rank, found.epochs, found.lr, found.data_source) == (1, 9, 3e-4, "s3")
    assert read_options([]).learnable_eta
    assert not read_options(["--no-learnable-eta", "--no-auto-resume"]).learnable_eta


LAUNCHED = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
NO_LAUNCHER = "--world-size 4 without a launcher; start ./train_distributed.sh 4"


@pytest.mark.parametrize(
    ("before", "flags", "after"),
    [
        ({}, "", {}),
        ({}, "--distributed", {}),
        ({}, "--local_rank 1 --world-size 2", {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "--local_rank=1", LAUNCHED),
        (LAUNCHED, "--local_rank=0 --world-size 8", LAUNCHED),
        ({}, "--distributed --world-size 4", NO_LAUNCHER),
        ({}, "--world-size 4", NO_LAUNCHER),
        ({}, "--distributed --local-rank 1", "--local-rank 1 without a launcher"),
    ],
)
def test_the_environment_comes_before_the_flags_and_several_processes_need_a_launcher(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, str], flags: str, after: dict[str, str] | str
) -> None:
    others = {name: value for name, value in os.environ.items() if name not in RANK_NAMES}
    monkeypatch.setattr(os, "environ", {**others, **before})
    config = read_options(flags.split())
    if isinstance(after, str):
        with assert_refused(after, kind=UsageError):
            adopt_launch_flags(config)
        return
    adopt_launch_flags(config)
    meeting_point = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} if after else {}
    assert {name: os.environ[name] for name in RANK_NAMES if name in os.environ} == {
        **after,
        **meeting_point,
    }


def test_weights_that_cannot_be_fetched_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import timm

    create = timm.create_model

    def offline(name: str, pretrained: bool = False, **options: Any) -> torch.nn.Module:
        if pretrained:
            raise OSError("We couldn't connect\nto the hub")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    assert build_scorer("test_resnet", pretrained=True, input_size=32).head[0].in_features == 96
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert (
        "--backbone test_resnet: its pretrained weights cannot be fetched (We couldn't connect to "
        "the hub)" in errors
    )
    with assert_refused("--backbone resnet81: timm has no such network (did you mean resnet18?)"):
        build_scorer("resnet81")
