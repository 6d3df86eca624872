"""Instances drawn on photographs, grids, and image files."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.pages.drawn import BLUE, NAMES, ORANGE
from yolo_seg_ddp.pages import READABLE_PX, draw_instances, image_grid, pictures, save_image
from yolo_seg_ddp.predict.regions import Region, canvas_of
from yolo_seg_ddp.utils.text import class_color


def test_masks_tint_their_pixels_and_leave_the_rest_and_the_original_alone() -> None:
    image = np.full((200, 300, 3), 100, np.uint8)
    mask = np.zeros((1, 200, 300), bool)
    mask[0, 80:160, 100:220] = True
    mask[0, 110:130, 140:180] = False  # a hole
    drawn = draw_instances(image, [4], None, mask, None, NAMES)
    assert drawn[145, 120].tolist() == [60, 106, 131]  # 60 % photograph, 40 % of (0, 114, 178)
    assert drawn[120, 160].tolist() == [100, 100, 100]
    assert np.abs(drawn[80, 120:210].astype(int) - BLUE).max() < 50  # the outline
    assert drawn[180, 250].tolist() == [100, 100, 100]
    assert image.min() == image.max() == 100


@pytest.mark.parametrize("class_id", range(8))
@pytest.mark.parametrize("is_dashed", [False, True])
def test_an_outline_is_seen_on_a_photograph_of_its_own_colour(
    class_id: int, is_dashed: bool
) -> None:
    image = np.full((200, 300, 3), class_color(class_id), np.uint8)
    square = np.array([(100, 80), (220, 80), (220, 160), (100, 160)])
    drawn = draw_instances(
        image, [class_id], None, [square], None, NAMES, labels=[""], dashed=[is_dashed]
    )
    away = np.abs(drawn[70:90, 110:210].astype(int) - class_color(class_id)).sum(axis=2)
    assert (away.max(axis=0) > 150).mean() > 0.4, "an edge above most of the outline"


def test_masks_cut_to_a_part_of_the_picture_are_drawn_as_whole_ones() -> None:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (200, 300, 3), dtype=np.uint8)
    parts = [(0, 0, 50, 70), (230, 120, 70, 80), (40, 30, 100, 5), (90, 90, 20, 20), (5, 5, 0, 0)]
    masks, cut = np.zeros((len(parts), 200, 300), bool), []
    for number, (left, top, width, height) in enumerate(parts):
        bitmap = (
            cv2.blur(rng.random((height, width)), (5, 5)) > 0.5 if width else np.zeros((0, 0), bool)
        )
        cut.append(Region(left, top, bitmap if number != 3 else bitmap & False))
        masks[number, top : top + height, left : left + width] = cut[-1].mask
    for boxes in (None, np.full((5, 4), 50.0)):
        whole = draw_instances(image, [0, 1, 2, 0, 1], boxes, masks, None, NAMES)
        assert np.array_equal(
            draw_instances(image, [0, 1, 2, 0, 1], boxes, cut, None, NAMES), whole
        )


def test_labels_of_a_small_picture_leave_its_objects_visible_because_it_is_enlarged_first() -> None:
    image, box = np.full((80, 100, 3), 100, np.uint8), np.array([[30.0, 20, 70, 60]])
    region, polygon = (
        Region(30, 20, np.ones((40, 40), bool)),
        np.array([(30, 20), (69.8, 20), (69.8, 59.8), (30, 59.8)]),
    )
    mask = canvas_of([region], (100, 80))[None]
    look: dict[str, Any] = {"labels": ["a long name of a class 0.87"], "min_px": READABLE_PX}
    drawn = [
        draw_instances(image, [4], box, shape, None, NAMES, **look)
        for shape in (mask, [region], [polygon])
    ]
    for one in drawn:
        assert one.shape == (400, 500, 3)
        assert np.array_equal(one, drawn[0])
    tint = [60, 106, 131]  # 60 % photograph, 40 % of (0, 114, 178)
    assert (drawn[0][110:290, 160:340] == tint).all(), "the label lies outside"
    large = np.full((400, 500, 3), 100, np.uint8)
    wide = [
        draw_instances(large, [4], 5 * box, None, None, NAMES, min_px=least)
        for least in (1, READABLE_PX)
    ]
    assert np.array_equal(wide[0], wide[1])


def test_boxes_are_drawn_and_cut_at_the_edge() -> None:
    image = np.zeros((200, 300, 3), np.uint8)
    drawn = draw_instances(
        image, [0, 4], np.array([[50, 60, 120, 150], [250.0, -20, 400, 80]]), None, None, NAMES
    )
    assert drawn[60:150, 50].tolist() == [list(ORANGE)] * 90
    assert drawn[149, 50:120].tolist() == [list(ORANGE)] * 70
    assert drawn[100, 85].tolist() == [0, 0, 0]
    assert drawn[30, 299].tolist() == list(BLUE)


def noted_plates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, int]]:
    """Collect where labels are drawn: left, top, right, bottom, the last two included."""
    plates: list[tuple[int, int, int, int]] = []
    draw = cv2.rectangle

    def note(canvas: Any, first: Any, last: Any, color: Any, thickness: int) -> Any:
        if thickness == cv2.FILLED:
            plates.append((*first, *last))
        return draw(canvas, first, last, color, thickness)

    monkeypatch.setattr(pictures.cv2, "rectangle", note)
    return plates


@pytest.mark.parametrize(
    ("size", "heights"), [((64, 48), (4, 18)), ((480, 640), (12, 24)), ((3000, 4000), (60, 120))]
)
@pytest.mark.parametrize("corner", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_labels_stay_inside_and_grow_with_the_picture(
    size: tuple[int, int],
    heights: tuple[int, int],
    corner: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    height, width = size
    x, y = corner[0] * (width - width // 8), corner[1] * (height - height // 8)
    plates = noted_plates(monkeypatch)
    box = np.array([[x, y, x + width // 8, y + height // 8]])
    drawn = draw_instances(np.zeros((height, width, 3), np.uint8), [7], box, None, [0.87], NAMES)
    left, top, right, bottom = plates[0]
    assert 0 <= left < right < width
    assert 0 <= top < bottom < height
    assert heights[0] <= bottom + 1 - top <= heights[1]
    label = np.abs(drawn[top : bottom + 1, left : right + 1].astype(int) - class_color(7)).max(
        axis=2
    )
    for edge in (label[0], label[-1], label[:, 0], label[:, -1]):
        assert edge.max() == 0  # the background is whole and no letter touches its edge
    assert label[2:-2].max() > 100  # white letters


def test_labels_cover_neither_each_other_nor_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    corners = rng.integers(0, (540, 340), (12, 2))
    squares = [corner + np.array([(0, 0), (40, 0), (40, 40), (0, 40)]) for corner in corners]
    wires = [np.array([(0, y), (599, y + 60), (599, y + 64), (0, y + 4)]) for y in (80, 100, 300)]
    plates = noted_plates(monkeypatch)
    draw_instances(
        np.zeros((400, 600, 3), np.uint8),
        range(15),
        None,
        [*squares, *wires],
        None,
        "abcdefghijklmno",
    )
    assert len(plates) == 15
    taken = np.zeros((400, 600), np.uint8)
    for outline in (*squares, *wires):
        cv2.fillPoly(taken, [outline.astype(np.int32)], 1)
    for left, top, right, bottom in plates:
        assert not taken[top : bottom + 1, left : right + 1].any()
        taken[top : bottom + 1, left : right + 1] = 1


def test_without_room_a_label_covers_a_mask_but_no_other_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plates = noted_plates(monkeypatch)
    full = np.ones((30, 2, 60, 60), bool)[:, 0]
    draw_instances(np.zeros((60, 60, 3), np.uint8), [0] * 30, None, full, None, ["wire"])
    taken = np.zeros((60, 60), int)
    for left, top, right, bottom in plates:
        taken[top : bottom + 1, left : right + 1] += 1
    assert 2 <= len(plates) < 30
    assert taken.max() == 1


@pytest.mark.parametrize(
    "outline",
    [[(20, 30), (380, 200), (380, 204), (20, 34)], [(20, 30), (24, 30), (24, 280), (20, 280)]],
)
def test_a_thin_object_has_a_label_but_no_box(
    outline: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    polygon = np.array(outline)
    box = np.array([[*polygon.min(axis=0), *polygon.max(axis=0)]])
    plates = noted_plates(monkeypatch)
    drawn = draw_instances(np.zeros((300, 400, 3), np.uint8), [0], box, [polygon], [0.5], NAMES)
    (left, top, right, bottom) = plates[0]
    away = [
        np.hypot(max(left - x, x - right, 0), max(top - y, y - bottom, 0))
        for x, y in (polygon[0], polygon[2])
    ]
    assert min(away) < 20
    without_label = drawn.copy()
    without_label[top : bottom + 1, left : right + 1] = 0
    near = cv2.dilate(
        cv2.fillPoly(np.zeros((300, 400), np.uint8), [polygon.astype(np.int32)], 1), np.ones((7, 7))
    )
    assert not without_label[near == 0].any(), "a box"
    square = draw_instances(
        np.zeros((300, 400, 3), np.uint8), [0], np.array([[50, 50, 90, 90]]), None, [0.5], NAMES
    )
    assert square[50, 50:90].tolist() == [list(ORANGE)] * 40


def test_a_dashed_mask_has_gaps_and_no_tint() -> None:
    mask = np.zeros((1, 200, 300), bool)
    mask[0, 80:160, 100:220] = True
    drawn = draw_instances(
        np.zeros((200, 300, 3), np.uint8), [0], None, mask, None, NAMES, labels=[""], dashed=[True]
    )
    assert not drawn[85:155, 105:215].any()
    assert 0.3 < (drawn[80, 100:220, 0] > 100).mean() < 0.8


def test_nothing_found_and_empty_masks_are_no_error() -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    none: tuple[Any, ...] = (None, np.zeros((0, 50, 60), bool), [])
    for masks in none:
        assert np.array_equal(draw_instances(image, [], np.zeros((0, 4)), masks, [], NAMES), image)
    drawn = draw_instances(image, [0, 1], None, np.zeros((2, 50, 60), bool), None, NAMES)
    assert np.array_equal(drawn, image)
    assert not np.array_equal(
        draw_instances(image, [], None, [], None, NAMES, nothing="no detections"), image
    )


def test_what_does_not_fit_is_refused() -> None:
    image = np.zeros((50, 60, 3), np.uint8)
    with pytest.raises(ValueError, match="2 instances, but 1 boxes"):
        draw_instances(image, [0, 1], np.zeros((1, 4)), None, None, NAMES)
    with pytest.raises(
        ValueError, match=r"a mask of \(25, 30\) does not fit a picture of \(50, 60\)"
    ):
        draw_instances(image, [0], None, np.ones((1, 25, 30), bool), None, NAMES)
    with pytest.raises(ValueError, match="1 pictures, but 2 captions"):
        image_grid([image], 1, 50, ["a", "b"])
    with pytest.raises(ValueError, match=r"\.png or \.jpg"):
        save_image(Path("a.gif"), image)


def test_image_grid_places_pictures_and_captions() -> None:
    colors = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    pictures = [np.full((100, 200, 3), color, np.uint8) for color in colors]
    grid = image_grid(pictures, 2, 100)
    assert grid.shape == (2 * (50 + 2) + 2, 2 * (100 + 2) + 2, 3)
    assert [grid[25, 50].tolist(), grid[25, 150].tolist(), grid[80, 50].tolist()] == [
        list(color) for color in colors
    ]
    assert grid[80, 150].tolist() == [255, 255, 255]
    captioned = image_grid(
        pictures, 2, 100, ["one", "4 (176).JPG", "a caption much too long for a small cell"]
    )
    strip = captioned[54:66]
    assert (strip.min(axis=(0, 2)) < 128).sum() > 10  # black letters
    assert captioned.shape[1] == grid.shape[1]
    assert image_grid([], 3, 40).shape == (44, 128, 3)


@pytest.mark.parametrize(("name", "tolerance"), [("a.png", 0), ("a.jpg", 4), ("b.JPEG", 4)])
def test_save_image_writes_colours_the_right_way_round(
    tmp_path: Path, name: str, tolerance: int
) -> None:
    image = np.full((16, 24, 3), (200, 100, 30), np.uint8)
    save_image(tmp_path / "new" / name, image)
    stored = np.asarray(cv2.imread(str(tmp_path / "new" / name)))[..., ::-1]
    assert np.abs(stored.astype(int) - image).max() <= tolerance
    assert [file.name for file in (tmp_path / "new").iterdir()] == [name]


def test_in_a_crowd_the_largest_of_each_class_is_named_and_masks_have_no_boxes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plates = noted_plates(monkeypatch)
    corners = np.array([(x, y) for y in range(20, 820, 80) for x in range(20, 820, 80)])
    boxes = np.hstack([corners, corners + 20 + np.arange(100)[:, None] // 10])
    polygons = [np.array([(x, y), (x2, y), (x2, y2)]) for x, y, x2, y2 in boxes]
    drawn = draw_instances(
        np.zeros((840, 840, 3), np.uint8), [0, 1] * 50, boxes, polygons, None, NAMES
    )
    assert len(plates) == 2
    assert not drawn[
        [y2 - 1 for _, _, _, y2 in boxes[:80]], [x for x, *_ in boxes[:80]]
    ].any()  # where a box would have a corner


def test_labels_that_are_given_are_all_written_where_few_instances_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plates = noted_plates(monkeypatch)
    polygons = [
        np.array([(x, y), (x + 20, y), (x + 20, y + 20)])
        for y in range(20, 820, 80)
        for x in range(20, 820, 80)
    ]
    labels = ["missed", "false", *[""] * 98]
    draw_instances(
        np.zeros((840, 840, 3), np.uint8), [0] * 100, None, polygons, None, NAMES, labels=labels
    )
    assert len(plates) == 2
