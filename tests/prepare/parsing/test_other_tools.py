"""YOLO's folders become the same data set, what COCO files say in another way is understood, and
what is foreign is named.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.prepare.download.archives import zip_bytes
from tests.prepare.parsing.raw_folder import photo
from tests.prepare.parsing.tool_folder import (
    BOX,
    HEIGHT,
    PHOTO,
    STRIP,
    TEXT,
    WIDTH,
    annotation,
    box_of,
    build,
    coco,
    files,
    labels_of,
    texts_of,
    yolo,
)
from yolo_seg_ddp.data.labels import ANY_CLASS, LabelError, read_yolo_label
from yolo_seg_ddp.prepare.parsing import foreign
from yolo_seg_ddp.prepare.parsing.account import account_lines
from yolo_seg_ddp.prepare.parsing.formats import YOLO, find_format
from yolo_seg_ddp.prepare.parsing.manifest import report_lines
from yolo_seg_ddp.prepare.parsing.rows import IGNORED
from yolo_seg_ddp.prepare.parsing.yolo_text import YoloFile
from yolo_seg_ddp.utils.errors import UserError

NAMES = "[pole, wire]"
SQUARE = [[30, 20, 60, 20, 60, 50, 30, 50]]


ROBOFLOW = f"train: ../train/images\nval: ../valid/images\nnc: 2\nnames: {NAMES}\n"
FOLDERS: dict[str, tuple[str, dict[str, bytes | str]]] = {
    "Roboflow": (
        YOLO,
        {
            "data.yaml": ROBOFLOW,
            "README.roboflow.txt": "exported\n",
            "train/images/a.jpg": PHOTO,
            "train/labels/a.txt": TEXT,
        },
    ),
    "YOLO, two trees": (
        YOLO,
        {"classes.txt": "pole\nwire\n", "images/x/a.jpg": PHOTO, "labels/x/a.txt": TEXT},
    ),
    "YOLO, side by side": (YOLO, {"obj.names": "pole\nwire", "a.JPG": PHOTO, "a.txt": TEXT}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_each_tools_folder_becomes_the_same_data_set(tmp_path: Path, name: str) -> None:
    assert_same_data_set(tmp_path, *FOLDERS[name])


def assert_same_data_set(
    tmp_path: Path, label_format: str, contents: Mapping[str, bytes | str]
) -> None:
    raw = files(tmp_path / "raw", contents)
    assert find_format(raw) == label_format
    said: list[str] = []
    manifest = build(raw, line_width_px=8.0, announce=said.append)
    assert said[0].endswith(", 1 photograph, 2 regions of 2 classes")
    boxes = {number: box_of(polygon) for number, polygon in labels_of(tmp_path / "processed")}
    assert (manifest["classes"], boxes) == (["pole", "wire"], {0: BOX, 1: STRIP})
    assert not texts_of(manifest)


def test_a_file_in_which_every_annotation_is_a_crowd_has_objects(tmp_path: Path) -> None:
    crowd = annotation(1, 1, [[30, 20, 60, 20, 60, 50, 30, 50]], iscrowd=1)
    manifest = build(files(tmp_path / "raw", {"a.json": json.dumps(coco([crowd])), "a.jpg": PHOTO}))
    assert {number: box_of(polygon) for number, polygon in labels_of(tmp_path / "processed")} == {
        0: BOX
    }
    assert (
        texts_of(manifest)
        == "a.json: all annotations have `iscrowd` 1, so they are read as objects, not as crowds"
    )


def test_regions_to_ignore_are_written_counted_read_again_and_removed(tmp_path: Path) -> None:
    """A crowd of COCO, but not CVAT's masks, which are no crowds; and the folder that the parser
    itself writes.
    """
    square, there = (
        [[30, 20, 60, 20, 60, 50, 30, 50]],
        {"iscrowd": 1, "attributes": {"occluded": False}},
    )
    crowds = [annotation(1, 1, square, iscrowd=1), annotation(2, 1, square, category_id=2, **there)]
    manifest = build(files(tmp_path / "raw", {"a.json": json.dumps(coco(crowds)), "a.jpg": PHOTO}))
    assert "regions to ignore: pole 1" in report_lines(manifest)
    assert manifest["account"]["pole"]["left_out"] == {IGNORED: 1}
    (file,) = (tmp_path / "processed").glob("*/ignore/a.txt")
    file.write_text(file.read_text() + "-1 0.5 0.5 0.2 0.2\n")
    shutil.copytree(tmp_path / "processed", tmp_path / "again/raw")
    again = build(tmp_path / "again/raw")
    assert again["counts"]["ignored"] == {"all classes": 1, "pole": 1}
    assert not texts_of(again)
    (copied,) = (tmp_path / "again/processed").glob("*/ignore/a.txt")
    class_ids, outlines = read_yolo_label(copied, 2, ANY_CLASS)
    assert (class_ids.tolist(), box_of(outlines[0])) == ([0, ANY_CLASS], BOX)
    assert [number for number, _ in labels_of(tmp_path / "again/processed")] == [1]
    (source,) = (tmp_path / "again/raw").glob("*/ignore/a.txt")
    source.unlink()
    assert build(tmp_path / "again/raw")["fingerprint"] not in (
        again["fingerprint"],
        manifest["fingerprint"],
    )
    assert not copied.exists()


def of_numbers(**numbers: Any) -> dict[str, bytes | str]:
    """Return a COCO file of six annotations alike, whose numbers are those of the square BOX unless
    others are given.
    """
    square = {
        "segmentation": [[30, 20, 60, 20, 60, 50, 30, 50]],
        "bbox": [30, 20, 30, 30],
        "area": 900,
    }
    annotations = [annotation(number, 1, **(square | numbers)) for number in range(1, 7)]
    return {"a.json": json.dumps(coco(annotations))}


def of_coco(categories: Any, *annotations: dict[str, Any]) -> dict[str, bytes | str]:
    content = coco([one | {"bbox": [30, 20, 30, 30]} for one in annotations]) | {
        "categories": categories
    }
    return {
        "a.json": json.dumps({key: value for key, value in content.items() if value is not None})
    }


BACKGROUND = [
    {"id": 0, "name": "_background_"},
    {"id": 1, "name": "pole"},
    {"id": 2, "name": "Background"},
]


UNDERSTOOD: list[tuple[dict[str, bytes | str], dict[str, tuple[int, int, int, int]], str]] = [
    (of_coco([], {"id": 1, "image_id": 1}), {"object": BOX}, "the classes are called object"),
    (
        of_coco(None, annotation(1, 1, [], category_id=4)),
        {"class_4": BOX},
        "the classes are called class_4; name them there",
    ),
    (
        of_coco(
            BACKGROUND, annotation(1, 1, []), annotation(2, 1, [[1, 1, 9, 1, 9, 9]], category_id=0)
        ),
        {"pole": BOX},
        "_background_ is no class",
    ),
    (of_coco(BACKGROUND[1:], annotation(1, 1, [[]])), {"pole": BOX}, ""),
    (
        of_coco(BACKGROUND[1:], annotation(1, 1, {"counts": [], "size": [HEIGHT, WIDTH]})),
        {"pole": BOX},
        "",
    ),
]


@pytest.mark.parametrize(("contents", "boxes", "text"), UNDERSTOOD)
def test_what_a_tool_writes_in_another_way_keeps_its_meaning(
    tmp_path: Path,
    contents: dict[str, bytes | str],
    boxes: dict[str, tuple[int, int, int, int]],
    text: str,
) -> None:
    manifest = build(files(tmp_path / "raw", {**contents, "a.jpg": PHOTO}))
    found = labels_of(tmp_path / "processed", num_classes=len(boxes))
    assert {manifest["classes"][number]: box_of(polygon) for number, polygon in found} == boxes
    assert text in texts_of(manifest)
    assert bool(manifest["problems"]) == bool(text)


BAD_LINES = [
    ("2 .1 .1 .2 .2 .3 .1", "class 2 is not one of 0..1"),
    ("0 .1 .1 .2", "3 coordinates"),
    ("0 2 1 1 1", "outside 0..1"),
]


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        ({"a.txt": f"{yolo(0, BOX)}\n{bad}", "classes.txt": "pole\nwire"}, reason)
        for bad, reason in BAD_LINES
    ],
)
def test_a_bad_object_is_named_and_the_others_are_kept(
    tmp_path: Path, contents: Mapping[str, bytes | str], reason: str
) -> None:
    raw = files(tmp_path / "raw", {**contents, "a.jpg": PHOTO})
    manifest = build(raw)
    assert [box_of(polygon) for _, polygon in labels_of(tmp_path / "processed")] == [BOX]
    assert reason in texts_of(manifest)
    assert bool(manifest["problems"])
    assert "no row" not in texts_of(manifest)


PIXELS = "0 30 20 60 20 60 50"
# Boxes with two key points: of two numbers each, and of three, of which the last says what is seen.
POSE = "\n".join(
    f"0 .{number} .5 .2 .4 .{number} .35 .{number + 5} .6" for number in range(30, 60, 5)
)
SHOWN_POSE = "\n".join(
    f"0 .{number} .5 .2 .4 .{number} .35 2 .{number + 5} .6 1 0 0 0 0 0 0"
    for number in range(30, 60, 5)
)
OTHER = {
    "images": [{"id": 1, "file_name": "b.jpg", "width": 9, "height": 9}],
    "categories": [],
    "annotations": [],
}
# Files beside a.jpg that hold no labels which can be read, and what the message says.
WITHOUT_LABELS: list[tuple[dict[str, bytes | str], str]] = [
    (
        {"a.txt": TEXT, "../classes.txt": "pole\nwire"},
        "data.yaml, classes.txt or obj.names near it names the classes",
    ),
    ({"a.txt": TEXT, "data.yaml": "nc: 2\n"}, "`names` must list the classes"),
    ({"a.txt": TEXT, "classes.txt": "pole\n\nwire\n"}, "classes.txt: line 2 is empty"),
    ({"a_2.png": PHOTO}, "the file with the labels is missing"),  # a JPEG, and no mask by its name
    (
        {"task.zip": zip_bytes({"annotations.xml": b"<annotations/>"})},
        "task.zip/annotations.xml: lies in a zip, in which only photographs are read: unzip it "
        "there",
    ),
    (
        {"a.xml": "<annotation><object><name>a</name><polygon/></object></annotation>"},
        "a.xml: is LabelMe's XML",
    ),
    ({"instances.json": '{"images": []}'}, "no list `categories` and `annotations`"),
    ({"instances.json": '{"images": 3, "categories": [], "annotations": []}'}, "no list `images`"),
    ({"instances.json": json.dumps(OTHER)}, "none of its rows names one of the 1 photograph"),
    ({}, "only 1 .jpg: the file with the labels is missing"),
    ({"a.xml": "<annotation><object/></annotation>"}, "a.xml: holds <annotation>"),
    (
        {"via.csv": "filename,file_size\n"},
        "via.csv: is a CSV other than EPRI's (filename,file_size)",
    ),
    (
        {"a.json": '{"description": "", "size": {"height": 1}}'},
        "a.json: has only description, size",
    ),
    ({"a.json": '{"images": '}, "a.json: cannot be read"),
    (
        {"a.json": '[{"image": "a.jpg", "annotations": []}]'},
        "other items than Label Studio's tasks",
    ),
    ({"export.ndjson": "{}\n"}, "Labelbox's NDJSON is not read"),
    ({"a.txt": "a caption"}, "the texts hold no YOLO labels"),
    (
        {"a.txt": TEXT, "data.yaml": "kpt_shape: [3, 2]\nnames: [pole, wire]\n"},
        "`kpt_shape`: its labels are key points",
    ),
    ({"a.txt": POSE, "classes.txt": "pole"}, "a.txt: its lines hold a box and then key points"),
    (
        {"a.txt": SHOWN_POSE, "classes.txt": "pole"},
        "a.txt: its lines hold a box and then key points",
    ),
    (
        {"a.txt": f"1{TEXT[1:]}\n2 .1 .1 .2 .2", "classes.txt": "pole\nwire"},
        "the labels count from 1 to 2: subtract 1",
    ),
    (
        of_numbers(segmentation=[[20, 30, 20, 60, 50, 60, 50, 30]]),
        "a.json: the outlines have y before x",
    ),
    (
        of_numbers(segmentation=[], bbox=[30, 20, 60, 50], area=900),
        "a.json: `bbox` holds two corners",
    ),
]
# Files whose objects are lost: such a set is never ready.
LOST: list[tuple[dict[str, bytes | str], str]] = [
    (
        {"a.json": json.dumps(coco([annotation(1, 1, [[1] * 6], category_id=9)]))},
        "`categories` has no `category 9`",
    ),
    (
        {"a.json": json.dumps(coco([annotation(1, "01", [], bbox=[1, 1, 9, 9])]))},
        "no image has the id 01",
    ),
    ({"a.txt": f"{PIXELS}\n", "classes.txt": "pole"}, "outside 0..1"),
    (
        {"a.txt": f"{TEXT}\n{PIXELS}\n{PIXELS}\n{PIXELS}", "classes.txt": "pole\nwire"},
        "3 of 5 objects, more than half",
    ),
]
FOREIGN: list[tuple[dict[str, bytes | str], str]] = [
    ({}, "is empty"),
    ({"a.md": "x"}, "photographs and labels are missing"),
    ({"train.tfrecord": b"\0"}, "TFRecord is not read"),
    *((contents | {"a.jpg": PHOTO}, reason) for contents, reason in WITHOUT_LABELS + LOST),
]


@pytest.mark.parametrize(("contents", "reason"), FOREIGN)
def test_a_foreign_folder_gets_one_line(
    tmp_path: Path, contents: Mapping[str, bytes | str], reason: str
) -> None:
    (tmp_path / "raw").mkdir()
    with pytest.raises(UserError) as raised:
        build(files(tmp_path / "raw", contents))
    assert reason in str(raised.value)
    assert "download_data" not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "processed").exists()


def of_two(**flags: Any) -> dict[str, bytes | str]:
    return {
        "a.json": json.dumps(coco([annotation(1, 1, SQUARE), annotation(2, 1, SQUARE, **flags)]))
    }


IGNORES: list[tuple[dict[str, bytes | str], dict[str, int]]] = [
    (of_two(ignore=1), {"pole": 1}),
    (of_two(difficult=True), {"pole": 1}),
    (of_two(attributes={"Ignore": "true"}), {"pole": 1}),
    (
        {"a.txt": f"{yolo(0, BOX)}\n{yolo(1, STRIP)}", "classes.txt": "pole\n__ignore__"},
        {"all classes": 1},
    ),
]


@pytest.mark.parametrize(("contents", "regions"), IGNORES)
def test_what_nobody_judges_is_a_region_to_ignore(
    tmp_path: Path, contents: dict[str, bytes | str], regions: dict[str, int]
) -> None:
    """It was learned as an object, or as background."""
    manifest = build(files(tmp_path / "raw", {**contents, "a.jpg": PHOTO}))
    assert manifest["counts"]["ignored"] == regions
    assert manifest["classes"][0] == "pole"
    assert [number for number, _ in labels_of(tmp_path / "processed")] == [0]


UNSURE: list[tuple[dict[str, bytes | str], str]] = [
    (
        of_numbers(bbox=[30, 20, 60, 50]),
        "`bbox` holds two corners, as the outlines or `area` show: write left",
    ),
    (
        of_numbers(bbox=[1, 2, 3, 4]),
        "the boxes are not around their outlines: look at labels.jpg; the outlines are used",
    ),
    (
        of_numbers(segmentation=[], keypoints=[1, 2, 2]),
        "6 annotations have key points, which are not read",
    ),
    (
        {"a.json": of_numbers()["a.json"].replace('"width"', '"neg_category_ids": [2], "width"')},  # type: ignore[arg-type]
        "1 images were not searched for all classes",
    ),
]


@pytest.mark.parametrize(("contents", "text"), UNSURE)
def test_numbers_that_contradict_each_other_in_all_annotations_are_said(
    tmp_path: Path, contents: dict[str, bytes | str], text: str
) -> None:
    assert text in texts_of(build(files(tmp_path / "raw", {**contents, "a.jpg": PHOTO})))
    assert not texts_of(build(files(tmp_path / "right", of_numbers() | {"a.jpg": PHOTO})))


def test_files_that_are_not_read_end_the_account_with_a_line_for_each_kind(tmp_path: Path) -> None:
    """Files of a known other purpose have none."""
    contents: dict[str, bytes | str] = {
        f"{number}.jpg": photo(WIDTH, HEIGHT, 40 * number) for number in range(5)
    }
    contents |= {
        f"{number}.jpg___pixel.json": '{"instances": [{"className": "pole"}]}'
        for number in range(5)
    }
    contents |= {f"more/{number}.txt": TEXT for number in range(5)}
    contents |= {
        "voc/a.xml": "<annotation/>",
        "a.csv": "x,y\n",
        "b.heic": "",
        "c.npy": "",
        "sub/d.zip": "",
        "e.json": "[]",
    }
    contents |= {
        "images.zip": zip_bytes({"f.json": b"{}", "__MACOSX/._f.json": b"", "READ me.md": b""})
    }
    contents |= {
        "README.dataset.txt": "x",
        "LICENSE": "",
        "classes.txt": "pole",
        "train.txt": "./0.jpg\n",
        "1.aux.xml": "",
    }
    contents |= {
        "ids.txt": "0\n1\n",
        "1.jpg.aux.xml": "<PAMDataset/>",
        ".hidden.json": "{}",
        "data.yaml": "names: [pole]",
    }
    contents |= {
        "annotations/instances_a.json": json.dumps(coco([annotation(1, 1, SQUARE)], ["0.jpg"]))
    }
    manifest = build(files(tmp_path / "raw", contents))
    lines = account_lines(manifest, {}, 6.0)
    assert lines[lines.index("! no object: wire: leave it out: --classes pole") + 1 :] == [
        "0.jpg___pixel.json: is probably SuperAnnotate's: has only instances: if these are "
        "labels, export them as COCO "
        "(5 such files)",
        "1.aux.xml: is not XML: export it again",
        "a.csv: is a CSV other than EPRI's (x,y): if it holds labels, export them as JSON",
        "b.heic: 1 file not read: .heic (1); such as b.heic; convert photographs to JPEG",
        "c.npy: NumPy arrays are not read: save the masks as PNG",
        "e.json: is a list of other items than Label Studio's tasks: export as COCO",
        "images.zip/f.json: lies in a zip, in which only photographs are read: unzip it there",
        "more/0.txt: YOLO labels: not used, the labels are read from COCO file (5 such files)",
        "sub/d.zip: a zip in a subfolder is not opened: unzip it there",
        "voc/a.xml: holds <annotation>: export polygons or masks",
    ]
    assert not [line for line in report_lines(manifest) if "not read" in line or "voc" in line]


def test_a_misspelled_class_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    """The other class of 748 of 780 objects became background, and the advice was to leave the
    misspelled name out.
    """
    contents: dict[str, bytes | str] = {
        "a.txt": f"{TEXT}\n{TEXT}",
        "classes.txt": "pole\nwire",
        "a.jpg": PHOTO,
    }
    raw = files(tmp_path / "raw", contents)
    refused: list[tuple[tuple[str, ...], str]] = [
        (("pole", "wrie"), r"wrie: no .* class \(did you mean wire\?\)\. .* \(wire\) would"),
        # "the nearest one is pole" was said of any other word
        (("cap",), r"cap: no object has this class\. .* \((pole, wire|wire, pole)\) would"),
    ]
    for names, told in refused:
        with pytest.raises(UserError, match=told):
            build(raw, class_names=names, use_file_classes=False)
        assert not (tmp_path / "processed" / "dataset.yaml").exists()
    wished: list[tuple[tuple[str, ...], int]] = [
        (("pole",), 2),
        (("pole", "wire", "cap"), 4),
    ]  # the latter of other labels
    for names, number in wished:
        assert (
            sum(
                build(raw, class_names=names, use_file_classes=False)["counts"]["objects"][
                    "pole"
                ].values()
            )
            == 2
        )
        assert len(labels_of(tmp_path / "processed", num_classes=3)) == number


def test_nobody_looked_for_the_classes_that_a_list_lacks(tmp_path: Path) -> None:
    contents: dict[str, bytes | str] = {
        "b/a.jpg": photo(WIDTH, HEIGHT, 200),
        "b/a.txt": TEXT,
        "b/classes.txt": "pole\nwire",
    }
    contents |= {"a/a.jpg": PHOTO, "a/a.txt": yolo(0, BOX), "a/classes.txt": "pole"}
    said: list[str] = []
    manifest = build(files(tmp_path / "raw", contents), announce=said.append)
    looked_for = {name: sum(n.values()) for name, n in manifest["counts"]["looked_for"].items()}
    assert looked_for == {"pole": 2, "wire": 1}
    (region,) = (tmp_path / "processed").glob("*/ignore/a-*.txt")
    assert region.read_text().startswith("1 0.000000 0.000000 1.000000 ")
    assert any(
        line.startswith("2 photographs got another name in the data set: a.jpg is a-")
        for line in said
    )
    (tmp_path / "raw/b/a.txt").write_text(f"{TEXT}\n1 2 3")
    # which of two files of one name
    assert "b/a.txt: ./a.jpg: line 3" in texts_of(build(tmp_path / "raw"))


def test_a_file_that_changes_before_its_objects_are_read_is_refused(tmp_path: Path) -> None:
    file = files(tmp_path, {"classes.txt": "wire", "a.txt": "0 0.1 0.1 0.2 0.1 0.2 0.2"}) / "a.txt"
    (row,) = YoloFile(file, [], tmp_path).rows
    file.write_text(file.read_text().replace("0.1", "0.3"))
    with pytest.raises(LabelError, match="has changed since this run began"):
        row.parse()


def test_boxes_without_outlines_are_told(tmp_path: Path) -> None:
    raw = files(
        tmp_path / "raw",
        {"classes.txt": "pole", "a.jpg": PHOTO, "a.txt": "0 .5 .5 .2 .2\n" + yolo(0, BOX)},
    )
    said = account_lines(build(raw), {}, 6.0)[-1]
    assert "! boxes: pole: 1 object has a box and no outline" in said
    assert "add --boxes pole" in account_lines(build(raw), {}, 6.0, ["pole"])[-1]
    boxes = build(raw, boxes=("pole",))
    assert "! boxes: pole: 2 objects have a box" in account_lines(boxes, {}, 6.0)[-1]


def test_a_box_is_written_as_a_box_and_boxes_says_which_outlines_are_boxes(tmp_path: Path) -> None:
    """A model learned rectangular masks from the boxes of a tool."""
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [30, 18, 60, 36]}
    content = json.dumps(coco([box, annotation(2, 1, SQUARE)]))
    raw = files(tmp_path / "coco", {"a.json": content, "a.jpg": PHOTO})

    def rows(**changes: Any) -> list[list[str]]:
        build(raw, **changes)
        (file,) = (tmp_path / "processed").glob("*/labels/a.txt")
        return [line.split() for line in file.read_text().splitlines()]

    of_box, of_square = rows()
    assert of_box == ["0", "0.400000", "0.400000", "0.400000", "0.400000"]
    assert len(of_square) == 9
    assert [len(row) for row in rows(boxes=("pole",))] == [5, 5]
    assert [len(row) for row in rows()] == [5, 9]  # what is written follows the option
    with pytest.raises(
        UserError, match=r"--boxes poles: not one of pole, wire \(did you mean pole"
    ):
        build(raw, boxes=("poles",))


def test_links_keep_the_bounds_of_untrusted_files(tmp_path: Path) -> None:
    secret = files(tmp_path / "outside", {"secret.txt": "0 a secret", "classes.txt": "a secret\nb"})
    raw = files(
        tmp_path / "raw", {"a.jpg": PHOTO, "b.jpg": photo(WIDTH, HEIGHT, shade=200), "a.txt": TEXT}
    )
    (raw / "b.txt").symlink_to(secret / "secret.txt")
    (raw / "classes.txt").symlink_to(secret / "classes.txt")
    with pytest.raises(UserError, match="names the classes"):
        build(raw)
    (raw / "classes.txt").unlink()
    manifest = build(files(raw, {"classes.txt": "pole\nwire"}))
    assert "b.txt: a link that leaves" in texts_of(manifest)
    assert "secret" not in json.dumps(manifest)


def test_a_photograph_whose_only_object_is_unusable_is_no_background(tmp_path: Path) -> None:
    contents: dict[str, bytes | str] = {"classes.txt": "pole\nwire", "a.jpg": PHOTO, "a.txt": TEXT}
    contents |= {"c.jpg": photo(WIDTH, HEIGHT, shade=120), "c.txt": PIXELS}
    manifest = build(files(tmp_path / "raw", contents))
    assert [item["file"] for item in manifest["photographs"]] == ["a.jpg"]
    assert "c.jpg: its only 1 object cannot be used; left out" in texts_of(manifest)
    kept = build(tmp_path / "raw", keep_unusable=True)["photographs"]
    assert [(item["file"], item["objects"]) for item in kept] == [
        ("a.jpg", {"pole": 1, "wire": 1}),
        ("c.jpg", {}),
    ]


def test_without_the_extra_its_formats_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "EXTRA_READERS", ())
    with pytest.raises(
        UserError,
        match=r"docs/labels.md\); Label Studio, .* need yolo_seg_ddp/extras/labels, which is "
        r"not in this folder",
    ):
        build(files(tmp_path / "raw", {"a.md": "x"}))
