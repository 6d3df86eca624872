"""Outlines of bitmaps enclose exactly their pixels."""

import cv2
import numpy as np
import pytest

from tests.prepare.parsing.tool_folder import whole
from yolo_seg_ddp.data.mask_rings import join_rings, mask_rings, signed_area
from yolo_seg_ddp.evaluation.native_masks import fill_outline


def filled(rings: list[np.ndarray], height: int, width: int) -> np.ndarray:
    mask = np.zeros((height, width), bool)
    for ring in rings:
        mask ^= whole(fill_outline(ring, (width, height)), width, height)
    return mask


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("blur", [1, 5])
def test_rings_enclose_the_pixels_of_the_mask_and_no_others(share: float, blur: int) -> None:
    random = np.random.default_rng(int(share * 10) + blur)
    for height, width in ((1, 1), (1, 30), (30, 1), (23, 31)):
        noise = cv2.blur(random.random((height, width)), (blur, blur)).reshape(height, width)
        mask = noise <= np.quantile(noise, share)
        rings = mask_rings(mask)
        assert (filled(rings, height, width) == mask).all()
        assert (filled([join_rings(rings)], height, width) == mask).all()


def test_pixels_that_touch_at_a_corner_are_one_outline_and_a_hole_runs_the_other_way() -> None:
    (diagonal,) = mask_rings(np.eye(30, dtype=bool), 100, 200)
    assert len(diagonal) < 10
    assert diagonal.min(0).tolist() == pytest.approx([100, 200], abs=0.5)
    frame = np.ones((9, 12), bool)
    frame[3:6, 4:8] = False
    outer, hole = mask_rings(frame)
    assert signed_area(outer) * signed_area(hole) < 0


def test_slanted_edges_keep_a_quarter_of_the_vertices_of_their_pixels() -> None:
    mask = np.zeros((300, 400), np.uint8)
    cv2.fillPoly(mask, [np.array([(20, 40), (380, 60), (330, 280), (60, 250)])], 1)
    (ring,) = mask_rings(mask.astype(bool))
    sides = np.count_nonzero(np.diff(mask, axis=0)) + np.count_nonzero(np.diff(mask, axis=1))
    assert len(ring) < sides / 4


def test_noise_of_many_megapixels_is_refused_before_it_takes_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("yolo_seg_ddp.data.mask_rings.MAX_CORNERS", 50)
    with pytest.raises(ValueError, match="is noise, not an object"):
        mask_rings(np.random.default_rng(0).random((20, 20)) < 0.5)
    assert mask_rings(np.ones((20, 20), bool))
