"""Augmentation: pixels and outlines go through the same map, and everything follows from (seed,
epoch, index).
"""

import dataclasses
from typing import Any

import cv2
import numpy as np
import pytest

from tests.data.pictures import (
    APART,
    WORST_LABEL,
    content,
    dataset_of,
    samples_of,
    unlabelled_pixels,
    worst_label,
)
from yolo_seg_ddp.data.augment import (
    Augmentation,
    compose,
    letterbox_matrix,
    mosaic_matrices,
    random_view,
    sample_generator,
    seen_window,
    warp_into,
)
from yolo_seg_ddp.data.images import FILL
from yolo_seg_ddp.data.polygons import transform_points

STILL = Augmentation(
    mosaic=0, degrees=0, translate=0, scale=0, fliplr=0, flipud=0, hsv_h=0, hsv_s=0, hsv_v=0
)
GEOMETRY_ONLY = Augmentation(hsv_h=0, hsv_s=0, hsv_v=0, degrees=20, flipud=0.5)


@pytest.mark.parametrize("seed", range(6))
def test_pixels_land_where_points_land(seed: int) -> None:
    config = Augmentation(degrees=45, scale=0.2, translate=0.05, fliplr=0.5, flipud=0.5)
    view = random_view(160, 160, config, sample_generator(seed, 1, 0))
    matrix = compose(view, letterbox_matrix(75, 100, 160))
    output, image = np.zeros((160, 160, 3), np.uint8), np.zeros((75, 100, 3), np.uint8)
    image[20:50, 30:70] = 255
    warp_into(output, image, matrix)
    rows, columns = (output[..., 0] > 127).nonzero()
    corners = transform_points(np.array([[30.0, 20], [70, 20], [70, 50], [30, 50]]), matrix)
    assert [columns.mean() + 0.5, rows.mean() + 0.5] == pytest.approx(corners.mean(0), abs=0.25)
    assert len(rows) == pytest.approx(cv2.contourArea(corners.astype(np.float32)), rel=0.03)
    drawn = np.zeros((160, 160), np.uint8)
    cv2.fillPoly(drawn, [np.rint((corners - 0.5) * 16).astype(np.int32)], 1, shift=4)
    assert ((output[..., 0] > 127) != (drawn > 0)).sum() < 0.06 * cv2.contourArea(
        corners.astype(np.float32)
    )


def test_only_what_the_photograph_covers_is_touched() -> None:
    output = np.full((60, 60, 3), FILL, np.uint8)
    warp_into(output, np.full((10, 20, 3), 255, np.uint8), np.array([[1.0, 0, 15], [0, 1.0, 25]]))
    expected = np.full((60, 60, 3), FILL, np.uint8)
    expected[25:35, 15:35] = 255
    np.testing.assert_array_equal(output, expected)
    warp_into(output, np.zeros((10, 20, 3), np.uint8), np.array([[1.0, 0, 100], [0, 1.0, 0]]))
    np.testing.assert_array_equal(output, expected)


def tile_matrix(degrees: float, rng: np.random.Generator) -> np.ndarray:
    view = random_view(256, 128, Augmentation(degrees=degrees), rng)
    return compose(view, mosaic_matrices([(90, 120)], 128, rng)[0])


@pytest.mark.parametrize("degrees", [0, 20])
def test_a_fourth_channel_changes_no_byte_of_the_others(degrees: float) -> None:
    rng = np.random.default_rng(4)
    image = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    for _ in range(20):
        matrix = tile_matrix(degrees, rng)
        three, four = np.full((128, 128, 3), FILL, np.uint8), np.full((128, 128, 4), FILL, np.uint8)
        warp_into(three, image, matrix)
        warp_into(four, image, matrix)
        np.testing.assert_array_equal(four[..., :3], three)


@pytest.mark.parametrize("degrees", [0, 30])
def test_what_is_seen_of_an_image_draws_the_same_as_the_whole(degrees: float) -> None:
    rng = np.random.default_rng(5)
    image = cv2.resize(
        rng.integers(0, 256, (9, 12, 3), dtype=np.uint8), (120, 90), interpolation=cv2.INTER_CUBIC
    )
    shares, unseen = [], 0
    for _ in range(60):
        matrix = tile_matrix(degrees, rng)
        rows, columns = seen_window(matrix, (90, 120), 128)
        whole, part = (np.full((128, 128, 3), FILL, np.uint8) for _ in range(2))
        warp_into(whole, image, matrix)
        shares.append(len(rows) * len(columns) / (90 * 120))
        if not rows:
            unseen += 1
            assert (whole == FILL).all()
            continue
        window = image[rows.start : rows.stop, columns.start : columns.stop]
        warp_into(
            part, window, compose(matrix, np.array([[1, 0, columns.start], [0, 1, rows.start]]))
        )
        gap = np.abs(whole.astype(int) - part)
        assert gap.max() <= 8, "more than OpenCV's rounding of a place to a 32nd of a pixel"
        assert (gap > 0).mean() < 0.001
    assert unseen
    assert np.mean(shares) < 0.6


