"""Every command line of the quick start is accepted as written there, with the defaults it promises."""

from __future__ import annotations

import importlib
import shlex
from pathlib import Path
from typing import Any

import pytest

import benchmark_ddp
from tests.conftest import PROJECT, run_script
from utils.common.config import parse_config
from utils.common.cores import choose_threads_and_workers
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML
from utils.training.config import TrainConfig

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
    assert config.num_workers is None  # the guide's 8, or more where a GPU has more cores to itself
    assert [choose_threads_and_workers(1, None, device, cores=9)[1] for device in ("cpu", "cuda")] == [2, 8]
    assert config.best_metric == "val_loss"
    assert Path(PROJECT / config.data).samefile(PROJECT / "dataset.yaml")


MODEL = "models/epri_distribution_ddp/best.pt"
OTHER_COMMANDS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("download_data", "DownloadConfig", "", {"output": "data/raw", "sample": None, "max_images": None}),
    ("parse_labels", "ParseConfig", "", {"input": "data/raw", "output": "data/processed"}),
    ("evaluate_model", "EvaluationConfig", f"--model {MODEL}", {"model": MODEL, "split": "val"}),
    (
        "inference",
        "InferenceConfig",
        f"--model {MODEL} --source data/processed/val/images --output outputs/predictions",
        {"model": MODEL, "source": "data/processed/val/images", "output": "outputs/predictions"},
    ),
    (
        "profile_gpu",
        "ProfileConfig",
        "--model yolov8m-seg.pt --batch-sizes 4 8 16 32 64",
        {"model": "yolov8m-seg.pt", "batch_sizes": (4, 8, 16, 32, 64), "output": "outputs/profiling"},
    ),
    ("profile_gpu", "ProfileConfig", "--batch-sizes 4 8 16 32 64 128", {"batch_sizes": (4, 8, 16, 32, 64, 128)}),
    ("benchmark_ddp", "BenchmarkConfig", "", {"output": "outputs/benchmarks", "processes": None}),
    ("test_ddp", "MachineCheckConfig", "", {"data": str(DEFAULT_DATASET_YAML)}),
]


@pytest.mark.parametrize(("script", "config_class", "command", "promised"), OTHER_COMMANDS)
def test_the_guides_other_commands_mean_what_it_promises(
    script: str, config_class: str, command: str, promised: dict[str, Any]
) -> None:
    config = parse_config(getattr(importlib.import_module(script), config_class), "", shlex.split(command))
    assert {name: getattr(config, name) for name in promised} == promised


def test_the_benchmark_tries_one_two_four_and_eight_gpus() -> None:
    assert benchmark_ddp.choose_counts(benchmark_ddp.BenchmarkConfig(), 8) == (1, 2, 4, 8)


def test_the_launcher_takes_the_guides_command() -> None:
    done = run_script(
        "bash", "train_ddp.sh", "4", "--", "--model", "yolov8n-seg.yaml", DRY_RUN="1", CUDA_VISIBLE_DEVICES=""
    )
    # Without data or GPUs it says what is missing; it must not fail over its own arguments.
    assert done.returncode != 2, done.stderr
    assert "usage" not in done.stderr.lower()


def paths_in(tree: str) -> set[str]:
    """Return the first word of each line; an indented one lies in the last folder that is indented less."""
    paths, folders = set(), [(-1, "")]
    for line in tree.strip().splitlines():
        name, indent = line.split()[0], len(line) - len(line.lstrip())
        while folders[-1][0] >= indent:
            folders.pop()
        path = folders[-1][1] + name
        paths.add(path)
        if name.endswith("/"):
            folders.append((indent, path))
    return paths


def test_the_readmes_tree_is_true() -> None:
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    (tree,) = [block for block in readme.split("```")[1::2] if "\nutils/" in block]
    named = paths_in(tree)
    absent = {path for path in named if not (PROJECT / path).exists()}
    assert not absent, f"README names what is not there: {absent}"
    folders = {f"utils/{file.parent.name}/" for file in (PROJECT / "utils").glob("*/__init__.py")}
    scripts = {file.name for kind in ("*.py", "*.sh") for file in PROJECT.glob(kind)}
    missing = (folders | scripts) - named
    assert not missing, f"README's tree does not name {missing}"
