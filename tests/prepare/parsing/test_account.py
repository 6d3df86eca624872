"""The account of a parse: what is in the source is written or left out for a reason, and what is
odd is marked.

`balanced` holds source = written + left out in every build of the other tests, and counts the
source without the readers.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prepare.parsing.raw_folder import BOX as INSULATOR
from tests.prepare.parsing.raw_folder import photo, write_csv
from tests.prepare.parsing.tool_folder import PHOTO, TEXT, annotation, build, coco, files
from yolo_seg_ddp.data.labels import Photo
from yolo_seg_ddp.pages.label_picture import choose_photos
from yolo_seg_ddp.prepare.parsing.account import MERGED, UNREAD, account_lines

SQUARE = [[30, 20, 60, 20, 60, 50, 30, 50]]
ANNOTATIONS = [
    *(annotation(number, 1, SQUARE) for number in (1, 1, 2)),
    annotation(3, 9, [], bbox=[1, 1, 9, 9], category_id=2),
    annotation(4, 2, {"size": [9, 9], "counts": "0"}),
    annotation(5, 1, SQUARE, category_id=9),
    *(annotation(number, 1, [], bbox=[1, 1, 40, 40], category_id=2) for number in range(6, 12)),
]
COCO = json.dumps(coco(ANNOTATIONS, ("a.jpg", "missing.jpg")))
# Files, and what was left out by reason, of all classes together.
CASES: dict[str, tuple[dict[str, bytes | str], dict[str, int]]] = {
    "COCO": ({"a.json": COCO}, {"duplicate id": 1, "missing photograph": 1, "unusable object": 2}),
    "YOLO": (
        {"a.txt": f"{TEXT}\n1 .1 .2 .3\n7 .1 .1 .2 .2", "classes.txt": "pole\nwire"},
        {"unusable object": 2},
    ),
}


@pytest.mark.parametrize("name", [*CASES, "EPRI"])
def test_an_object_of_the_source_is_written_or_left_out_for_a_reason(
    tmp_path: Path, name: str
) -> None:
    contents, reasons = CASES.get(name, ({}, {}))
    raw = files(tmp_path / "raw", {**contents, "a.jpg": PHOTO})
    if name == "EPRI":
        files(
            raw,
            {f"{number}.jpg": photo(shade=number) for number in range(9)} | {"b.jpg": PHOTO[:900]},
        )
        rows: list[tuple[str, object]] = [(f"{number}.jpg", [INSULATOR]) for number in range(9)]
        rows += [
            ("a.jpg", [{}]),
            *[("8.jpg", [INSULATOR] * 2)] * 2,
            ("b.jpg", [INSULATOR]),
            ("c.jpg", [INSULATOR]),
        ]
        write_csv(raw, rows)
        reasons = {
            "unusable object": 1,
            MERGED: 2,
            "duplicate row": 2,
            UNREAD: 1,
            "missing photograph": 1,
        }
    assert left_out_of(build(raw)) == reasons


def left_out_of(manifest: dict[str, Any]) -> dict[str, int]:
    """Return the objects of all classes that were left out, by reason."""
    left_out: dict[str, int] = {}
    for facts in manifest["account"].values():
        left_out |= {
            reason: left_out.get(reason, 0) + number for reason, number in facts["left_out"].items()
        }
    return left_out


def test_the_table_has_twelve_lines_at_most_and_names_what_is_odd_with_its_remedy(
    tmp_path: Path,
) -> None:
    names = ["wire", "cap", "7", *(f"kind {number}" for number in range(30))]
    contents: dict[str, bytes | str] = {"classes.txt": "\n".join(names)}
    for number in range(4):
        lines = [TEXT.splitlines()[0], "2 .5 .5 .2 .2", "40 .1 .1 .2 .2"][: 3 if number < 3 else 1]
        split = "val" if number == 3 else "train"
        contents |= {
            f"{split}/{number}.jpg": photo(shade=40 * number),
            f"{split}/{number}.txt": "\n".join(lines),
        }
    manifest = build(
        files(tmp_path / "raw", contents), keep_unusable=True, split_by="hash", val_fraction=0.9
    )
    lines = account_lines(manifest, {"wire": "30 x 9.0"}, 6.0)
    said = [" ".join(line.split()) for line in lines]
    assert said[0] == "class named by source written val photos size at 640 px drawn as"
    in_val = manifest["counts"]["objects"]["wire"]["val"]
    assert said[2] == f"wire classes.txt: 0 4 4 {in_val} 4 30 x 9.0 polygon"
    assert said[3] == "cap classes.txt: 1 0 0 0 0 - ! no object"
    assert said[4].startswith("7 classes.txt: 2 3 3 ")
    assert said[4].endswith("box ! a number as a name ! boxes")
    assert (
        said[11]
        == "… and 25 more classes: 3 objects in the source, 0 written; all in manifest.json"
    )
    assert said[5] == "kind 0 classes.txt: 3 0 0 0 0 - ! no object ! differs only by a number"
    assert said[12] == "in the source and not written: 3 objects: unusable object 3"
    odd = {line.split(":")[0]: line for line in said[13:]}
    in_yaml = (tmp_path / "processed" / "dataset.yaml").read_text().splitlines().index(
        "  2: '7'"
    ) + 1
    assert odd["! a number as a name"].endswith(f"; until the next parse in dataset.yaml:{in_yaml}")
    assert odd["! no object"].endswith("leave it out: --classes wire 7")
    assert {
        "! a number as a name",
        "! boxes",
        "! folder not used as a split",
        "! differs only by a number",
    } <= odd.keys()


def test_the_picture_shows_every_class() -> None:
    photos = [
        Photo(Path(f"{number}"), np.array([number % 2, 2 + number // 90]), [])
        for number in range(100)
    ]
    for number in (20, 55):
        photos[number] = Photo(Path(f"{number}"), np.array([number]), [])
    shown = choose_photos(photos)
    assert len(shown) == 12
    assert {one for photo in shown for one in photo.class_ids.tolist()} == {0, 1, 2, 3, 20, 55}
