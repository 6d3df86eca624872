"""CVAT's XML, VIA's JSON, RSML and mask PNGs become the data set that YOLO's folders become, and
what is foreign is named.
"""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.prepare.parsing import test_other_tools as core
from tests.prepare.parsing import test_split_folders
from tests.prepare.parsing.raw_folder import photo
from tests.prepare.parsing.test_account import left_out_of
from tests.prepare.parsing.test_other_tools import BACKGROUND, of_coco
from tests.prepare.parsing.tool_folder import (
    BOX,
    HEIGHT,
    PHOTO,
    STRIP,
    WIDTH,
    annotation,
    box_of,
    build,
    files,
    labels_of,
    mask,
    png,
    texts_of,
)
from yolo_seg_ddp.extras.labels.cvat import CvatFile
from yolo_seg_ddp.extras.labels.label_studio import OTHER_ANNOTATION
from yolo_seg_ddp.extras.labels.mask_images import STRAY, MaskFile
from yolo_seg_ddp.extras.labels.rsml import RsmlFile
from yolo_seg_ddp.extras.labels.tests.test_labelme import shape as labelme_shape
from yolo_seg_ddp.extras.labels.tests.test_labelme import write as write_labelme
from yolo_seg_ddp.extras.labels.tests.test_masks import DOTS, ONE, TWO, WHITE, several
from yolo_seg_ddp.extras.labels.tests.tool_files import (
    POLE,
    REGIONS,
    WIRE,
    cvat,
    region,
    shape,
    task,
    via,
    via_region,
)
from yolo_seg_ddp.extras.labels.via import ViaFile
from yolo_seg_ddp.prepare.parsing.account import MERGED, account_lines
from yolo_seg_ddp.prepare.parsing.formats import find_format
from yolo_seg_ddp.prepare.parsing.label_csv import Problem
from yolo_seg_ddp.prepare.parsing.reading import choose_format, read_labels
from yolo_seg_ddp.prepare.parsing.rows import CLOSED, IGNORED, NO_OBJECT, UNUSED_SOURCE

CVAT, VIA, MASKS = CvatFile.format, ViaFile.format, MaskFile.format
EDGE = mask((100, 0, 150, 60))  # its pixels belong to no object
PAIR: dict[str, bytes | str] = {
    "SegmentationClass/a.png": png(mask(BOX, value=1) + mask(STRIP, value=2) + EDGE),
    "SegmentationObject/a.png": png(mask(BOX, value=7) + mask(STRIP, value=3) + EDGE),
}
COLOURED: dict[str, bytes | str] = {  # CVAT draws both masks in colours
    "SegmentationClass/a.png": png(np.stack([mask(BOX), mask(STRIP), mask()], axis=2)),
    "SegmentationObject/a.png": png(
        np.stack([mask(BOX, value=64), mask(), mask(STRIP, value=64)], axis=2)
    ),
}
LABELMAP = "# label:color_rgb:parts:actions\nbackground:0,0,0::\npole:0,0,255::\nwire:0,255,0::\n"
# The pole's two halves touch at a corner; the wire has two parts.
HALVES = mask((30, 20, 45, 35), (45, 35, 60, 50), value=1)
TWO_PARTS = mask((*STRIP[:2], 40, 84), (60, 76, 140, 84))
RLE = shape("mask", "pole", rle="0, 900", left=30, top=20, width=30, height=30)
FOLDERS: dict[str, tuple[str, dict[str, bytes | str]]] = {
    "CVAT for images": (CVAT, {"annotations.xml": cvat(POLE, WIRE), "images/sub/a.jpg": PHOTO}),
    "CVAT, a mask": (CVAT, {"annotations.xml": cvat(RLE, WIRE), "sub/a.jpg": PHOTO}),
    "VIA 2, a project": (
        VIA,
        {"a.json": via(REGIONS, _via_settings={}, _via_attributes={}), "a.jpg": PHOTO},
    ),
    "VIA 1, an export": (
        VIA,
        {"train/via.json": via({"0": REGIONS[0], "1": REGIONS[1]}), "train/a.jpg": PHOTO},
    ),
    "Pascal VOC of LabelMe": (
        MASKS,
        PAIR
        | {
            "class_names.txt": "_background_\npole\nwire\n",
            "JPEGImages/a.jpg": PHOTO,
            "SegmentationClassVisualization/a.jpg": PHOTO,
        },
    ),
    "Pascal VOC of CVAT": (MASKS, COLOURED | {"labelmap.txt": LABELMAP, "JPEGImages/a.jpg": PHOTO}),
    "a mask per class": (
        MASKS,
        {
            "images/a.jpg": PHOTO,
            "masks/pole/a.png": png(mask(BOX)),
            "masks/wire/a.png": png(mask(STRIP)),
        },
    ),
    "a mask per object": (
        MASKS,
        {"a.jpg": PHOTO, "a_pole_1.png": png(mask(BOX)), "a_wire_12.png": png(TWO_PARTS)},
    ),
    "indices with a list": (
        MASKS,
        {
            "images/a.jpg": PHOTO,
            "masks/a.png": png(HALVES + mask(STRIP, value=2) + EDGE),
            "classes.txt": "background\npole\nwire",
        },
    ),
}


