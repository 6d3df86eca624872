"""Made-up detections in tiles become the objects that they are parts of."""

import cProfile
from dataclasses import replace

import cv2
import numpy as np
import pytest

from tests.predict.tile_scenes import (
    Truth,
    blur_edges,
    iou_of,
    made_up_piece,
    seen_in_tiles,
    stroke,
    wires_and_pole,
)
from yolo_seg_ddp.predict.agreement import WIDEN_PX, Masks, widen
from yolo_seg_ddp.predict.merge_tiles import MergedInstance, TileDetection, is_cut, join_tiles
from yolo_seg_ddp.predict.overview import without_mask
from yolo_seg_ddp.predict.regions import Runs
from yolo_seg_ddp.predict.tiles import cut_tiles

SIZE = (1280, 896)
TILES = cut_tiles(*SIZE, 320)  # 6 x 4, 128 px of overlap
WIRE, POLE = 0, 1


SCENE = wires_and_pole(SIZE)


def assert_found(objects: list[MergedInstance], truth: list[Truth], min_iou: float = 0.99) -> None:
    """Every true object is found once, with its class, and nothing else is."""
    assert len(objects) == len(truth)
    for class_id, mask in truth:
        same_class = [instance for instance in objects if instance.class_id == class_id]
        assert sum(iou_of(instance.region(), mask) >= min_iou for instance in same_class) == 1


def test_parallel_wires_across_24_tiles_and_a_pole_are_four_objects() -> None:
    assert len(TILES) == 24
    for seed in range(3):
        pieces = seen_in_tiles(SCENE, TILES, seed, share=0.01)
        objects = join_tiles(pieces, TILES, 0.7)
        assert_found(objects, SCENE)
        for instance in objects:
            low, high = (
                min(piece.score for piece in instance.pieces),
                max(piece.score for piece in instance.pieces),
            )
            assert low < instance.score < high
            x1, y1, x2, y2 = instance.box
            assert instance.corners == (x1, y1, x2, y2)


def test_neither_order_nor_duplicates_nor_masks_of_hardly_any_confidence_change_objects() -> None:
    pieces = seen_in_tiles(SCENE, TILES)
    objects = join_tiles(pieces, TILES, 0.7)
    for seed in range(3):
        shuffled = [
            pieces[position] for position in np.random.default_rng(seed).permutation(len(pieces))
        ]
        again = join_tiles(shuffled, TILES, 0.7)
        assert [instance.score for instance in again] == [instance.score for instance in objects]
        assert [instance.pieces for instance in again] == [instance.pieces for instance in objects]
    more = list(pieces)
    for share, seed in ((0.5, 1), (0.01, 2)):  # of the confidence; with other edges
        rng = np.random.default_rng(seed)
        for piece in pieces:
            left, top, *_ = piece.mask.corners
            mask = blur_edges(piece.mask.crop(piece.mask.corners), rng, 0.2)
            more += made_up_piece(piece.tile, piece.class_id, piece.score * share, mask, left, top)
    again = join_tiles(more, TILES, 0.7)
    assert [instance.pieces for instance in again] == [instance.pieces for instance in objects]
    for number, (left, top, *_) in enumerate(TILES):
        for _ in range(20):
            mask = np.zeros((320, 320), bool)
            x, y, width, height = rng.integers(0, 280, 4)
            mask[y : y + height + 8, x : x + width + 8] = True
            more += made_up_piece(
                number, int(rng.integers(2)), float(rng.uniform(0.001, 0.02)), mask, left, top
            )
    again = join_tiles(more, TILES, 0.7)
    assert [instance.pieces for instance in again[:4]] == [instance.pieces for instance in objects]
    assert all(instance.score <= 0.02 for instance in again[4:])


def test_a_mask_three_pixels_beside_the_other_still_agrees() -> None:
    masks = Masks([Runs.of(stroke((300, 100), [(10, y), (280, y)], 7)) for y in (40, 43, 60)])
    pairs, rectangles = np.array([[0, 1], [0, 2]]), np.array([[0, 0, 300, 100]] * 2)
    # an IoU below 0.5
    assert (masks.shared(pairs) < masks.areas(pairs[:, 0], rectangles) * 2 / 3).all()
    beside, far = masks.agreement(pairs, rectangles)
    assert beside >= 0.5
    assert far == 0


def test_a_mask_is_widened_to_all_sides() -> None:
    canvas = np.zeros((40, 60), bool)
    canvas[1:33, 4:58] = np.random.default_rng(0).random((32, 54)) < 0.04
    wide = cv2.dilate(canvas.view(np.uint8), np.ones((2 * WIDEN_PX + 1,) * 2)).view(bool)
    np.testing.assert_array_equal(
        widen(Runs.of(canvas), (3, 0, 60, 40)).crop((3, 0, 60, 40)), wide[:, 3:]
    )


