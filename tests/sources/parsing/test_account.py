"""The account of a parse: what is in the source is written or left out for a reason, and what is odd is marked.

`balanced` holds source = written + left out in every build of the other tests, and counts the source without the readers.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.sources.parsing.raw_folder import BOX as INSULATOR
from tests.sources.parsing.raw_folder import photo, write_csv
from tests.sources.parsing.test_labelme import shape as labelme_shape
from tests.sources.parsing.test_labelme import write as write_labelme
from tests.sources.parsing.test_masks import DOTS, ONE, TWO, WHITE, several
from tests.sources.parsing.test_other_tools import PAIR, root, rsml
from tests.sources.parsing.tool_folder import (
    BOX,
    PHOTO,
    POLE,
    REGIONS,
    STRIP,
    TEXT,
    WIRE,
    annotation,
    build,
    coco,
    cvat,
    files,
    mask,
    png,
    region,
    shape,
    task,
    via,
    via_region,
)
from utils.data.labels import Photo
from utils.pages.label_picture import choose_photos
from utils.sources.parsing.account import MERGED, UNREAD, account_lines
from utils.sources.parsing.label_studio import OTHER_ANNOTATION
from utils.sources.parsing.mask_images import STRAY
from utils.sources.parsing.rows import CLOSED, NO_OBJECT, UNUSED_SOURCE

SQUARE = [[30, 20, 60, 20, 60, 50, 30, 50]]
TRIANGLE = [[10, 10], [60, 10], [60, 80]]
ANNOTATIONS = [
    *(annotation(number, 1, SQUARE) for number in (1, 1, 2)),
    annotation(3, 9, [], bbox=[1, 1, 9, 9], category_id=2),
    annotation(4, 2, {"size": [9, 9], "counts": "0"}),
    annotation(5, 1, SQUARE, category_id=9),
    *(annotation(number, 1, [], bbox=[1, 1, 40, 40], category_id=2) for number in range(6, 12)),
]
COCO = json.dumps(coco(ANNOTATIONS, ("a.jpg", "missing.jpg")))
TASKS = [task(1, "a.jpg", [region(1, "polygonlabels", points=TRIANGLE), region(2, "ellipselabels", x=1)])]
TASKS[0]["annotations"].append({"result": [region(3, "brushlabels", rle=[])] * 2, "was_cancelled": True})
GROUPED = [shape("polygon", "pole", points="30,20;60,20;60,50", group_id=7)] * 3
PARTS = [{**labelme_shape(label=label), "group_id": 1} for label in ("pole", "pole", "__ignore__", "pole")]
LOOP = shape("polyline", "pole", points="30,20;60,20;60,50;30,50;30,21", group_id=7)
THREE = png(mask(BOX, value=7) + mask(STRIP, value=3) + mask((80, 5, 90, 15), value=9))  # the last has no class in PAIR
# Files, and what was left out by reason, of all classes together.
CASES: dict[str, tuple[dict[str, bytes | str], dict[str, int]]] = {
    "COCO": ({"a.json": COCO}, {"duplicate id": 1, "row without a photograph": 1, "unusable object": 2}),
    "Label Studio": ({"a.json": json.dumps(TASKS)}, {OTHER_ANNOTATION: 2, "unusable object": 1}),
    "VIA": ({"a.json": via([*REGIONS, via_region("pole", name="point"), {}])}, {"unusable object": 2}),
    "CVAT": ({"a.xml": cvat(POLE, WIRE, *GROUPED, shape("points", ""))}, {MERGED: 2, "unusable object": 1}),
    "RSML": ({"a.rsml": rsml(root("20,20 130,40"), root("5,5"))}, {"unusable object": 1}),
    "YOLO": ({"a.txt": f"{TEXT}\n1 .1 .2 .3\n7 .1 .1 .2 .2", "classes.txt": "pole\nwire"}, {"unusable object": 2}),
    "background": (
        {"a.json": via([*REGIONS, via_region("_background_", **REGIONS[0]["shape_attributes"])])},
        {NO_OBJECT: 1},
    ),
    "two folders of masks": (
        several(ONE, TWO) | several(WHITE, WHITE + mask(STRIP, value=255), folder="fore"),
        {UNUSED_SOURCE: 3},
    ),
    "stray values": (several(ONE, TWO, ONE, TWO, ONE + DOTS), {STRAY: 2}),
    "damage": (several(WHITE, WHITE, DOTS), {STRAY: 2}),
    "white in a list": (several(ONE, TWO, WHITE, classes__txt="background\na\nb"), {STRAY: 1}),
    "masks": ({**PAIR, "SegmentationObject/a.png": THREE, "JPEGImages/a.jpg": PHOTO}, {"unusable object": 1}),
}


@pytest.mark.parametrize("name", [*CASES, "LabelMe", "EPRI"])
def test_an_object_of_the_source_is_written_or_left_out_for_a_reason(tmp_path: Path, name: str) -> None:
    contents, reasons = CASES.get(name, ({}, {}))
    raw = files(tmp_path / "raw", {**contents, "a.jpg": PHOTO})
    if name == "LabelMe":
        reasons = {NO_OBJECT: 1, MERGED: 2}
        write_labelme(raw, "a.json", PARTS)
    elif name == "EPRI":
        files(raw, {f"{number}.jpg": photo(shade=number) for number in range(9)} | {"b.jpg": PHOTO[:900]})
        rows: list[tuple[str, object]] = [(f"{number}.jpg", [INSULATOR]) for number in range(9)]
        rows += [("a.jpg", [{}]), *[("8.jpg", [INSULATOR] * 2)] * 2, ("b.jpg", [INSULATOR]), ("c.jpg", [INSULATOR])]
        write_csv(raw, rows)
        reasons = {"unusable object": 1, MERGED: 2, "duplicate row": 2, UNREAD: 1, "row without a photograph": 1}
    manifest = build(raw)
    left_out: dict[str, int] = {}
    for facts in manifest["account"].values():
        left_out |= {reason: left_out.get(reason, 0) + number for reason, number in facts["left_out"].items()}
    assert left_out == reasons


def test_a_closed_polyline_counts_as_an_outline_also_as_a_part(tmp_path: Path) -> None:
    """The account called it a strip."""
    manifest = build(files(tmp_path / "raw", {"a.xml": cvat(LOOP, LOOP, GROUPED[0], WIRE), "a.jpg": PHOTO}))
    account = manifest["account"]
    assert account["pole"]["source"] == {CLOSED: 2, "polygon": 1}
    assert account["pole"]["left_out"] == {MERGED: 2}
    assert account["wire"]["source"] == {"polyline": 1}


def test_what_is_not_used_or_no_object_gets_no_advice_about_classes(tmp_path: Path) -> None:
    contents = several(ONE, TWO, classes__txt="background\npole\nwire") | several(
        np.stack([0 * ONE, 0 * ONE, 9 * ONE], axis=2), folder="fore"
    )
    lines = account_lines(build(files(tmp_path / "raw", contents)), {}, 6.0)
    assert any(line.startswith("colour_090000") for line in lines)
    assert not [line for line in lines if line.startswith(("! none", "! a number"))]
    box = shape("box", "_background_", xtl=1, ytl=1, xbr=9, ybr=9)
    lines = account_lines(build(files(tmp_path / "b" / "raw", {"a.xml": cvat(POLE, box), "a.jpg": PHOTO})), {}, 6.0)
    assert not [line for line in lines if line.startswith(("! none", "! boxes"))]


def test_the_table_has_twelve_lines_at_most_and_names_what_is_odd_with_its_remedy(tmp_path: Path) -> None:
    names = ["wire", "cap", "7", *(f"kind {number}" for number in range(30))]
    contents: dict[str, bytes | str] = {"classes.txt": "\n".join(names)}
    for number in range(4):
        lines = [TEXT.splitlines()[0], "2 .5 .5 .2 .2", "40 .1 .1 .2 .2"][: 3 if number < 3 else 1]
        split = "val" if number == 3 else "train"
        contents |= {f"{split}/{number}.jpg": photo(shade=40 * number), f"{split}/{number}.txt": "\n".join(lines)}
    manifest = build(files(tmp_path / "raw", contents), keep_unusable=True, split_by="hash", val_fraction=0.9)
    lines = account_lines(manifest, {"wire": "30 x 9.0"}, 6.0)
    said = [" ".join(line.split()) for line in lines]
    assert said[0] == "class named by source written val photos size at 640 px drawn as"
    in_val = manifest["counts"]["objects"]["wire"]["val"]
    assert said[2] == f"wire classes.txt: 0 4 4 {in_val} 4 30 x 9.0 polygon"
    assert said[3] == "cap classes.txt: 1 0 0 0 0 - ! no object"
    assert said[4].startswith("7 classes.txt: 2 3 3 ")
    assert said[4].endswith("box ! a number as a name ! boxes")
    assert said[11] == "… and 25 more classes: 3 objects in the source, 0 written; all in manifest.json"
    assert said[5] == "kind 0 classes.txt: 3 0 0 0 0 - ! no object ! differs only by a number"
    assert said[12] == "in the source and not written: 3 objects: unusable object 3"
    odd = {line.split(":")[0]: line for line in said[13:]}
    assert odd["! no object"].endswith("leave it out: --classes wire 7")
    assert {
        "! a number as a name",
        "! boxes",
        "! folder not used as a split",
        "! differs only by a number",
    } <= odd.keys()


def test_a_class_in_one_photograph_is_marked_and_the_picture_shows_every_class(tmp_path: Path) -> None:
    raw = files(tmp_path / "raw", {"a.json": via(REGIONS), "a.jpg": PHOTO})
    files(raw, {"b.json": via(REGIONS[:1]).replace("a.jpg", "b.jpg"), "b.jpg": photo(shade=200)})
    (line,) = [line for line in account_lines(build(raw), {}, 8.0) if line.startswith("wire")]
    assert line.endswith("polyline as a strip of 8 px  ! in 1 photograph")
    photos = [Photo(Path(f"{number}"), np.array([number % 2, 2 + number // 90]), []) for number in range(100)]
    for number in (20, 55):
        photos[number] = Photo(Path(f"{number}"), np.array([number]), [])
    shown = choose_photos(photos)
    assert len(shown) == 12
    assert {one for photo in shown for one in photo.class_ids.tolist()} == {0, 1, 2, 3, 20, 55}
