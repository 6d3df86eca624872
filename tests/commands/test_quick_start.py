"""Every command line of the quick start is accepted as written there, with the defaults it promises."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import PROJECT, run_script
from utils.common.config import parse_config
from utils.train_config import TrainConfig

TRAIN_COMMANDS = [
    "--model yolov8n-seg.pt --epochs 10 --batch-size 16",
    "--model yolov8m-seg.pt --epochs 100 --batch-size 16",
    "--batch-size 8",
    "--lr 0.02 --weight-decay 1e-4",
    "--model yolov8n-seg.pt",
    "--model yolov8l-seg.pt",
    "",
]


@pytest.mark.parametrize("command", TRAIN_COMMANDS)
def test_the_guides_training_flags_are_taken(command: str) -> None:
    config = parse_config(TrainConfig, "", shlex.split(command))
    given = dict(zip(*[iter(shlex.split(command))] * 2, strict=True))
    for flag, text in given.items():
        value = getattr(config, flag[2:].replace("-", "_"))
        assert value == type(value)(text)


def test_the_trainers_defaults_are_the_guides() -> None:
    config = parse_config(TrainConfig, "", [])
    assert config.save_dir == "models/epri_distribution_ddp"
    assert config.num_workers == 8
    assert config.best_metric == "val_loss"
    assert Path(PROJECT / config.data).samefile(PROJECT / "dataset.yaml")


OTHER_COMMANDS = [
    ("download_data", "DownloadConfig", ""),
    ("parse_labels", "ParseConfig", ""),
    ("evaluate_model", "EvaluationConfig", "--model models/epri_distribution_ddp/best.pt"),
    (
        "inference",
        "InferenceConfig",
        "--model models/epri_distribution_ddp/best.pt --source data/processed/val/images --output outputs/predictions",
    ),
    ("profile_gpu", "ProfileConfig", "--model yolov8m-seg.pt --batch-sizes 4 8 16 32 64"),
    ("profile_gpu", "ProfileConfig", "--batch-sizes 4 8 16 32 64 128"),
    ("benchmark_ddp", "BenchmarkConfig", ""),
    ("test_ddp", "MachineCheckConfig", ""),
]


@pytest.mark.parametrize(("script", "config_class", "command"), OTHER_COMMANDS)
def test_the_guides_other_commands_are_taken(script: str, config_class: str, command: str) -> None:
    config = parse_config(getattr(importlib.import_module(script), config_class), "", shlex.split(command))
    words = shlex.split(command)
    if "--batch-sizes" in words:
        sizes = tuple(map(int, words[words.index("--batch-sizes") + 1 :]))
        assert config.batch_sizes == sizes


def test_the_launcher_takes_the_guides_command() -> None:
    done = run_script(
        "bash", "train_ddp.sh", "4", "--", "--model", "yolov8n-seg.yaml", DRY_RUN="1", CUDA_VISIBLE_DEVICES=""
    )
    # Without data or GPUs it says what is missing; it must not fail over its own arguments.
    assert done.returncode != 2, done.stderr
    assert "usage" not in done.stderr.lower()


def test_the_readmes_tree_is_true() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    tree = readme.split("```\ndownload_data.py", 1)[1].split("```")[0]
    named = set(re.findall(r"[\w./-]+\.(?:py|sh|yaml|txt|toml|lock)\b|[a-z]+/", "download_data.py" + tree))
    for name in named - {"data/", "parsing/"}:
        found = (PROJECT / name).exists() or (PROJECT / "utils" / name).exists()
        assert found or name in ("manifest.json", "processed/"), f"README names {name}, which is not there"
    modules = {path.name for path in (PROJECT / "utils").glob("*.py")} - {"__init__.py"}
    scripts = {path.name for path in PROJECT.glob("*.py")}
    missing = sorted(module for module in modules | scripts if module not in readme)
    assert not missing, f"not in README's tree: {missing}"
