"""The folders and subsets of a labelled set are its split, and an object stays in its own."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.prepare.parsing.raw_folder import photo
from tests.prepare.parsing.tool_folder import (
    BOX,
    HEIGHT,
    TEXT,
    WIDTH,
    annotation,
    box_of,
    build,
    coco,
    files,
    labels_of,
)
from yolo_seg_ddp.prepare.parsing.manifest import report_lines
from yolo_seg_ddp.prepare.parsing.sources import Photograph
from yolo_seg_ddp.prepare.parsing.split import assign_splits, choose_split
from yolo_seg_ddp.utils.errors import UserError


def test_the_folders_of_a_yolo_set_are_its_split(tmp_path: Path) -> None:
    contents: dict[str, bytes | str] = {"data.yaml": "names: [pole, wire]\n"}
    for number in range(9):
        folder = ("train", "valid", "test")[number % 3]
        contents[f"{folder}/images/{number}.jpg"] = photo(WIDTH, HEIGHT, shade=40 + 20 * number)
        contents[f"{folder}/labels/{number}.txt"] = TEXT
    del contents["train/labels/0.txt"]  # YOLO's convention: no objects
    raw = files(tmp_path / "raw", contents)
    manifest = build(raw, split_by="auto")
    assert {record["file"]: record["split"] for record in manifest["photographs"]} == {
        f"{number}.jpg": ("train", "val", "test")[number % 3] for number in range(9)
    }
    assert manifest["counts"]["without_objects"] == {"train": 1, "val": 0, "test": 0}
    assert "test: test/images" in (tmp_path / "processed" / "dataset.yaml").read_text()
    lines = report_lines(manifest, has_circuits=False)
    assert lines[-1] == "photographs: train 3, val 3, test 3; without objects 1"
    assert (
        "split: as the input's folders for train and val and test say; --split-by hash makes a "
        "new one" in lines
    )
    shutil.rmtree(tmp_path / "processed" / "test")
    again = build(raw, split_by="hash")
    assert set(again["counts"]["photographs"]) == {"train", "val"}
    assert not list((tmp_path / "processed" / "test").rglob("*.jpg"))


FOLDERS_AND_SPLITS = [
    ("images/Training/a images/TESTING/b", "train val", "the input has no val: its test is val"),
    ("train2017/a Validation/b test_set/c", "train val test", ""),
    (
        "train/a val/b test/c d",
        "train val test train",
        "1 photograph outside of folders for train, val and test: for training",
    ),
    ("x/a test/b", "train val", "the input has no val: its test is val; 1 photograph outside"),
    ("a=train b=val c=Testing", "train val test", ""),  # subsets that the labels name
    ("val/a test/b", "", "only for test and val: train or val would be empty"),
]


@pytest.mark.parametrize(("names", "splits", "text"), FOLDERS_AND_SPLITS)
def test_a_publishers_test_never_goes_into_train(names: str, splits: str, text: str) -> None:
    pairs = [name.partition("=")[::2] for name in names.split()]
    photographs = [
        Photograph(name, name, "", Path(name), None, 1, "", True, subset) for name, subset in pairs
    ]
    if not splits:
        with pytest.raises(UserError, match=text):
            choose_split(photographs, "auto")
        return
    chosen, line = choose_split(photographs, "auto")
    assert [*assign_splits(photographs, chosen, 0.2).values()] == splits.split()
    assert line.startswith(text)
    assert bool(line) == bool(text)


@pytest.mark.parametrize("names", ["train/a", "a b", "test/a", "train/a b"])
def test_folders_that_are_no_split_are_said_or_split_anew(names: str) -> None:
    photographs = [
        Photograph(name, name, "", Path(name), None, 1, "", True) for name in names.split()
    ]
    assert choose_split(photographs, "auto") == ("hash", "")
    with pytest.raises(UserError, match=r"only for (train|test)|for none of train"):
        choose_split(photographs, "folders")


def test_the_subsets_of_label_files_are_the_split_of_photographs_in_one_folder(
    tmp_path: Path,
) -> None:
    contents: dict[str, bytes | str] = {
        f"annotations/instances_{part}.json": json.dumps(
            coco([annotation(1, 1, [], bbox=[30, 20, 30, 30])], [f"{part}.jpg"])
        )
        for part in ("train2017", "test2017")
    } | {
        f"images/{part}2017.jpg": photo(WIDTH, HEIGHT, shade=90 + len(part))
        for part in ("train", "test")
    }
    said: list[str] = []
    manifest = build(files(tmp_path / "raw", contents), split_by="auto", announce=said.append)
    assert {item["file"]: item["split"] for item in manifest["photographs"]} == {
        "test2017.jpg": "val",
        "train2017.jpg": "train",
    }
    assert "split: the input has no val: its test is val" in said


COCO_POLE = json.dumps(coco([annotation(1, "1", [], bbox=[30, 20, 30, 30])]))
COCO_OTHER = json.dumps(coco([annotation(1, 1.0, [], bbox=[120, 30, -50, 30])]))
FLIGHT = "flight 1/annotations/instances_default.json"
OTHER_BOX = (70, 30, 120, 60)


@pytest.mark.parametrize(
    ("contents", "places"),
    [
        (
            {
                "annotations/instances_Train.json": COCO_POLE,
                "annotations/instances_Val.json": COCO_OTHER,
            },
            ("images/train", "images/valid"),
        ),
        (
            {"train/_annotations.coco.json": COCO_POLE, "valid/_annotations.coco.json": COCO_OTHER},
            ("train", "valid"),
        ),
        (
            {FLIGHT: COCO_POLE, FLIGHT.replace("1", "2"): COCO_OTHER},
            ("flight 1/images", "flight 2/images"),
        ),
    ],
)
def test_an_object_lies_on_the_photograph_of_its_own_subset(
    tmp_path: Path, contents: Mapping[str, str], places: tuple[str, str]
) -> None:
    photographs = {
        f"{place}/a.jpg": photo(WIDTH, HEIGHT, shade=90 * n) for n, place in enumerate(places)
    }
    raw = files(tmp_path / "raw", {**contents, **photographs})
    manifest = build(raw)
    found = {
        item["source"]: [
            box_of(polygon) for _, polygon in labels_of(tmp_path / "processed", item["file"][:-4])
        ]
        for item in manifest["photographs"]
    }
    assert found == {f"{places[0]}/a.jpg": [BOX], f"{places[1]}/a.jpg": [OTHER_BOX]}
    (raw / places[0] / "a.jpg").unlink()
    assert [item["objects"] for item in build(raw)["photographs"]] == [{"pole": 1}]
    assert [box_of(polygon) for _, polygon in labels_of(tmp_path / "processed")] == [OTHER_BOX]
