"""Run lengths of COCO and Label Studio: what others encode is decoded, what is hostile is refused at once."""

import time
from typing import Any

import numpy as np
import pytest
from faster_coco_eval.core import mask as coco_mask

from tests.sources.parsing.tool_folder import HEIGHT, WIDTH, brush, hard_masks, run_lengths, whole
from utils.predict.regions import Region
from utils.sources.parsing.run_lengths import RunLengthError, decode_coco, decode_label_studio, decode_rows

MASKS = hard_masks()


@pytest.mark.parametrize("name", MASKS)
def test_both_of_cocos_encodings_and_cvats_rows_are_decoded(name: str) -> None:
    mask = MASKS[name]
    compressed = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    text = {"size": [HEIGHT, WIDTH], "counts": compressed["counts"].decode("ascii")}
    for segmentation in (text, run_lengths(mask)):
        bitmap, left, top = decode_coco(segmentation, (WIDTH, HEIGHT))
        assert (whole(Region(left, top, bitmap)) == mask).all()
        assert all(edge.any() for edge in (bitmap[0], bitmap[-1], bitmap[:, 0], bitmap[:, -1]))
    changes = np.flatnonzero(np.diff(mask.ravel(), prepend=False))
    rows = ", ".join(map(str, np.diff([0, *changes, mask.size])))
    bitmap, left, top = decode_rows(rows, (5, 3, WIDTH, HEIGHT))
    assert (whole(Region(left - 5, top - 3, bitmap)) == mask).all()


@pytest.mark.parametrize("colour", [(0, 0, 0), (255, 255, 255), (10, 200, 30), (0, 0, 255), (0, 255, 255)])
@pytest.mark.parametrize("name", ["parts", "noise"])
def test_label_studios_brush_is_decoded_by_its_alpha(name: str, colour: tuple[int, int, int]) -> None:
    bitmap, left, top = decode_label_studio(brush(MASKS[name], colour), (WIDTH, HEIGHT))
    assert (whole(Region(left, top, bitmap)) == MASKS[name]).all()


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
    side, start_s = 100_000, time.perf_counter()
    with pytest.raises(RunLengthError, match="400 megapixels"):
        decode_coco({"size": [side, side], "counts": [0, side * side]}, (side, side))
    with pytest.raises(RunLengthError, match="400 megapixels"):
        decode_label_studio([255] * 8, (side, side))
    bomb = [*(4 * 20_000 * 19_000).to_bytes(4, "big"), 0b00111_111, *[0xFF] * 40]
    with pytest.raises(RunLengthError, match="ends too early"):
        decode_label_studio(bomb, (20_000, 19_000))
    assert time.perf_counter() - start_s < 5


@pytest.mark.parametrize("codes", ["text", [300] * 9, [0.5], [], [1, 2, 3], brush(MASKS["hole"])[:-40]])
def test_bad_brushes_are_refused(codes: Any) -> None:
    with pytest.raises(RunLengthError):
        decode_label_studio(codes, (WIDTH, HEIGHT))
