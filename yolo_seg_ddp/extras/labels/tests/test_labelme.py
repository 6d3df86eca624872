"""LabelMe's files, one for each photograph, become the data set that EPRI's CSV becomes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.prepare.parsing.raw_folder import photo
from tests.prepare.parsing.tool_folder import HEIGHT, WIDTH, box_of, build, labels_of, texts_of
from yolo_seg_ddp.prepare.parsing import label_file

SQUARE = [[30, 20], [60, 20], [60, 50], [30, 50]]


def shape(points: Any = SQUARE, label: Any = "pole", kind: str = "polygon") -> dict[str, Any]:
    return {"label": label, "points": points, "group_id": None, "shape_type": kind, "flags": {}}


def write(folder: Path, file: str, shapes: Any, image: Any = "a.jpg", **more: Any) -> Path:
    """Write a LabelMe file, and the photograph `a.jpg` beside it."""
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).with_name("a.jpg").write_bytes(photo(WIDTH, HEIGHT))
    content = {
        "version": "5.4.1",
        "flags": {},
        "shapes": shapes,
        "imagePath": image,
        "imageData": "iVBO" * 9,
    }
    content |= {"imageHeight": HEIGHT, "imageWidth": WIDTH, **more}
    (folder / file).write_text(json.dumps(content))
    return folder


def test_polygons_of_one_group_and_label_are_one_object(tmp_path: Path) -> None:
    shifted = [[x + 70, y] for x, y in SQUARE]
    shapes = [
        {**shape(points, label), "group_id": group}
        for points, label, group in (
            *((SQUARE, "pole", 1), (shifted, "pole", 1), (SQUARE, "wire", 1), (SQUARE, "pole", 2)),
        )
    ]
    build(write(tmp_path / "raw", "a.json", shapes))
    objects = [(label, box_of(points)) for label, points in labels_of(tmp_path / "processed")]
    assert objects == [(0, (30, 20, 130, 50)), (1, (30, 20, 60, 50)), (0, (30, 20, 60, 50))]


def test_a_photograph_that_was_renamed_with_its_file_is_found(tmp_path: Path) -> None:
    manifest = build(write(tmp_path / "raw", "a.json", [shape()], "IMG_0001.JPG"))
    assert [item["objects"] for item in manifest["photographs"]] == [{"pole": 1}]


def test_a_line_drawn_on_a_smaller_copy_keeps_its_width_in_the_photograph(tmp_path: Path) -> None:
    wire = shape([[5, 40], [70, 40]], "wire", "linestrip")
    build(
        write(tmp_path / "raw", "a.json", [wire], imageWidth=WIDTH // 2, imageHeight=HEIGHT // 2),
        line_width_px=8.0,
    )
    ((_, strip),) = labels_of(tmp_path / "processed", num_classes=1)
    assert box_of(strip) == (10, 76, 140, 84)


def test_each_folder_has_its_own_photograph_of_a_name(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for folder, shapes in (("one", [shape()]), ("two", []), ("two/labels", [shape(label="wire")])):
        write(raw, f"{folder}/a.json", shapes)
    (raw / "two/a.json").unlink()
    write(raw, "two/labels/a.json", [shape(label="wire")], "..\\a.jpg")
    manifest = build(raw)
    found = {item["source"]: item["objects"] for item in manifest["photographs"]}
    assert found == {"one/a.jpg": {"pole": 1}, "two/a.jpg": {"wire": 1}}
    assert texts_of(manifest) == "two/labels/a.jpg: no row in raw; skipped"


@pytest.mark.parametrize("image", ["../a.jpg", "/etc/a.jpg", "../raw/../../a.jpg", "b.jpg"])
def test_a_path_outside_the_folder_finds_nothing(tmp_path: Path, image: str) -> None:
    (tmp_path / "a.jpg").write_bytes(photo())
    raw = write(
        write(tmp_path / "raw", "sub/a.json", [shape()]), "sub/b.json", [shape()], f"../{image}"
    )
    manifest = build(raw)
    assert [item["source"] for item in manifest["photographs"]] == ["sub/a.jpg"]
    assert sum(manifest["skipped"].values()) == 1


def test_a_label_file_that_is_a_link_out_of_the_folder_is_not_read(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", "a.json", [shape()])
    outside = (
        write(tmp_path / "outside", "secret.json", [shape([[1, 2]], "a secret")]) / "secret.json"
    )
    (raw / "b.json").symlink_to(outside)
    manifest = build(raw)
    assert "b.json: a link that leaves" in texts_of(manifest)
    assert "secret" not in json.dumps(manifest)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (shape([[1, 2], [3, 4]]), "shape (pole): a polygon needs a list of 3 or more points"),
        (shape([[1, 2]], kind="linestrip"), "a line needs a list of 2 or more points"),
        (shape([[1, 2], [3, float("nan")], [5, 6]]), "nan is not a finite number"),
        (shape([[1, 2], [3, "4"], [5, 6]]), "4 is not a finite number"),
        (shape([[1e300, 2], [3, 4]], kind="line"), "far outside any photograph"),
        (shape([[1, 2]] * 20_001), "polygon of 20,001 points, more than 20,000"),
        (shape(None), "a polygon needs a list"),
        (shape(kind="point"), "point is not read; draw a polygon or a linestrip"),
        (shape(label=3), "a shape has no label"),
        ("shape", "a shape has no label"),
    ],
)
def test_a_bad_shape_is_named_and_the_others_are_kept(
    tmp_path: Path, bad: Any, reason: str
) -> None:
    manifest = build(write(tmp_path / "raw", "a.json", [shape(), bad]))
    assert len(labels_of(tmp_path / "processed", num_classes=1)) == 1
    (problem,) = manifest["problems"]
    assert problem["place"] == "a.json"
    assert reason in problem["text"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"shapes": [', "not valid JSON"),
        ('{"setting": 1}', "not LabelMe's"),
        ('{"shapes": [], "imagePath": 3}', "not LabelMe's"),
        (
            '{"shapes": [], "imagePath": "a.jpg", "imageWidth": -1, "imageHeight": 4}',
            "image of -1x4 pixels",
        ),
        (f'{{"imageData": "{"A" * 3_000_000}", "shapes": []}}', "larger than 1 MB"),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, content: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_file, "MAX_LABEL_BYTES", 1_000_000)
    raw = write(tmp_path / "raw", "a.json", [shape()])
    (raw / "0.json").write_text(content)
    manifest = build(raw)
    assert len(manifest["photographs"]) == 1
    (problem,) = manifest["problems"]
    assert problem["place"] == "0.json"
    assert reason in problem["text"]


def test_more_objects_than_a_photograph_may_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    raw = write(write(tmp_path / "raw", "a.json", [shape()] * 10_001), "b/b.json", [shape()])
    assert "more than 10,000 objects in one photograph" in texts_of(build(raw, keep_unusable=True))