def test_random_wires_come_out_whole() -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        ends = rng.integers(0, 896, (8, 2))
        truth = [
            (WIRE, stroke(SIZE, [(0, low), (1279, high)], 4 + number))
            for number, (low, high) in enumerate(ends)
        ]
        pieces = seen_in_tiles(truth, TILES, seed, share=0.01, split=False)
        objects = join_tiles(pieces, TILES, 0.7)
        assert len(pieces) > 8 * len(truth)
        assert len(objects) <= len(truth) + 1
        assert all(
            max(iou_of(instance.region(), mask) for instance in objects) > 0.97 for _, mask in truth
        )


def test_wires_that_cross_stay_two() -> None:
    ends = [
        ((20, 100), (1260, 800)),
        ((20, 800), (1260, 100)),
        ((20, 780), (1260, 720)),
        ((600, 20), (640, 880)),
    ]
    truth = [(WIRE, stroke(SIZE, line, 8)) for line in ends]
    assert_found(join_tiles(seen_in_tiles(truth, TILES, share=0.01), TILES, 0.7), truth)


@pytest.mark.parametrize("lowest", [200, 310, 330, 345, 420, 700])
def test_a_wire_that_leaves_a_tile_and_returns_is_one(lowest: int) -> None:
    sag = [(x, lowest - (lowest - 20) * ((x - 160) / 130) ** 2) for x in range(30, 291, 4)]
    truth = [(WIRE, stroke(SIZE, sag, 6))]
    pieces = seen_in_tiles(truth, TILES, share=0.01)
    if lowest > 330:
        assert sum(piece.tile == 0 for piece in pieces) == 2
    assert_found(join_tiles(pieces, TILES, 0.7), truth)


def test_wires_whose_detections_end_before_their_tile_does_come_out_whole() -> None:
    # YOLOv8's finest level predicts boxes of at most 240 px: here each tile of 320 px has up to two
    # such parts of a wire.
    truth = [(WIRE, stroke(SIZE, [(0, y), (1279, y + 60)], 7)) for y in (200, 250, 640)]
    pieces = []
    for piece in seen_in_tiles(truth, TILES, split=False):
        left, top, right, bottom = piece.mask.corners
        for start, stop in ((left, left + 200), (left + 70, left + 270)):
            corners = (start, top, min(stop, right), bottom)
            pieces += made_up_piece(
                piece.tile, WIRE, piece.score, piece.mask.crop(corners), start, top
            )
    objects = join_tiles(pieces, TILES, 0.7)
    assert_found(objects, truth, min_iou=0.9)


def test_boxes_that_overlap_in_one_tile_stay_two() -> None:
    truth = [(POLE, stroke(SIZE, [(x, 40), (x, 90)], 40)) for x in (100, 118)]
    pieces = [*made_up_piece(0, POLE, 0.9, truth[0][1]), *made_up_piece(0, POLE, 0.8, truth[1][1])]
    assert len(join_tiles(pieces, TILES, 0.7)) == 2


def test_one_detection_of_two_separate_wires_does_not_make_them_one() -> None:
    wires = [(WIRE, stroke(SIZE, [(20, y), (800, y)], 8)) for y in (100, 150)]
    pieces = seen_in_tiles(wires, TILES)
    both = wires[0][1] | wires[1][1]
    left, top, right, bottom = TILES[1]
    pieces = [piece for piece in pieces if piece.tile != 1]
    pieces += made_up_piece(1, WIRE, 0.6, both[top:bottom, left:right], left, top)
    objects = join_tiles(pieces, TILES, 0.7)
    for other in objects:
        tiles = [piece.tile for piece in other.pieces]
        assert len(set(tiles)) == len(tiles)
    assert len(objects) >= 2


def test_wires_that_cross_in_one_tile_and_meet_in_the_next_stay_two() -> None:
    lines = [[(20, 100), (260, 200), (500, 150)], [(20, 200), (260, 100), (500, 150)]]
    wires = [(WIRE, stroke(SIZE, line, 8)) for line in lines]
    in_first = [piece for piece in seen_in_tiles(wires, TILES, split=False) if piece.tile == 0]
    left, top, right, bottom = TILES[1]
    both = (wires[0][1] | wires[1][1])[top:bottom, left:right]
    both[:, :68] = False  # the part in which they still run apart
    objects = join_tiles(in_first + made_up_piece(1, WIRE, 0.6, both, left, top), TILES, 0.7)
    assert len(objects) >= 2
    assert all(
        len({piece.tile for piece in instance.pieces}) == len(instance.pieces)
        for instance in objects
    )


def test_a_wire_continues_in_the_confident_detection_not_in_a_doubtful_one_that_fits_better() -> (
    None
):
    wire = stroke(SIZE, [(20, 100), (480, 100)], 8)
    astray = stroke(SIZE, [(20, 100), (320, 100), (480, 250)], 8)
    shifted = np.roll(wire, 1, axis=0)
    (left, top, right, bottom), tile = TILES[1], (slice(0, 320), slice(0, 320))
    there = (slice(top, bottom), slice(left, right))
    (start,) = made_up_piece(0, WIRE, 0.9, wire[tile])
    (good,) = made_up_piece(1, WIRE, 0.8, shifted[there], left, top)
    (doubtful,) = made_up_piece(1, WIRE, 0.3, astray[there], left, top)
    first, *_ = join_tiles([start, good, doubtful], TILES, 0.7)
    assert first.pieces == (start, good)


