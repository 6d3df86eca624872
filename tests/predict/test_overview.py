"""The coarse masks of the whole photograph beside the objects from tiles."""

from dataclasses import replace

import cv2
import numpy as np
import pytest

from tests.predict.tile_scenes import iou_of, made_up_piece, seen_in_tiles, stroke
from yolo_seg_ddp.predict.merge_tiles import MergedInstance, TileDetection, join_tiles
from yolo_seg_ddp.predict.overview import merge_coarse_level
from yolo_seg_ddp.predict.tiles import cut_tiles

SIZE = (1280, 896)
TILES = cut_tiles(*SIZE, 320)
MASK_PX = 16.0  # 4 pixels of an input at a quarter of the photograph's size


def coarse(mask: np.ndarray, score: float = 0.6, class_id: int = 0) -> TileDetection:
    """Return what the pass over the whole photograph finds of a true mask: one decision for each 16
    x 16 pixels.
    """
    small = cv2.resize(
        mask.astype(np.float32), (SIZE[0] // 16, SIZE[1] // 16), interpolation=cv2.INTER_AREA
    )
    seen = cv2.resize((small > 0.2).astype(np.uint8), SIZE, interpolation=cv2.INTER_NEAREST).view(
        bool
    )
    (piece,) = made_up_piece(-1, class_id, score, seen)
    return piece


def joined(pieces: list[TileDetection], *whole: TileDetection) -> list[MergedInstance]:
    return merge_coarse_level(
        join_tiles(pieces, TILES, 0.7),
        [MergedInstance((piece,)) for piece in whole],
        TILES,
        320,
        1280,
        MASK_PX,
    )


def test_an_object_of_tiles_beats_its_coarse_mask() -> None:
    wire, pole = (
        stroke(SIZE, [(60, 860), (1200, 60)], 8),
        stroke(SIZE, [(300, 100), (300, 700)], 70),
    )
    pieces = seen_in_tiles([(0, wire), (1, pole)], TILES, share=0.01)
    alone = {instance.class_id: instance for instance in join_tiles(pieces, TILES, 0.7)}
    for instance in joined(pieces, coarse(wire), coarse(pole, 0.9, 1)):
        before = alone.pop(instance.class_id)
        assert instance.pieces == before.pieces
        # The whole photograph hardly shows a wire: wrong only if both are wrong. It shows a pole
        # well: the mean.
        confidence = (1 - (1 - before.score) * 0.4, (before.score + 0.9) / 2)
        assert instance.score == pytest.approx(confidence[instance.class_id])
    assert not alone


def test_a_coarse_mask_raises_the_confidence_of_no_object_that_fills_less_than_half_of_it() -> None:
    posts = [stroke(SIZE, [(300, y), (300, y + 90)], 20) for y in (60, 250, 440, 630)]
    pieces = seen_in_tiles([(0, post) for post in posts], TILES, share=0.01)
    alone = joined(pieces)
    fence = coarse(stroke(SIZE, [(300, 50), (300, 720)], 20), 0.9)
    assert sorted(instance.score for instance in joined(pieces, fence))[:4] == sorted(
        instance.score for instance in alone
    )


def building(width: int, height: int) -> np.ndarray:
    mask = np.zeros(SIZE[::-1], bool)
    mask[200 : 200 + height, 300 : 300 + width] = True
    return mask


def test_the_coarse_mask_of_what_is_thicker_than_a_tile_replaces_the_pieces_inside() -> None:
    house = building(600, 400)
    # scores 0.59 to 0.98
    panes = [(0, stroke(SIZE, [(x, 320), (x, 480)], 60)) for x in range(350, 900, 110)]
    beside = [
        (0, stroke(SIZE, [(100, 100), (100, 300)], 60)),
        (1, stroke(SIZE, [(500, 300), (500, 500)], 60)),
    ]
    pieces = seen_in_tiles([*panes, *beside], TILES, share=0.01)
    assert len(joined(pieces)) == 7
    found = joined(pieces, coarse(house, 0.99))
    assert len(found) == 3
    assert sorted(iou_of(instance.region(), house) > 0.9 for instance in found) == [
        False,
        False,
        True,
    ]
    # It replaces only what is less confident.
    assert len(joined(pieces, coarse(house, 0.6))) == 5
    # Thinner than a tile: the pieces stay, and the coarse mask goes, because they cover half of it.
    assert len(joined(pieces, coarse(building(600, 280), 0.99))) == 7


def test_a_thick_coarse_mask_over_two_more_confident_objects_replaces_neither() -> None:
    pair = [building(280, 500), np.roll(building(280, 500), 300, axis=1)]
    pieces = seen_in_tiles([(0, instance) for instance in pair], TILES, share=0.01)
    found = joined(pieces, coarse(pair[0] | pair[1], 0.3))
    assert sorted(iou_of(instance.region(), pair[0]) > 0.9 for instance in found) == [
        False,
        False,
        True,
    ]
    assert {instance.pieces for instance in found[:2]} == {
        instance.pieces for instance in joined(pieces)
    }


def test_what_is_thicker_than_a_tile_and_not_seen_in_the_whole_photograph_is_dropped() -> None:
    pieces = seen_in_tiles([(0, building(600, 400)), (1, building(600, 280))], TILES, share=0.01)
    assert [instance.class_id for instance in joined(pieces)] == [1]
    assert [
        instance.class_id for instance in joined(pieces, coarse(building(600, 400), class_id=1))
    ] == [1]


def test_a_blob_from_tiles_that_contains_a_coarse_mask_neither_agrees_with_it_nor_covers_it() -> (
    None
):
    house = building(400, 340)
    pieces = seen_in_tiles([(0, building(900, 600))], TILES, share=0.01)
    (found,) = joined(pieces, coarse(house, 0.3))
    assert iou_of(found.region(), house) > 0.85
    assert found.score == 0.3


@pytest.mark.parametrize("score", [0.3, 0.98])
def test_of_a_thick_object_that_both_passes_found_the_more_confident_mask_stays(
    score: float,
) -> None:
    house = building(600, 400)
    whole = coarse(house, score)
    pieces = seen_in_tiles([(0, house)], TILES, share=0.01)
    (alone,) = join_tiles(pieces, TILES, 0.7)
    (found,) = joined(pieces, whole)
    assert found.pieces == ((whole,) if score > alone.score else alone.pieces)
    assert found.score == pytest.approx((score + alone.score) / 2)


@pytest.mark.parametrize(
    ("width", "share"),
    # in a tile; longer than a tile; thinner than the photograph's pass shows well
    [(100, 0.5), (400, 0.5), (30, 1)],
)
def test_what_the_whole_photograph_shows_well_but_has_not_found_loses_half_its_confidence(
    width: int, share: float
) -> None:
    pieces = seen_in_tiles([(0, building(width, 200))], TILES, share=0.01)
    (alone,) = join_tiles(pieces, TILES, 0.7)
    (found,) = joined(pieces)
    assert found.score == pytest.approx(share * alone.score)


def test_a_blob_longer_than_its_tiles_does_not_hide_the_smaller_coarse_mask_inside() -> None:
    house = building(300, 280)
    pieces = seen_in_tiles([(0, building(800, 300))], TILES, share=0.01)
    found = joined(pieces, coarse(house, 0.4))
    assert [instance.score for instance in found if iou_of(instance.region(), house) > 0.85] == [
        pytest.approx(0.4)
    ]
    assert len(found) == 2


def test_what_no_tile_found_stays() -> None:
    wire, bush = (
        stroke(SIZE, [(60, 860), (1200, 60)], 8),
        stroke(SIZE, [(300, 100), (500, 200)], 200),
    )
    pieces = seen_in_tiles([(0, wire)], TILES)
    found = joined(pieces, coarse(bush, 0.95))
    assert len(found) == 2
    assert iou_of(found[0].region(), bush) > 0.9
    # The same place, but another class: two objects.
    assert (
        len(joined(pieces, coarse(stroke(SIZE, [(60, 860), (1200, 60)], 40), 0.95, class_id=1)))
        == 2
    )


def test_a_coarse_mask_one_pixel_thick_is_dropped_where_no_tile_found_anything() -> None:
    wire = stroke(SIZE, [(60, 440), (1200, 440)], 8)  # half a pixel of the coarse mask
    assert joined([], coarse(wire, 0.9)) == []
    assert len(joined([], coarse(stroke(SIZE, [(60, 440), (1200, 440)], 30), 0.9))) == 1


def test_fragments_inside_one_coarse_mask_become_one_object_and_the_gap_is_filled() -> None:
    pole = stroke(SIZE, [(640, 40), (640, 860)], 40)
    pieces = seen_in_tiles([(0, pole)], TILES, share=0.0)
    missed = [number for number, tile in enumerate(TILES) if tile[1] == 192]
    pieces = [piece for piece in pieces if piece.tile not in missed and TILES[piece.tile][1] != 384]
    assert len(joined(pieces)) == 2
    (found,) = joined(pieces, coarse(pole))
    assert iou_of(found.region(), pole) > 0.85  # the coarse mask is 48 to 64 px wide
    # background and one part
    assert cv2.connectedComponents(found.region().mask.astype(np.uint8))[0] == 2
    assert found.box.tolist() == [608, 20, 672, 881]
    rest = found.pieces[-1]
    assert rest.tile == -1
    assert rest.mask.area < pole.sum() / 2


def test_a_coarse_mask_over_two_parallel_wires_joins_none_of_them() -> None:
    wires = [stroke(SIZE, [(60, y), (1200, y)], 8) for y in (150, 170)]
    pieces = seen_in_tiles([(0, wire) for wire in wires], TILES)
    gap = [number for number, tile in enumerate(TILES) if tile[0] in (384, 576)]
    pieces = [piece for piece in pieces if piece.tile not in gap]
    alone = joined(pieces)
    assert len(alone) == 4
    both = joined(pieces, coarse(wires[0] | wires[1]))
    assert [instance.pieces for instance in both] == [instance.pieces for instance in alone]


def test_a_coarse_mask_of_hardly_any_confidence_joins_and_covers_nothing() -> None:
    pole = stroke(SIZE, [(640, 40), (640, 860)], 40)
    pieces = [
        piece
        for piece in seen_in_tiles([(0, pole)], TILES)
        if TILES[piece.tile][1] not in (192, 384)
    ]
    found = joined(pieces, coarse(pole, 0.004))
    assert [instance.pieces for instance in found[:2]] == [
        instance.pieces for instance in joined(pieces)
    ]
    assert len(found) == 3


def test_larger_tiles_join_and_replace_as_the_whole_photograph_does() -> None:
    """Two passes over tiles: 320 and 640 pixels, 8 and 16 pixels of the photograph a pixel of their
    masks.
    """
    larger = cut_tiles(*SIZE, 640)
    house, wire = building(600, 400), stroke(SIZE, [(60, 860), (1200, 60)], 8)
    panes = [(0, stroke(SIZE, [(x, 320), (x, 480)], 60)) for x in range(350, 900, 110)]
    fine = join_tiles(seen_in_tiles([*panes, (1, wire)], TILES, share=0.01), TILES, 0.7)
    tiles = [*TILES, *larger]
    seen = seen_in_tiles([(0, house), (1, wire)], larger, share=0.01)
    seen = [replace(piece, tile=piece.tile + len(TILES), score=0.99) for piece in seen]
    coarser = join_tiles(seen, tiles, 0.7)
    # no tile shows either of them whole
    assert [len(instance.pieces) > 1 for instance in coarser] == [True, True]
    found = {
        instance.class_id: instance
        for instance in merge_coarse_level(fine, coarser, tiles, 320, 640, MASK_PX)
    }
    assert len(found) == 2
    assert iou_of(found[0].region(), house) > 0.95
    # the finer mask of the wire
    assert {piece.tile < len(TILES) for piece in found[1].pieces} == {True}
    assert found[1].support == pytest.approx(0.99)
