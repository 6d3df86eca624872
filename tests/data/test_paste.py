"""Objects of another photograph in a picture: their pixels and labels, and what remains visible of those behind them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.data.pictures import COLOURLESS, rectangle, samples_of
from utils.data.augment import Scene
from utils.data.paste import paste_objects
from utils.data.polygons import draw_index_map

SIDE_PX = 160
POLE, CAP, WIRE = 0, 1, 2


def scene_of(grey: int, *objects: tuple[int, np.ndarray]) -> Scene:
    image = np.full((SIDE_PX, SIDE_PX, 3), grey, np.uint8)
    return Scene(image, [class_id for class_id, _ in objects], [outline for _, outline in objects])


DONOR = scene_of(
    200, (POLE, rectangle(60, 20, 100, 140)), (CAP, rectangle(70, 20, 90, 40)), (WIRE, rectangle(0, 150, 160, 154))
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
        ((WIRE, rectangle(0, 80, 160, 86)), [(0, 60), (101, 160)]),  # a wire ends at the object and goes on after it
        ((WIRE, rectangle(50, 80, 110, 86)), []),  # both parts are too short
        ((POLE, rectangle(20, 50, 90, 70)), [(20, 60)]),  # the larger part of another object
        ((POLE, rectangle(55, 50, 105, 70)), []),  # most of it is hidden
        ((CAP, rectangle(5, 5, 25, 25)), [(5, 25)]),  # beside it
    ],
)
def test_what_is_behind_keeps_visible_labels(behind: tuple[int, np.ndarray], left: list[tuple[float, float]]) -> None:
    result = pasted(scene_of(40, behind))
    assert result.class_ids[2:] == [behind[0]] * len(left)
    spans = sorted((outline[:, 0].min(), outline[:, 0].max()) for outline in result.polygons[2:])
    assert np.array(spans).reshape(-1, 2) == pytest.approx(np.array(left, float).reshape(-1, 2), abs=1.5)


def test_a_picture_without_anything_to_paste_stays() -> None:
    scene, wires = scene_of(40), scene_of(200, (WIRE, rectangle(0, 150, 160, 154)))
    assert paste_objects(scene, wires, (WIRE,), np.random.default_rng(0)) is scene


def test_all_classes_but_the_thin_ones_are_pasted_equally_often() -> None:
    plain, more = (
        samples_of(dataclasses.replace(COLOURLESS, paste=share, wire_classes=(1,)), epochs=4) for share in (0.0, 1.0)
    )
    before, after = (
        np.bincount(np.concatenate([sample.class_ids for sample in samples]), minlength=4) for samples in (plain, more)
    )
    gains = (after - before)[[0, 2, 3]]
    assert gains.min() > 0.25 * gains.max() > 0
    assert after[1] <= before[1] + 4, "only a wire that is cut in two counts twice"
