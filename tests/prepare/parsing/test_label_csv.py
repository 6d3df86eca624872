"""EPRI's label CSV, its Label field, and the spellings of classes."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.data.labels import LabelError
from yolo_seg_ddp.prepare.parsing.label_csv import (
    ClassTable,
    Problem,
    parse_label_text,
    read_label_csv,
)
from yolo_seg_ddp.utils.errors import UserError

NAMES = load_dataset_yaml(DEFAULT_DATASET_YAML).names


def label(
    value: str = "pole",
    kind: str = "polygon",
    pairs: tuple[tuple[object, object], ...] = ((1, 2), (3, 4)),
) -> dict[str, Any]:
    return {
        "objects": [{"value": value, kind: [{"x": x, "y": y} for x, y in pairs]}],
        "classifications": [],
    }


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


@pytest.mark.parametrize("content", ["", "\n", "Label,Name\n", "External ID\nx\n", None])
def test_csv_without_its_columns_and_a_missing_one_are_refused(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "labels.csv").write_text(content)
    with pytest.raises(
        UserError, match="download_data" if content is None else r"labels.csv:1: no column"
    ):
        list(read_label_csv(tmp_path / "labels.csv", []))


def test_label_is_read_as_json_and_as_a_python_literal() -> None:
    content = label("conductor", "line", ((1.5, 2), (3, -4.25)))
    for text in (json.dumps(content), repr(content)):
        (item,), complaints = parse_label_text(text)
        assert (item.value, item.kind, item.points.tolist()) == (
            "conductor",
            "line",
            [[1.5, 2.0], [3.0, -4.25]],
        )
        assert complaints == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Skip",
        "{}",
        "{'objects': 3}",
        "[]",
        "-" * 5_000 + "1",
        "-" * 500_000 + "1",
        "1" + "+1" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_unreadable_label_is_an_error(text: str) -> None:
    with pytest.raises(LabelError) as caught:
        parse_label_text(text)
    assert "\n" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("bad", [1e999, float("nan"), None, "12", True, 1 + 2j, [1], 10**400])
def test_coordinates_that_are_no_finite_numbers_lose_the_object(bad: object) -> None:
    text = (
        repr(label(pairs=((1, 2), (3, bad), (5, 6))))
        .replace("inf", "1e999")
        .replace("nan", "(1e999-1e999)")
    )
    if bad == bad:  # a NaN can only come from JSON
        objects, complaints = parse_label_text(text)
    else:
        objects, complaints = parse_label_text(json.dumps(label(pairs=((1, 2), (3, bad)))))
    assert objects == []
    assert len(complaints) == 1
    assert complaints[0].startswith("object 1: ")


def test_objects_of_other_shapes_are_complained_about_and_the_rest_is_kept() -> None:
    good = label()["objects"][0]
    bad = [
        3,
        {},
        {"value": 5},
        {"value": "pole"},
        {"value": "pole", "polygon": [1]},
        {"value": "a\nb\x1b", "line": 0},
    ]
    objects, complaints = parse_label_text(repr({"objects": [*bad, good]}))
    assert len(objects) == 1
    assert [complaint.split(":")[0] for complaint in complaints] == [
        f"object {number}" for number in range(1, 7)
    ]
    assert all(complaint.isprintable() for complaint in complaints)


SPELLINGS = {
    "conductor": ("conductor", "Conductors"),
    "other_wire": ("other-wires", "guy_wires", "Guy Wire"),
    "pole": ("POLES",),
    "crossarm": ("cross_arm", "Cross Arms"),
    "insulator": ("insulators",),
    "cutouts": ("cutout", "cut-outs"),
    "transformers": ("transformer",),
    "background_structure": ("background structure",),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_find_their_class(name: str) -> None:
    for spelling in SPELLINGS[name]:
        assert ClassTable(NAMES).find(spelling) == NAMES.index(name)


def test_unknown_spellings_and_absent_classes_are_none() -> None:
    assert ClassTable(NAMES).find("tower") is None
    assert ClassTable(NAMES).find("") is None
    assert ClassTable(["pole"]).find("guy_wires") is None
    assert ClassTable(["pole", "poles"]).find("poles") == 1
