"""Objects pasted and wires drawn into a picture: labels lie on their pixels, also those of what is
behind them.
"""

import dataclasses

import numpy as np
import pytest

from tests.data.pictures import COLOURLESS, rectangle, samples_of
from yolo_seg_ddp.data import drawn_wires
from yolo_seg_ddp.data.augment import Scene, paste_objects
from yolo_seg_ddp.data.drawn_wires import band, catenary, draw_bars, draw_wires
from yolo_seg_ddp.data.polygons import areas, draw_index_map

SIDE_PX = 160
POLE, CAP, WIRE = 0, 1, 2


def scene_of(grey: int, *objects: tuple[int, np.ndarray]) -> Scene:
    image = np.full((SIDE_PX, SIDE_PX, 3), grey, np.uint8)
    return Scene(image, [class_id for class_id, _ in objects], [outline for _, outline in objects])


DONOR = scene_of(
    200,
    (POLE, rectangle(60, 20, 100, 140)),
    (CAP, rectangle(70, 20, 90, 40)),
    (WIRE, rectangle(0, 150, 160, 154)),
)


def pasted(scene: Scene, seed: int = 0) -> Scene:
    return paste_objects(scene, DONOR, (WIRE,), np.random.default_rng(seed))


def test_objects_come_with_what_lies_on_them_in_another_colour_and_without_wires() -> None:
    scene = scene_of(40)
    results = [pasted(scene, seed) for seed in range(20)]
    for result in results:
        assert result.class_ids == [POLE, CAP]
        changed = (result.image != 40).any(axis=2)
        labelled = draw_index_map(result.polygons, SIDE_PX) > 0
        assert (changed[22:138, 62:98]).all()
        assert np.count_nonzero(changed & ~labelled) < 2 * (40 + 120) * 2  # the soft edge
        assert not changed[146:].any()
    greys = [result.image[80, 80].mean() for result in results]
    assert min(greys) < 100 < 200 < max(greys)
    assert (scene.image == 40).all(), "the picture that was given is not changed"


@pytest.mark.parametrize(
    ("behind", "left"),
    [
        # a wire ends at the object and goes on after it
        ((WIRE, rectangle(0, 80, 160, 86)), [(0, 60), (101, 160)]),
        ((WIRE, rectangle(50, 80, 110, 86)), []),  # both parts are too short
        ((POLE, rectangle(20, 50, 90, 70)), [(20, 60)]),  # the larger part of another object
        ((POLE, rectangle(55, 50, 105, 70)), []),  # most of it is hidden
        ((CAP, rectangle(5, 5, 25, 25)), [(5, 25)]),  # beside it
    ],
)
def test_what_is_behind_keeps_visible_labels(
    behind: tuple[int, np.ndarray], left: list[tuple[float, float]]
) -> None:
    result = pasted(scene_of(40, behind))
    assert result.class_ids[2:] == [behind[0]] * len(left)
    spans = sorted((outline[:, 0].min(), outline[:, 0].max()) for outline in result.polygons[2:])
    assert np.array(spans).reshape(-1, 2) == pytest.approx(
        np.array(left, float).reshape(-1, 2), abs=1.5
    )


def test_a_picture_without_anything_to_paste_stays() -> None:
    scene, wires = scene_of(40), scene_of(200, (WIRE, rectangle(0, 150, 160, 154)))
    assert paste_objects(scene, wires, (WIRE,), np.random.default_rng(0)) is scene


def test_all_classes_but_the_thin_ones_are_pasted_equally_often() -> None:
    plain, more = (
        samples_of(dataclasses.replace(COLOURLESS, paste=share, wire_classes=(1,)), epochs=4)
        for share in (0.0, 1.0)
    )
    before, after = (
        np.bincount(np.concatenate([sample.class_ids for sample in samples]), minlength=4)
        for samples in (plain, more)
    )
    gains = (after - before)[[0, 2, 3]]
    assert gains.min() > 0.25 * gains.max() > 0
    assert after[1] <= before[1] + 4, "only a wire that is cut in two counts twice"


GREY = np.full((SIDE_PX, SIDE_PX, 3), 128, np.uint8)


