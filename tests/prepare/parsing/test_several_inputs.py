"""Several folders become one data set: each with its format and its classes, and no class that
nobody looked for is background.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

import parse_labels
from tests.prepare.parsing.raw_folder import picture, tree
from tests.prepare.parsing.tool_folder import (
    BOX,
    HEIGHT,
    PHOTO,
    STRIP,
    WIDTH,
    annotation,
    coco,
    corners,
    files,
    yolo,
)
from tests.support.plugin import run_main
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.data.labels import Photo, count_searched, read_photos
from yolo_seg_ddp.utils.errors import UserError

SQUARE = [[float(value) for point in corners(BOX) for value in point]]
OTHER = (100, 10, 120, 30)
Contents = dict[str, bytes | str]


def coco_folder(names: list[str], photographs: Mapping[str, bytes]) -> Contents:
    """Return a COCO file in which each photograph has a square of the first class."""
    number = range(1, len(photographs) + 1)
    content = coco(
        [annotation(one, one, SQUARE) for one in number],
        [*photographs],
        categories=[{"id": one, "name": name} for one, name in enumerate(names, 1)],
    )
    return {"a.json": json.dumps(content), **photographs}


def yolo_folder(names: list[str], photographs: Mapping[str, bytes], *rows: str) -> Contents:
    texts: Contents = {f"{Path(name).stem}.txt": "\n".join(rows) for name in photographs}
    return {"classes.txt": "\n".join(names), **texts, **photographs}


def shaded(*names: str, shade: int = 0) -> dict[str, bytes]:
    pictures = (picture(shade + number, (WIDTH, HEIGHT)) for number in range(len(names)))
    return {name: encode_jpeg(pixels, 95) for name, pixels in zip(names, pictures, strict=True)}


def parse(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *names: str,
    output: str = "processed",
    classes: Sequence[str] = (),
) -> dict[str, Any]:
    """Parse some folders; return the manifest. In its account source = written + left out."""
    monkeypatch.chdir(folder)
    words = ["--classes", *classes] if classes else []
    run_main(parse_labels, monkeypatch, "--input", *names, "--output", output, *words)
    manifest: dict[str, Any] = json.loads((folder / output / "manifest.json").read_text())
    for name, counts in manifest["account"].items():
        left_out = sum(counts["left_out"].values())
        assert sum(counts["source"].values()) == counts["written"] + left_out, name
    return manifest


def photos_of(processed: Path) -> dict[str, Photo]:
    spec = load_dataset_yaml(processed / "dataset.yaml")
    return {
        photo.file.stem: photo for split in ("train", "val") for photo in read_photos(spec, split)
    }


def labels_of(photo: Photo) -> tuple[list[int], list[int]]:
    """Return the classes of the objects, and those that nobody looked for."""
    return sorted(photo.class_ids.tolist()), photo.ignored_ids[photo.unsearched].tolist()


def test_what_a_folder_does_not_list_is_no_background_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files(tmp_path / "a", coco_folder(["pole", "fuse"], shaded("1.jpg", "2.jpg", "same.jpg")))
    wires = shaded("3.jpg", "4.jpg", "same.jpg", shade=50)
    files(tmp_path / "b", yolo_folder(["wire", "pole"], wires, yolo(0, STRIP)))
    manifest = parse(tmp_path, monkeypatch, "a", "b")
    said = capsys.readouterr().out
    assert manifest["classes"] == ["pole", "fuse", "wire"]
    photos = photos_of(tmp_path / "processed")
    assert {labels_of(photos[name]) == ([0], [2]) for name in "12"} == {True}
    assert {labels_of(photos[name]) == ([2], [1]) for name in "34"} == {True}
    assert len(photos) == 6, "of one name, but of two folders"
    assert count_searched(photos.values(), 3).tolist() == [6, 3, 3]
    assert "a: COCO file, 3 photographs, 3 regions of 2 classes\nb: YOLO labels" in said
    rows = {line.split()[0]: line.split() for line in said.splitlines() if "polygon" in line}
    assert {name: row[-5] for name, row in rows.items()} == {
        "pole": "6",
        "wire": "3",
    }

    # Whatever the order and the number of the classes are.
    parse(tmp_path, monkeypatch, "a", "b", classes=["wire", "pole"])
    photos = photos_of(tmp_path / "processed")
    assert {labels_of(photos[name]) == ([1], [0]) for name in "12"} == {True}
    assert {labels_of(photos[name]) == ([0], []) for name in "34"} == {True}
    assert len([*(tmp_path / "processed").glob("*/ignore/*.txt")]) == 3

    # A continued run, and another place of the folders, change no byte.
    before = tree(tmp_path / "processed")
    parse(tmp_path, monkeypatch, "a", "b", classes=["wire", "pole"])
    assert tree(tmp_path / "processed") == before
    for name in "ab":
        (tmp_path / "moved" / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).rename(tmp_path / "moved" / name)
    names = ["wire", "pole"]
    parse(tmp_path, monkeypatch, "moved/a", "moved/b", output="again", classes=names)
    assert tree(tmp_path / "again") == before


def test_a_photograph_in_two_folders_is_one_with_both_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = [picture(number, (2 * WIDTH, 2 * HEIGHT)) for number in range(4)]
    small = [cv2.resize(one, (WIDTH, HEIGHT), interpolation=cv2.INTER_AREA) for one in pixels]
    equal, shrunk, turned, alone = (encode_jpeg(one, 95) for one in small)
    files(
        tmp_path / "a",
        coco_folder(
            ["pole", "fuse"],
            {"equal.jpg": equal, "shrunk.jpg": shrunk, "turned.jpg": turned, "alone.jpg": alone},
        ),
    )
    copies = {
        "one.jpg": equal,
        "two.jpg": encode_jpeg(pixels[1], 80),
        "three.jpg": encode_jpeg(np.ascontiguousarray(small[2][::-1, ::-1]), 95),
    }
    # The pole is that of the other folder, one pixel away; the second one is not.
    near = (BOX[0] + 1, BOX[1], BOX[2] + 1, BOX[3])
    rows = (yolo(0, STRIP), yolo(1, near), yolo(1, OTHER))
    files(tmp_path / "b", yolo_folder(["wire", "pole"], copies, *rows))
    manifest = parse(tmp_path, monkeypatch, "a", "b")
    assert (
        "2 photographs also in another folder: each is one photograph with the labels of all"
        in capsys.readouterr().out
    )
    photos = photos_of(tmp_path / "processed")
    expected = {
        "equal": ([0, 0, 2], []),
        "two": ([0, 0, 2], []),  # the larger one
        "turned": ([0], [2]),
        "three": ([0, 0, 2], [1]),
        "alone": ([0], [2]),
    }
    assert {name: labels_of(photo) for name, photo in photos.items()} == expected
    assert manifest["account"]["pole"]["left_out"] == {"part or copy of another object": 2}
    for name in ("equal", "two"):
        poles = [
            outline
            for number, outline in zip(photos[name].class_ids, photos[name].polygons, strict=True)
            if number == 0
        ]
        first = min(float(outline[:, 0].min()) for outline in poles) * WIDTH
        # that of the photograph which stays
        assert first == pytest.approx((BOX if name == "equal" else near)[0], abs=0.01)
    assert sorted(map(sorted, manifest["copies"])) == [["three.jpg", "turned.jpg"]]

    before = tree(tmp_path / "processed")
    assert parse(tmp_path, monkeypatch, "a", "b") == manifest
    assert tree(tmp_path / "processed") == before
    only_poles = parse(tmp_path, monkeypatch, "a", "b", classes=["pole"])
    assert only_poles == parse(tmp_path, monkeypatch, "a", "b", classes=["pole"], output="fresh")


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_a_box_and_an_outline_of_one_object_the_outline_stays(
    names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs = shaded("one.jpg", "two.jpg")
    # a pole that leans: its outline has a small part of the box
    outline, box = "0 0.2 0.2 0.25 0.2 0.8 0.8 0.75 0.8", "0 0.5 0.5 0.6 0.6"
    files(tmp_path / "a", yolo_folder(["pole"], photographs, outline))
    files(tmp_path / "b", yolo_folder(["pole"], photographs, box))
    parse(tmp_path, monkeypatch, *names)
    for photo in photos_of(tmp_path / "processed").values():
        assert photo.class_ids.tolist() == [0]
        assert photo.boxed.size == 0


def test_one_folder_that_lists_all_classes_has_no_regions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = yolo_folder(["wire", "pole"], shaded("1.jpg", "2.jpg"), yolo(0, STRIP), yolo(1, BOX))
    files(tmp_path / "a", contents)
    manifest = parse(tmp_path, monkeypatch, "a")
    assert "looked_for" not in manifest["counts"]
    assert "looked for" not in capsys.readouterr().out
    assert not [*(tmp_path / "processed").glob("*/ignore")]
    assert "unsearched" not in (tmp_path / "processed/.parse_state.jsonl").read_text()


POLES, WIRES = ["pole"], ["wire"]
# The classes of two folders, those of --classes, and what is said.
REFUSED: dict[str, tuple[list[str], list[str], list[str], str]] = {
    "a plural": (
        POLES,
        ["Poles", "wire"],
        [],
        "pole (a) and Poles (b) may be names of one class: --classes pole wire joins them, "
        "--classes pole Poles wire keeps them apart",
    ),
    "no class of --classes": (
        POLES,
        WIRES,
        ["pole"],
        "b: none of its objects can be used: correct the labels, name their classes with "
        "--classes, or leave the folder out; b/3.txt: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first, second, names, expected = REFUSED[name]
    files(tmp_path / "a", coco_folder(first, shaded("1.jpg", "2.jpg")))
    files(tmp_path / "b", yolo_folder(second, shaded("3.jpg", "4.jpg", shade=50), yolo(0, STRIP)))
    with pytest.raises(UserError) as refusal:
        parse(tmp_path, monkeypatch, "a", "b", classes=names)
    assert expected in str(refusal.value)
    assert not (tmp_path / "processed/dataset.yaml").exists()


def test_names_that_may_be_one_class_are_joined_or_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path / "a", coco_folder(POLES, shaded("1.jpg", "2.jpg")))
    poles = yolo_folder(["Poles"], shaded("3.jpg", "4.jpg", shade=50), yolo(0, BOX))
    files(tmp_path / "b", poles)
    for names, expected in ((["pole"], [([0], [])] * 4), (["pole", "Poles"], [([0], [1])] * 2)):
        parse(tmp_path, monkeypatch, "a", "b", classes=names)
        photos = photos_of(tmp_path / "processed")
        assert [labels_of(photos[name]) for name in "1234"][: len(expected)] == expected


def test_a_folder_inside_another_and_one_without_an_object_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files(tmp_path / "a", coco_folder(POLES, shaded("1.jpg")))
    for second, expected in (
        ("a/b", "--input a/b is in --input a, so its photographs would be read twice"),
        ("./a", "--input a is in --input ./a"),
        ("c", "c: VOC"),
    ):
        files(tmp_path / "c", {"1.jpg": PHOTO})
        files(tmp_path / "a/b", {"1.jpg": PHOTO})
        with pytest.raises(UserError) as refusal:
            parse(tmp_path, monkeypatch, "a", second)
        assert str(refusal.value).startswith(expected.removesuffix("VOC"))


def test_val_without_a_photograph_that_was_searched_for_a_class_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val"):
        contents = yolo_folder(POLES, shaded(f"{split}.jpg", shade=len(split)), yolo(0, BOX))
        files(tmp_path / "a" / split, contents)
    files(tmp_path / "b", yolo_folder(WIRES, shaded("3.jpg", shade=50), yolo(0, STRIP)))
    parse(tmp_path, monkeypatch, "a", "b")
    said = capsys.readouterr().out
    assert "val has no photograph in which somebody looked for wire: " in said
    assert "objects in val: pole" in said
    assert ", wire" not in said
