"""COCO files, as CVAT writes them, become the data set that EPRI's CSV becomes."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prepare.parsing.raw_folder import photo, record, tree
from tests.prepare.parsing.tool_folder import (
    HEIGHT,
    NAMES,
    WIDTH,
    annotation,
    box_of,
    build,
    coco,
    drawn,
    hard_masks,
    iou,
    labels_of,
    run_lengths,
    texts_of,
    whole,
    write_folder,
)
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.utils.errors import UserError

SQUARE = [[30, 20, 60, 20, 60, 50, 30, 50]]


def test_polygons_of_several_parts_are_one_object(tmp_path: Path) -> None:
    parts = [[5, 5, 40, 5, 40, 30, 5, 30], [100, 50, 140, 50, 140, 80, 100, 80], [1, 2]]
    content = coco([annotation(1, 1, parts), annotation(2, 1, SQUARE[0])])
    manifest = build(write_folder(tmp_path / "raw", content))
    expected = np.zeros((HEIGHT, WIDTH), bool)
    expected[5:30, 5:40] = expected[50:80, 100:140] = True
    (_, both), (_, square) = labels_of(tmp_path / "processed")
    assert iou(whole(drawn(both)), expected) == 1
    assert box_of(square) == (30, 20, 60, 50)
    assert sum(manifest["counts"]["objects"]["pole"].values()) == 2


@pytest.mark.parametrize("has_size", [True, False])
def test_run_lengths_say_their_size_if_the_image_does_not(has_size: bool, tmp_path: Path) -> None:
    mask = hard_masks()["parts"]
    content = coco([annotation(1, 1, run_lengths(mask))])
    if not has_size:
        del content["images"][0]["width"], content["images"][0]["height"]
    build(write_folder(tmp_path / "raw", content))
    ((_, polygon),) = labels_of(tmp_path / "processed")
    assert iou(whole(drawn(polygon)), mask) >= 0.99


def test_a_box_without_segmentation_is_its_corners_and_attributes_do_not_matter(
    tmp_path: Path,
) -> None:
    more = {"occluded": False, "rotation": 0.0, "note": "größer"}
    boxes = [
        annotation(1, 1, [], bbox=[10, 20, 30, 40], attributes=more),
        annotation(2, 1, None, bbox=[1, 2, 3, 0]),
    ]
    manifest = build(write_folder(tmp_path / "raw", coco(boxes)))
    ((_, polygon),) = labels_of(tmp_path / "processed")
    assert len(polygon) == 4
    assert box_of(polygon) == (10, 20, 40, 60)
    assert "annotation 2 (pole): box of width 3 and height 0" in texts_of(manifest)


def test_photographs_in_subfolders_with_one_name_stay_apart(tmp_path: Path) -> None:
    files = ["north/a.jpg", "south\\A.jpg", "images/c.jpg", "/home/someone/d.jpg"]
    places = (
        "images/north/a.jpg",
        "images/south/a.jpg",
        "images/c.jpg",
        "images/deep/d.jpg",
        "images/e.jpg",
    )
    shapes = [[[10 * n, 10, 10 * n + 10, 10, 10 * n + 10, 20, 10 * n, 20]] for n in range(4)]
    content = coco([annotation(n + 1, n + 1, shape) for n, shape in enumerate(shapes)], files)
    manifest = build(write_folder(tmp_path / "raw", content, places), class_names=NAMES)
    lefts = {}
    for found in manifest["photographs"]:
        ((_, polygon),) = labels_of(tmp_path / "processed", Path(found["file"]).stem)
        lefts[found["source"]] = box_of(polygon)[0]
    assert lefts == {place: 10 * number for number, place in enumerate(places[:4])}
    assert texts_of(manifest) == "images/e.jpg: no row in instances_default.json; skipped"
    circuits = manifest["counts"]["circuits"]
    assert {*circuits["train"], *circuits["val"]} == {
        "images/north",
        "images/south",
        "images",
        "images/deep",
    }


def test_a_name_that_leads_out_of_the_folder_or_fits_two_photographs_finds_none(
    tmp_path: Path,
) -> None:
    (tmp_path / "secret.jpg").write_bytes(photo())
    files = [
        "../secret.jpg",
        "a.jpg",
        "twice.jpg",
        "x/one.jpg",
        "y/one.jpg",
        "missing.jpg",
        "\0\x1b.jpg",
    ]
    places = ("images/a.jpg", "images/1/twice.jpg", "images/2/twice.jpg", "images/one.jpg")
    content = coco([annotation(n, n, SQUARE) for n in range(1, 8)], files)
    manifest = build(write_folder(tmp_path / "raw", content, places))
    assert [found["file"] for found in manifest["photographs"]] == ["a.jpg"]
    text = texts_of(manifest)
    assert "../secret.jpg: the name leads out of the folder" in text
    assert "twice.jpg: 2 photographs have this name" in text
    assert "x/one.jpg: other names fit" in text
    assert "missing.jpg: no photograph called missing.jpg" in text
    assert manifest["skipped"] == {"unlisted photograph": 3, "missing photograph": 6}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"segmentation": [[1, 2, 3, 4]]}, "annotation 7 (pole): a polygon needs"),
        (
            {"segmentation": [[1, 2, float("nan"), 4, 5, 6]]},
            "annotation 7 (pole): nan is not a finite number",
        ),
        ({"segmentation": [[1, 2, 10**400, 4, 5, 6]]}, "annotation 7 (pole): int too large"),
        (
            {"segmentation": [[1, 2, 1e9, 4, 5, 6]]},
            "annotation 7 (pole): polygon has the coordinate 1e+09",
        ),
        (
            {"segmentation": [[900, 900, 990, 900, 990, 990]]},
            "annotation 7 (pole): lies outside the photograph",
        ),
        ({"segmentation": ["1,2,3"]}, "annotation 7 (pole): "),
        (
            {"segmentation": {"size": [HEIGHT, WIDTH], "counts": [1]}},
            "annotation 7 (pole): its runs do not add up",
        ),
        (
            {"segmentation": {"size": [10**6, 10**6], "counts": "0"}},
            "(pole): its `size` is 1000000x1000000",
        ),
        ({"segmentation": {}}, "annotation 7 (pole): has neither `segmentation` nor `bbox`"),
        ({"segmentation": 3}, "annotation 7 (pole): `segmentation` is neither"),
        (
            {"segmentation": [list(np.random.default_rng(n).random(6) * 90) for n in range(900)]},
            "crosses itself more",
        ),
        ({"category_id": 99}, "`categories` has no `category 99`"),
        ({"category_id": None}, "`categories` has no `category None`"),
        ({"image_id": 99}, "no image has the id 99; its 1 annotations are skipped"),
        ({"image_id": [1]}, "annotation 7, item 2 of the list: its image has no id"),
    ],
)
def test_a_bad_annotation_is_named_by_id_and_the_others_kept(
    tmp_path: Path, bad: dict[str, Any], reason: str
) -> None:
    content = coco([annotation(3, 1, SQUARE), {**annotation(7, 1, SQUARE), **bad}])
    manifest = build(write_folder(tmp_path / "raw", content))
    assert len(labels_of(tmp_path / "processed")) == 1
    (problem,) = manifest["problems"]
    assert problem["place"] == "instances_default.json"
    assert reason in problem["text"]
    assert "\n" not in problem["text"]
    assert sum(manifest["skipped"].values()) == 1


def test_ids_that_occur_twice_are_reported(tmp_path: Path) -> None:
    content = coco([annotation(n, n, SQUARE) for n in (1, 1, 2)], ["a.jpg", "b.jpg", "c.jpg"])
    content["images"][2]["id"] = 2
    content["categories"].append({"id": 1, "name": "other"})
    manifest = build(write_folder(tmp_path / "raw", content, ("a.jpg", "b.jpg", "c.jpg")))
    assert len(labels_of(tmp_path / "processed")) == 1
    assert [found["file"] for found in manifest["photographs"]] == ["a.jpg"]
    text = texts_of(manifest)
    assert "a.jpg: 1 annotations are exact copies of others; ignored" in text
    assert "image 2 twice, also as c.jpg" in text
    assert "category 1 twice: `pole` and `other`" in text


def test_a_photograph_of_another_shape_than_the_file_says_is_refused(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "raw", coco([annotation(n, n, SQUARE) for n in (1, 2)], ["a.jpg", "b.jpg"])
    )
    (folder / "images" / "b.jpg").write_bytes(photo(90, 90))
    manifest = build(folder)
    assert (
        "annotation 2: drawn on an image of 150x90 pixels, but the photograph has 90x90"
        in texts_of(manifest)
    )
    assert manifest["skipped"] == {"unreadable row": 1}


@pytest.mark.parametrize(
    ("orientation", "box"),  # of the square (30, 20, 60, 50) of the stored pixels
    [
        *((5, (20, 30, 50, 60)), (6, (HEIGHT - 50, 30, HEIGHT - 20, 60))),
        *(
            (7, (HEIGHT - 50, WIDTH - 60, HEIGHT - 20, WIDTH - 30)),
            (8, (20, WIDTH - 60, 50, WIDTH - 30)),
        ),
    ],
)
def test_labels_of_a_smaller_copy_are_scaled_and_a_turned_photograph_is_turned(
    tmp_path: Path, orientation: int, box: tuple[int, int, int, int]
) -> None:
    files = ["large.jpg", "turned.jpg", "stored.jpg"]
    content = coco([annotation(n, n, SQUARE) for n in (1, 2, 3)], files)
    content["images"][1] |= {"width": HEIGHT, "height": WIDTH}
    folder = write_folder(tmp_path / "raw", content, ())
    for name, data in (
        ("large.jpg", photo(2 * WIDTH, 2 * HEIGHT)),
        ("turned.jpg", photo(WIDTH, HEIGHT, orientation=orientation)),
        ("stored.jpg", photo(WIDTH, HEIGHT, orientation=orientation)),
    ):
        (folder / name).write_bytes(data)
    manifest = build(folder)
    assert record(manifest, "turned.jpg")["exif_frame"] == "upright"
    assert record(manifest, "stored.jpg")["exif_frame"] == "stored"
    ((_, large),), ((_, turned),), ((_, stored),) = (
        labels_of(tmp_path / "processed", name[:-4]) for name in files
    )
    assert box_of(large, 2 * WIDTH, 2 * HEIGHT) == (60, 40, 120, 100)
    assert box_of(turned, HEIGHT, WIDTH) == (30, 20, 60, 50)
    assert box_of(stored, HEIGHT, WIDTH) == box
    assert (
        "annotation 3: drawn on an image of 150x90 pixels, but the photograph has 90x150"
        in texts_of(build(folder, exif_frame="upright"))
    )


def test_classes_are_the_files_own_unless_others_are_given(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "raw", coco([annotation(1, 1, SQUARE, category_id=2), annotation(2, 1, SQUARE)])
    )
    assert build(folder)["classes"] == ["pole", "wire"]
    # EPRI's list once covered such labels, and a set of one class got eight.
    assert build(folder, class_names=("wires", "x", "Pole"))["classes"] == ["pole", "wire"]
    given = build(folder, class_names=("pole",), use_file_classes=False)
    assert given["classes"] == ["pole"]
    assert given["unknown_values"] == {"wire": 1}
    assert load_dataset_yaml(tmp_path / "processed" / "dataset.yaml").names == ("pole",)


def test_a_changed_annotation_rebuilds_one_label_and_the_order_of_the_lists_does_not_matter(
    tmp_path: Path,
) -> None:
    content = coco([annotation(1, 1, SQUARE), annotation(2, 2, SQUARE)], ["a.jpg", "b.jpg"])
    folder = write_folder(tmp_path / "raw", content, ("images/a.jpg", "images/b.jpg"))
    processed = tmp_path / "processed"
    build(folder)
    before = {file: file.stat().st_mtime_ns for file in processed.glob("*/*/*")}
    whole_set = tree(processed)
    changed = copy.deepcopy(content)
    changed["annotations"][1]["segmentation"] = [[1, 1, 9, 1, 9, 9]]
    write_folder(folder, changed, ())
    build(folder)
    touched = {file.name for file, then in before.items() if file.stat().st_mtime_ns != then}
    assert touched == {"b.txt"}
    backwards = dict(reversed(content.items()))  # annotations before images before categories
    backwards["categories"] = content["categories"][::-1]
    write_folder(folder, backwards, ())
    build(folder)
    assert tree(processed) == whole_set


def test_several_files_are_read_together(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "raw", coco([annotation(1, 1, SQUARE)]), ("images/a.jpg", "images/b.jpg")
    )
    (folder / "annotations/instances_2.json").write_text(
        json.dumps(coco([annotation(1, 1, SQUARE)], ["b.jpg"]))
    )
    (folder / "annotations" / "captions.json").write_text("{}")
    assert sum(build(folder)["counts"]["photographs"].values()) == 2


@pytest.mark.parametrize(
    ("names", "photographs", "said"),
    [
        (
            ["a.png", "B.TIF"],
            ["a.jpg", "sub/b.jpg"],
            "2 photographs have another extension than in the labels, such as a.png is",
        ),
        (["a.png", "a.jpg"], ["a.jpg"], "other names fit the only photograph of this name"),
        (["a.png", "b.jpg"], ["x/a.jpg", "y/a.bmp", "b.jpg"], "no photograph called a.png"),
    ],
)
def test_another_extension_is_matched_and_said_if_one_photograph_fits(
    tmp_path: Path, names: list[str], photographs: list[str], said: str
) -> None:
    rows = [annotation(number, number, SQUARE) for number in range(1, len(names) + 1)]
    manifest = build(
        write_folder(tmp_path / "raw", coco(rows, names), photographs), keep_unusable=True
    )
    assert said in texts_of(manifest)


def test_without_any_match_a_name_that_is_wanted_and_one_that_is_there_are_said(
    tmp_path: Path,
) -> None:
    folder = write_folder(
        tmp_path / "raw", coco([annotation(1, 1, SQUARE)], ["IMG_1.jpg"]), ["images/DJI_1.jpg"]
    )
    with pytest.raises(
        UserError,
        match=r"none of its rows .* 1 photograph .*IMG_1.jpg.*; there is images/dji_1.jpg",
    ):
        build(folder)
