from __future__ import annotations

import cv2
import numpy as np
import pytest

from utils.predict.prediction_files import outline
from utils.predict.regions import Region


@pytest.mark.parametrize(
    ("left", "top", "width", "height"), [(0, 0, 60, 40), (7, 9, 30, 20), (20, 0, 40, 40), (5, 5, 0, 0)]
)
def test_a_regions_outlines_are_those_of_the_whole_mask(left: int, top: int, width: int, height: int) -> None:
    noise = np.random.default_rng(1).random((height, width))
    region = Region(left, top, cv2.blur(noise, (5, 5)) > 0.5 if width else noise > 0)
    whole = np.zeros((40, 60), np.uint8)
    whole[top : top + height, left : left + width] = region.mask
    contours, _ = cv2.findContours(whole, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    expected = sorted((one[:, 0] for one in contours if len(one) >= 3), key=lambda one: -cv2.contourArea(one))
    assert [one.tolist() for one in outline(region)] == [one.tolist() for one in expected]
    assert bool(expected) == bool(width)
