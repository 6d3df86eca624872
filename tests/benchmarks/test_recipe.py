"""The bench of recipes: its data sets, how recipes are named and judged."""

import json
import subprocess
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from benchmarks import recipe, recipe_sets
from benchmarks.recipe import mean_ratio, summarise, table
from benchmarks.recipe_sets import PublicSet, make_public_set
from tests.support.recipes import run_command
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.labels import read_yolo_label
from yolo_seg_ddp.utils.errors import UserError


def make_run(side: str, seed: int, mask: float) -> dict[str, Any]:
    ours = {"mask_map50_95": mask, "box_map50_95": mask + 0.1}
    theirs = {**ours, "mask_map50_95": mask + 0.01}
    return {
        "side": side,
        "seed": seed,
        "scores": {"project": ours, "project_native": ours, "ultralytics": theirs},
        "wall_s": 60.0,
        "epoch_s": 5.0,
    }


def git(folder: Path, *arguments: str) -> str:
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *name, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def commit_of(folder: Path) -> str:
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "data")
    return git(folder, "rev-parse", "HEAD").strip()


def use(monkeypatch: pytest.MonkeyPatch, found: PublicSet) -> None:
    monkeypatch.setattr(recipe_sets, "PUBLIC_SETS", {"mine": found})


@pytest.fixture
def coco_repository(tmp_path: Path) -> tuple[Path, str]:
    """Five plants in two shots each, in two splits; an object with
    two parts, one without outline.
    """
    folder = tmp_path / "hub" / "someone" / "plants"
    for split in ("train", "valid"):
        names = [
            f"plant{number}_{shot}.rf.ab.jpg"
            for number in range(5)
            for shot in (split, split + "2")
        ]
        (folder / split).mkdir(parents=True)
        for name in names:
            cv2.imwrite(str(folder / split / name), np.full((60, 80, 3), 90, np.uint8))
        square, other = [10, 10, 40, 10, 40, 40, 10, 40], [50, 10, 60, 10, 60, 30]
        objects = [
            {"segmentation": [square, other], "category_id": 2},
            {"segmentation": [], "category_id": 1},
        ]
        content = {
            "images": [
                {"id": n, "file_name": name, "width": 80, "height": 60}
                for n, name in enumerate(names)
            ],
            "annotations": [
                {"id": 10 * n + k, "image_id": n, **thing}
                for n in range(len(names))
                for k, thing in enumerate(objects)
            ],
            "categories": [{"id": 1, "name": "root"}, {"id": 2, "name": "leaf"}],
        }
        (folder / split / "labels.json").write_text(json.dumps(content))
    return folder, commit_of(folder)


def test_a_coco_repository_becomes_a_data_set_whose_splits_share_no_subject(
    coco_repository: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = ("train/labels.json", "valid/labels.json")
    use(monkeypatch, PublicSet("someone/plants", coco_repository[1], "none", labels, r"(plant\d)"))
    data = make_public_set("mine", tmp_path / "out", f"{tmp_path}/hub/")
    spec = load_dataset_yaml(data)
    assert spec.names == ("leaf",)  # no outline of the other
    files = {split: spec.image_files(split) for split in ("train", "val")}
    assert sum(map(len, files.values())) == 20
    subjects = {split: {file.name[:6] for file in found} for split, found in files.items()}
    assert subjects["val"]
    assert not subjects["train"] & subjects["val"]
    _, (outline,) = read_yolo_label(spec.root / "val/labels" / f"{files['val'][0].stem}.txt", 1)
    assert outline.min(axis=0) == pytest.approx([10 / 80, 10 / 60], abs=1e-3)
    assert outline.max(axis=0) == pytest.approx([60 / 80, 40 / 60], abs=1e-3)
    # The second time nothing is fetched.
    monkeypatch.setattr(recipe_sets.subprocess, "run", None)
    assert make_public_set("mine", tmp_path / "out", "nowhere/") == data


def test_masks_of_crackforest_become_outlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hub" / "someone" / "cracks"
    for name in ("seg", "image"):
        (folder / name).mkdir(parents=True)
    for number in range(1, 9):
        cv2.imwrite(str(folder / f"image/{number:03}.jpg"), np.full((40, 60, 3), 90, np.uint8))
        runs = [f"1 {row} 5 54" for row in range(20, 23)] + ["2 35 5 8", "0 0 0 59"]
        head = "format ascii cr\nwidth 60\nheight 40\nsegments 3\ndata\n"
        (folder / f"seg/{number:03}.seg").write_text(head + "\n".join(runs) + "\n")
    use(monkeypatch, PublicSet("someone/cracks", commit_of(folder), "none", (), r"(\d+)"))
    spec = load_dataset_yaml(make_public_set("mine", tmp_path / "out", f"{tmp_path}/hub/"))
    label = next((spec.root / "train/labels").glob("*.txt"))
    _, (outline,) = read_yolo_label(label, 1)  # not the speck of 4 pixels
    low, high = outline.min(axis=0) * (60, 40), outline.max(axis=0) * (60, 40)
    assert low == pytest.approx([5, 20], abs=0.1)
    assert high == pytest.approx([55, 23], abs=0.1)


def test_a_repository_that_cannot_be_fetched_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, PublicSet("someone/nothing", "0" * 40, "none", (), r"(\d+)"))
    with pytest.raises(UserError, match=r"git fetch --quiet --depth: failed in .*mine: "):
        make_public_set("mine", tmp_path / "out", f"{tmp_path}/hub/")


