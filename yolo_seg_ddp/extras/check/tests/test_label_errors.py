"""Labels against the predictions of a stand-in that finds red wires and green poles."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import check_data
from tests.predict.tile_scenes import stroke
from tests.support.recipes import run_command
from tests.yolo.colour_network import NAMES, ColourNetwork, install, paint
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.extras.check import command
from yolo_seg_ddp.extras.check.tests.planted import row
from yolo_seg_ddp.utils.errors import UserError

SIZE = (700, 500)
WIRE, POLE = 0, 1


def outline(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([(left, top), (right, top), (right, bottom), (left, bottom)]) / SIZE


# In each photograph a wire across it and a pole, at other places.
def objects(number: int) -> dict[int, tuple[float, float, float, float]]:
    wire_y, pole_x = 60 + 50 * number, 60 + 130 * number
    return {WIRE: (0, wire_y - 6, 700, wire_y + 6), POLE: (pole_x, 330, pole_x + 60, 480)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five photographs: correct, a pole's label missing, a label on nothing, a pole labelled wire,
    no label file.

    In the last one poles are ignored where the pole and the wire are.
    """
    root = tmp_path_factory.mktemp("data")
    for kind in ("images", "labels", "ignore"):
        (root / "train" / kind).mkdir(parents=True)
    for number in range(5):
        shown = objects(number)
        wire = stroke(SIZE, [(0, shown[WIRE][1] + 6), (699, shown[WIRE][1] + 6)], 12)
        pole = np.zeros(SIZE[::-1], bool)
        left, top, right, bottom = (int(value) for value in shown[POLE])
        pole[top:bottom, left:right] = True
        image = paint([(WIRE, wire), (POLE, pole)], SIZE)
        (root / "train" / "images" / f"{number}.jpg").write_bytes(encode_jpeg(image, 98, "444"))
        rows = [row(class_id, outline(*place)) for class_id, place in shown.items()]
        if number == 1:
            rows = rows[:1]
        if number == 2:
            rows.append(row(POLE, outline(20, 220, 80, 300)))
        if number == 3:
            rows[1] = row(WIRE, outline(*shown[POLE]))
        if number < 4:
            (root / "train" / "labels" / f"{number}.txt").write_text("\n".join(rows) + "\n")
    regions = [row(POLE, outline(*place)) for place in objects(4).values()]
    (root / "train/ignore/4.txt").write_text("\n".join(regions) + "\n")
    (root / "data.yaml").write_text("train: train/images\nnames: [wire, pole]\n")
    return root


def check(data: Path, output: Path, *flags: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        install(monkeypatch)
        monkeypatch.setattr(command, "load_for_prediction", lambda path, device: ColourNetwork())
        words = (
            "--data",
            data / "data.yaml",
            "--model",
            "x.pt",
            "--output",
            output,
            "--img-size",
            "640",
        )
        run_command(check_data, *words, *flags)
    content: dict[str, Any] = json.loads((output / "check.json").read_text())
    return content


@pytest.mark.parametrize("tiles", ["off", "320"])
def test_each_contradiction_is_found_and_nothing_else(
    data: Path, tmp_path: Path, tiles: str
) -> None:
    facts = check(data, tmp_path, "--tiles", tiles)
    kinds = ("other_class", "missed_label", "unfound_label")
    found = [
        (one["kind"], Path(one["file"]).name, one["line"])
        for one in facts["findings"]
        if one["kind"] in kinds
    ]
    assert sorted(found) == [
        ("missed_label", "1.txt", None),
        ("missed_label", "4.txt", None),
        ("other_class", "3.txt", 2),
        ("unfound_label", "2.txt", 3),
    ]
    missed = [one for one in facts["findings"] if one["kind"] == "missed_label"]
    confidences = [one["confidence"] for one in missed]
    assert confidences == sorted(confidences, reverse=True)
    (pole,) = [one for one in missed if one["file"].endswith("1.txt")]
    assert pole["box"] == pytest.approx(
        (outline(*objects(1)[POLE])[[0, 2]]).ravel().tolist(), abs=0.01
    )
    assert pole["text"] == f"no label; the model says pole {pole['confidence']:.2f}"
    assert "Label that the model does not see" in (tmp_path / "check.html").read_text()


def test_a_class_seldom_found_is_not_listed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "yolo_seg_ddp.extras.check.label_errors.MIN_RECALL", 0.9
    )  # it finds three of four labelled poles
    facts = check(data, tmp_path, "--tiles", "off")
    assert facts["counts"]["unfound_label"] == 0
    assert [note.partition(",")[0] for note in facts["notes"] if note.startswith("pole")] == [
        "pole: the model finds 67% of 3 labels"
    ]


def test_a_slanted_wire_in_a_box_is_not_said_to_be_unseen(tmp_path: Path) -> None:
    """Its mask fills 4 % of its box. One box is on nothing."""
    for kind in ("images", "labels"):
        (tmp_path / "train" / kind).mkdir(parents=True)
    image = paint([(WIRE, stroke(SIZE, [(50, 50), (650, 400)], 12))], SIZE)
    for number in range(3):
        file = tmp_path / f"train/images/{number}.jpg"
        file.write_bytes(encode_jpeg(image, 98, "444"))
        rows = ["0 0.5 0.45 0.86 0.7", *["0 0.2 0.9 0.3 0.1"] * (number == 1)]
        (tmp_path / f"train/labels/{number}.txt").write_text("\n".join(rows))
    (tmp_path / "data.yaml").write_text("train: train/images\nnames: [wire, pole]\n")
    facts = check(tmp_path, tmp_path / "out", "--tiles", "off")
    (unseen,) = [one for one in facts["findings"] if one["kind"] == "unfound_label"]
    assert [unseen["line"], unseen["class_found"], facts["counts"]["box_row"]] == [2, 0.75, 4]
    assert facts["num_errors"] == 0, "a box is no error"


def test_a_model_of_other_classes_is_refused(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(f"path: {data}\ntrain: train/images\nnames: [cat, dog]\n")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(command, "load_for_prediction", lambda path, device: ColourNetwork())
        with pytest.raises(
            UserError, match=f"x.pt knows the classes {', '.join(NAMES)} but {other} has cat, dog"
        ):
            run_command(check_data, "--data", other, "--model", "x.pt", "--output", tmp_path)
