from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.conftest import PROJECT
from utils.data.images import read_image
from utils.plots import (
    class_color,
    draw_instances,
    image_grid,
    pictures,
    plot_confusion_matrix,
    plot_label_statistics,
    plot_pr_curves,
    plot_training_curves,
    save_image,
)

NAMES = ("conductor", "other_wire", "pole", "crossarm", "insulator", "cutouts", "transformers", "background_structure")
ORANGE, BLUE = (230, 159, 0), (0, 114, 178)


def epoch_record(epoch: int) -> dict[str, Any]:
    parts = {f"{split}_{part}": 2.0 / epoch for split in ("train", "val") for part in ("loss", "box", "seg")}
    maps = {f"{kind}_{name}": 1 - 1 / epoch for kind in ("box", "mask") for name in ("map50", "map50_95")}
    return {"kind": "epoch", "epoch": epoch, "lr": 0.01 / epoch, "images_per_s": 100.0, **parts, **maps}


def pr_curves(num_classes: int) -> dict[str, Any]:
    axis = np.linspace(0, 1, 1000)
    reach = np.linspace(0.5, 0.95, num_classes)[:, None]
    return {
        "class_ids": np.arange(num_classes),
        "axis": axis,
        "precision_at_recall": np.where(axis < reach, 0.9, 0.0),
        "average_precision": np.repeat(0.9 * reach, 10, axis=1),
    }


def share_of(picture: np.ndarray, color: tuple[int, int, int]) -> float:
    return float((np.abs(picture.astype(int) - color).max(axis=-1) <= 12).mean())