def scored(name: str, recipe_name: str, seed: int, mask: float) -> dict[str, Any]:
    side = "ultralytics" if recipe_name == "ultralytics" else "project"
    return {"set": name, "recipe": recipe_name, **make_run(side, seed, mask)}


def test_means_wins_and_the_ratio() -> None:
    masks = {
        ("a", "ultralytics"): (0.2, 0.4),
        ("a", "new"): (0.3, 0.3),
        ("b", "ultralytics"): (0.1,),
        ("b", "new"): (0.4,),
    }
    runs = [
        scored(*key, seed, mask)
        for key, values in masks.items()
        for seed, mask in enumerate(values)
    ]
    rows = {(row["set"], row["recipe"]): row for row in summarise(runs)}
    assert rows["a", "new"]["mask"] == pytest.approx(0.3)
    assert rows["a", "new"]["mask_theirs"] == pytest.approx(0.31)
    assert rows["a", "new"]["wins"] == 1
    assert rows["a", "ultralytics"]["wins"] == 0
    assert rows["b", "new"]["spread"] is None
    assert mean_ratio(list(rows.values()), "new") == pytest.approx(0.35 / 0.2)
    assert "1 of 2" in table(list(rows.values()))


def test_every_recipe_trains_as_many_steps_as_ultralytics(
    coco_repository: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(
        monkeypatch,
        PublicSet(
            "someone/plants", coco_repository[1], "none", ("train/labels.json",), r"(plant\d)"
        ),
    )
    data = make_public_set("mine", tmp_path / "out", f"{tmp_path}/hub/")
    asked = []

    def compare(
        setting: Any, data: Any, seed: int, side: str, folder: Path
    ) -> tuple[dict[str, Any], bool]:
        asked.append((side, seed, setting.extra))
        assert setting.nominal_batch == setting.batch_size == 2
        assert (
            (setting.epochs - 1) * -(-data.num_train // 2)
            < 7
            <= setting.epochs * -(-data.num_train // 2)
        )
        return make_run(side, seed, 0.2 if side == "project" else 0.1), False

    monkeypatch.setattr(recipe, "compare", compare)
    options = ("--steps", "7", "--batch-size", "2", "--seeds", "0", "1", "--output", tmp_path)
    assert run_command(recipe, "--sets", data, "--recipes", "a:", "b: --lr 1", *options) == 0
    sides = (("ultralytics", ()), ("project", ()), ("project", ("--lr", "1")))
    assert asked == [(side, seed, extra) for seed in (0, 1) for side, extra in sides]
    assert capsys.readouterr().out.splitlines()[-1] == "ratio 2.00"
    record = json.loads((tmp_path / "results.json").read_text())
    assert [row["recipe"] for row in record["summary"]] == ["ultralytics", "a", "b"]
    assert len(record["runs"]) == 6
