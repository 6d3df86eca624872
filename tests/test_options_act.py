"""Every option of every script acts, or says that it cannot, whatever the other options are."""

from __future__ import annotations

import ast

import pytest

import tests.recipes.crowd_bt
import tests.recipes.training_engine
import tests.recipes.underwater_ir  # noqa: F401 # these three make the recipes' modules importable
from tests.conftest import PROJECT
from tests.support.option_scripts import COMPRESSED_AD, SCRIPTS, Script
from tests.support.option_walk import Refused, Walk

KINDS = ("needs", "wants")
# Rules that the walk cannot prove: the script hands the option on in every mode, and what it calls leaves it out there.
HANDED_ON = {
    "train_yolo_ddp": {"ema_ramp", "prefetch", "colour", "close_mosaic"},
    "inference --model=m --source=s": {"iou"},
    "inference --model=m --source=map.tif": {"iou", "overlap"},
    "evaluate_model --model=m": {"centreline_tolerance", "centreline_confidence", "coco_eval"},
    "benchmark_ddp": {"num_workers", "objects_per_image"},
    "parse_labels": {"line_width", "time_gap", "exif_frame", "keep_unlabelled"},
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


IGNORED = [  # what scripts ignored without a word, and what they answer now
    ("train_yolo_ddp", "--window-scale 0.25 1", "--window-scale has no effect without --windows"),
    ("train_yolo_ddp", "--no-ema --ema-decay 0.9", "--ema-decay has no effect with --no-ema"),
    ("train_yolo_ddp", "--no-ema --ema-ramp 9", "--ema-ramp has no effect with --no-ema"),
    ("inference", "--tiles off --overlap 0.5", "--overlap has no effect with --tiles off"),
    ("inference", "--ground-height 3", "--ground-height has no effect without --geo"),
    ("inference", "--asset-range 50", "--asset-range has no effect without --geo"),
    ("inference", "--geo --asset-range 50", "--asset-range has no effect without --assets"),
    ("check_data", "--tiles 640", "--tiles has no effect without --model"),
    ("check_data", "--amp bf16", "--amp has no effect without --model"),
    ("check_data", "--batch-size 2", "--batch-size has no effect without --model"),
    ("check_data", "--next 9", "--next has no effect without --unlabelled"),
    ("check_data", "--model m --unlabelled u --strict", "--strict has no effect with --unlabelled"),
    ("check_data", "--device cpu", "--device has no effect without --model"),
    ("download_data", "--sample 3 --circuits 1", "--circuits has no effect with --sample"),
    ("download_data", "--sample 3 --keep-zips", "--keep-zips has no effect with --sample"),
    ("parse_labels", "--format coco --line-width 9", "--line-width has no effect with --format coco"),
    ("export", "--calibration-images 9", "--calibration-images has no effect without --int8"),
    (
        "evaluate_model",
        "--mask-resolution proto --centreline-tolerance 2",
        "--centreline-tolerance has no effect with --mask-resolution proto",
    ),
    ("benchmark_ddp", "--num-workers 2", "--num-workers has no effect without --data"),
    ("crowd_bt.train", "--loss bradley-terry --eta-lr 0.1", "--eta-lr has no effect with --loss bradley-terry"),
]


@pytest.mark.parametrize(("name", "flags", "answer"), IGNORED)
def test_an_option_that_was_ignored_is_refused(
    name: str, flags: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Walk(next(script for script in SCRIPTS if script.module == name), monkeypatch)
    with pytest.raises(Refused, match=answer):
        walk.run(flags.split())


def test_each_rule_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, set[str]] = {}
    for script in (script for script in SCRIPTS if not script.only):
        with monkeypatch.context() as patch:
            walk = Walk(script, patch)
            modes = walk.modes()
            for option in walk.options.values():
                if any(option.metadata[kind] for kind in KINDS) and option.name not in script.elsewhere:
                    with monkeypatch.context() as without:
                        without.setattr(option, "metadata", {**option.metadata, "needs": (), "wants": ()})
                        if not any(walk.idle(mode, [option.name]) for mode in modes):
                            found.setdefault(str(script), set()).add(option.name)
    assert found == HANDED_ON


def test_no_script_is_left_out() -> None:
    files = [*PROJECT.glob("*.py"), *PROJECT.glob("utils/**/*.py"), *PROJECT.glob("recipes/**/*.py")]
    declared = {
        (file.stem, node.name)
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Options") for base in node.bases)
    }
    walked = {(script.home.rpartition(".")[2], script.options) for script in (*SCRIPTS, *COMPRESSED_AD)}
    # The four numbers of a benchmark, and what inference.py and others share.
    shared = {("options", "ModelOptions"), ("options", "PredictOptions")}
    assert declared - walked == {("measure", "MeasureConfig"), *shared}
