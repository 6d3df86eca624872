"""Pairs of masks are compared run by run; here each pair is compared as bitmaps, with OpenCV."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from utils.predict import agreement
from utils.predict.regions import Runs

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
    corners = np.sort(rng.integers(0, (SIZE[1], SIZE[0]), (len(pairs), 2, 2)), axis=1).reshape(-1, 4)
    windows = np.where(np.arange(len(pairs))[:, None] % 2, corners + np.array([0, 0, 1, 1]), [0, 0, SIZE[1], SIZE[0]])
    cut = [[drawn[m][y1:y2, x1:x2] for m in pair] for pair, (x1, y1, x2, y2) in zip(pairs, windows, strict=True)]
    truth = [expected(np.ascontiguousarray(one), np.ascontiguousarray(two)) for one, two in cut]
    assert sum(value >= 0.5 for value in truth) >= 10
    assert sum(0 < value < 0.5 for value in truth) >= 10
    assert masks.agreement(pairs, windows).tolist() == truth
    assert masks.shared(pairs).tolist() == [int((drawn[p] & drawn[q]).sum()) for p, q in pairs]
    assert masks.areas(pairs[:, 0], windows).tolist() == [int(one.sum()) for one, _ in cut]