def scenes(scene: Scene, number: int = 40) -> list[Scene]:
    return [draw_wires(scene, (3, 5), np.random.default_rng(seed)) for seed in range(number)]


def width_of(outline: np.ndarray) -> float:
    perimeter = np.hypot(*(np.roll(outline, -1, axis=0) - outline).T).sum()
    return float(2 * areas(outline, np.zeros(1, int))[0] / perimeter)


def test_the_labels_cover_the_drawn_pixels_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.mean([unlabelled(scene, 0) for scene in scenes(Scene(GREY, [], []))]) > 0.3, (
        "bars have no label"
    )
    monkeypatch.setattr(drawn_wires, "MAX_BARS", 0)
    drawn = scenes(Scene(GREY, [], []))
    assert {class_id for scene in drawn for class_id in scene.class_ids} == {3, 5}
    assert all(1 <= len(scene.polygons) <= 8 for scene in drawn if scene.polygons)
    assert sum(bool(scene.polygons) for scene in drawn) >= 35, (
        "a group may lie outside the picture, seldom both"
    )
    assert np.mean([unlabelled(scene, 0) for scene in drawn]) < 0.03
    assert np.mean([unlabelled(scene, 4) for scene in drawn]) > 0.3, (
        "labels that lie beside the wires are noticed"
    )
    wide = [scene for scene in drawn if scene.polygons and min(map(width_of, scene.polygons)) > 3]
    shares = [
        painted(scene).sum() / (draw_index_map(scene.polygons, SIDE_PX) > 0).sum() for scene in wide
    ]
    assert np.mean(shares) == pytest.approx(1, abs=0.3)


def painted(scene: Scene) -> np.ndarray:
    return np.asarray((np.abs(scene.image.astype(int) - GREY) > 8).any(axis=2))


def unlabelled(scene: Scene, shift_px: int) -> float:
    """Return the share of the painted pixels that no outline touches after it is moved."""
    labelled = draw_index_map([outline + shift_px for outline in scene.polygons], SIDE_PX) > 0
    number = int(painted(scene).sum())
    return float((painted(scene) & ~labelled).sum()) / max(number, 1)


def test_a_drawn_wire_is_as_wide_as_a_labelled_one_of_its_class() -> None:
    wide = band(np.array([[0.0, 80.0], [160.0, 80.0]]), 12.0)
    widths = [
        width_of(outline)
        for scene in scenes(Scene(GREY, [3, 5], [wide, wide]))
        for outline in scene.polygons[2:]
        if np.ptp(outline, axis=0).max() > 100
    ]
    assert len(widths) > 20
    assert 0.5 * 12 < min(widths) < max(widths) < 1.5 * 12


def test_what_was_in_the_picture_keeps_its_labels() -> None:
    box = np.array([[10.0, 10.0], [40.0, 10.0], [40.0, 40.0]])
    for scene in scenes(Scene(GREY, [2], [box]), 5):
        assert scene.class_ids[0] == 2
        assert scene.polygons[0] is box
    assert (GREY == 128).all(), "the picture that was given is not changed"


def test_bars_lie_behind_what_is_labelled_and_are_wider_than_wires() -> None:
    wire = band(np.array([[0.0, 80.0], [160.0, 80.0]]), 4.0)
    scene = Scene(GREY, [3], [wire])
    labelled = draw_index_map([wire], SIDE_PX) > 0
    covered = []
    for seed in range(40):
        image = GREY.astype(np.float32)
        draw_bars(image, scene, (3,), np.random.default_rng(seed))
        assert (image[labelled] == 128).all()
        assert np.isfinite(image).all()
        covered.append(np.count_nonzero(np.abs(image - GREY).max(axis=2) > 8))
    assert sum(number > 3 * 4 * 0.3 * SIDE_PX / 2 for number in covered) > 15, (
        "a bar has 3 wires' width, and may lie half outside"
    )


@pytest.mark.parametrize("sag", [0.0, 12.0, -12.0])
def test_a_catenary_hangs_by_its_sag(sag: float) -> None:
    line = catenary(np.array([50.0, 60.0]), 0.0, 100.0, sag)
    assert np.allclose(line[[0, -1], 0], [0, 100])
    assert line[[0, -1], 1] - 60 == pytest.approx([sag, sag], rel=0.02)
