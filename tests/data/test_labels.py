"""The label CSV, class spellings, outlines and YOLO-seg text."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.common.errors import UserError
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.data.labels import LabelError, format_yolo_label, read_yolo_label
from utils.data.parsing.label_csv import ClassTable, Problem, parse_label_text, read_label_csv
from utils.data.parsing.outlines import MAX_RINGS, OutlineError, join_rings, object_ring

NAMES = load_dataset_yaml(DEFAULT_DATASET_YAML).names
SIZE = (400, 300)


def points(*pairs: tuple[float, float]) -> np.ndarray:
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def label(
    value: str = "pole", kind: str = "polygon", pairs: tuple[tuple[object, object], ...] = ((1, 2), (3, 4))
) -> dict:
    return {"objects": [{"value": value, kind: [{"x": x, "y": y} for x, y in pairs]}], "classifications": []}


def fill(ring: np.ndarray, scale: int = 4) -> float:
    """Return the area, in pixels of the photograph, that cv2.fillPoly paints for a ring."""
    canvas = np.zeros((SIZE[1] * scale, SIZE[0] * scale), np.uint8)
    cv2.fillPoly(canvas, [np.round(ring * scale).astype(np.int32)], 1)
    return float(canvas.sum()) / scale**2


# --- the CSV ---


def test_csv_rows_carry_the_line_they_start_on(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    with file.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["ID", "Label", "External ID"])
        writer.writerow(["a", "{\n'objects':\n[]}", "folder/4 (1).JPG"])
        writer.writerow(["b", "x" * 200_000, "4 (2).jpg"])
        writer.writerow(["c", "{}", " "])
        writer.writerow(["d"])
    problems: list[Problem] = []
    rows = list(read_label_csv(file, problems))
    assert [(row.image_name, row.line) for row in rows] == [("4 (1).JPG", 2), ("4 (2).jpg", 5)]
    assert rows[0].text == "{\n'objects':\n[]}"
    assert len(rows[1].text) == 200_000
    assert [problem.place for problem in problems] == ["labels.csv:6", "labels.csv:7"]


@pytest.mark.parametrize("content", ["", "\n", "Label,Name\n", "External ID\nx\n"])
def test_csv_without_its_columns_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "labels.csv").write_text(content)
    with pytest.raises(UserError, match=r"labels.csv:1: no column"):
        list(read_label_csv(tmp_path / "labels.csv", []))


def test_missing_csv_names_the_download(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="download_data"):
        list(read_label_csv(tmp_path / "labels.csv", []))


# --- the Label field ---


def test_label_is_read_as_json_and_as_a_python_literal() -> None:
    content = label("conductor", "line", ((1.5, 2), (3, -4.25)))
    for text in (json.dumps(content), repr(content)):
        (item,), complaints = parse_label_text(text)
        assert (item.value, item.kind, item.points.tolist()) == ("conductor", "line", [[1.5, 2.0], [3.0, -4.25]])
        assert complaints == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Skip",
        "{}",
        "{'objects': 3}",
        "[]",
        "__import__('os').getcwd()",
        "{'objects': [].__class__}",
        "[" * 100_000,
        "-" * 5_000 + "1",
        "-" * 500_000 + "1",
        "1" + "+1" * 100_000,
        '{"a":' * 50_000,
        "9" * 5_000,
        "\0",
        "{'objects': []" + " " * 4_000_000,
    ],
    ids=lambda text: text[:20],
)
def test_unreadable_label_is_an_error_and_nothing_runs(text: str) -> None:
    with pytest.raises(LabelError) as caught:
        parse_label_text(text)
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("bad", [1e999, float("nan"), None, "12", True, 1 + 2j, [1], 10**400])
def test_coordinates_that_are_no_finite_numbers_lose_the_object(bad: object) -> None:
    text = repr(label(pairs=((1, 2), (3, bad), (5, 6)))).replace("inf", "1e999").replace("nan", "(1e999-1e999)")
    if bad == bad:  # a NaN can only come from JSON
        objects, complaints = parse_label_text(text)
    else:
        objects, complaints = parse_label_text(json.dumps(label(pairs=((1, 2), (3, bad)))))
    assert objects == []
    assert len(complaints) == 1
    assert complaints[0].startswith("object 1: ")


def test_objects_of_other_shapes_are_complained_about_and_the_rest_is_kept() -> None:
    good = label()["objects"][0]
    bad = [3, {}, {"value": 5}, {"value": "pole"}, {"value": "pole", "polygon": [1]}, {"value": "a\nb\x1b", "line": 0}]
    objects, complaints = parse_label_text(repr({"objects": [*bad, good]}))
    assert len(objects) == 1
    assert [complaint.split(":")[0] for complaint in complaints] == [f"object {number}" for number in range(1, 7)]
    assert all(complaint.isprintable() for complaint in complaints)


# --- classes ---


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("conductor", "conductor"),
        ("Conductors", "conductor"),
        ("other-wires", "other_wire"),
        ("guy_wires", "other_wire"),
        ("Guy Wire", "other_wire"),
        ("POLES", "pole"),
        ("cross_arm", "crossarm"),
        ("Cross Arms", "crossarm"),
        ("insulators", "insulator"),
        ("cutout", "cutouts"),
        ("cut-outs", "cutouts"),
        ("transformer", "transformers"),
        ("background structure", "background_structure"),
    ],
)
def test_spellings_find_their_class(spelling: str, name: str) -> None:
    assert ClassTable(NAMES).find(spelling) == NAMES.index(name)


def test_unknown_spellings_and_absent_classes_are_none() -> None:
    assert ClassTable(NAMES).find("tower") is None
    assert ClassTable(NAMES).find("") is None
    assert ClassTable(["pole"]).find("guy_wires") is None
    assert ClassTable(["pole", "poles"]).find("poles") == 1


# --- outlines ---


def test_polygon_stays_as_drawn() -> None:
    square = points((10, 10), (50, 10), (50, 40), (10, 40))
    ring = object_ring("polygon", np.concatenate([square, square[:1]]), SIZE, 6, 1)
    assert {tuple(vertex) for vertex in ring} == {tuple(vertex) for vertex in square}


def test_line_becomes_a_strip_and_not_the_area_it_encloses() -> None:
    ring = object_ring("line", points((50, 50), (350, 50), (350, 250)), SIZE, 6, 1)
    assert fill(ring) == pytest.approx(6 * 500, rel=0.05)
    assert len(ring) == 6


def test_line_ends_are_flat_and_its_width_exact() -> None:
    ring = object_ring("line", points((100, 100), (200, 100)), SIZE, 6, 1)
    assert sorted(ring.tolist()) == [[100, 97], [100, 103], [200, 97], [200, 103]]


def test_polygon_is_clipped_to_the_photograph() -> None:
    ring = object_ring("polygon", points((-100, -100), (100, -100), (100, 100), (-100, 100)), SIZE, 6, 1)
    assert ring.min() == 0
    assert fill(ring) == pytest.approx(100 * 100, rel=0.02)


def test_wire_that_leaves_and_returns_stays_one_object() -> None:
    wire = points((50, 50), (100, -200), (150, 50), (200, -200), (250, 50))
    ring = object_ring("line", wire, SIZE, 6, 1)
    length_inside = 4 * np.hypot(50, 250) * 50 / 250
    assert ring.min() >= 0
    assert fill(ring) == pytest.approx(6 * length_inside, rel=0.12)


def test_polygon_with_a_hole_keeps_its_hole() -> None:
    outer, inner = (
        points((10, 10), (210, 10), (210, 210), (10, 210)),
        points((60, 60), (60, 160), (160, 160), (160, 60)),
    )
    assert fill(join_rings([outer, inner])) == pytest.approx(200 * 200 - 100 * 100, rel=0.02)


def test_closed_wire_encloses_nothing() -> None:
    loop = points((50, 50), (250, 50), (250, 250), (50, 250), (50, 50))
    assert fill(object_ring("line", loop, SIZE, 8, 1)) == pytest.approx(4 * 200 * 8, rel=0.06)


def test_bow_tie_keeps_both_halves() -> None:
    ring = object_ring("polygon", points((50, 50), (250, 250), (250, 50), (50, 250)), SIZE, 6, 1)
    assert fill(ring) == pytest.approx(2 * 200 * 100 / 2, rel=0.03)


def test_outline_drawn_over_itself_has_no_hole() -> None:
    overlapping = points((50, 50), (150, 50), (150, 150), (50, 150), (50, 30), (80, 30), (80, 80), (50, 80))
    assert fill(object_ring("polygon", overlapping, SIZE, 6, 1)) == pytest.approx(100 * 100 + 30 * 20, rel=0.03)


def test_dense_outline_is_thinned_without_moving() -> None:
    angles = np.linspace(0, 2 * np.pi, 5000, endpoint=False)
    circle = 200 + 100 * np.column_stack([np.cos(angles), np.sin(angles)]) * (1, 0.9)
    ring = object_ring("polygon", circle, SIZE, 6, tolerance_px=0.5)
    assert len(ring) < 100
    assert fill(ring) == pytest.approx(np.pi * 100 * 90, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "pairs", "reason"),
    [
        ("polygon", (), "0 different points"),
        ("polygon", ((5, 5), (5, 5), (9, 9), (5, 5)), "2 different points"),
        ("polygon", ((5, 5), (9, 9), (13, 13)), "no area"),
        ("polygon", ((500, 5), (900, 5), (900, 90)), "outside the photograph of 400x300"),
        ("polygon", ((0, 0), (1e300, 0), (1e300, 1e300)), "far outside"),
        ("line", ((5, 5),), "1 different points"),
        ("line", ((5, 5), (5, 5)), "1 different points"),
        ("line", ((5, -50), (300, -50)), "outside the photograph"),
    ],
)
def test_objects_without_a_visible_area_are_refused(kind: str, pairs: tuple, reason: str) -> None:
    with pytest.raises(OutlineError, match=reason):
        object_ring(kind, points(*pairs), SIZE, 6, 1)


def test_random_scribbles_give_rings_inside_the_photograph() -> None:
    generator = np.random.default_rng(3)
    num_rings = 0
    for _ in range(300):
        scribble = generator.normal(0.5, 0.6, (int(generator.integers(3, 40)), 2)) * generator.choice([10, 400, 4000])
        for kind in ("polygon", "line"):
            try:
                ring = object_ring(kind, scribble, SIZE, 6, 1)
            except OutlineError:
                continue
            num_rings += 1
            assert len(ring) >= 3
            assert (ring >= -1e-6).all()
            assert (ring <= np.array(SIZE) + 1e-6).all()
    assert num_rings > 300


def test_scribble_with_many_holes_stays_bounded() -> None:
    scribble = np.random.default_rng(0).random((300, 2)) * SIZE
    assert len(object_ring("polygon", scribble, SIZE, 6, 1)) < 100 * MAX_RINGS


# --- YOLO text ---


def test_yolo_text_round_trip(tmp_path: Path) -> None:
    triangle = np.array([[0.1, 0.2], [0.3, 0.4], [1.2, -0.1]])
    text = format_yolo_label([(3, triangle), (0, triangle[::-1])])
    assert text.splitlines()[0] == "3 0.100000 0.200000 0.300000 0.400000 1.000000 0.000000"
    (tmp_path / "a.txt").write_text(text)
    read = read_yolo_label(tmp_path / "a.txt", 8)
    assert read.class_ids.tolist() == [3, 0]
    assert read.class_ids.dtype == np.int64
    assert read.polygons[0].dtype == np.float32
    np.testing.assert_allclose(read.polygons[0], np.clip(triangle, 0, 1), atol=1e-6)


def test_empty_label_has_no_objects() -> None:
    read = read_yolo_label(Path("a.txt"), 8, text="\n  \n")
    assert read.class_ids.shape == (0,)
    assert read.polygons == []


def test_box_row_becomes_four_corners() -> None:
    (polygon,) = read_yolo_label(Path("a.txt"), 8, text="1 0.5 0.5 0.2 0.4").polygons
    np.testing.assert_allclose(polygon, [[0.4, 0.3], [0.6, 0.3], [0.6, 0.7], [0.4, 0.7]], atol=1e-6)


def test_rounding_past_the_edge_is_clipped() -> None:
    (polygon,) = read_yolo_label(Path("a.txt"), 8, text="1 -0.0005 0 1.0005 0 1 1").polygons
    assert polygon.min() == 0
    assert polygon.max() == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("8 0 0 1 0 1 1", "class 8 is not one of 0..7"),
        ("-1 0 0 1 0 1 1", "class -1"),
        ("1.5 0 0 1 0 1 1", "class 1.5"),
        ("nan 0 0 1 0 1 1", "class nan"),
        ("1 0 0 1 0 1", "5 coordinates"),
        ("1 0 0", "2 coordinates"),
        ("1", "0 coordinates"),
        ("1 0 0 x 0 1 1", "not a number"),
        ("1 0 0 1.01 0 1 1", "coordinate 1.01 is outside"),
        ("1 0 0 nan 0 1 1", "coordinate nan"),
        ("1 0.5 0.5 0 0.1", "box of width 0"),
    ],
)
def test_wrong_yolo_rows_are_named_by_file_and_line(row: str, reason: str) -> None:
    with pytest.raises(LabelError, match=rf"a\.txt:2: .*{reason}"):
        read_yolo_label(Path("a.txt"), 8, text=f"0 0 0 1 0 1 1\n{row}\n")


def test_files_that_are_no_labels_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("binary.txt", "missing.txt"):
        with pytest.raises(LabelError, match=name):
            read_yolo_label(tmp_path / name, 8)
