"""Training curves, precision-recall curves, and confusion matrices."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pages.drawn import BLUE, NAMES, share_of, spoken_texts
from tests.support.plugin import PROJECT
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.pages import (
    plot_confusion_matrix,
    plot_curves,
    plot_label_statistics,
    plot_training_curves,
)


def epoch_record(epoch: int) -> dict[str, Any]:
    parts = {
        f"{split}_{part}": 2.0 / epoch
        for split in ("train", "val")
        for part in ("loss", "box", "seg")
    }
    maps = {
        f"{kind}_{name}": 1 - 1 / epoch
        for kind in ("box", "mask")
        for name in ("map50", "map50_95")
    }
    return {
        "kind": "epoch",
        "epoch": epoch,
        "lr": 0.01 / epoch,
        "images_per_s": 100.0,
        **parts,
        **maps,
    }


def curves_of(num_classes: int) -> dict[str, Any]:
    axis = np.linspace(0, 1, 1000)
    reach = np.linspace(0.5, 0.95, num_classes)[:, None]
    falling = np.tile(1 - axis, (num_classes, 1))
    return {
        "best_confidence": axis[250],
        **dict.fromkeys(("precision", "recall", "f1"), falling),
        "class_ids": np.arange(num_classes),
        "axis": axis,
        "precision_at_recall": np.where(axis < reach, 0.9, 0.0),
        "average_precision": np.repeat(0.9 * reach, 10, axis=1),
    }


def test_training_curves_show_every_metric_that_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    plot_training_curves(
        [epoch_record(epoch) for epoch in range(1, 4)], tmp_path / "deep" / "curves.png", best=2
    )
    titles = {
        "loss",
        "box loss",
        "seg loss",
        "box mAP",
        "mask mAP",
        "learning rate",
        "images per second",
    }
    assert titles | {"dotted: epoch 2 is the best, kept as best.pt"} <= set(texts)
    picture = read_image(tmp_path / "deep" / "curves.png")
    assert picture.shape[1] > picture.shape[0] > 400
    assert share_of(picture, BLUE) > 0.001
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["curves.png"]


def test_curves_skip_what_is_missing_and_other_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    records: list[dict[str, Any]] = [
        {"kind": "start", "train_loss": 5.0},
        {"epoch": 1, "train_loss": 3.0, "val_loss": None, "train_box": float("nan")},
        {"epoch": 2, "train_loss": 2.0, "epoch_time_s": 3.0},
    ]
    plot_training_curves(records, tmp_path / "curves.png")
    assert "loss" in texts
    assert not {"box loss", "box mAP", "learning rate", "validation"} & set(texts)


def test_one_epoch_is_drawn_as_points_on_whole_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    plot_training_curves([{"epoch": 1, "train_loss": 3.0}], tmp_path / "one.png")
    plot_training_curves([{"epoch": 1, "train_loss": None}], tmp_path / "none.png")
    assert "no epochs yet" in texts
    assert {"0", "1", "2"} <= set(texts)
    assert "0.96" not in texts
    assert 0 < share_of(read_image(tmp_path / "one.png"), BLUE) < 0.001
    assert share_of(read_image(tmp_path / "none.png"), BLUE) == 0


def test_a_loss_with_an_outlier_is_drawn_on_a_logarithmic_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    plot_training_curves(
        [{"epoch": at, "val_loss": loss} for at, loss in ((1, 20.0), (2, 6000.0), (3, 7.0))],
        tmp_path / "c.png",
    )
    assert {"10", "100", "1000"} <= set(texts)


def test_curves_name_classes_while_they_can_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    plot_curves({"box": curves_of(8)}, NAMES, tmp_path)
    files = {f"Box{name}_curve.png" for name in ("PR", "P", "R", "F1")}
    assert {file.name for file in tmp_path.iterdir()} == files
    titles = {"Box: precision over recall at IoU 0.5", "AP at IoU 0.5", "F1 at confidence 0.25"}
    assert titles <= set(texts)
    known = {text for text in texts if text.startswith("background_structure")}
    assert known == {"background_structure  0.855", "background_structure  0.750"}
    assert {"mean of 8 classes  0.653", "mean of 8 classes  0.750"} <= set(texts)
    texts.clear()
    plot_curves({"mask": curves_of(80)}, [f"class {index}" for index in range(80)], tmp_path)
    assert "mean of 80 classes  0.653" in texts
    assert not [text for text in texts if text.startswith("class ")]
    plot_curves({"mask": curves_of(0)}, NAMES, tmp_path)
    assert "no targets" in texts


def test_confusion_matrix_shows_shares_of_each_true_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    matrix = np.zeros((9, 9), int)
    matrix[0, 0], matrix[2, 0], matrix[8, 0] = 6, 3, 1  # conductor: found, taken for a pole, missed
    plot_confusion_matrix(matrix.tolist(), NAMES, tmp_path / "matrix.png")
    assert {"missed", "background"} <= set(texts)
    # Nothing is written into empty cells.
    assert {text for text in texts if "\n" in text} == {"0.60\n6", "0.30\n3", "0.10\n1"}
    assert read_image(tmp_path / "matrix.png").shape[0] > 600


def test_a_matrix_of_eighty_classes_has_labels_and_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    names = [f"class {index}" for index in range(80)]
    plot_confusion_matrix(np.eye(81, dtype=int), names, tmp_path / "matrix.png")
    assert set(names) <= set(texts)
    assert not [text for text in texts if "\n" in text]
    height, width = read_image(tmp_path / "matrix.png").shape[:2]
    assert height / 81 > 15  # pixels for each row: a label of 7 points is 12 pixels high
    assert width < 4000


def test_importing_plots_loads_no_matplotlib_and_charts_need_no_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from yolo_seg_ddp.pages import "
        "plot_training_curves as p\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "p([{'epoch': 1, 'train_loss': 1.0}], Path(sys.argv[1])); assert 'matplotlib.pyplot' not "
        "in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "curves.png")]
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "curves.png").stat().st_size > 1000


@pytest.mark.parametrize("num_classes", [2, 40])
def test_label_statistics_count_each_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_classes: int
) -> None:
    texts = spoken_texts(monkeypatch)
    class_ids = np.array([0] * 1234 + [num_classes - 1] * 7)
    boxes = np.tile(np.array([[0.1, 0.2, 0.3, 0.25]]), (len(class_ids), 1))
    names = [f"class {number}" for number in range(num_classes)]
    plot_label_statistics(class_ids, boxes, np.array([0, 600, 641]), names, tmp_path / "labels.png")
    assert {"class 0", f"class {num_classes - 1}", "1,234", "7"} <= set(texts)
    assert "1,241 objects in 3 photographs, 1 of them without any" in texts
    assert ("10 more" in texts) == (num_classes == 40)
    assert share_of(read_image(tmp_path / "labels.png"), BLUE) > 0.001


def test_labels_without_an_object_are_drawn_too(tmp_path: Path) -> None:
    nothing = np.zeros((0, 4))
    plot_label_statistics(
        np.zeros(0, np.int64), nothing, np.zeros(3, np.int64), NAMES, tmp_path / "labels.png"
    )
    plot_label_statistics(
        np.zeros(0, np.int64), nothing, np.zeros(0, np.int64), NAMES, tmp_path / "none.png"
    )
    assert read_image(tmp_path / "none.png").shape[0] > 400