def test_the_shapes_of_cvat_via_and_labelme(tmp_path: Path) -> None:
    shapes = [
        shape("box", "pole", xtl=30, ytl=20, xbr=60, ybr=50, rotation="0.0"),
        shape("box", "pole", xtl=20, ytl=30, xbr=60, ybr=40, rotation="90.0"),
        shape("ellipse", "pole", cx=75, cy=45, rx=30, ry=20, rotation="90.0"),
    ]
    regions = [
        via_region("pole", name="rect", x=30, y=20, width=30, height=30),
        via_region("pole", name="rect", x=35, y=15, width=10, height=40),
        via_region("pole", name="ellipse", cx=75, cy=45, rx=30, ry=20, theta=np.pi / 2),
        via_region("pole", name="circle", cx=75, cy=45, r=20),
    ]
    grouped, apart = (
        [
            shape("polygon", "pole", points=f"{x},20;{x + 30},20;{x + 30},50;{x},50", group_id=n)
            for x in (30, 70)
        ]
        for n in (7, 0)  # 0: none
    )
    octagon = {"label": "pole", "shape_type": "mask", "points": [[30, 20], [59, 49]]}
    octagon["mask"] = base64.b64encode(png(np.full((30, 30), 255, np.uint8))).decode()
    rectangle = {"label": "pole", "shape_type": "rectangle", "points": [[60, 50], [30, 20]]}
    circle = {"label": "pole", "shape_type": "circle", "points": [[50, 40], [50, 60]]}
    ignored = {"label": "__ignore__", "points": [[1, 1], [9, 1], [9, 9]]}
    cases: list[tuple[Callable[[Path], Path], list[tuple[int, int, int, int]]]] = [
        (
            lambda raw: files(raw, {"a.xml": cvat(*shapes), "a.jpg": PHOTO}),
            [BOX, (35, 15, 45, 55), (55, 15, 95, 75)],
        ),
        (
            lambda raw: files(raw, {"a.json": via(regions), "a.jpg": PHOTO}),
            [BOX, (35, 15, 45, 55), (55, 15, 95, 75), (55, 25, 95, 65)],
        ),
        (lambda raw: files(raw, {"a.xml": cvat(*grouped), "a.jpg": PHOTO}), [(30, 20, 100, 50)]),
        (lambda raw: files(raw, {"a.xml": cvat(*apart), "a.jpg": PHOTO}), [BOX, (70, 20, 100, 50)]),
        (
            lambda raw: write_labelme(raw, "a.json", [octagon, rectangle, circle, ignored]),
            [BOX, BOX, (30, 20, 70, 60)],
        ),
    ]
    for number, (write, boxes) in enumerate(cases):
        raw = write(tmp_path / str(number) / "raw")
        manifest = build(raw)
        assert [box_of(polygon) for _, polygon in labels_of(raw.parent / "processed")] == boxes
        assert not texts_of(manifest)