@pytest.mark.parametrize(("score", "num_objects"), [(0.29, 1), (0.25, 2)])
def test_a_detection_of_hardly_any_confidence_does_not_continue_a_sure_one(
    score: float, num_objects: int
) -> None:
    pieces = seen_in_tiles([(WIRE, stroke(SIZE, [(20, 100), (500, 180)], 8))], TILES[:2])
    scored = [
        replace(piece, score=value) for piece, value in zip(pieces, (0.9, score), strict=True)
    ]
    assert len(join_tiles(scored, TILES, 0.7)) == num_objects


def test_an_object_seen_whole_by_four_tiles_is_one_and_one_of_another_class_another() -> None:
    spot = stroke(SIZE, [(250, 240), (262, 270)], 20)
    truth = [(WIRE, spot), (POLE, spot)]
    pieces = seen_in_tiles(truth, TILES, share=0.0)
    assert len(pieces) == 8
    objects = join_tiles(pieces, TILES, 0.7)
    assert_found(objects, truth)
    assert [len(instance.pieces) for instance in objects] == [4, 4]


def test_a_wire_that_ends_where_tiles_overlap_is_one() -> None:
    for end in (200, 230, 280, 315, 319):
        truth = [(WIRE, stroke(SIZE, [(20, 100), (end, 130)], 8))]
        assert_found(join_tiles(seen_in_tiles(truth, TILES, share=0.0), TILES, 0.7), truth, 0.98)


def test_a_sliver_at_a_border_goes_and_a_true_neighbour_stays() -> None:
    pole = stroke(SIZE, [(330, 60), (330, 180)], 28)  # tile 0 sees 4 px of it
    sliver = np.zeros((320, 320), bool)
    sliver[100:130, 317:] = True
    (whole,) = [
        piece
        for piece in seen_in_tiles([(POLE, pole)], TILES, share=0.0, short_px=0)
        if piece.tile == 1
    ]
    pieces = [whole, *made_up_piece(0, POLE, 0.25, sliver)]
    assert is_cut(MergedInstance((pieces[1],)), TILES)
    assert not is_cut(MergedInstance((whole,)), TILES)
    assert [instance.pieces for instance in join_tiles(pieces, TILES, 0.7)] == [(whole,)]
    beside = np.zeros((320, 320), bool)
    beside[250:300, 290:] = True
    pieces[1:] = made_up_piece(0, POLE, 0.25, beside)
    assert len(join_tiles(pieces, TILES, 0.7)) == 2


def test_pairs_of_masks_are_counted_together_not_one_by_one_in_python() -> None:
    # A weak model finds hundreds of objects in each tile: comparing the pairs one by one took
    # longer than the network.
    rng = np.random.default_rng(0)
    pieces = []
    for number, (left, top) in enumerate(rng.integers(0, 160, (100, 2)).tolist()):
        pieces += made_up_piece(0, POLE, 0.5 + number / 1000, np.ones((160, 160), bool), left, top)
    profile = cProfile.Profile()
    profile.runcall(join_tiles, pieces, TILES, 0.7)
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 15 * len(pieces) * (len(pieces) - 1) / 2


def test_of_detections_without_a_mask_the_boxes_decide() -> None:
    empty, tiles = Runs.of(np.zeros((1, 1), bool)), [(0, 0, 320, 200), (192, 0, 512, 200)]

    def bare(tile: int, score: float, *box: float, class_id: int = POLE) -> TileDetection:
        return TileDetection(tile, class_id, score, np.array(box, np.float32), empty)

    first = bare(0, 0.9, 20, 30, 80, 130)
    copies = [bare(0, 0.5, 22, 30, 80, 130), bare(-1, 0.4, 20, 32, 81, 130)]
    whole = bare(1, 0.6, 230, 40, 420, 90)  # tile 0 shows a part of it, up to its border
    part, other = bare(0, 0.8, 230, 40, 318, 90), bare(0, 0.3, 21, 30, 80, 130, class_id=WIRE)
    masked = MergedInstance(
        (
            TileDetection(
                1,
                POLE,
                0.7,
                np.array([440, 20, 500, 180], np.float32),
                Runs.of(np.ones((9, 9), bool)),
            ),
        )
    )
    # at the photograph's own edge
    hidden, edge = bare(1, 0.9, 441, 20, 500, 180), bare(1, 0.2, 500, 0, 512, 60)
    pieces = [first, *copies, part, whole, other, hidden, edge]
    found = without_mask(pieces, [masked], tiles, 0.7)
    assert [instance.pieces[0] for instance in found] == [first, whole, other, edge]
    assert [instance.score for instance in found] == [0.9, 0.6, 0.3, 0.2]
    again = without_mask(pieces[::-1], [masked], tiles, 0.7)
    assert [instance.pieces for instance in again] == [instance.pieces for instance in found]
    assert not found[0].region().mask.size
    assert join_tiles(pieces, tiles, 0.7) == []
