"""Run lengths of COCO: what others encode is decoded, what is hostile is refused at once."""

import time
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask

from tests.prepare.parsing.tool_folder import HEIGHT, WIDTH, hard_masks, run_lengths, whole
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.prepare.parsing.coco import RunLengthError, decode_coco

MASKS = hard_masks()


@pytest.mark.parametrize("name", MASKS)
def test_both_of_cocos_encodings_are_decoded(name: str) -> None:
    mask = MASKS[name]
    compressed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    text = {"size": [HEIGHT, WIDTH], "counts": compressed["counts"].decode("ascii")}
    for segmentation in (text, run_lengths(mask)):
        bitmap, left, top = decode_coco(segmentation, (WIDTH, HEIGHT))
        assert (whole(Region(left, top, bitmap)) == mask).all()
        assert all(edge.any() for edge in (bitmap[0], bitmap[-1], bitmap[:, 0], bitmap[:, -1]))


@pytest.mark.parametrize(
    ("segmentation", "reason"),
    [
        ({"size": [9, 9], "counts": [81]}, "its `size` is 9x9"),
        ({"size": [HEIGHT, WIDTH], "counts": [5, 10**9]}, "do not add up"),
        ({"size": [HEIGHT, WIDTH], "counts": [5, -5, HEIGHT * WIDTH]}, "neither a text nor"),
        ({"size": [HEIGHT, WIDTH], "counts": [5, 5]}, "do not add up"),
        ({"size": [HEIGHT, WIDTH], "counts": [HEIGHT * WIDTH]}, "no pixels"),
        ({"size": [HEIGHT, WIDTH], "counts": [1.5]}, "neither a text nor"),
        ({"size": [HEIGHT, WIDTH], "counts": "o" * 40}, "damaged"),
        ({"size": [HEIGHT, WIDTH], "counts": "o" * 40 + "0"}, "damaged"),
        ({"size": [HEIGHT, WIDTH], "counts": "\u00e9"}, "characters"),
        ({"size": [HEIGHT, WIDTH], "counts": ""}, "do not add up"),
        ({"size": [HEIGHT], "counts": "0"}, "`size` is not"),
    ],
)
def test_bad_run_lengths_are_refused(segmentation: dict[str, Any], reason: str) -> None:
    with pytest.raises(RunLengthError, match=reason):
        decode_coco(segmentation, (WIDTH, HEIGHT))


def test_run_lengths_of_gigapixels_take_no_memory() -> None:
    side, start_s = 100_000, time.process_time()
    with pytest.raises(RunLengthError, match="400 megapixels"):
        decode_coco({"size": [side, side], "counts": [0, side * side]}, (side, side))
    assert time.process_time() - start_s < 5
