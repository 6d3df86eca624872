"""Label Studio's export as JSON becomes the data set that EPRI's CSV becomes."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.predict.test_annotation_files import MASKS, assert_masks_survive
from tests.prepare.parsing.raw_folder import photo
from tests.prepare.parsing.tool_folder import (
    HEIGHT,
    WIDTH,
    build,
    drawn,
    iou,
    labels_of,
    texts_of,
    whole,
    write_folder,
)
from yolo_seg_ddp.data.mask_rings import join_rings
from yolo_seg_ddp.extras.labels.label_studio import decode_brush
from yolo_seg_ddp.extras.labels.tests.tool_files import brush, region, task
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.prepare.parsing.coco import RunLengthError

SIZE = (150, 90)  # of the photographs
TRIANGLE = [[10, 10], [60, 10], [60, 80]]


def test_polygons_and_turned_boxes_are_in_percent(tmp_path: Path) -> None:
    box: dict[str, Any] = {"x": 50.0, "y": 50.0, "width": 20.0, "height": 20.0, "rotation": 90}
    regions = [
        region(1, "polygonlabels", points=TRIANGLE, closed=True),
        region(2, "rectanglelabels", **box),
    ]
    build(write_folder(tmp_path / "raw", [task(1, "a.jpg", regions)]))
    (_, triangle), (_, turned) = labels_of(tmp_path / "processed")
    assert {tuple(point) for point in (triangle * 100).round(3).tolist()} == {
        tuple(point) for point in TRIANGLE
    }
    x, y = (turned * SIZE).T  # 30 x 18 pixels, turned clockwise about (75, 45)
    assert (x.min(), x.max(), y.min(), y.max()) == pytest.approx((57, 75, 45, 75), abs=0.01)


def test_a_polygon_whose_bridges_join_parts_and_holes_keeps_them(tmp_path: Path) -> None:
    outer = np.array([(10, 10), (70, 10), (70, 70), (10, 70)], float)
    hole, other = outer[::-1] / 2 + 10, outer / 4 + (75.5, 20.5)
    points = join_rings([outer, hole, other]) / SIZE * 100
    build(
        write_folder(
            tmp_path / "raw",
            [task(1, "a.jpg", [region(1, "polygonlabels", points=points.tolist())])],
        )
    )
    ((_, polygon),) = labels_of(tmp_path / "processed")
    assert drawn(polygon).mask.sum() == 60 * 60 - 30 * 30 + 15 * 15


@pytest.mark.parametrize(
    ("address", "file"),
    [
        ("/data/upload/12/0a1b2c3d-1_3.JPG", "1 (3).JPG"),
        ("/data/upload/12/0a1b2c3d-1_3.JPG", "images/0a1b2c3d-1_3.JPG"),
        ("/data/local-files/?d=tower%20a/1%20(3).JPG", "tower a/1 (3).JPG"),
        ("s3://bucket/key/with%20sign/1.jpg", "images/1.jpg"),
        ("gs://bucket/1.jpg", "deep/er/1.jpg"),
        ("https://example.com/photos/1.jpg?X-Amz-Signature=a%2Fb.jpg", "photos/1.jpg"),
        ("C:\\photos\\1.jpg", "photos/1.jpg"),
    ],
)
def test_addresses_of_all_storages_find_the_photograph(
    tmp_path: Path, address: str, file: str
) -> None:
    content = [task(1, address, [region(1, "polygonlabels", points=TRIANGLE)])]
    manifest = build(write_folder(tmp_path / "raw", content, (file, "images/other.jpg")))
    assert [found["source"] for found in manifest["photographs"]] == [file]


@pytest.mark.parametrize(
    "address",
    [
        "/data/local-files/?d=../../secret.jpg",
        "s3://b/../../secret.jpg",
        "/etc/passwd",
        "data:image/png;base64,AA",
        "http://[1/a.jpg",
    ],
)
def test_an_address_outside_the_folder_opens_nothing(tmp_path: Path, address: str) -> None:
    (tmp_path / "secret.jpg").write_bytes(photo())
    good = task(1, "a.jpg", [region(1, "polygonlabels", points=TRIANGLE)])
    bad = task(2, address, [region(1, "polygonlabels", points=TRIANGLE)])
    manifest = build(write_folder(tmp_path / "raw", [good, bad]))
    assert [found["file"] for found in manifest["photographs"]] == ["a.jpg"]
    assert sum(manifest["skipped"].values()) == 1 or address.endswith("a.jpg")


def test_the_best_annotation_of_a_task_is_used_and_the_others_are_counted(tmp_path: Path) -> None:
    def one(left: int, **more: Any) -> dict[str, Any]:
        points = [[left, 10], [left + 10, 10], [left + 10, 30]]
        return {
            "result": [region(1, "polygonlabels", points=points)],
            "was_cancelled": False,
            **more,
        }

    tasks = [
        {
            "id": 1,
            "data": {"img": "a.jpg", "text": "x"},
            "annotations": [one(10, updated_at="2024-02"), one(20, updated_at="2024-01")],
        },
        {
            "id": 2,
            "data": {"image": "b.jpg"},
            "annotations": [one(30, ground_truth=True), one(40, updated_at="2025")],
        },
        {
            "id": 3,
            "data": {"image": "c.jpg"},
            "annotations": [one(50), one(60, was_cancelled=True)],
        },
        {"id": 4, "data": {"image": "d.jpg"}, "annotations": [], "predictions": [one(70)]},
        {
            "id": 5,
            "data": {"image": "/image5"},
            "file_upload": "abcdef12-e.jpg",
            "completions": [{"result": []}],
        },
    ]
    manifest = build(write_folder(tmp_path / "raw", tasks, [f"{letter}.jpg" for letter in "abcde"]))
    lefts = {
        stem: [
            round(float(polygon[:, 0].min() * 100))
            for _, polygon in labels_of(tmp_path / "processed", stem, 1)
        ]
        for stem in "abce"
    }
    assert lefts == {"a": [10], "b": [30], "c": [50], "e": []}
    assert "task 1: 1 more annotations" in texts_of(manifest)
    assert "d.jpg: no row in export.json; skipped" in texts_of(manifest)
    assert len(manifest["problems"]) == 3


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (region(7, "polygonlabels", points=[[1, 2]]), "task 1 region r7 (pole): a polygon needs"),
        (
            region(7, "polygonlabels", points=[[1, 2], [3, float("inf")], [4, 5]]),
            "inf is not a finite number",
        ),
        (
            region(7, "polygonlabels", points=[[1e300, 2], [3, 4], [4, 5]]),
            "far outside any photograph",
        ),
        (
            region(7, "brushlabels", format="rle", rle=[1, 2]),
            "task 1 region r7 (pole): `rle` ends too early",
        ),
        (
            region(7, "ellipselabels", x=1, y=2, radiusX=3, radiusY=3),
            "ellipse is not read; draw a polygon",
        ),
        (region(7, "polygonlabels", points=TRIANGLE) | {"image_rotation": 90}, "turned by 90"),
        (region(7, "polygonlabels", points=TRIANGLE) | {"original_width": -3}, "image of -3x"),
        (region(7, "polygonlabels", label="", points=TRIANGLE), "task 1 region r7: has no label"),
        (region(7, "rectanglelabels", x=1, y=2, width=0, height=9), "box of width 0"),
        (region(7, "rectanglelabels", x=1), "has neither points, a box nor a brush mask"),
    ],
)
def test_a_bad_region_is_named_and_the_others_are_kept(
    tmp_path: Path, bad: dict[str, Any], reason: str
) -> None:
    choices = {
        "id": "r1",
        "type": "choices",
        "value": {"points": TRIANGLE, "choices": ["uncertain"]},
    }
    good = [region(1, "polygonlabels", points=TRIANGLE), choices, {"type": "relation"}]
    manifest = build(write_folder(tmp_path / "raw", [task(1, "a.jpg", [*good, bad])]))
    assert len(labels_of(tmp_path / "processed")) == 1
    (problem,) = manifest["problems"]
    assert problem["place"] == "export.json"
    assert reason in problem["text"]


@pytest.mark.parametrize(
    ("data", "regions", "found"),
    [
        ({"x": "a.jpg", "y": "b.jpg"}, [("x", None), ("y", None)], {"a.jpg": 1, "b.jpg": 1}),
        ({"x": "a.jpg", "y": "b.jpg"}, [("y", None)], {"b.jpg": 1}),
        ({"x": "a.jpg", "y": "b.jpg"}, [("x", None), ("tag", None)], {"a.jpg": 1, "b.jpg": 1}),
        ({"x": "a.jpg", "y": "b.jpg"}, [("tag", None)], {}),
        ({"pages": ["a.jpg", "b.jpg"]}, [("tag", 1), ("tag", 1)], {"a.jpg": 0, "b.jpg": 2}),
        ({"pages": ["a.jpg", "b.jpg"]}, [("tag", None)], {}),
        ({"image": "a.jpg"}, [("tag", None)], {"a.jpg": 1}),
    ],
)
def test_a_region_lies_on_the_picture_that_it_names_or_the_task_is_refused(
    tmp_path: Path, data: Any, regions: list[Any], found: dict[str, int]
) -> None:
    drawn_on = [
        region(1, "polygonlabels", points=TRIANGLE) | {"to_name": to, "item_index": index}
        for to, index in regions
    ]
    tasks = [
        task(1, "c.jpg", [region(1, "polygonlabels", points=TRIANGLE)] * 3),
        task(7, "", drawn_on, data=data),
    ]
    manifest = build(write_folder(tmp_path / "raw", tasks, ("a.jpg", "b.jpg", "c.jpg")))
    objects = {item["file"]: sum(item["objects"].values()) for item in manifest["photographs"]}
    assert objects == found | {"c.jpg": 3}
    assert ("task 7: shows 2 pictures" in texts_of(manifest)) is (not found)


def test_a_second_label_and_a_box_drawn_upwards_are_told_and_read(tmp_path: Path) -> None:
    box = region(1, "rectanglelabels", x=60, y=80, width=-40, height=-60)
    box["value"]["rectanglelabels"] = ["pole", "truck"]
    manifest = build(write_folder(tmp_path / "raw", [task(1, "a.jpg", [box])]))
    assert "task 1 region r1 (pole): has the labels pole, truck; the first is used" in texts_of(
        manifest
    )
    ((_, polygon),) = labels_of(tmp_path / "processed", num_classes=1)
    assert (polygon.min(axis=0), polygon.max(axis=0)) == (
        pytest.approx([0.2, 0.2]),
        pytest.approx([0.6, 0.8]),
    )


@pytest.mark.parametrize(
    "colour", [(0, 0, 0), (255, 255, 255), (10, 200, 30), (0, 0, 255), (0, 255, 255)]
)
@pytest.mark.parametrize("name", ["parts", "noise"])
def test_label_studios_brush_is_decoded_by_its_alpha(
    name: str, colour: tuple[int, int, int]
) -> None:
    bitmap, left, top = decode_brush(brush(MASKS[name], colour), (WIDTH, HEIGHT))
    assert (whole(Region(left, top, bitmap)) == MASKS[name]).all()


def test_brushes_of_gigapixels_take_no_memory() -> None:
    side, start_s = 100_000, time.process_time()
    with pytest.raises(RunLengthError, match="400 megapixels"):
        decode_brush([255] * 8, (side, side))
    bomb = [*(4 * 20_000 * 19_000).to_bytes(4, "big"), 0b00111_111, *[0xFF] * 40]
    with pytest.raises(RunLengthError, match="ends too early"):
        decode_brush(bomb, (20_000, 19_000))
    assert time.process_time() - start_s < 5


@pytest.mark.parametrize(
    "codes", ["text", [300] * 9, [0.5], [], [1, 2, 3], brush(MASKS["hole"])[:-40]]
)
def test_bad_brushes_are_refused(codes: Any) -> None:
    with pytest.raises(RunLengthError):
        decode_brush(codes, (WIDTH, HEIGHT))


def test_masks_survive_the_way_from_label_studio_through_yolo_back_to_it(tmp_path: Path) -> None:
    masks = list(MASKS.values())
    content = [
        task(
            1, "a.jpg", [region(n, "brushlabels", rle=brush(mask)) for n, mask in enumerate(masks)]
        )
    ]
    entry = assert_masks_survive(tmp_path, write_folder(tmp_path / "raw", content), masks)
    # What the annotator accepts comes back as an annotation.
    accepted = [
        {**entry, "id": 1, "annotations": [{"id": 1, "result": entry["predictions"][0]["result"]}]}
    ]
    build(write_folder(tmp_path / "again" / "raw", accepted))
    for (_, polygon), mask in zip(
        labels_of(tmp_path / "again" / "processed", num_classes=1), masks, strict=True
    ):
        assert iou(whole(drawn(polygon)), mask) >= 0.99
