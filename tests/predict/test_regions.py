"""Masks as regions and as runs: what they draw, count and share is what whole bitmaps do, with
OpenCV.
"""

import cv2
import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask

from yolo_seg_ddp.predict import agreement
from yolo_seg_ddp.predict.prediction_files import outline
from yolo_seg_ddp.predict.regions import Cells, Region, Runs, column_runs


@pytest.mark.parametrize(
    ("left", "top", "width", "height"),
    [(3, 2, 30, 20), (0, 0, 60, 40), (20, 0, 30, 40), (50, 5, 10, 4), (5, 5, 0, 0)],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_a_regions_outlines_and_run_lengths_are_those_of_the_whole_mask(
    left: int, top: int, width: int, height: int, share: float
) -> None:
    noise = np.random.default_rng(5).random((height, width))
    smooth = cv2.blur(noise, (3, 3)) if width else noise
    for bitmap in (noise < share, smooth < share):
        whole = np.zeros((40, 60), np.uint8)
        whole[top : top + height, left : left + width] = bitmap
        region = Region(left, top, bitmap)
        runs = {"size": [40, 60], "counts": column_runs(region, (60, 40))}
        assert coco_mask.frPyObjects(runs, 40, 60) == coco_mask.encode(np.asfortranarray(whole))
        contours, _ = cv2.findContours(whole, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
        expected = sorted(
            (one[:, 0] for one in contours if len(one) >= 3), key=lambda one: -cv2.contourArea(one)
        )
        assert [one.tolist() for one in outline(region)] == [one.tolist() for one in expected]


def random_mask(seed: int, height: int = 60, width: int = 90) -> np.ndarray:
    """Return a mask with full rows, empty rows and pixels at all edges."""
    rng = np.random.default_rng(seed)
    mask = rng.random((height, width)) < rng.uniform(0.05, 0.95)
    mask[rng.integers(height)] = True
    mask[rng.integers(height)] = False
    return mask


@pytest.mark.parametrize("seed", range(6))
def test_runs_draw_and_count_as_bitmaps_do(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    photo = np.zeros((200, 300), bool)
    left, top = (int(value) for value in rng.integers(0, 100, 2))
    photo[top : top + 60, left : left + 90] = random_mask(seed)
    runs = Runs.of(photo)
    assert runs.area == photo.sum()
    for _ in range(20):
        x, y = np.sort(rng.integers(0, 300, 2)), np.sort(rng.integers(0, 200, 2))
        corners = (int(x[0]), int(y[0]), int(x[1]), int(y[1]))
        np.testing.assert_array_equal(runs.crop(corners), photo[y[0] : y[1], x[0] : x[1]])


def test_runs_are_cut_to_their_pixels_and_may_be_empty() -> None:
    mask = np.zeros((20, 30), bool)
    assert Runs.of(mask, 5, 6).is_empty
    assert not Runs.of(mask).crop((0, 0, 30, 20)).any()
    mask[4, 7:9] = True
    runs = Runs.of(mask, 100, 200)
    assert runs.corners == (107, 204, 109, 205)


def test_cells_count_the_pixels_on_a_grid_over_the_photograph() -> None:
    photo = np.zeros((96, 96), bool)
    photo[13:70, 21:80] = random_mask(3, 57, 59)
    cells = Cells.of(Runs.of(photo), 16)
    expected = photo.reshape(6, 16, 6, 16).sum(axis=(1, 3))
    np.testing.assert_array_equal(cells.crop((0, 0, 6, 6)), expected)
    np.testing.assert_array_equal(
        cells.crop((2, 1, 9, 4)), np.pad(expected, ((0, 0), (0, 3)))[1:4, 2:9]
    )


# --- pairs of masks, compared run by run and as bitmaps ---


WIDE = np.ones((5, 5), np.uint8)
SIZE = (150, 400)


def blobs(rng: np.random.Generator) -> np.ndarray:
    """Draw a mask of a few parts, some of them thin, some at the photograph's edges."""
    mask = np.zeros(SIZE, np.uint8)
    for _ in range(rng.integers(1, 5)):
        ends = rng.integers(-30, (SIZE[1] + 30, SIZE[0] + 30), (2, 2)).tolist()
        cv2.line(mask, ends[0], ends[1], 1, int(rng.integers(1, 40)))
    mask[rng.random(SIZE) > rng.choice([0.5, 0.97, 1.0])] = 0
    return mask


def widened(mask: np.ndarray) -> np.ndarray:
    return cv2.dilate(mask, WIDE)


def expected(first: np.ndarray, second: np.ndarray) -> float:
    one, two = widened(first), widened(second)
    shared = one & two
    if 2 * shared.sum() < min(one.sum(), two.sum()):
        return 0.0
    _, labels = cv2.connectedComponents(first | second, connectivity=8)
    kept = widened(np.isin(labels, np.setdiff1d(labels[shared > 0], 0)).astype(np.uint8))
    return int((shared & kept).sum()) / max(int(kept.sum()), 1)


@pytest.mark.parametrize("seed", range(4))
def test_pairs_agree_and_share_pixels_as_their_bitmaps_do(seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = [blobs(rng) for _ in range(14)]
    drawn += [np.roll(mask, rng.integers(0, 4, 2), (0, 1)) for mask in drawn]
    drawn = [mask for mask in drawn if mask.any()]
    masks = agreement.Masks([Runs.of(mask) for mask in drawn])
    pairs = np.array([(p, q) for p in range(len(drawn)) for q in range(p)])
    corners = np.sort(rng.integers(0, (SIZE[1], SIZE[0]), (len(pairs), 2, 2)), axis=1).reshape(
        -1, 4
    )
    rectangles = np.where(
        np.arange(len(pairs))[:, None] % 2,
        corners + np.array([0, 0, 1, 1]),
        [0, 0, SIZE[1], SIZE[0]],
    )
    cut = [
        [drawn[m][y1:y2, x1:x2] for m in pair]
        for pair, (x1, y1, x2, y2) in zip(pairs, rectangles, strict=True)
    ]
    truth = [expected(np.ascontiguousarray(one), np.ascontiguousarray(two)) for one, two in cut]
    assert sum(value >= 0.5 for value in truth) >= 10
    assert sum(0 < value < 0.5 for value in truth) >= 10
    assert masks.agreement(pairs, rectangles).tolist() == truth
    assert masks.shared(pairs).tolist() == [int((drawn[p] & drawn[q]).sum()) for p, q in pairs]
    assert masks.areas(pairs[:, 0], rectangles).tolist() == [int(one.sum()) for one, _ in cut]