def spoken_texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect what charts write, as matplotlib draws it."""
    from matplotlib.text import Text

    texts: list[str] = []
    draw = Text.draw

    def note(self: Text, renderer: Any) -> None:
        texts.append(self.get_text())
        draw(self, renderer)

    monkeypatch.setattr(Text, "draw", note)
    return texts


# --- charts --------------------------------------------------------------------------------------------------------


def test_training_curves_show_every_metric_that_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = spoken_texts(monkeypatch)
    plot_training_curves([epoch_record(epoch) for epoch in range(1, 4)], tmp_path / "deep" / "curves.png")
    titles = {"loss", "box loss", "seg loss", "box mAP", "mask mAP", "learning rate", "images per second"}
    assert titles <= set(texts)
    picture = read_image(tmp_path / "deep" / "curves.png")
    assert picture.shape[1] > picture.shape[0] > 400
    assert share_of(picture, BLUE) > 0.001
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["curves.png"]


def test_training_curves_skip_what_is_missing_and_other_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    records = [
        {"kind": "start", "train_loss": 5.0},
        {"epoch": 1, "train_loss": 3.0, "val_loss": None, "train_box": float("nan")},
        {"epoch": 2, "train_loss": 2.0, "epoch_time_s": 3.0},
    ]
    plot_training_curves(records, tmp_path / "curves.png")
    assert "loss" in texts
    assert not {"box loss", "box mAP", "learning rate", "validation"} & set(texts)


def test_one_epoch_is_drawn_as_points_on_whole_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = spoken_texts(monkeypatch)
    plot_training_curves([{"epoch": 1, "train_loss": 3.0}], tmp_path / "one.png")
    plot_training_curves([{"epoch": 1, "train_loss": None}], tmp_path / "none.png")
    assert "no epochs yet" in texts
    assert {"0", "1", "2"} <= set(texts)
    assert "0.96" not in texts
    assert 0 < share_of(read_image(tmp_path / "one.png"), BLUE) < 0.001
    assert share_of(read_image(tmp_path / "none.png"), BLUE) == 0


@pytest.mark.parametrize("num_classes", [2, 40])
def test_label_statistics_name_the_classes_and_count_their_objects(
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
    plot_label_statistics(np.zeros(0, np.int64), nothing, np.zeros(3, np.int64), NAMES, tmp_path / "labels.png")
    plot_label_statistics(np.zeros(0, np.int64), nothing, np.zeros(0, np.int64), NAMES, tmp_path / "none.png")
    assert read_image(tmp_path / "none.png").shape[0] > 400


def test_pr_curves_name_the_classes_only_while_they_can_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = spoken_texts(monkeypatch)
    plot_pr_curves(pr_curves(8), NAMES, tmp_path / "pr.png", "box precision and recall")
    assert "box precision and recall" in texts
    assert {text for text in texts if text.startswith("background_structure")} == {"background_structure  0.855"}
    assert "mean of 8 classes  0.653" in texts
    texts.clear()
    plot_pr_curves(pr_curves(80), [f"class {index}" for index in range(80)], tmp_path / "many.png", "many")
    assert "mean of 80 classes  0.653" in texts
    assert not [text for text in texts if text.startswith("class ")]
    empty = {"class_ids": [], "axis": np.zeros(0), "precision_at_recall": [], "average_precision": np.zeros((0, 10))}
    plot_pr_curves(empty, NAMES, tmp_path / "empty.png", "empty")
    assert "no targets" in texts


def test_confusion_matrix_shows_shares_of_each_true_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = spoken_texts(monkeypatch)
    matrix = np.zeros((9, 9), int)
    matrix[0, 0], matrix[2, 0], matrix[8, 0] = 6, 3, 1  # conductor: found, taken for a pole, missed
    plot_confusion_matrix(matrix.tolist(), NAMES, tmp_path / "matrix.png")
    assert {"missed", "background"} <= set(texts)
    # Nothing is written into empty cells.
    assert {text for text in texts if "\n" in text} == {"0.60\n6", "0.30\n3", "0.10\n1"}
    assert read_image(tmp_path / "matrix.png").shape[0] > 600


def test_confusion_matrix_of_eighty_classes_has_labels_and_no_numbers(
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


def test_a_failed_write_leaves_the_old_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot_training_curves([epoch_record(1)], tmp_path / "curves.png")
    before = (tmp_path / "curves.png").read_bytes()

    def fail(source: object, target: object) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        plot_training_curves([epoch_record(1), epoch_record(2)], tmp_path / "curves.png")
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]
    assert (tmp_path / "curves.png").read_bytes() == before


def test_importing_plots_loads_no_matplotlib_and_charts_need_no_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from utils.plots import plot_training_curves as p\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "p([{'epoch': 1, 'train_loss': 1.0}], Path(sys.argv[1])); assert 'matplotlib.pyplot' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "curves.png")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "curves.png").stat().st_size > 1000


# --- colours -------------------------------------------------------------------------------------------------------


def test_first_classes_have_the_colours_of_okabe_and_ito_and_more_classes_others() -> None:
    assert class_color(0) == ORANGE
    assert class_color(4) == BLUE
    assert len({class_color(index) for index in range(23)}) == 23  # white cannot get lighter
    assert all(0 <= value <= 255 for index in range(200) for value in class_color(index))


# --- photographs ---------------------------------------------------------------------------------------------------


def test_masks_tint_their_pixels_and_leave_the_rest_and_the_original_alone() -> None:
    image = np.full((200, 300, 3), 100, np.uint8)
    mask = np.zeros((1, 200, 300), bool)
    mask[0, 80:160, 100:220] = True
    mask[0, 110:130, 140:180] = False  # a hole
    drawn = draw_instances(image, [4], None, mask, None, NAMES)
    assert drawn[145, 120].tolist() == [60, 106, 131]  # 60 % photograph, 40 % of (0, 114, 178)
    assert drawn[120, 160].tolist() == [100, 100, 100]
    assert share_of(drawn[80:81, 120:210], BLUE) == 1  # the outline
    assert drawn[180, 250].tolist() == [100, 100, 100]
    assert image.min() == image.max() == 100


def test_polygons_look_like_the_masks_they_describe() -> None:
    image = np.full((200, 300, 3), 100, np.uint8)
    polygon = np.array([[100.2, 79.8], [219.0, 80.0], [219.0, 159.4], [100.0, 159.0]])
    mask = np.zeros((1, 200, 300), bool)
    mask[0, 80:160, 100:220] = True
    from_polygon = draw_instances(image, [0], None, [polygon], [0.5], NAMES)
    from_mask = draw_instances(image, [0], None, mask, [0.5], NAMES)
    assert np.array_equal(from_polygon, from_mask)


def test_boxes_are_drawn_and_cut_at_the_edge() -> None:
    image = np.zeros((200, 300, 3), np.uint8)
    drawn = draw_instances(image, [0, 4], np.array([[50, 60, 120, 150], [250.0, -20, 400, 80]]), None, None, NAMES)
    assert drawn[60:150, 50].tolist() == [list(ORANGE)] * 90
    assert drawn[149, 50:120].tolist() == [list(ORANGE)] * 70
    assert drawn[100, 85].tolist() == [0, 0, 0]
    assert drawn[30, 299].tolist() == list(BLUE)


@pytest.mark.parametrize(("size", "heights"), [((64, 48), (4, 18)), ((480, 640), (12, 24)), ((3000, 4000), (60, 120))])
@pytest.mark.parametrize("corner", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_labels_stay_inside_and_grow_with_the_picture(
    size: tuple[int, int], heights: tuple[int, int], corner: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    height, width = size
    x, y = corner[0] * (width - width // 8), corner[1] * (height - height // 8)
    places = []
    draw_label = pictures._draw_label

    def note(*arguments: Any) -> Any:
        places.append(draw_label(*arguments))
        return places[-1]

    monkeypatch.setattr(pictures, "_draw_label", note)
    box = np.array([[x, y, x + width // 8, y + height // 8]])
    drawn = draw_instances(np.zeros((height, width, 3), np.uint8), [7], box, None, [0.87], NAMES)
    left, top, right, bottom = places[0]
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert heights[0] <= bottom - top <= heights[1]
    label = drawn[top:bottom, left:right].min(axis=2)
    for edge in (label[0], label[-1], label[:, 0], label[:, -1]):
        assert edge.min() == 255  # the background is whole and no letter touches its edge
    assert label[2:-2].min() < 100  # black letters


def test_labels_of_neighbours_do_not_cover_each_other() -> None:
    image = np.zeros((400, 600, 3), np.uint8)
    boxes = np.array([[200, 200, 300, 300], [202, 201, 302, 302], [204, 202, 303, 304]])
    drawn = draw_instances(image, [0, 4, 6], boxes, None, [0.9, 0.8, 0.7], NAMES)
    alone = [
        share_of(draw_instances(image, [class_id], boxes[[row]], None, [0.9], NAMES), class_color(class_id))
        for row, class_id in enumerate((0, 4, 6))
    ]
    for class_id, expected in zip((0, 4, 6), alone, strict=True):
        assert share_of(drawn, class_color(class_id)) > 0.75 * expected


def test_nothing_found_and_empty_masks_are_no_error() -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    for masks in (None, np.zeros((0, 50, 60), bool), []):
        assert np.array_equal(draw_instances(image, [], np.zeros((0, 4)), masks, [], NAMES), image)
    drawn = draw_instances(image, [0, 1], None, np.zeros((2, 50, 60), bool), None, NAMES)
    assert np.array_equal(drawn, image)


def test_what_does_not_fit_is_refused() -> None:
    image = np.zeros((50, 60, 3), np.uint8)
    with pytest.raises(ValueError, match="2 instances, but 1 boxes"):
        draw_instances(image, [0, 1], np.zeros((1, 4)), None, None, NAMES)
    with pytest.raises(ValueError, match=r"a mask of \(25, 30\) does not fit a picture of \(50, 60\)"):
        draw_instances(image, [0], None, np.ones((1, 25, 30), bool), None, NAMES)
    with pytest.raises(ValueError, match="1 pictures, but 2 captions"):
        image_grid([image], 1, 50, ["a", "b"])


def test_image_grid_places_pictures_and_captions() -> None:
    colors = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    pictures = [np.full((100, 200, 3), color, np.uint8) for color in colors]
    grid = image_grid(pictures, 2, 100)
    assert grid.shape == (2 * (50 + 2) + 2, 2 * (100 + 2) + 2, 3)
    assert [grid[25, 50].tolist(), grid[25, 150].tolist(), grid[80, 50].tolist()] == [list(color) for color in colors]
    assert grid[80, 150].tolist() == [255, 255, 255]
    captioned = image_grid(pictures, 2, 100, ["one", "4 (176).JPG", "a caption much too long for a small cell"])
    strip = captioned[54:66]
    assert (strip.min(axis=(0, 2)) < 128).sum() > 10  # black letters
    assert captioned.shape[1] == grid.shape[1]
    assert image_grid([], 3, 40).shape == (44, 128, 3)


@pytest.mark.parametrize(("name", "tolerance"), [("a.png", 0), ("a.jpg", 4), ("b.JPEG", 4)])
def test_save_image_writes_colours_the_right_way_round(tmp_path: Path, name: str, tolerance: int) -> None:
    image = np.full((16, 24, 3), (200, 100, 30), np.uint8)
    save_image(tmp_path / "new" / name, image)
    stored = cv2.cvtColor(cv2.imread(str(tmp_path / "new" / name)), cv2.COLOR_BGR2RGB)
    assert np.abs(stored.astype(int) - image).max() <= tolerance
    assert [file.name for file in (tmp_path / "new").iterdir()] == [name]


def test_save_image_refuses_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.png or \.jpg"):
        save_image(tmp_path / "a.gif", np.zeros((4, 4, 3), np.uint8))
