"""benchmarks/vs_sahi.py: its refusal, masks, judge, and the whole command with a made-up SAHI that finds the labels."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from benchmarks import vs_sahi
from benchmarks.sahi_judge import judge
from benchmarks.sahi_sides import fill_polygons
from benchmarks.vs_sahi import SIDES, figures_of, ratio_line, table
from tests.conftest import TrainedRun, run_main
from utils.common.errors import UserError
from utils.data.dataset import Photo
from utils.evaluation.coco import encode_region
from utils.evaluation.native_masks import fill_outline

# Finds the labels of each photograph, a hundredth lower than they are, and fails on the photograph called `failing`.
MADE_UP_SAHI = """
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np

class AutoDetectionModel:
    @staticmethod
    def from_pretrained(model_type, model_path, confidence_threshold, device, image_size):
        assert (model_type, confidence_threshold, device, image_size) == ("ultralytics", 0.1, "cpu", 96)
        assert Path(model_path).exists()

def get_sliced_prediction(image, model, slice_height, slice_width, verbose):
    assert (slice_height, slice_width) == (256, 256)
    file = Path(image)
    if file.name == FAILING:
        raise MemoryError("too many pixels")
    height, width = cv2.imread(image).shape[:2]
    label = file.parent.parent / "labels" / f"{file.stem}.txt"
    objects = []
    for line in label.read_text().splitlines():
        class_id, *values = line.split()
        points = np.array(values, float).reshape(-1, 2) * (width, height)
        corners = [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]
        mask = SimpleNamespace(full_shape_width=width, full_shape_height=height, segmentation=[points.ravel().tolist()])
        box = SimpleNamespace(to_xyxy=lambda corners=corners: corners)
        kind, score = SimpleNamespace(id=int(class_id)), SimpleNamespace(value=np.float32(0.9))
        objects.append(SimpleNamespace(mask=mask, bbox=box, category=kind, score=score))
    return SimpleNamespace(object_prediction_list=objects)
"""


def test_without_sahi_it_refuses_in_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vs_sahi, "package_version", lambda _: None)
    with pytest.raises(UserError, match=r"^SAHI is not installed: pip install sahi .*$"):
        run_main(vs_sahi, monkeypatch, "--model", "none.pt", "--data", "none.yaml")


def test_both_sides_side_by_side_and_what_was_not_finished(
    trained: TrainedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted((trained.processed / "val" / "images").iterdir())[:3]
    packages, results = tmp_path / "packages", tmp_path / "results.json"
    for name in ("sahi", "sahi-9.8.7.dist-info"):
        (packages / name).mkdir(parents=True)
    (packages / "sahi-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sahi\nVersion: 9.8.7\n")
    (packages / "sahi" / "__init__.py").write_text("from sahi.predict import AutoDetectionModel\n")
    (packages / "sahi" / "predict.py").write_text(MADE_UP_SAHI.replace("FAILING", repr(files[1].name)))
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    options = ("--model", trained.folder / "best.pt", "--data", trained.data, "--photographs", "3", "--tiles", "256")
    places = ("--output", tmp_path / "out", "--json", results, "--device", "cpu")
    assert run_main(vs_sahi, monkeypatch, *options, *places) == 0
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(results.read_text())
    ours, theirs = record["sides"]["ours"], record["sides"]["sahi"]
    assert record["environment"]["sahi"] == "9.8.7"
    assert (ours["finished"], theirs["finished"], record["num_judged"]) == (3, 2, 2)
    assert "too many pixels" in record["photographs"][1]["sahi"]["unfinished"]
    assert record["photographs"][2]["sahi"]["objects"] > 0  # its process was started again
    assert theirs["scores"]["map50"] > 0.5 > ours["scores"]["map50"]
    assert ours["seconds"] > 0 < ours["peak_memory_gb"]
    assert record["ratio"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    assert lines[-1] == f"ratio {record['ratio']:.2f}"
    finished = next(line for line in lines if line.startswith("photographs finished"))
    assert finished.split()[2:] == ["3", "of", "3", "2", "of", "3"]
    assert any(line.startswith("conductor: AP50 / AP50-95") for line in lines)


SLOW_SIDE = """
import json, sys, time
from pathlib import Path

Path(json.loads(Path(sys.argv[1]).read_text())["ready"]).write_text("{}")
for line in sys.stdin:
    request = json.loads(line)
    time.sleep(30 if request["photo"] == "slow" else 0)
    Path(request["answer"]).write_text('{"seconds": 1}')