def test_slanted_shapes_turn_clockwise(tmp_path: Path) -> None:
    ellipse, angle = {"cx": 60, "cy": 40, "rx": 20, "ry": 5}, np.pi / 6
    box = shape("box", "pole", xtl=40, ytl=35, xbr=80, ybr=45, rotation="30.0")
    for name, content in (
        ("a.xml", cvat(box, shape("ellipse", "pole", rotation="30.0", **ellipse))),
        ("a.json", via([via_region("pole", name="ellipse", theta=angle, **ellipse)])),
    ):
        raw = files(tmp_path / name / "raw", {name: content, "a.jpg": PHOTO})
        build(raw)
        for _, polygon in labels_of(raw.parent / "processed"):
            points = polygon * (WIDTH, HEIGHT) - (60, 40)
            along, across = (
                points @ (np.cos(angle), np.sin(angle)),
                points @ (-np.sin(angle), np.cos(angle)),
            )
            assert (np.ptp(along), np.ptp(across)) == pytest.approx((40, 10), abs=0.3)


def attributes(box: tuple[int, int, int, int], **values: object) -> dict[str, Any]:
    left, top, right, bottom = box
    shape_of = {"name": "rect", "x": left, "y": top, "width": right - left, "height": bottom - top}
    return {"shape_attributes": shape_of, "region_attributes": values}


OTHER_BOX = (100, 10, 140, 40)
LOOP = [(30, 20), (60, 20), (60, 50), (30, 50), (30, 22)]  # a drawn line whose ends are 2 px apart
THERE_AND_BACK = [(10, 80), (140, 80), (140, 81), (10, 81)]
SAID = "a closed polyline, read as an outline"


def via_line(points: list[tuple[int, int]]) -> dict[str, bytes | str]:
    x, y = zip(*points, strict=True)
    return {
        "a.json": via([via_region("pole", name="polyline", all_points_x=[*x], all_points_y=[*y])])
    }


UNDERSTOOD: list[tuple[dict[str, bytes | str], dict[str, tuple[int, int, int, int]], str]] = [
    (
        {"a.json": via([attributes(BOX, label=3), attributes(OTHER_BOX, label=7.0)])},
        {"3": BOX, "7": OTHER_BOX},
        "",
    ),
    (
        {
            "a.json": via(
                [attributes(BOX, kind="pole", id=12), attributes(OTHER_BOX, kind="wire", id=1)]
            )
        },
        {"pole": BOX, "wire": OTHER_BOX},
        "",
    ),
    ({"a.json": via([attributes(BOX, label=["pole"])])}, {"pole": BOX}, ""),
    (via_line(LOOP), {"pole": BOX}, SAID),
    (
        {
            "a.json": json.dumps(
                {
                    "imagePath": "a.jpg",
                    "shapes": [{"label": "pole", "shape_type": "linestrip", "points": LOOP}],
                }
            )
        },
        {"pole": BOX},
        SAID,
    ),
    (
        {
            "a.xml": cvat(
                shape("polyline", "pole", points=";".join(f"{x},{y}" for x, y in LOOP)), WIRE
            )
        },
        {"pole": BOX, "wire": (10, 77, 140, 83)},
        SAID,
    ),
    (via_line(THERE_AND_BACK), {"pole": (10, 77, 143, 84)}, ""),
    (
        of_coco(BACKGROUND[1:], annotation(1, 1, [])) | {"masks/a.png": png(mask(BOX))},
        {"pole": BOX},
        "masks/a.png: mask PNGs: not used, the labels are read from COCO file",
    ),
    (
        of_coco(BACKGROUND[1:], annotation(1, 1, [])) | {"b.xml": cvat(POLE)},
        {"pole": BOX},
        "b.xml: CVAT for images: not used",
    ),
]


