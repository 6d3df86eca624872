from __future__ import annotations

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask

from utils.evaluation.coco import encode_region
from utils.predict.regions import Region


@pytest.mark.parametrize(
    ("left", "top", "width", "height"), [(3, 2, 5, 4), (0, 0, 12, 9), (4, 0, 3, 9), (9, 5, 3, 4), (2, 3, 0, 0)]
)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_a_regions_run_lengths_are_those_of_the_whole_mask(
    left: int, top: int, width: int, height: int, share: float
) -> None:
    bitmap = np.random.default_rng(5).random((height, width)) < share
    whole = np.zeros((9, 12), np.uint8)
    whole[top : top + height, left : left + width] = bitmap
    expected = coco_mask.encode(np.asfortranarray(whole))
    encoded = encode_region(Region(left, top, bitmap), (12, 9))
    assert encoded == {"size": [9, 12], "counts": expected["counts"].decode("ascii")}
