"""The guide's commands: one real launch, then the other commands in this process."""

import contextlib
import os
import re
import subprocess
import sys
import types
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from recipes.compressed_ad import collect, evaluate, train
from recipes.compressed_ad.environment import Darkroom, KeyToDoor
from recipes.compressed_ad.settings import DEFAULT_CONFIG, Settings
from recipes.compressed_ad.tests.small import NUM_STEPS, small_settings, write_small_histories
from tests.support.plugin import free_port
from tests.support.recipes import RECIPES, assert_refused, run_command
from yolo_seg_ddp.engine import EngineOptions
from yolo_seg_ddp.utils.config import read_config
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.options import to_dict

FOLDER = RECIPES / "compressed_ad"


def write_config(folder: Path, **changes: Any) -> Path:
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(to_dict(small_settings(folder, **changes))), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Train with the README's command for all GPUs, and the guide's file; return the folder and
    what it printed.
    """
    folder = tmp_path_factory.mktemp("launched")
    write_small_histories(small_settings(folder))
    done = launch(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def launch(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Start the README's command for all GPUs with a configuration that is
    written into a folder.
    """
    (line,) = re.findall(
        r"^bin/accelerate launch .*=auto .*$", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    program, word, *flags, script = line.split()
    assert [word, script] == ["launch", "train.py"]
    command = [program, word, "--config_file", "accelerate_config.yaml", *flags]
    command += [f"--main_process_port={free_port()}", script, str(write_config(folder))]
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder), "PATH": search}
    return subprocess.run(
        command, cwd=FOLDER, env=variables, capture_output=True, text=True, timeout=240, check=False
    )


def test_without_histories_the_launch_ends_with_one_line_and_no_report_of_torchrun(
    tmp_path: Path,
) -> None:
    done = launch(tmp_path)
    assert done.returncode == 1
    assert "no such file; make it with python collect.py" in done.stderr.splitlines()[-1]
    assert "torch/distributed" not in done.stderr


def test_the_launch_prints_the_guides_lines_once(launched: tuple[Path, str]) -> None:
    _, printed = launched
    lines = printed.splitlines()
    assert lines[:4] == [
        "fp16 needs a GPU: training in fp32 on the CPU",
        "Distributed training: MULTI_CPU",
        "Number of processes: 2",
        "Mixed precision: no",
    ]
    assert sorted(lines[4:6]) == ["Process 0 using device: cpu", "Process 1 using device: cpu"]
    assert printed.count("Effective batch: 4 x 2 x 1 = 8") == 1
    assert printed.count(f"Step {NUM_STEPS}: action accuracy") == 1


def test_the_run_keeps_one_checkpoint_and_the_guides_scalars(launched: tuple[Path, str]) -> None:
    event_files = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = small_settings(launched[0]).run_folder
    assert [path.name for path in run.glob("*.pt")] == [f"ckpt-{NUM_STEPS}.pt"]
    folders = [
        file.parent.name for file in run.rglob("events.*")
    ]  # one file of the main process for each line in the charts
    assert sorted(folders) == ["tensorboard", "train", "val"]
    events = event_files.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if name.startswith(("train/", "test/"))]
    steps = {name: [event.step for event in events.Scalars(name)] for name in names}
    assert steps.keys() == {
        *(
            f"train/{name}"
            for name in ("loss", "loss_action", "acc_action", "lr", "samples_per_sec")
        ),
        *(f"test/{name}" for name in ("loss_action", "acc_action")),
    }
    assert steps["test/acc_action"] == [4, 8]
    assert steps["train/samples_per_sec"] == sorted(set(steps["train/loss"]))
    assert all(event.value > 0 for event in events.Scalars("train/samples_per_sec"))