BAD_SHAPES = [
    (shape("mask", "pole", rle="1, 2", left=0, top=0, width=9, height=9), "do not add up"),
    (shape("mask", "pole", rle="41, -1, 41", left=0, top=0, width=9, height=9), "do not add up"),
    (
        shape("mask", "pole", rle="0, 81", left=149, top=0, width=9, height=9),
        "that the image does not hold",
    ),
    (
        shape("mask", "pole", rle="0, 81", left=0, top=89, width=9, height=9),
        "that the image does not hold",
    ),
    (
        shape("mask", "pole", rle="0, x", left=0, top=0, width=9, height=9),
        "`rle` is not a list of whole numbers",
    ),
    (shape("polygon", "pole", points="1,2;nan,4;5,6"), "nan is not a finite number"),
    (shape("box", "pole", xtl=1), "no attribute 'ytl'"),
    (shape("ellipse", "pole", cx=1, cy=1, rx=0, ry=1), "both must be above 0"),
    (shape("skeleton", "pole"), "is not read"),
    (shape("polygon", "", points="1,1;2,2;3,1"), "has no label"),
]
BAD_REGIONS = [
    (
        via_region("pole", name="polygon", all_points_x=[1], all_points_y=[1, 2]),
        "are not lists of the same length",
    ),
    (via_region("pole", name="circle", cx=1, cy=1, r="1"), "1 is not a finite number"),
    (via_region("pole", name="rect", x=1), "no 'y'"),
    (via_region("pole", name="point", cx=1, cy=1), "point is not read"),
    (via_region("", name="rect"), "has no `class`"),
]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
DAMAGED_MASKS = [
    ("a_wire.png", png(mask(BOX))[:-30], "damaged: truncated or corrupt"),
    ("masks/a.png", png(mask(BOX))[:60], "damaged: truncated or corrupt"),
    ("masks/wire/a.png", b"", "damaged, or not a PNG"),
    ("a_mask.png", photo(WIDTH, HEIGHT), "damaged, or not a PNG"),
    ("a_label.png", LFS, "a Git LFS pointer, not the mask: run git lfs pull"),
]


BAD: list[Any] = [
    *(({"a.xml": cvat(POLE, bad)}, reason) for bad, reason in BAD_SHAPES),
    *(({"a.json": via([REGIONS[0], bad])}, reason) for bad, reason in BAD_REGIONS),
    *(
        ({"a_pole.png": png(mask(BOX)), name: data}, f"{name.split('/')[-1]}: {reason}")
        for name, data, reason in DAMAGED_MASKS
    ),
]


def rsml(*roots: str) -> str:
    return (
        '<?xml version="1.0"?><rsml><metadata/><scene><plant '
        f'ID="1">{"".join(roots)}</plant></scene></rsml>'
    )


def root(points: str, inner: str = "", label: str = "root 7") -> str:
    pairs = (pair.split(",") for pair in points.split())
    drawn = "".join(f'<point x="{x}" y="{y}"/>' for x, y in pairs)
    return (
        f'<root ID="1.1" label="{label}"><geometry><polyline>{drawn}</polyline></geometry>{inner}</'
        "root>"
    )


