"""What a photograph shows of a wire."""

import numpy as np
import pytest

from yolo_seg_ddp.extras.wires.in_photo import likeness, profiles
from yolo_seg_ddp.extras.wires.tests.drawn import straight

ACROSS, ALONG = np.mgrid[:600, :900]


@pytest.mark.parametrize(
    ("photo", "low", "high"),
    [
        (np.where(abs(ACROSS - 300) < 4, 90, 60), 0.8, 1.0),
        # from dark ground to light ground
        (np.where(abs(ACROSS - 300) < 4, 90, 60 + ALONG // 8), 0.6, 0.95),
        (np.where(ACROSS < 300, 60, 180), 0.2, 0.5),  # an edge
        # a pole
        (
            np.where(abs(ACROSS - 300) < 4, 90, np.where((ALONG > 400) & (ALONG < 500), 200, 60)),
            0.8,
            1.0,
        ),
        (np.full((600, 900), 60), 0.0, 0.0),
    ],
    ids=["wire", "ground", "edge", "pole", "nothing"],
)
def test_a_wire_differs_from_both_sides(photo: np.ndarray, low: float, high: float) -> None:
    whole = likeness(straight((50, 300), (850, 300)), photo.astype(np.uint8))
    assert low <= whole <= high
    assert likeness(straight((50, 300), (120, 300)), photo.astype(np.uint8)) <= 0.55 * high


def test_a_wire_across_a_photograph_wider_than_opencv_takes_is_measured() -> None:
    photo = np.full((60, 40_000, 3), 90, np.uint8)
    photo[30:36] = 200
    places, beside, widths = profiles(straight((0, 31), (40_000, 31), width=8), photo)
    assert len(places) == 1000
    assert np.ptp(places) > 39_900
    assert beside == pytest.approx(np.full(1000, 2.0), abs=0.3)
    assert widths == pytest.approx(np.full(1000, 6.0), abs=1)