def test_the_trained_model_is_evaluated_in_context(
    launched: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = launched
    run_command(evaluate, folder / "small.yaml")
    run = small_settings(folder).run_folder
    returns = np.load(run / "eval_result.npy")
    assert returns.shape == (1, 20)  # one test goal of nine
    assert ((returns >= 0) & (returns <= 5)).all()
    assert (run / "eval_returns.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    for name in ("CompressedAD", "source learner", "random actions"):
        assert name in printed


def test_python_alone_continues_the_checkpoint_of_two_processes(
    launched: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = launched
    config = write_config(folder, train_timesteps=NUM_STEPS + 4, train_batch_size=2)
    assert run_command(train, config) == 0
    printed = capsys.readouterr().out
    assert "Distributed training: NO\nNumber of processes: 1" in printed
    assert f"ckpt-{NUM_STEPS}.pt (epoch 3, batch 0)" in printed
    (checkpoint,) = small_settings(folder).run_folder.glob("ckpt-*.pt")
    saved = torch.load(checkpoint, weights_only=True)
    assert (saved["step"], saved["config"]["train_batch_size"]) == (NUM_STEPS + 4, 2)


def test_the_guides_line_reads_a_precision_that_a_cpu_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / "train.py").read_text(encoding="utf-8")
    assert 'mixed_precision=config["mixed_precision"]' in text
    accelerator = train.start(small_settings(tmp_path, mixed_precision="fp16"))
    assert accelerator.mixed_precision == "no"
    assert "fp16 needs a GPU: training in fp32 on the CPU" in capsys.readouterr().out


def collect_here(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    """Run collect.py in this process alone."""
    pool = SimpleNamespace(map=map)
    monkeypatch.setattr(
        collect, "ProcessPoolExecutor", lambda *arguments: contextlib.nullcontext(pool)
    )
    run_command(collect, config)


def test_all_three_commands_work_with_a_key_and_a_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"environment": "key_to_door", "num_goals": 10, "horizon": 6}
    settings, config = small_settings(tmp_path, **changes), write_config(tmp_path, **changes)
    collect_here(monkeypatch, config)
    # its import takes a second
    monkeypatch.setattr(train, "EngineOptions", partial(EngineOptions, tensorboard=False))
    assert run_command(train, config) == 0
    run_command(evaluate, config)
    printed = capsys.readouterr().out
    assert "10 goals x 2 histories" in printed
    assert (
        f"{settings.save_dir}/CompressedAD-key_to_door-seed0, step {NUM_STEPS}: 1 test goals"
        in printed
    )
    assert np.load(settings.run_folder / "eval_result.npy").max() <= 2


def test_the_shipped_options_are_the_guides() -> None:
    config = read_config(Settings, FOLDER / DEFAULT_CONFIG)
    assert (config.train_batch_size, config.mixed_precision, config.summary_interval) == (
        128,
        "fp16",
        100,
    )
    assert config.run_folder == Path("runs/CompressedAD-darkroom-seed0")
    assert config == Settings()  # the files repeat the defaults
    launcher = yaml.safe_load((FOLDER / "accelerate_config.yaml").read_text())
    expected = {"num_processes": 2, "distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}
    assert expected.items() <= launcher.items()
    for file in (FOLDER / "configs").glob("*.yaml"):
        assert read_config(Settings, file).room is (KeyToDoor if "key" in file.name else Darkroom)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("lr: 0", "bad.yaml: lr 0.0: must be above 0"),
        ("mixed_precision: fp8", "bad.yaml: mixed_precision: 'fp8' is not one of no, fp16, bf16"),
        ("heads: 7", "bad.yaml: width 128: must be a multiple of heads, 7"),
        ("num_goals: 4", "bad.yaml: num_goals 4: must be 0 (all) or at least 5"),
        (
            "train_timesteps: 1500",
            "bad.yaml: train_timesteps 1500: must be a multiple of eval_interval, 1000",
        ),
        ("eval_segment: 90", "bad.yaml: eval_recent 80: must be at least eval_segment, 90"),
    ],
)
def test_a_wrong_option_is_one_clear_line(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with assert_refused(complaint, kind=UsageError):
        read_config(Settings, file)


def test_flags_missing_data_and_missing_checkpoints_are_one_line(tmp_path: Path) -> None:
    with assert_refused("takes no flags, only a YAML file", kind=UsageError):
        run_command(train, "--lr", "0.1")
    config = write_config(tmp_path)
    with assert_refused(f"hdf5: no such file; make it with python collect.py {config}"):
        run_command(train, config)
    assert list(tmp_path.iterdir()) == [config]
    with assert_refused(f"no ckpt-<step>.pt; train first with python train.py {config}"):
        run_command(evaluate, config)


def test_more_processes_than_gpus_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with assert_refused("2 processes but 1 visible GPU(s): set num_processes to 1"):
        train.start(Settings())


def test_auto_becomes_the_number_of_gpus() -> None:
    # a script without an ending
    loader = SourceFileLoader("shim", str(FOLDER / "bin" / "accelerate"))
    shim = types.ModuleType("shim")
    loader.exec_module(shim)
    for arguments, gpus, expected in (
        (
            "launch --multi_gpu --num_processes=auto train.py",
            4,
            "launch --multi_gpu --num_processes=4 train.py",
        ),
        (
            "launch --multi_gpu --num_processes auto train.py",
            0,
            "launch --multi_gpu --num_processes 2 train.py",
        ),
        (
            "launch --multi_gpu --num_processes=auto train.py",
            1,
            "launch --num_processes=1 train.py",
        ),
        (
            "launch --multi_gpu --num_processes=1 auto.py",
            1,
            "launch --multi_gpu --num_processes=1 auto.py",
        ),
    ):
        assert " ".join(shim.expanded(arguments.split(), gpus)) == expected