DEEP_RSML = "<rsml>" * 40 + "</rsml>" * 40
SMALL = [
    {
        "image": "/data/upload/1/a.jpg",
        "id": 1,
        "label": [{"points": [[1, 1], [9, 1], [9, 9]]}],
        "lead_time": 3.2,
    }
]
# Files beside a.jpg that hold no labels which can be read, or of which objects are lost, and what
# the message says.
FOREIGN: list[tuple[dict[str, bytes | str], str]] = [
    (
        {"a.xml": cvat(head='<!DOCTYPE annotations [<!ENTITY a "aaaa">]>')},
        "it declares a document type",
    ),
    ({"a.xml": cvat()[:-30]}, "not CVAT's XML: "),
    (
        {"a.xml": "<annotations>" + "<a>" * 40 + "</a>" * 40 + "</annotations>"},
        "nested deeper than 32 levels",
    ),
    (
        {"a.xml": "<annotations><track/></annotations>"},
        "it holds tracks of a video; export as CVAT for images 1.1",
    ),
    (
        {"a.json": via([{"region_attributes": {"a": "1", "b": "2"}}])},
        "which attribute is the class? Found a, b",
    ),
    ({"a.json": via([attributes(BOX, wire=True)])}, "hold neither texts nor numbers: wire"),
    ({"a.json": '{"_via_settings": {}, "_via_img_metadata": {}}'}, "no photographs of VIA 2"),
    ({"a_mask.png": b"\x89PNG\r\n\x1a\n"}, "a_mask.png: damaged: truncated or corrupt"),
    ({"a.json": json.dumps(SMALL)}, "export as JSON, not as JSON-MIN"),
    (
        {
            "a.json": json.dumps(
                [
                    {"data": {}, "annotations": [], "predictions": [{}]},
                    {"data": {}, "annotations": []},
                ]
            )
        },
        "no task has an annotation, 1 with only predictions and 1 with nothing: submit them",
    ),
    ({"a.json": json.dumps(SMALL), "b.json": '[{"data": {}}]'}, "which file holds the labels"),
    (
        {"a.json": '{"shapes": [], "imagePath": "a.jpg"}'},
        "LabelMe's files of 1 photograph, but without any object",
    ),
    (
        {"a_pole.png": png(mask(BOX)), "a_wire.png": png(mask(BOX)[:, 50:])},
        "drawn on an image of 100x90 pixels",
    ),
    (
        {
            "a.jpg___save.png": png(mask(BOX)),
            "a.jpg___pixel.json": '{"instances": [{"className": "pole"}]}',
        },
        "no list names the classes of the masks, but a.jpg___pixel.json may: is probably "
        "SuperAnnotate's",
    ),
    (
        {
            "a_seg.png": png(np.stack([mask(BOX)] * 2 + [mask()], axis=2)),
            "a_atr.txt": "001 # 0 # 0 # wall # wall",
        },
        "but a_atr.txt may",
    ),
    ({"a.rsml": rsml()[:-9]}, "not RSML: "),
    (
        {"a.rsml": "<rsml><root><geometry><point x='1'/></geometry></root></rsml>"},
        "a point has no 'y'",
    ),
    ({"a.rsml": '<!DOCTYPE rsml [<!ENTITY a "b">]><rsml>&a;</rsml>'}, "document type"),
    ({"a.rsml": DEEP_RSML}, "nested too deeply"),
    (
        {"a.json": via([*REGIONS, via_region("cap", name="point", cx=1)])},
        "no object of cap can be used",
    ),
]


def labelme(*shapes: dict[str, Any]) -> dict[str, bytes | str]:
    return {"a.json": json.dumps({"imagePath": "a.jpg", "shapes": [labelme_shape(), *shapes]})}


FLAG = '<attribute name="occluded">false</attribute><attribute name="Ignore"> true</attribute>'
FLAGGED = f"{shape('polygon', 'pole', points='1,1;9,1;9,9')[:-2]}>{FLAG}</polygon>"
CHOICE = [
    region(1, "polygonlabels", points=[[9, 9], [30, 9], [30, 30]]),
    region(2, "polygonlabels", points=[[9, 9], [30, 9], [30, 30]]),
]
CHOICE.append({"id": "r2", "type": "choices", "value": {"choices": ["ignore"]}})
IGNORES: list[tuple[dict[str, bytes | str], dict[str, int]]] = [
    (labelme(labelme_shape(label="__ignore__")), {"all classes": 1}),
    (labelme(labelme_shape() | {"flags": {"difficult": True}}), {"pole": 1}),
    ({"a.xml": cvat(POLE, FLAGGED)}, {"pole": 1}),
    ({"a.json": json.dumps([task(1, "a.jpg", CHOICE)])}, {"pole": 1}),
    (
        {
            "a.json": via(
                [
                    attributes(BOX, kind="pole", ignore="no"),
                    attributes(BOX, kind="pole", ignore="yes"),
                ]
            )
        },
        {"pole": 1},
    ),
]
CHECKS: dict[Any, list[Any]] = {
    core.test_what_nobody_judges_is_a_region_to_ignore: IGNORES,
    core.assert_same_data_set: [*FOLDERS.values()],
    core.test_what_a_tool_writes_in_another_way_keeps_its_meaning: UNDERSTOOD,
    core.test_a_bad_object_is_named_and_the_others_are_kept: BAD,
    core.test_a_foreign_folder_gets_one_line: [
        (contents | {"a.jpg": PHOTO}, reason) for contents, reason in FOREIGN
    ],
}


