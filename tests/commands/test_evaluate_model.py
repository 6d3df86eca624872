"""evaluate_model.py on the sample: one process, and two ranks with tiles."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask

import evaluate_model
from tests.predict.tiny_network import NAMES, SIZE_PX, WINDOWS, smooth_data, tiny_weights
from tests.support.plugin import TrainedRun, must_run, run_main, torchrun
from tests.support.processes import run_guarded
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.yolo.loss import PARTS
from yolo_seg_ddp.yolo.model import build_model, save_deployable

APS = ("box_map50", "box_map50_95", "mask_map50", "mask_map50_95")


def test_joined_detections_a_second_model_and_the_second_judge_on_two_ranks(
    trained: TrainedRun, tmp_path: Path
) -> None:
    flags = (
        "--mask-resolution",
        "native",
        "--tiles",
        "256",
        "--overlap",
        "0.5",
        "--coco-eval",
        "--batch-size",
        "3",
    )
    model = (
        "--model",
        trained.folder / "last.pt",
        "--data",
        trained.data,
        "--compare",
        trained.folder / "best.pt",
    )
    printed = must_run(*torchrun(2), "evaluate_model.py", *model, *flags, "--output", tmp_path)
    words = ("faster-coco-eval", "small (under 32x32", "centrelines: recall", "Most errors: ")
    assert all(part in printed for part in words)
    metrics, truth, compared = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("metrics", "ground_truth", "compared_metrics")
    )
    assert (metrics["mask_resolution"], metrics["tiles"], metrics["overlap"]) == (
        "native",
        256,
        0.5,
    )
    assert (
        metrics["num_images"]
        == len(truth["images"])
        == len(list((trained.processed / "val/images").iterdir()))
    )
    assert metrics["num_targets"] == len(truth["annotations"])
    assert (
        sum(size["num_targets"] for size in metrics["by_size"].values()) == metrics["num_targets"]
    )
    assert [category["name"] for category in truth["categories"]] == [
        row["name"] for row in metrics["per_class"]
    ]
    thin = {row["name"] for row in metrics["per_class"] if row["centreline_recall"] is not None}
    assert thin == {"conductor", "other_wire"}
    for name in APS:
        assert metrics[name] == pytest.approx(metrics["coco_eval"][name], abs=0.005)
    assert compared["model"] == str(trained.folder / "best.pt")


def test_a_model_of_other_classes_is_not_compared(
    trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other.yaml"
    text = trained.data.read_text().replace("train: ", f"train: {trained.processed}/")
    other.write_text(text.replace("val: ", f"val: {trained.processed}/").replace("pole", "mast"))
    weights = trained.folder / "last.pt"
    with pytest.raises(UserError, match="knows the classes conductor, other_wire, pole"):
        run_main(
            evaluate_model,
            monkeypatch,
            "--model",
            weights,
            "--data",
            other,
            "--output",
            tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("on_windows", [False, True])
def test_models_of_other_classes_are_compared_on_those_that_both_know(
    on_windows: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--compare old.pt` was refused after one more class."""
    data = smooth_data(tmp_path)
    with (tmp_path / "val/labels/1.txt").open("a") as labels:
        labels.write("2 0.5 0.5 0.9 0.5 0.9 0.9\n")  # a sign, which the old model does not know
    tiny_weights(tmp_path / "first.pt")
    for name, classes, wire in (("new", NAMES, 0), ("old", ("mast", "pole", "wire", "post"), 2)):
        # its rows are those of the classes' names
        model = build_model(str(tmp_path / "first.pt"), classes)
        facts = (
            {"windows": WINDOWS, "thin_classes": [wire], "label_lengths": [wire, 30.0, 0.5]}
            if on_windows
            else {}
        )
        save_deployable(
            tmp_path / f"{name}.pt", model, {}, img_size=SIZE_PX, data="made up", **facts
        )
    paths = ("--data", data, "--output", tmp_path / "out", "--num-workers", "0")
    both = ("--model", tmp_path / "new.pt", "--compare", tmp_path / "old.pt")
    assert run_main(evaluate_model, monkeypatch, *both, *paths) == 0
    assert "Compared on the classes that both models know: wire, pole\n" in capsys.readouterr().out
    new, old = (
        json.loads((tmp_path / f"out/{name}metrics.json").read_text()) for name in ("", "compared_")
    )
    assert {row["name"]: row["num_targets"] for row in new["per_class"]} == {
        "wire": 1,
        "pole": 1,
        "sign": 0,
    }
    different = {name for name in new if new[name] != old[name]}
    assert different <= {"model", "val_loss", *(f"val_{part}" for part in PARTS)}
    assert new["confusion_matrix"] != np.zeros((4, 4)).tolist()


