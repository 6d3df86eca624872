from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import TrainedRun, must_run, run_script, torchrun


def test_native_masks_and_the_second_judge_on_two_ranks(trained: TrainedRun, tmp_path: Path) -> None:
    flags = ("--mask-resolution", "native", "--coco-eval", "--batch-size", "3", "--output", tmp_path)
    model = ("--model", trained.folder / "last.pt", "--data", trained.data, "--split", "train")
    printed = must_run(*torchrun(2), "evaluate_model.py", *model, *flags)
    assert "faster-coco-eval" in printed
    assert "small (under 32x32 px)" in printed
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    truth = json.loads((tmp_path / "ground_truth.json").read_text())
    assert metrics["mask_resolution"] == "native"
    assert len(truth["images"]) == metrics["num_images"]
    assert len(truth["annotations"]) == metrics["num_targets"]
    assert [category["name"] for category in truth["categories"]] == [row["name"] for row in metrics["per_class"]]
    assert sum(size["num_targets"] for size in metrics["by_size"].values()) == metrics["num_targets"]
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95"):
        assert metrics[name] == pytest.approx(metrics["coco_eval"][name], abs=0.005)


def test_the_second_judge_without_predictions_is_wrong_usage() -> None:
    done = run_script("python", "evaluate_model.py", "--model", "x.pt", "--coco-eval", "--no-predictions")
    assert done.returncode == 2
    assert "--coco-eval judges predictions.json" in done.stderr