@pytest.mark.parametrize(
    ("check", "case"), [(check, case) for check, cases in CHECKS.items() for case in cases]
)
def test_what_holds_for_the_formats_of_the_core_holds_for_these(
    tmp_path: Path, check: Any, case: tuple[Any, ...]
) -> None:
    check(tmp_path, *case)


def test_boxes_without_outlines_are_told(tmp_path: Path) -> None:
    region_of_via = via_region("pole", name="rect", x=30, y=20, width=30, height=30)
    rectangle = {"label": "pole", "shape_type": "rectangle", "points": [[30, 20], [60, 50]]}
    for folder in (
        files(tmp_path / "via", {"a.json": via([region_of_via]), "a.jpg": PHOTO}),
        write_labelme(tmp_path / "labelme", "a.json", [rectangle]),
    ):
        assert (
            "! boxes: pole: 1 object has a box and no outline"
            in account_lines(build(folder), {}, 6.0)[-1]
        )


def test_files_of_another_format_beside_the_labels_are_named_and_left_out(tmp_path: Path) -> None:
    contents: dict[str, bytes | str] = {
        "jsons/a.json": via([via_region("pole", name="rect", x=30, y=20, width=30, height=30)]),
        "jsons/coco.json": '{"images": [], "annotations": []}',
        "jsons/empty.json": '{"_via_settings": {}, "_via_img_metadata": {}}',
        "a.jpg": PHOTO,
    }
    problems: list[Problem] = []
    raw = files(tmp_path / "raw", contents)
    labels = read_labels(raw, choose_format(raw), False, problems, False)
    assert (labels.title, labels.class_names, [*labels.rows]) == (
        "VGG Image Annotator's file",
        ("pole",),
        ["a.jpg"],
    )
    assert [(problem.place, problem.text[:9]) for problem in problems] == [
        ("empty.json", "no photog"),
        ("jsons/coco.json", "COCO file"),
    ]


def test_roots_of_rsml_are_lines_whose_class_is_their_kind_or_order(tmp_path: Path) -> None:
    """Nested roots, a label that is a kind, points of a function, a root of one point, and two
    photographs.
    """
    lateral = root("60,30 90,60")
    widths = '<functions><function><sample value="9"/></function></functions>'
    first = rsml(
        root("20,20 130,40", lateral + widths), root("10,80 140,80", label="Seminal"), root("5,5")
    )
    contents: dict[str, bytes | str] = {
        "rsml/a.rsml": first,
        "imgs/a.jpg": PHOTO,
        "rsml/b.rsml": rsml(root("20,20 130,40")),
        "imgs/b.jpg": PHOTO,
    }
    raw = files(tmp_path / "raw", contents)
    assert find_format(raw) == RsmlFile.format
    manifest = build(raw, line_width_px=4.0)
    assert manifest["classes"] == ["lateral", "primary", "seminal"]
    found = {
        class_id: box_of(polygon)
        for class_id, polygon in labels_of(tmp_path / "processed", num_classes=3)
    }
    assert found[2] == pytest.approx((10, 78, 140, 82), abs=2)
    assert found[1] == pytest.approx((20, 18, 130, 42), abs=3)
    assert found[0] == pytest.approx((60, 30, 90, 60), abs=3)
    assert len(labels_of(tmp_path / "processed", "b", num_classes=3)) == 1
    assert "root 4 (primary)" in texts_of(manifest)


def test_a_photograph_whose_only_objects_are_unusable_is_no_background(tmp_path: Path) -> None:
    entries: dict[str, dict[str, Any]] = {
        name: {"filename": name, "regions": REGIONS} for name in ("a.jpg", "b.jpg", "c.jpg")
    }
    entries["b.jpg"]["regions"] = "[{a text}]"
    entries["c.jpg"]["regions"] = ["x"]
    contents: dict[str, bytes | str] = {"a.json": json.dumps(entries)}
    contents |= {name: photo(WIDTH, HEIGHT, shade=60 * n) for n, name in enumerate(entries)}
    manifest = build(files(tmp_path / "raw", contents))
    assert [item["file"] for item in manifest["photographs"]] == ["a.jpg"]
    assert "b.jpg is skipped" in texts_of(manifest)
    assert "c.jpg: its only 1 object cannot be used; left out" in texts_of(manifest)
    kept = build(tmp_path / "raw", keep_unusable=True)["photographs"]
    assert [(item["file"], item["objects"]) for item in kept] == [
        ("a.jpg", {"pole": 1, "wire": 1}),
        ("c.jpg", {}),
    ]