def test_the_letterbox_is_centred_and_touches_the_border() -> None:
    corners = np.array([[0.0, 0], [100, 50]])
    assert transform_points(corners, letterbox_matrix(50, 100, 200)).tolist() == [
        [0, 50],
        [200, 150],
    ]
    assert transform_points(corners[:, ::-1], letterbox_matrix(100, 50, 200)).tolist() == [
        [50, 0],
        [150, 200],
    ]


def test_mosaic_tiles_meet_in_one_point_without_overlap() -> None:
    shapes = [(100, 50), (50, 100), (90, 30), (40, 100)]
    matrices = mosaic_matrices(shapes, 100, sample_generator(0, 0, 0))
    boxes = [
        transform_points(np.array([[0.0, 0], [width, height]]), matrix)
        for (height, width), matrix in zip(shapes, matrices, strict=True)
    ]
    a, b, c, d = boxes
    inner_corners = np.array([a[1], [b[0, 0], b[1, 1]], [c[1, 0], c[0, 1]], d[0]])
    np.testing.assert_allclose(inner_corners, inner_corners[:1].repeat(4, 0))
    assert inner_corners[0].min() >= 50
    assert inner_corners[0].max() <= 150
    assert [float(np.max(corner[1] - corner[0])) for corner in boxes] == pytest.approx([100] * 4)


def test_mosaic_keeps_labels_on_their_objects_and_without_it_there_is_one_photograph() -> None:
    mosaics, singles = (
        samples_of(GEOMETRY_ONLY, mosaic_epochs, epochs=6, pictures=APART)
        for mosaic_epochs in (9, 0)
    )
    assert max(map(worst_label, mosaics + singles)) < WORST_LABEL
    # Slivers at the border lose their label on purpose: less than two pixels long, or a hundredth
    # of the object.
    assert np.mean([unlabelled_pixels(sample) for sample in mosaics + singles]) < 2
    # a photograph has four objects
    assert np.mean([len(sample.class_ids) for sample in mosaics]) > 5
    assert all(len(set(sample.class_ids.tolist())) == len(sample.class_ids) for sample in singles)
    last, after = (
        dataset_of(GEOMETRY_ONLY, mosaic_epochs=3)[2, 1],
        dataset_of(GEOMETRY_ONLY, mosaic_epochs=3)[3, 1],
    )
    assert content(last) == content(dataset_of(GEOMETRY_ONLY)[2, 1])
    assert content(after) == content(dataset_of(GEOMETRY_ONLY, mosaic_epochs=0)[3, 1])


@pytest.mark.parametrize(("name", "axis"), [("fliplr", 0), ("flipud", 1)])
def test_flips_mirror_picture_and_polygons(name: str, axis: int) -> None:
    still = dataset_of(STILL)[0, 1]
    flipped = dataset_of(dataclasses.replace(STILL, **dict[str, Any]({name: 1.0})))[0, 1]
    for before, after in zip(still.polygons, flipped.polygons, strict=True):
        expected = before.copy()
        expected[:, axis] = len(still.image) - expected[:, axis]
        np.testing.assert_allclose(after, expected, atol=1e-6)
    mirrored = still.image[:, ::-1] if axis == 0 else still.image[::-1]
    assert np.abs(flipped.image.astype(int) - mirrored).mean() < 1
    assert np.abs(flipped.image.astype(int) - still.image).mean() > 5


def test_a_sample_depends_on_seed_epoch_and_index_alone() -> None:
    def bytes_of(seed: int, epoch: int, index: int, before: tuple[int, ...] = ()) -> bytes:
        data = dataset_of(Augmentation(), seed=seed)
        for earlier in before:
            data[epoch, earlier]
        return b"".join(content(data[epoch, index]))

    assert bytes_of(1, 2, 3) == bytes_of(1, 2, 3, before=(0, 1, 2))
    assert len({bytes_of(1, 2, 3), bytes_of(1, 2, 4), bytes_of(1, 3, 3), bytes_of(2, 2, 3)}) == 4