"""


def test_a_side_that_needs_too_much_memory_or_time_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "side.py"
    program.write_text(SLOW_SIDE)
    monkeypatch.setattr(vs_sahi, "SIDE_PROGRAM", (str(program),))
    process = vs_sahi.SideProcess({"side": "ours"}, tmp_path, timeout_s=20, memory_gb=50)
    try:
        process.memory_gb = 0.001
        with pytest.raises(vs_sahi.Unfinished, match=r"needs more than 0.001 GB \(--memory-gb\)"):
            process.find(Path("slow"), 0)
        process.memory_gb, process.timeout_s = 50, 0.1
        with pytest.raises(vs_sahi.Unfinished, match=r"not done after 0.1 s \(--timeout-s\)"):
            process.find(Path("slow"), 0)
        process.timeout_s = 20
        assert process.find(Path("quick"), 0) == {"seconds": 1}
    finally:
        process.end()


def test_polygons_are_filled_as_on_the_whole_photograph() -> None:
    rng = np.random.default_rng(0)
    size = (60, 40)
    for _ in range(50):
        polygons = [(rng.uniform(-0.2, 1, (5, 2)).clip(0) * size).ravel().tolist() for _ in range(3)]
        whole = np.zeros((40, 60), np.uint8)
        cv2.fillPoly(whole, [np.array(polygon).reshape(-1, 2).round().astype(int) for polygon in polygons], (1,))
        region = fill_polygons(polygons, size)
        found = np.zeros((40, 60), bool)
        rows, columns = region.mask.shape
        found[region.top : region.top + rows, region.left : region.left + columns] = region.mask
        np.testing.assert_array_equal(found, whole.view(bool))
    assert not fill_polygons([], size).mask.any()


def test_the_judge_gives_full_marks_to_the_labels_and_half_to_half_of_them(tmp_path: Path) -> None:
    size = (120, 80)
    corners = [np.array([(10, 10), (50, 10), (50, 20), (10, 20)]), np.array([(60, 30), (110, 30), (110, 70), (60, 70)])]
    file = tmp_path / "a.png"
    cv2.imwrite(str(file), np.zeros((80, 120, 3), np.uint8))
    photo = Photo(file, np.array([0, 1]), [(points / size).astype(np.float32) for points in corners])
    objects: list[dict[str, Any]] = []
    for class_id, points in enumerate(corners):
        box = [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]
        mask = encode_region(fill_outline(points.astype(float), size), size)
        objects.append({"class_id": class_id, "score": 0.5 + class_id / 10, "box": box, "mask": mask})
    names = ("wire", "pole", "unseen")
    everything = judge([photo], 64, names, [objects])
    assert everything["map50_95"] == pytest.approx(1)
    assert everything["by_our_evaluator"]["map50_95"] == pytest.approx(1, abs=0.01)
    assert set(everything["by_class"]["unseen"].values()) == {None}
    half = judge([photo], 64, names, [objects[:1]])
    assert half["map50_95"] == pytest.approx(0.5)
    assert half["by_class"]["pole"]["map50"] == 0
    assert judge([photo], 64, names, [[]])["map50"] == 0


ANSWER = {"seconds": 2.0, "cpu_seconds": 3.0, "peak_memory_bytes": 5e8, "objects": [{}, {}]}


def test_the_table_and_the_ratio_of_a_side_that_finished_nothing() -> None:
    figures = {"ours": figures_of([ANSWER], None), "sahi": figures_of([{"unfinished": "too large"}], None)}
    lines = table(figures).splitlines()
    assert next(line for line in lines if line.startswith("seconds")).split()[-2:] == ["2.00", "-"]
    assert lines[-1].split()[2:] == ["1", "of", "1", "0", "of", "1"]
    assert ratio_line({"ratio": None}) == "ratio nan"
    assert tuple(figures) == SIDES


def test_the_table_shows_the_centrelines_of_wires_and_leaves_out_classes_without_labels() -> None:
    nothing = dict.fromkeys(("map50", "map50_95", "centreline_recall", "centreline_precision", "pieces_per_object"))
    pole = {**nothing, "map50": 0.5, "map50_95": 0.25}
    lost = {**nothing, "map50": 0.0, "map50_95": 0.0, "centreline_recall": 0.0}
    wire = {**lost, "centreline_recall": 0.9, "centreline_precision": 0.8, "pieces_per_object": 2}
    means = {"map50": 0.25, "map50_95": 0.125, "by_our_evaluator": {"map50": 0.24, "map50_95": 0.12}}
    ours, theirs = ({**means, "by_class": {"wire": of, "pole": pole, "unseen": nothing}} for of in (wire, lost))
    shown = table({"ours": figures_of([ANSWER], ours), "sahi": figures_of([ANSWER], theirs)})
    rows = {line.partition("  ")[0]: line.partition("  ")[2].split() for line in shown.splitlines()}
    assert rows["wire: centreline recall / precision"] == ["0.900", "/", "0.800", "0.000", "/", "-"]
    assert rows["wire: pieces per object found"] == ["2.00", "-"]
    assert rows["pole: AP50 / AP50-95"] == ["0.500", "/", "0.250"] * 2
    assert rows["mask mAP50 (our evaluator)"] == ["0.2400", "0.2400"]
    assert "unseen" not in shown
    assert "pole: centreline" not in shown