def subsets(**boxes: tuple[int, int, int, int]) -> str:
    """Return CVAT's file of a photograph a.jpg in each subset, with a pole."""
    images = ""
    for subset, (left, top, right, bottom) in boxes.items():
        pole = shape("Box", "pole", xtl=left, ytl=top, xbr=right, ybr=bottom)
        images += (
            f'<image id="0" name="a.jpg" subset="{subset}" width="{WIDTH}" '
            f'height="{HEIGHT}">{pole}</image>'
        )
    return f"<annotations>{images}</annotations>"


@pytest.mark.parametrize(
    "places", [("images/Train", "images/Validation"), ("train/images", "val/images")]
)
def test_an_object_lies_on_the_photograph_of_its_own_subset(
    tmp_path: Path, places: tuple[str, str]
) -> None:
    contents = {"a.xml": subsets(Train=BOX, Validation=test_split_folders.OTHER_BOX)}
    test_split_folders.test_an_object_lies_on_the_photograph_of_its_own_subset(
        tmp_path, contents, places
    )


TRIANGLE = [[10, 10], [60, 10], [60, 80]]
TASKS = [
    task(1, "a.jpg", [region(1, "polygonlabels", points=TRIANGLE), region(2, "ellipselabels", x=1)])
]
TASKS[0]["annotations"].append(
    {"result": [region(3, "brushlabels", rle=[])] * 2, "was_cancelled": True}
)
GROUPED = [shape("polygon", "pole", points="30,20;60,20;60,50", group_id=7)] * 3
PARTS = [
    {**labelme_shape(label=label), "group_id": 1}
    for label in ("pole", "pole", "__ignore__", "pole")
]
CLOSED_LOOP = shape("polyline", "pole", points="30,20;60,20;60,50;30,50;30,21", group_id=7)
# the last has no class in PAIR
THREE = png(mask(BOX, value=7) + mask(STRIP, value=3) + mask((80, 5, 90, 15), value=9))
# Files, and what was left out by reason, of all classes together.
CASES: dict[str, tuple[dict[str, bytes | str], dict[str, int]]] = {
    "Label Studio": ({"a.json": json.dumps(TASKS)}, {OTHER_ANNOTATION: 2, "unusable object": 1}),
    "VIA": (
        {"a.json": via([*REGIONS, via_region("pole", name="point"), {}])},
        {"unusable object": 2},
    ),
    "CVAT": (
        {"a.xml": cvat(POLE, WIRE, *GROUPED, shape("points", ""))},
        {MERGED: 2, "unusable object": 1},
    ),
    "RSML": ({"a.rsml": rsml(root("20,20 130,40"), root("5,5"))}, {"unusable object": 1}),
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
    "masks": (
        {**PAIR, "SegmentationObject/a.png": THREE, "JPEGImages/a.jpg": PHOTO},
        {"unusable object": 1},
    ),
}


@pytest.mark.parametrize("name", [*CASES, "LabelMe"])
def test_an_object_of_the_source_is_written_or_left_out_for_a_reason(
    tmp_path: Path, name: str
) -> None:
    contents, reasons = CASES.get(name, ({}, {}))
    raw = files(tmp_path / "raw", {**contents, "a.jpg": PHOTO})
    if name == "LabelMe":
        reasons = {IGNORED: 1, MERGED: 2}
        write_labelme(raw, "a.json", PARTS)
    assert left_out_of(build(raw)) == reasons


def test_a_closed_polyline_counts_as_an_outline_also_as_a_part(tmp_path: Path) -> None:
    """The account called it a strip."""
    manifest = build(
        files(
            tmp_path / "raw",
            {"a.xml": cvat(CLOSED_LOOP, CLOSED_LOOP, GROUPED[0], WIRE), "a.jpg": PHOTO},
        )
    )
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
    lines = account_lines(
        build(files(tmp_path / "b" / "raw", {"a.xml": cvat(POLE, box), "a.jpg": PHOTO})), {}, 6.0
    )
    assert not [line for line in lines if line.startswith(("! none", "! boxes"))]


