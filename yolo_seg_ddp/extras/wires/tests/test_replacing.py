"""Detections of thin classes become lines, which end where labelled wires end."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.predict.tile_scenes import iou_of
from yolo_seg_ddp.extras.wires.along import outside, samples
from yolo_seg_ddp.extras.wires.replacing import votes_of
from yolo_seg_ddp.extras.wires.step import with_lines
from yolo_seg_ddp.extras.wires.tests.drawn import (
    CROSSARM,
    SAGGING,
    SIZE,
    STRAIGHT,
    drawn,
    parabola,
    straight,
)
from yolo_seg_ddp.extras.wires.wire_labels import WireLabels
from yolo_seg_ddp.predict.detections import Detections, Letterbox, PhotoPrediction
from yolo_seg_ddp.predict.merge_tiles import TileDetection
from yolo_seg_ddp.predict.regions import Region, Runs, fill_outline

POLE = np.zeros(SIZE[::-1], bool)
POLE[:, 400:440] = True
PLACEMENT = Letterbox(450, (450, 300), (0, 75), SIZE)


def predicted(
    *masks: np.ndarray, scores: Sequence[float] = (), class_ids: Sequence[int] = ()
) -> PhotoPrediction:
    """Return detections of class 1 with a confidence of 0.9, unless stated, with masks (H, W) and
    without boxes.
    """
    ids, count = torch.tensor(class_ids or [1] * len(masks)), len(masks)
    found = Detections(
        torch.zeros(count, 4), torch.tensor(scores or [0.9] * count), ids, torch.zeros(count, 0)
    )
    return PhotoPrediction(
        found, [Region(0, 0, mask) for mask in masks], np.zeros((count, 4), np.float32)
    )


def pictured(mask: np.ndarray) -> np.ndarray:
    """Return a photograph that shows a mask bright."""
    return np.repeat(np.where(mask, 200, 60).astype(np.uint8)[..., None], 3, axis=2)


def test_only_detections_of_the_asked_classes_change() -> None:
    masks = [
        Region(0, 0, drawn(STRAIGHT, CROSSARM)),
        Region(0, 0, drawn(SAGGING)),
        Region(7, 7, np.ones((40, 40), bool)),
        Region(0, 0, drawn(parabola(200, 700, 0))),  # a part of the first
    ]
    boxes, class_ids = np.array([[0, 0, 900, 600]] * 4, np.float32), torch.tensor([1, 0, 1, 1])
    found = Detections(
        torch.from_numpy(boxes), torch.tensor([0.9, 0.8, 0.7, 0.6]), class_ids, torch.zeros(4, 0)
    )
    prediction, photo = PhotoPrediction(found, masks, boxes), pictured(masks[0].mask)
    assert with_lines(prediction, WireLabels(), PLACEMENT, photo) is prediction
    lined = with_lines(prediction, WireLabels((1,)), PLACEMENT, photo)
    width = np.mean([line.width_px for line in lined.lines if line is not None])
    short = (
        0.7 * (1 - np.exp(-np.hypot(40, 40) / 90)) * (1.5 * width / (1600 / np.hypot(40, 40))) ** 2
    )
    assert lined.detections.scores.tolist() == pytest.approx([0.88, 0.87, 0.8, short], abs=0.02)
    assert [line is not None for line in lined.lines] == [True, True, False, False]
    assert lined.masks[2] is masks[1]
    assert lined.masks[3] is masks[2]
    assert lined.boxes[0] == pytest.approx([36, 146, 844, 354], abs=5)
    assert lined.detections.boxes[0] == pytest.approx(
        torch.tensor([18, 148, 422, 252]), abs=3
    )  # half the size, 75 px lower
    assert lined.boxes[2].tolist() == lined.detections.boxes[2].tolist() == [0, 0, 900, 600]
    assert len(with_lines(prediction, WireLabels((1,)), PLACEMENT, photo, 0.5).masks) == 3


def test_objects_of_curved_classes_keep_masks_and_have_a_centreline_if_they_are_one_band() -> None:
    masks = [drawn(SAGGING), drawn(STRAIGHT, CROSSARM)]
    prediction, photo = predicted(*masks), pictured(np.any(masks, axis=0))
    lined = with_lines(prediction, WireLabels((1,), curved=(1,)), PLACEMENT, photo)
    assert [lined.masks[number] is prediction.masks[number] for number in (0, 1)] == [True, True]
    assert lined.detections.scores.tolist() == prediction.detections.scores.tolist()
    band, branched = lined.lines
    assert branched is None
    assert band is not None
    assert iou_of(fill_outline(band.outline, SIZE), masks[0]) > 0.8


@pytest.mark.parametrize(
    ("end_at", "pole_score", "ends"),
    [
        ((0,), 0.6, [36, 400, 440, 844]),
        ((0,), 0.2, [36, 844]),  # not confident
        ((), 0.6, [36, 844]),  # labels pass through poles
    ],
)
def test_a_wire_ends_at_the_objects_at_which_labels_end(
    end_at: tuple[int, ...], pole_score: float, ends: list[int]
) -> None:
    inside = [(410.0, 0.0), (412.0, 600.0)]  # an edge of the pole
    masks, photo = (drawn(STRAIGHT), POLE, drawn(inside, width_px=5)), pictured(drawn(STRAIGHT))
    prediction = predicted(*masks, scores=(0.9, pole_score, 0.9), class_ids=(1, 0, 1))
    lined = with_lines(prediction, WireLabels((1,), end_at), PLACEMENT, photo)
    level = [line for line in lined.lines if line is not None and np.ptp(line.points[:, 0]) > 100]
    assert sorted(
        end for line in level for end in line.points[[0, -1], 0].tolist()
    ) == pytest.approx(ends, abs=6)
    # the edge stays or goes
    assert sum(line is not None for line in lined.lines) == len(ends) // 2 + (len(ends) == 2)
    lefts = [box[0] for box in lined.boxes[lined.class_ids == 1].tolist() if box[2] - box[0] > 100]
    assert sorted(lefts) == pytest.approx(ends[::2], abs=6)


def test_the_box_of_a_wire_that_leaves_the_photograph_ends_at_its_edge() -> None:
    mask = drawn([(0.0, 0.0), (899.0, 599.0)], width_px=9)
    (box,) = with_lines(predicted(mask), WireLabels((1,)), PLACEMENT, pictured(mask)).boxes.tolist()
    assert box == [0, 0, *SIZE]


def test_a_band_wider_than_the_photographs_wires_is_less_sure() -> None:
    masks = [
        drawn([(40.0, y), (840.0, y)], width_px=width)
        for y, width in ((100.0, 9), (300.0, 9), (500.0, 27))
    ]
    photo = pictured(np.any(masks, axis=0))

    def band(*chosen: int) -> tuple[float, float]:
        """Return the confidence of the widest line, and how wide it is beside the median line."""
        lined = with_lines(
            predicted(*(masks[number] for number in chosen)), WireLabels((1,)), PLACEMENT, photo
        )
        widths = [line.width_px for line in lined.lines if line is not None]
        return float(lined.detections.scores[int(np.argmax(widths))]), max(widths) / float(
            np.median(widths)
        )

    alone, _ = band(2)
    score, wider = band(0, 1, 2)
    assert wider > 2
    assert score == pytest.approx(alone * (1.5 / wider) ** 2)
    score, wider = band(0, 2)  # the median lies between both
    assert wider < 1.5
    assert score == pytest.approx(alone)


def test_a_line_that_runs_otherwise_than_the_other_wires_is_less_sure() -> None:
    across = drawn([(440.0, 40.0), (460.0, 560.0)])
    masks = [*(drawn([(40.0, y), (840.0, y + 40)]) for y in (100.0, 300.0, 500.0)), across]
    photo = pictured(np.any(masks, axis=0))

    def scores(
        parallel: dict[int, float], *chosen: int, class_ids: Sequence[int] = ()
    ) -> list[float]:
        found = predicted(*(masks[number] for number in chosen), class_ids=class_ids)
        return with_lines(
            found, WireLabels((1, 2), parallel=parallel), PLACEMENT, photo
        ).detections.scores.tolist()

    *wires, crossing = scores({}, 0, 1, 2, 3)
    *found, lowered = scores({1: 0.5}, 0, 1, 2, 3)
    assert found == wires  # they run alike: nothing is taken from them
    # Of three wires of 800 pixels with these confidences, and the 180 pixels of which half are
    # assumed to run alike.
    share = 0.5 * 180 / (sum(wires) * np.hypot(800, 40) + 180)
    assert lowered == pytest.approx(crossing * share / 0.5, rel=0.02)
    assert scores({1: 0.5}, 3) == scores({}, 3)  # no other line says where wires run
    assert scores({1: 0.5}, 0, 1, 2, 3, class_ids=[2, 2, 2, 1]) == scores(
        {}, 0, 1, 2, 3, class_ids=[2, 2, 2, 1]
    )


def test_a_line_that_continues_a_surer_one_is_part_of_it_unless_labels_end_somewhere() -> None:
    parts = [
        drawn(parabola(40, 300, 0)),
        drawn(parabola(500, 840, 0)),
        drawn([(600.0, 40.0), (860.0, 60.0)]),
    ]
    prediction, photo = predicted(*parts, scores=(0.9, 0.4, 0.4)), pictured(np.any(parts, axis=0))
    alone = {
        number: float(
            with_lines(
                predicted(parts[number], scores=[score]), WireLabels((1,)), PLACEMENT, photo
            ).detections.scores
        )
        for number, score in enumerate((0.9, 0.4, 0.4))
    }
    apart = with_lines(prediction, WireLabels((1,), (0,)), PLACEMENT, photo)
    raised = alone[1] ** 0.6 * alone[0] ** 0.4
    assert apart.detections.scores.tolist() == pytest.approx([alone[0], raised, alone[2]], rel=0.01)
    joined = with_lines(prediction, WireLabels((1,)), PLACEMENT, photo)
    wire, other = joined.lines
    assert joined.detections.scores[0] == pytest.approx(
        np.average([alone[0], raised], weights=[277, 359]), rel=0.01
    )
    assert wire is not None
    assert wire.points[[0, -1], 0] == pytest.approx([36, 844], abs=6)
    assert wire.gaps[0, :, 0] == pytest.approx([304, 496], abs=6)
    assert other is not None
    assert not len(other.gaps)


def test_gaps_stay_with_the_part_of_the_line_that_has_them() -> None:
    wire = drawn(parabola(40, 200, 0), parabola(260, 840, 0))
    lined = with_lines(
        predicted(wire, POLE, class_ids=(1, 0)), WireLabels((1,), (0,)), PLACEMENT, pictured(wire)
    )
    assert sorted(len(line.gaps) for line in lined.lines if line is not None) == [0, 1]


def test_one_sample_of_a_hair_thin_wire_is_no_line() -> None:
    hair = straight((0, 0), (40, 0), width=0.1)
    is_inside = np.ones(len(samples(hair)[0]), bool)
    is_inside[2] = False
    assert outside(hair, is_inside) == []
    is_inside[3] = False
    assert len(outside(hair, is_inside)) == 1


def test_a_wire_ends_where_tiles_hardly_see_it() -> None:
    tiles = [(0, 0, 500, 600), (400, 0, 900, 600), (300, 0, 700, 600)]

    def piece(tile: int, start: int, end: int, score: float) -> TileDetection:
        return TileDetection(
            tile, 1, score, np.zeros(4, np.float32), Runs.of(drawn(parabola(start, end, 0)))
        )

    seen = [
        piece(0, 40, 490, 0.8),
        piece(1, 410, 600, 0.8),
        piece(1, 660, 840, 0.8),
        piece(2, 310, 690, 0.2),
    ]
    votes = votes_of([*seen, piece(-1, 40, 840, 0.9)], tiles, SIZE, (1, 2))
    expected = {100: 0.8, 450: 0.6, 550: 0.5, 630: 0.1, 750: 0.8}
    assert {x: votes[1][round(140 + x / 4), x] for x in expected} == pytest.approx(expected)
    assert not votes[2].any()
    prediction, photo = predicted(drawn(STRAIGHT)), pictured(drawn(STRAIGHT))
    for known, ends in ((votes, [36, 604, 656, 844]), ({}, [36, 844])):
        lined = with_lines(prediction, WireLabels((1,), (0,)), PLACEMENT, photo, votes=known)
        found_ends = sorted(
            end
            for line in lined.lines
            if line is not None
            for end in line.points[[0, -1], 0].tolist()
        )
        assert found_ends == pytest.approx(ends, abs=6)


@pytest.mark.parametrize(
    ("width", "labelled_px"),
    [((1.0, 0.0), 8.0), ((1.0, 12.0), 20.0), ((1.5, 0.0), 12.0), ((0.0, 10.0), 10.0)],
)
def test_a_line_moves_onto_the_wire_and_is_as_wide_as_labels_are(
    width: tuple[float, ...], labelled_px: float
) -> None:
    photo = np.full((*SIZE[::-1], 3), 90, np.uint8)
    photo[drawn(SAGGING, width_px=8)] = (90, 90, 160)  # blue, as bright as the ground
    mask = np.roll(drawn(SAGGING, width_px=12), 4, axis=0)  # beside it
    (line,) = with_lines(predicted(mask), WireLabels((1,), width=width), PLACEMENT, photo).lines
    assert line is not None
    assert line.width_px == pytest.approx(labelled_px, abs=1.5)
    assert (
        iou_of(fill_outline(line.outline, SIZE), drawn(SAGGING, width_px=round(labelled_px))) > 0.75
    )


def test_a_line_stays_where_the_photograph_shows_nothing() -> None:
    prediction, photo = predicted(drawn(STRAIGHT)), pictured(drawn())
    lined = [
        with_lines(prediction, WireLabels((1,), width=width), PLACEMENT, photo)
        for width in ((), (1.0, 9.0))
    ]
    assert np.array_equal(lined[0].masks[0].mask, lined[1].masks[0].mask)
