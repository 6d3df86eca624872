"""The optional augmentation: labels stay on their pixels, what is off changes nothing, all ranks
agree.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import (
    COLOURLESS,
    COLOURS,
    WORST_LABEL,
    content,
    samples_of,
    unlabelled_pixels,
    worst_label,
)
from yolo_seg_ddp.data import dataset as dataset_module
from yolo_seg_ddp.data.augment import Augmentation, Scene, blend, paste_mirrored, sample_generator
from yolo_seg_ddp.data.mask_rings import ring_area

STRONG = {"shear": 15.0, "copy_paste": 1.0, "mixup": 1.0, "paste": 1.0, "draw_wires": 1.0}
ROTATED = Augmentation(degrees=10, wire_classes=(1,))


@pytest.mark.parametrize("name", STRONG)
def test_an_option_at_zero_changes_no_byte_and_above_it_does(name: str) -> None:
    plain, still, changed = (
        [content(sample) for sample in samples_of(config)]
        for config in (
            ROTATED,
            dataclasses.replace(ROTATED, **dict[str, Any]({name: 0.0})),
            dataclasses.replace(ROTATED, **dict[str, Any]({name: STRONG[name]})),
        )
    )
    assert still == plain
    assert sum(now != before for now, before in zip(changed, plain, strict=True)) > len(plain) / 2


@pytest.mark.parametrize("name", ["copy_paste", "mixup", "paste"])
def test_a_probability_that_never_strikes_leaves_the_geometry(name: str) -> None:
    for sample, plain in zip(
        samples_of(Augmentation(**dict[str, Any]({name: 1e-12}))),
        samples_of(Augmentation()),
        strict=True,
    ):
        assert [polygon.tobytes() for polygon in sample.polygons] == [
            polygon.tobytes() for polygon in plain.polygons
        ]


def test_shear_moves_labels_with_their_pixels() -> None:
    config = dataclasses.replace(COLOURLESS, shear=20.0)
    samples = samples_of(config, mosaic_epochs=0)
    assert max(map(worst_label, samples)) < WORST_LABEL
    assert max(map(unlabelled_pixels, samples)) < 12
    shifted = [
        dataclasses.replace(one, polygons=[polygon + 6 for polygon in one.polygons])
        for one in samples
    ]
    assert min(worst_label(one) for one in shifted if len(one.polygons) > 3) > 0.3, (
        "labels that are off are seen"
    )
    assert unlabelled_pixels(dataclasses.replace(samples[0], polygons=samples[0].polygons[:1])) > 50
    edges = [
        np.diff(sample.polygons[k][:2], axis=0)[0]
        for sample in samples
        for k in range(len(sample.polygons))
    ]
    assert np.mean([min(abs(edge)) > 1 for edge in edges]) > 0.3  # upright bars no longer are


def test_pasted_objects_bring_their_labels_and_spare_those_on_top() -> None:
    config = dataclasses.replace(COLOURLESS, copy_paste=1.0)
    pasted, plain = samples_of(config), samples_of(COLOURLESS)
    assert max(map(worst_label, pasted)) < WORST_LABEL
    unlabelled = [
        np.array([unlabelled_pixels(sample) for sample in samples]) for samples in (pasted, plain)
    ]
    assert (unlabelled[0] - unlabelled[1]).max() < 5
    more = [
        len(now.class_ids) - len(before.class_ids)
        for now, before in zip(pasted, plain, strict=True)
    ]
    assert min(more) >= 0
    assert np.mean(more) > 1
    fewer = np.mean(
        [
            len(sample.class_ids)
            for sample in samples_of(dataclasses.replace(COLOURLESS, copy_paste=0.3))
        ]
    )
    assert fewer < np.mean([len(sample.class_ids) for sample in pasted])


def painted(*squares: tuple[int, float, float, float]) -> Scene:
    image = np.full((100, 100, 3), 60, np.uint8)
    for class_id, left, top, side in squares:
        image[int(top) : int(top + side), int(left) : int(left + side)] = COLOURS[class_id]
    outlines = [
        np.array([[x, y], [x + side, y], [x + side, y + side], [x, y + side]])
        for _, x, y, side in squares
    ]
    return Scene(image, [entry[0] for entry in squares], outlines)


def test_an_object_is_pasted_mirrored_where_there_is_room_only() -> None:
    # The first has room on the other side; the second would cover more than 30 % of itself.
    scene = painted((0, 10, 10, 20), (1, 42, 60, 20))
    result = paste_mirrored(scene, 1.0, sample_generator(0, 0, 0))
    assert result.class_ids == [0, 1, 0]
    np.testing.assert_allclose(result.polygons[2].min(0), (70, 10))
    np.testing.assert_allclose(result.polygons[2].max(0), (90, 30))
    assert (result.image[11:29, 71:89] == COLOURS[0]).all()
    assert (result.image[61:79, 43:61] == COLOURS[1]).all()
    assert (scene.image[11:29, 71:89] == 60).all()  # the picture passed in stays
    assert paste_mirrored(scene, 0.0, sample_generator(0, 0, 0)) is scene


def test_an_object_never_comes_without_what_lies_on_it() -> None:
    # The transformer's mirror image would cover the box, so it stays away, and the pole that
    # carries it too.
    pole, transformer, in_the_way = (0, 10, 10, 30), (1, 20, 20, 12), (3, 66, 20, 16)
    alone = paste_mirrored(painted(pole, transformer), 1.0, sample_generator(0, 0, 0))
    assert sorted(alone.class_ids) == [0, 0, 1, 1]
    assert (alone.image[21:31, 69:79] == COLOURS[1]).all()
    blocked = paste_mirrored(painted(pole, transformer, in_the_way), 1.0, sample_generator(0, 0, 0))
    assert 0 not in blocked.class_ids[3:]
    assert 1 not in blocked.class_ids[3:]


def test_mixup_holds_both_pictures_and_the_labels_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Scene, Scene, Scene]] = []

    def recorded(first: Scene, second: Scene, rng: np.random.Generator) -> Scene:
        seen.append((first, second, blend(first, second, rng)))
        return seen[-1][2]

    monkeypatch.setattr(dataset_module, "blend", recorded)
    samples = samples_of(dataclasses.replace(COLOURLESS, mixup=1.0), epochs=2)
    assert len(seen) == len(samples)
    for sample, (first, second, _) in zip(samples, seen, strict=True):
        assert max(worst_label(first), worst_label(second)) < WORST_LABEL
        assert sorted(sample.class_ids.tolist()) == sorted(first.class_ids + second.class_ids)
        a, b, mixed = (image.astype(float) for image in (first.image, second.image, sample.image))
        differs = np.abs(a - b) > 60
        shares = (mixed - b)[differs] / (a - b)[differs]
        assert 0.2 < np.median(shares) < 0.8
        assert np.ptp(shares) < 0.04
        assert set(np.unique(sample.masks)) <= set(range(len(sample.class_ids) + 1))
        areas = [round(ring_area(polygon), 6) for polygon in sample.polygons]
        assert areas == sorted(areas, reverse=True)


def test_what_is_mixed_pasted_and_drawn_ends_with_mosaic() -> None:
    strong = Augmentation(mixup=1.0, copy_paste=1.0, paste=1.0, draw_wires=1.0, wire_classes=(1,))
    late, plain = (samples_of(config, mosaic_epochs=0) for config in (strong, Augmentation()))
    assert list(map(content, late)) == list(map(content, plain))