def test_a_class_in_one_photograph_is_marked(tmp_path: Path) -> None:
    raw = files(tmp_path / "raw", {"a.json": via(REGIONS), "a.jpg": PHOTO})
    files(raw, {"b.json": via(REGIONS[:1]).replace("a.jpg", "b.jpg"), "b.jpg": photo(shade=200)})
    (line,) = [line for line in account_lines(build(raw), {}, 8.0) if line.startswith("wire")]
    assert line.endswith("polyline as a strip of 8 px  ! in 1 photograph")


VOC_BOX = "<bndbox><xmin>30</xmin><ymin>20</ymin><xmax>60</xmax><ymax>50</ymax></bndbox>"
VOC_PART = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"


def voc(*objects: str, size: str = "<size><width>150</width><height>90</height></size>") -> str:
    names = "<folder>JPEGImages</folder><filename>a.jpg</filename>"
    return f"<annotation>{names}{size}{''.join(objects)}</annotation>"


def voc_object(name: str, more: str = VOC_BOX) -> str:
    return f"<object><name>{name}</name>{more}</object>"


LABEL_ME_BOX = {"label": "pole", "shape_type": "rectangle", "points": [[60, 20], [30, 50]]}
VIA_BOX = via_region("pole", name="rect", x=30, y=20, width=30, height=30)
LABEL_STUDIO_BOX: dict[str, Any] = {
    "x": 20,
    "y": 200 / 9,
    "width": 20,
    "height": 300 / 9,
    "rotation": 0,
}
BOXES: dict[str, dict[str, bytes | str]] = {
    "CVAT": {"a.xml": cvat(shape("box", "pole", xtl=30, ytl=20, xbr=60, ybr=50))},
    "VIA": {"a.json": via({"0": VIA_BOX})},
    "LabelMe": {"a.json": json.dumps({"imagePath": "a.jpg", "shapes": [LABEL_ME_BOX]})},
    "Label Studio": {
        "a.json": json.dumps([task(1, "a.jpg", [region(1, "rectanglelabels", **LABEL_STUDIO_BOX)])])
    },
    "VOC": {"Annotations/a.xml": voc(voc_object("pole", VOC_BOX + VOC_PART))},
    "VOC without a size": {"a.xml": voc(voc_object("pole"), size="")},
}


@pytest.mark.parametrize("tool", BOXES)
def test_a_box_of_a_tool_is_written_as_a_box(tmp_path: Path, tool: str) -> None:
    raw = files(tmp_path / "raw", {**BOXES[tool], "a.jpg": PHOTO})
    build(raw)
    (file,) = (tmp_path / "processed").glob("*/labels/a.txt")
    assert file.read_text() == "0 0.300000 0.388889 0.200000 0.333333\n"


def test_what_voc_cannot_say_is_told_and_the_rest_is_read(tmp_path: Path) -> None:
    difficult = voc_object("pole", f"<difficult>1</difficult>{VOC_BOX}")
    flat = voc_object("pole", VOC_BOX.replace("60", "30"))
    endless = voc_object("pole", VOC_BOX.replace("60", "inf"))
    contents: dict[str, bytes | str] = {
        "a.xml": voc(
            voc_object("pole"), difficult, flat, endless, voc_object(""), voc_object("pole", "")
        ),
        "b.xml": "<annotation>",
        "c.xml": "<!DOCTYPE a><annotation/>",
        "d.xml": "<gdal/>",
        "a.jpg": PHOTO,
    }
    manifest = build(files(tmp_path / "raw", contents), keep_unusable=True)
    assert manifest["account"]["pole"]["written"] == 1
    assert manifest["account"]["pole"]["left_out"] == {
        "region to ignore": 1,
        "unusable object": 3,
    }
    texts = texts_of(manifest)
    for text in (
        "an object has no name",
        "has no 'annotation/object/bndbox/xmin'",
        "not a finite",
        "DOCTYPE",
    ):
        assert text in texts
