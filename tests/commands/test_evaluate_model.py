from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import TrainedRun, must_run, run_script, torchrun
from tests.pages.report.elements import Elements, check_figures


def test_native_masks_and_the_second_judge_on_two_ranks(trained: TrainedRun, tmp_path: Path) -> None:
    flags = ("--mask-resolution", "native", "--coco-eval", "--batch-size", "3", "--output", tmp_path)
    model = ("--model", trained.folder / "last.pt", "--data", trained.data)
    other = ("--compare", trained.folder / "best.pt")
    printed = must_run(*torchrun(2), "evaluate_model.py", *model, *other, *flags)
    assert "faster-coco-eval" in printed
    assert "small (under 32x32 px)" in printed
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    truth = json.loads((tmp_path / "ground_truth.json").read_text())
    assert metrics["mask_resolution"] == "native"
    assert len(truth["images"]) == metrics["num_images"]
    assert len(truth["annotations"]) == metrics["num_targets"]
    assert [category["name"] for category in truth["categories"]] == [row["name"] for row in metrics["per_class"]]
    assert sum(size["num_targets"] for size in metrics["by_size"].values()) == metrics["num_targets"]
    assert "centreline R" in printed
    thin = {row["name"] for row in metrics["per_class"] if row["centreline_recall"] is not None}
    assert thin == {"conductor", "other_wire"}
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95"):
        assert metrics[name] == pytest.approx(metrics["coco_eval"][name], abs=0.005)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    compared = json.loads((tmp_path / "compared_metrics.json").read_text())
    assert compared["model"] == str(trained.folder / "best.pt")
    assert check_figures(page, [metrics, compared]) > 300
    pictures = [facts for tag, facts in Elements(page).found if tag == "img"]
    assert len(pictures) == 3 * len(metrics["worst_images"])
    assert len(page) < 8_000_000


def test_a_model_of_other_classes_is_not_compared(trained: TrainedRun, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    text = trained.data.read_text().replace("train: ", f"train: {trained.processed}/")
    other.write_text(text.replace("val: ", f"val: {trained.processed}/").replace("pole", "mast"))
    weights = trained.folder / "last.pt"
    done = run_script("python", "evaluate_model.py", "--model", weights, "--data", other, "--output", tmp_path / "out")
    assert done.returncode == 1
    assert "knows the classes conductor, other_wire, pole" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_second_judge_without_predictions_is_wrong_usage() -> None:
    done = run_script("python", "evaluate_model.py", "--model", "x.pt", "--coco-eval", "--no-predictions")
    assert done.returncode == 2
    assert "--coco-eval has no effect with --no-predictions" in done.stderr


@pytest.fixture(scope="module")
def evaluated(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    output = must_run(
        "python", "evaluate_model.py", "--model", trained.folder / "last.pt", "--data", trained.data, "--output", folder
    )
    assert "conductor" in output
    assert "mAP50-95" in output
    return folder


def test_evaluation_writes_metrics_and_coco_predictions(trained: TrainedRun, evaluated: Path) -> None:
    metrics = json.loads((evaluated / "metrics.json").read_text())
    names = ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95")
    assert all(0 <= metrics[name] <= 1 for name in names)
    num_images = len(list((trained.processed / "val" / "images").iterdir()))
    assert metrics["num_images"] == num_images
    assert len(metrics["per_class"]) == 8
    predictions = json.loads((evaluated / "predictions.json").read_text())
    assert predictions
    assert {entry["image_id"] for entry in predictions} <= set(range(num_images))
    from faster_coco_eval.core import mask as coco_mask

    entry = predictions[0]
    decoded = coco_mask.decode(entry["segmentation"])
    assert list(decoded.shape[:2]) == entry["segmentation"]["size"]
    assert check_figures((evaluated / "report.html").read_text(encoding="utf-8"), [metrics]) > 150
    for picture in ("box_pr_curve.png", "mask_pr_curve.png", "confusion_matrix.png"):
        assert (evaluated / picture).stat().st_size > 5000


def test_evaluation_gives_the_same_on_two_ranks_as_on_one(trained: TrainedRun, evaluated: Path, tmp_path: Path) -> None:
    must_run(
        *torchrun(2),
        "evaluate_model.py",
        "--model",
        trained.folder / "last.pt",
        "--data",
        trained.data,
        "--output",
        tmp_path,
        "--batch-size",
        "3",
    )
    one, two = (json.loads((folder / "metrics.json").read_text()) for folder in (evaluated, tmp_path))
    assert one["num_images"] == two["num_images"]
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95", "val_loss"):
        assert two[name] == pytest.approx(one[name], abs=1e-4), name


def test_joined_detections_of_tiles_are_judged_and_shown_on_two_ranks(trained: TrainedRun, tmp_path: Path) -> None:
    flags = ("--tiles", "192", "--overlap", "0.5", "--mask-resolution", "native", "--coco-eval", "--batch-size", "4")
    model = ("--model", trained.folder / "last.pt", "--data", trained.data)
    must_run(*torchrun(2), "evaluate_model.py", *model, *flags, "--output", tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["tiles"], metrics["overlap"]) == (192, 0.5)
    assert metrics["num_images"] == len(list((trained.processed / "val" / "images").iterdir()))
    for name in ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95"):
        assert metrics[name] == pytest.approx(metrics["coco_eval"][name], abs=0.005)
    assert check_figures((tmp_path / "report.html").read_text(encoding="utf-8"), [metrics]) > 150


def test_tiles_without_native_masks_are_wrong_usage() -> None:
    done = run_script("python", "evaluate_model.py", "--model", "x.pt", "--tiles", "640")
    assert done.returncode == 2
    assert "--tiles has no effect without --mask-resolution native" in done.stderr
