"""Wires drawn into pictures: their labels lie on their pixels, and they look like those of the picture."""

from __future__ import annotations

import numpy as np
import pytest

from utils.data import drawn_wires
from utils.data.augment import Scene
from utils.data.drawn_wires import band, catenary, draw_bars, draw_wires
from utils.data.polygons import areas, draw_index_map

SIDE_PX = 160
GREY = np.full((SIDE_PX, SIDE_PX, 3), 128, np.uint8)


def scenes(scene: Scene, number: int = 40) -> list[Scene]:
    return [draw_wires(scene, (3, 5), np.random.default_rng(seed)) for seed in range(number)]


def width_of(outline: np.ndarray) -> float:
    perimeter = np.hypot(*(np.roll(outline, -1, axis=0) - outline).T).sum()
    return float(2 * areas(outline, np.zeros(1, int))[0] / perimeter)


def test_the_labels_cover_the_drawn_pixels_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.mean([unlabelled(scene, 0) for scene in scenes(Scene(GREY, [], []))]) > 0.3, "bars have no label"
    monkeypatch.setattr(drawn_wires, "MAX_BARS", 0)
    drawn = scenes(Scene(GREY, [], []))
    assert {class_id for scene in drawn for class_id in scene.class_ids} == {3, 5}
    assert all(1 <= len(scene.polygons) <= 8 for scene in drawn if scene.polygons)
    assert sum(bool(scene.polygons) for scene in drawn) >= 35, "a group may lie outside the picture, seldom both"
    assert np.mean([unlabelled(scene, 0) for scene in drawn]) < 0.03
    assert np.mean([unlabelled(scene, 4) for scene in drawn]) > 0.3, "labels that lie beside the wires are noticed"
    wide = [scene for scene in drawn if scene.polygons and min(map(width_of, scene.polygons)) > 3]
    assert np.mean([np.count_nonzero(painted(scene)) / areas_of(scene) for scene in wide]) == pytest.approx(1, abs=0.3)


def painted(scene: Scene) -> np.ndarray:
    return np.asarray((np.abs(scene.image.astype(int) - GREY) > 8).any(axis=2))


def unlabelled(scene: Scene, shift_px: int) -> float:
    """Return the share of the painted pixels that no outline touches after it is moved."""
    labelled = draw_index_map([outline + shift_px for outline in scene.polygons], SIDE_PX) > 0
    number = int(painted(scene).sum())
    return float((painted(scene) & ~labelled).sum()) / max(number, 1)


def areas_of(scene: Scene) -> int:
    return int(np.count_nonzero(draw_index_map(scene.polygons, SIDE_PX)))


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
