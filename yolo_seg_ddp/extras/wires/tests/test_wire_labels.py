"""What labels say of wires."""

from dataclasses import replace

import numpy as np
import pytest

from tests.prepare.parsing.tool_folder import whole
from yolo_seg_ddp.data.label_shapes import LabelledPhoto
from yolo_seg_ddp.extras.wires.tests.drawn import SIZE, straight
from yolo_seg_ddp.extras.wires.wire_labels import measure_wire_labels
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.regions import fill_outline

POLE_OUTLINE = np.array([[400.0, 0.0], [440.0, 0.0], [440.0, 600.0], [400.0, 600.0]])
CUT = (straight((0, 100), (400, 110)), straight((440, 111), (900, 120)))
PASSING, BESIDE = straight((0, 300), (900, 320)), straight((500, 400), (900, 400))
UPRIGHT = straight((600, 20), (610, 580))


def labelled(
    *wires: Line, gain: float = 1.0, margin_px: float = 3.0, seed: int = 0
) -> LabelledPhoto:
    """Draw wires 4 to 16 pixels wide and label them."""
    photo, rng = np.full((*SIZE[::-1], 3), 90, np.uint8), np.random.default_rng(seed)
    outlines = [POLE_OUTLINE]
    for wire in wires:
        width_px = rng.uniform(4, 16)
        photo[
            whole(fill_outline(replace(wire, widths=np.full(2, width_px)).outline, SIZE), *SIZE)
        ] = 200
        outlines.append(replace(wire, widths=np.full(2, gain * width_px + margin_px)).outline)
    return LabelledPhoto(np.array([2] + [1] * len(wires)), outlines, SIZE, lambda: photo)


@pytest.mark.parametrize(
    ("photos", "end_at"),
    [
        ([labelled(*CUT, BESIDE)] * 4, [2]),
        ([labelled(*CUT, BESIDE)] * 2, []),  # too few to say so
        ([labelled(*CUT)] * 4 + [labelled(PASSING)] * 4, []),  # as many pass through
        ([labelled(BESIDE)] * 9 + [labelled()] * 9, []),
        ([], []),
    ],
)
def test_labels_say_at_which_objects_wires_end(
    photos: list[LabelledPhoto], end_at: list[int]
) -> None:
    assert measure_wire_labels(photos, (1,))["wires_end_at"] == end_at


@pytest.mark.parametrize(("gain", "margin_px"), [(1.0, 3.0), (0.0, 7.0), (1.5, 0.0)])
def test_labels_say_how_wide_they_are(gain: float, margin_px: float) -> None:
    photos = [
        labelled(PASSING, BESIDE, gain=gain, margin_px=margin_px, seed=seed) for seed in range(8)
    ]
    found = measure_wire_labels(photos, (1,))["wire_width"]
    assert found[0] == pytest.approx(gain, abs=0.25)
    assert found[0] * 6 + found[1] == pytest.approx(gain * 6 + margin_px, abs=0.8)
    assert measure_wire_labels(photos[:4], (1,))["wire_width"] == []  # too few


@pytest.mark.parametrize(
    ("photos", "parallel"),
    [
        ([labelled(PASSING, BESIDE)] * 5, [1, 0.5]),
        ([labelled(PASSING, BESIDE)] * 4, []),  # too few
        ([labelled(PASSING)] * 20, []),  # none beside another
        ([labelled(PASSING, UPRIGHT)] * 20, []),  # in all directions
        ([labelled(PASSING, BESIDE, UPRIGHT)] * 20, []),  # a third of them across
    ],
)
def test_labels_say_whether_wires_run_side_by_side(
    photos: list[LabelledPhoto], parallel: list[float]
) -> None:
    assert measure_wire_labels(photos, (1,))["wires_parallel"] == parallel