def test_evaluation_writes_its_files(trained: TrainedRun, tmp_path: Path) -> None:
    model = ("--model", trained.folder / "last.pt", "--data", trained.data)
    # So short a training is sure of no mask.
    alone = run_guarded("evaluate_model.py", *model, "--output", tmp_path, "--no-mask-score")
    assert alone.returncode == 0, alone.stderr
    assert "conductor" in alone.stdout
    assert "mAP50-95" in alone.stdout
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    num_images = len(list((trained.processed / "val" / "images").iterdir()))
    assert metrics["num_images"] == num_images
    assert all(0 <= metrics[name] <= 1 for name in APS)
    assert len(metrics["per_class"]) == 8
    predictions = json.loads((tmp_path / "predictions.json").read_text())
    assert {entry["image_id"] for entry in predictions} <= set(range(num_images))
    encoded = predictions[0]["segmentation"]
    assert list(coco_mask.decode(encoded).shape[:2]) == encoded["size"]
    curves = [
        f"{kind}{name}_curve.png" for kind in ("Box", "Mask") for name in ("PR", "P", "R", "F1")
    ]
    for picture in (*curves, "confusion_matrix.png"):
        assert (tmp_path / picture).stat().st_size > 5000


def test_the_report_says_in_how_many_photographs_somebody_looked_for_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", tiny_weights(tmp_path / "last.pt"), "--data", smooth_data(tmp_path))
    options: list[str | Path] = [*model, "--output", tmp_path / "out"]
    run_main(evaluate_model, monkeypatch, *options)
    assert "looked for" not in capsys.readouterr().out
    (tmp_path / "val/ignore").mkdir()
    (tmp_path / "val/ignore/0.txt").write_text("1 0 0 1 0 1 1 0 1\n")
    run_main(evaluate_model, monkeypatch, *options)
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    assert [row["num_searched"] for row in (metrics, *metrics["per_class"])] == [2, 2, 1, 2]
    assert "images  looked for in  objects" in capsys.readouterr().out


@pytest.mark.parametrize(("f1", "end"), [(0.5, " --conf 0.40"), (0.0, "images")])
def test_the_next_command_names_the_confidence_of_the_best_f1(
    f1: float,
    end: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = {"mask_f1": f1, "mask_best_confidence": 0.404, "worst_images": []}
    monkeypatch.setattr(evaluate_model, "run", lambda config: [metrics])
    monkeypatch.setattr(evaluate_model, "all_tables", lambda metrics: "")
    run_main(evaluate_model, monkeypatch, "--model", "best.pt", "--data", smooth_data(tmp_path))
    assert capsys.readouterr().out.splitlines()[-1].endswith(end)


@pytest.mark.parametrize(
    ("flags", "files"),
    [((), "metrics.json, predictions.json"), (("--no-predictions",), "metrics.json")],
)
def test_without_its_page_an_evaluation_names_the_files_that_are_there(
    flags: tuple[str, ...],
    files: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "yolo_seg_ddp.extras.report", None)
    model = ("--model", tiny_weights(tmp_path / "best.pt"), "--data", smooth_data(tmp_path))
    output = ("--output", tmp_path / "out")
    assert run_main(evaluate_model, monkeypatch, *model, *output, *flags) == 0
    results = (
        f"Results in {tmp_path}/out: {files}, *_curve.png, confusion_matrix.png\nMost errors: "
    )
    assert results in (printed := capsys.readouterr().out)
    assert ".html" not in printed
