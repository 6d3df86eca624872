"""Every option of every script acts, or says that it cannot, whatever the other options are."""

import ast

import pytest

import tests.recipes.crowd_bt
import tests.recipes.training_engine
import tests.recipes.underwater_ir  # noqa: F401 # these three make the recipes' modules importable
from recipes.compressed_ad.settings import Settings
from tests.support.option_scripts import COMPRESSED_AD, SCRIPTS, Script
from tests.support.option_walk import Walk
from tests.support.plugin import PROJECT
from utils.data.augment import Augmentation
from utils.engine import EngineOptions
from utils.training.config import TrainConfig

# Rules that the walk cannot prove: the script hands the option on in every mode, and what it calls leaves it out there.
HANDED_ON = {
    "train_yolo_ddp": {"ema_decay", "ema_ramp", "prefetch", "colour", "close_mosaic"},
    "inference --model=m --source=s": {"iou"},
    "inference --model=m --source=map.tif": {"iou", "overlap"},
    "evaluate_model --model=m": {"centreline_tolerance", "centreline_confidence", "coco_eval"},
    "export --model=m": {"thresholds"},
    "benchmark_ddp": {"num_workers", "objects_per_image"},
    "parse_labels": {"line_width", "time_gap", "exif_frame", "keep_unlabelled", "keep_unusable"},
    "crowd_bt.train": {"eta_lr", "auto_resume"},
    "distributed_training_example": {"backend", "data_dir"},
    "underwater_ir.student.train_student": {"pseudo_root"},
}


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_option_acts_or_is_refused_in_every_mode(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(script, monkeypatch)
    acted, idle = walk.all()
    print(f"{script}: {walk.num_combinations} combinations, {walk.num_refused} of them refused")
    assert not idle
    assert sorted(acted) == sorted(set(script.only or walk.options) - set(script.elsewhere))


def test_every_setting_of_compressed_ad_acts_in_one_of_its_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    acted: set[str] = set()
    for script in COMPRESSED_AD:
        with monkeypatch.context() as patch:
            walk = Walk(script, patch)
            acted |= walk.all()[0]
            print(f"{script}: {walk.num_combinations} combinations")
    assert sorted(acted) == sorted(walk.options)


def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[str]] = {}
    for script in (script for script in SCRIPTS if not script.only):
        with monkeypatch.context() as patch:
            found[str(script)] = Walk(script, patch).unneeded_rules()
    assert {script: names for script, names in found.items() if names} == HANDED_ON


def test_no_script_is_left_out() -> None:
    files = [*PROJECT.glob("*.py"), *PROJECT.glob("utils/**/*.py"), *PROJECT.glob("recipes/**/*.py")]
    declared = {
        (file.stem, node.name)
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Options") for base in node.bases)
    }
    walked = {(script.home.rpartition(".")[2], script.options) for script in (*SCRIPTS, *COMPRESSED_AD)}
    # The four numbers of a benchmark, what inference.py and others share, and the sections of the trainer's options.
    shared = {("measure", "MeasureConfig"), ("options", "ModelOptions"), ("options", "PredictOptions")}
    sections = {
        (kind.__module__.rpartition(".")[2], kind.__name__)
        for kind in (*TrainConfig.__mro__, *Settings.__mro__, EngineOptions, Augmentation)
    }
    assert declared - walked == shared | (sections & declared) - walked
