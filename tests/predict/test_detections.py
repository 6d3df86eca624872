"""From raw outputs to detections: suppression per class, the way back to the photograph, masks in the right place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from utils.data.images import letterbox
from utils.predict.detections import Detections, Placement, decode, detect, photo_masks, prototype_masks

SIZE_PX, STRIDES, NUM_CLASSES, NUM_BINS = 64, [8.0, 16.0, 32.0], 3, 16
NUM_ANCHORS = 64 + 16 + 4


def empty_outputs(num_images: int = 1) -> dict[str, torch.Tensor]:
    return {
        "boxes": torch.zeros(num_images, 4 * NUM_BINS, NUM_ANCHORS),
        "scores": torch.full((num_images, NUM_CLASSES, NUM_ANCHORS), -20.0),
        "mask_coefficient": torch.zeros(num_images, 32, NUM_ANCHORS),
        "proto": torch.zeros(num_images, 32, SIZE_PX // 4, SIZE_PX // 4),
    }


def put(
    outputs: dict[str, torch.Tensor], cell: tuple[int, int], sides: tuple[int, ...], class_id: int, score: float
) -> None:
    """Let the cell (column, row) of the finest level predict a box that reaches `sides` cells left, up, right, down."""
    anchor = cell[1] * 8 + cell[0]
    for side, distance in enumerate(sides):
        outputs["boxes"][0, side * NUM_BINS + distance, anchor] = 60.0
    outputs["scores"][0, class_id, anchor] = torch.logit(torch.tensor(score))
    outputs["mask_coefficient"][0, :, anchor] = float(anchor)


def test_boxes_are_decoded_from_the_cells_centre() -> None:
    outputs = empty_outputs()
    put(outputs, (3, 2), (1, 2, 3, 4), 1, 0.9)
    boxes, probabilities = decode(outputs, STRIDES, SIZE_PX)
    assert boxes.shape == (1, NUM_ANCHORS, 4)
    # The centre is at 28, 20; the sides are 1, 2, 3 and 4 cells of 8 pixels away.
    assert boxes[0, 2 * 8 + 3].tolist() == pytest.approx([28 - 8, 20 - 16, 28 + 24, 20 + 32], abs=1e-3)
    assert probabilities[0, 2 * 8 + 3].tolist() == pytest.approx([0, 0.9, 0], abs=1e-6)
    outputs["boxes"][0, [1, 17, 33, 49], NUM_ANCHORS - 1] = 60.0  # the coarsest level has the last anchors
    assert decode(outputs, STRIDES, SIZE_PX)[0][0, -1].tolist() == pytest.approx([16, 16, 80, 80], abs=1e-3)


BOX, NEXT = ((3, 3), (2, 2, 2, 2)), ((4, 3), (3, 2, 1, 2))  # the same box, from neighbouring cells
FAR = ((0, 7), (0, 1, 2, 0))
LEFT, RIGHT = ((2, 3), (2, 2, 2, 2)), ((4, 3), (2, 2, 2, 2))  # they overlap by a third
OF_ONE_CLASS = [(*BOX, 1, 0.8), (*NEXT, 1, 0.9), (*FAR, 1, 0.5)]
OF_TWO_CLASSES = [(*BOX, 1, 0.8), (*NEXT, 2, 0.9)]
OF_ONE_CELL = [(*BOX, 1, 0.8), (*BOX, 2, 0.6)]
NEIGHBOURS = [(*LEFT, 0, 0.9), (*RIGHT, 0, 0.6)]


@pytest.mark.parametrize(
    ("seen", "options", "kept"),
    [
        (OF_ONE_CLASS, {}, [1, 2]),  # duplicates go, the best stays
        (OF_TWO_CLASSES, {}, [1, 0]),
        (OF_TWO_CLASSES, {"classes": (1,)}, [0]),
        (OF_TWO_CLASSES, {"classes": (0,)}, []),
        (OF_ONE_CELL, {}, [0]),
        (OF_ONE_CELL, {"multi_label": True}, [0, 1]),
        (NEIGHBOURS, {}, [0, 1]),
        (NEIGHBOURS, {"iou": 0.3}, [0]),
        (NEIGHBOURS, {"confidence": 0.7}, [0]),
        (NEIGHBOURS, {"max_detections": 1}, [0]),
    ],
)
def test_what_a_cell_sees_is_kept_or_suppressed(seen: list[Any], options: dict[str, Any], kept: list[int]) -> None:
    outputs = empty_outputs()
    for cell, sides, class_id, score in seen:
        put(outputs, cell, sides, class_id, score)
    (found,) = detect(outputs, STRIDES, SIZE_PX, **{"confidence": 0.25, "iou": 0.5, **options})
    assert len(found) == len(kept)
    for row, number in enumerate(kept):
        (column, line), (left, top, right, bottom), class_id, score = seen[number]
        x, y = 8 * column + 4, 8 * line + 4
        assert found.boxes[row].tolist() == pytest.approx(
            [x - 8 * left, y - 8 * top, x + 8 * right, y + 8 * bottom], abs=1e-3
        )
        assert int(found.class_ids[row]) == class_id
        assert float(found.scores[row]) == pytest.approx(score, abs=1e-5)
        assert found.coefficients[row, 0] == line * 8 + column


def test_thin_boxes_of_thin_classes_are_as_sure_as_thick_ones() -> None:
    outputs = empty_outputs()
    put(outputs, (1, 1), (1, 1, 1, 1), 0, 0.5)
    put(outputs, (3, 3), (2, 1, 2, 1), 1, 0.4)  # 16 pixels thick
    put(outputs, (3, 6), (2, 0, 2, 0), 1, 0.1)  # without thickness: three times
    (found,) = detect(outputs, STRIDES, SIZE_PX, confidence=0.25, iou=0.5, thin=(1,))
    assert found.scores.tolist() == pytest.approx([0.4 * (1 + 12 / 16), 0.5, 0.3], abs=1e-4)
    assert found.class_ids.tolist() == [1, 0, 1]


# --- the way back to the photograph --------------------------------------------------------------------------------


def placement_of(width: int, height: int) -> Placement:
    """Return where the project's letterbox puts a photograph."""
    _, inner_size, pad = letterbox(np.zeros((height, width, 3), np.uint8), SIZE_PX)
    return Placement(SIZE_PX, inner_size, pad, (width, height))


@pytest.mark.parametrize("size", [(200, 100), (101, 333), (64, 64), (30, 17), (5472, 3648)])
def test_boxes_come_back_to_the_photograph(size: tuple[int, int]) -> None:
    width, height = size
    placement = placement_of(width, height)
    rng = np.random.default_rng(0)
    corners = np.sort(rng.uniform(0, 1, (20, 2, 2)), 1).reshape(20, 4) * (width, height, width, height)
    scale = SIZE_PX / max(size)
    inside = torch.tensor(corners * scale + placement.pad * 2, dtype=torch.float32)
    one_input_pixel = 1 / scale
    assert np.abs(placement.boxes_to_photo(inside).numpy() - corners).max() < 0.51 * one_input_pixel
    whole = torch.tensor([[*placement.pad, *np.add(placement.pad, placement.inner_size)]], dtype=torch.float32)
    assert placement.boxes_to_photo(whole).numpy() == pytest.approx(np.array([[0, 0, width, height]]), rel=1e-5)


def test_boxes_in_the_padding_are_clipped_to_the_photograph() -> None:
    boxes = placement_of(200, 100).boxes_to_photo(torch.tensor([[-10.0, 0, 70, 64], [10, 0, 20, 10]]))
    assert boxes.tolist() == [[0, 0, 200, 100], [pytest.approx(31.25), 0, pytest.approx(62.5), 0]]


def blob_prototypes(rows: slice, columns: slice) -> torch.Tensor:
    prototypes = torch.zeros(32, SIZE_PX // 4, SIZE_PX // 4)
    prototypes[0] = -10
    prototypes[0, rows, columns] = 10
    return prototypes


def one_detection(*boxes: tuple[float, ...]) -> Detections:
    coefficients = torch.zeros(len(boxes), 32)
    coefficients[:, 0] = 1
    count = len(boxes)
    return Detections(torch.tensor(boxes), torch.ones(count), torch.zeros(count, dtype=torch.int64), coefficients)


def whole_masks(prototypes: torch.Tensor, found: Detections, placement: Placement) -> np.ndarray:
    """Return the masks in the whole photograph, bool (n, H, W)."""
    regions = list(photo_masks(prototypes, found, placement))
    masks = np.zeros((len(regions), *placement.photo_size[::-1]), bool)
    for mask, region in zip(masks, regions, strict=True):
        height, width = region.mask.shape
        mask[region.top : region.top + height, region.left : region.left + width] = region.mask
    return masks


def interpolated(prototypes: torch.Tensor, found: Detections, placement: Placement) -> torch.Tensor:
    """Enlarge the whole mask of each detection with PyTorch, to the input and from there to the photograph: (n, H, W)."""
    (left, top), (width, height) = placement.pad, placement.inner_size
    logits = torch.einsum("nc,chw->nhw", found.coefficients, prototypes)
    at_input = F.interpolate(logits[None], (placement.size_px,) * 2, mode="bilinear")
    inner = at_input[..., top : top + height, left : left + width]
    return F.interpolate(inner, placement.photo_size[::-1], mode="bilinear")[0]


@pytest.mark.parametrize("size", [(200, 100), (101, 333), (64, 64), (30, 17), (1, 7), (1333, 77), (700, 900)], ids=str)
def test_a_mask_computed_inside_its_box_is_the_whole_enlarged_one(size: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(sum(size))
    prototypes = F.interpolate(torch.randn(1, 32, 5, 5, generator=rng), (16, 16), mode="bicubic")[0]
    centre, half = (torch.rand(12, 2, generator=rng) * span for span in (64, 40))
    boxes = torch.cat([centre - half, centre + half], 1)
    boxes[0] = torch.tensor([0.0, 0, 64, 64])
    found = Detections(boxes, torch.ones(12), torch.zeros(12).long(), torch.randn(12, 32, generator=rng))
    placement = placement_of(*size)
    values = interpolated(prototypes, found, placement)
    x1, y1, x2, y2 = placement.boxes_to_photo(boxes).T[..., None]
    columns, rows = torch.arange(size[0]), torch.arange(size[1])
    inside = ((columns >= x1) & (columns < x2))[:, None, :] & ((rows >= y1) & (rows < y2))[:, :, None]
    expected = (values > 0) & inside
    differs = torch.from_numpy(whole_masks(prototypes, found, placement)) != expected
    assert values[differs].abs().sum() < 1e-4  # only rounding may decide otherwise
    assert differs.sum() <= 1e-5 * differs.numel() + 2
    assert 0 < expected.sum() < inside.sum()


@pytest.mark.parametrize(
    ("size", "rows", "columns", "expected"),
    [
        # 200 x 100 lies at scale 0.32 between rows 16 and 48 of the input: prototype rows 4 to 12.
        ((200, 100), slice(5, 9), slice(2, 10), (25, 12.5, 125, 62.5)),
        # 100 x 200 lies between columns 16 and 48.
        ((100, 200), slice(2, 10), slice(5, 9), (12.5, 25, 62.5, 125)),
    ],
)
def test_a_blob_of_the_prototypes_lands_in_the_right_place_of_the_photograph(
    size: tuple[int, int], rows: slice, columns: slice, expected: tuple[float, ...]
) -> None:
    whole_input = (0.0, 0.0, 64.0, 64.0)
    (mask,) = whole_masks(blob_prototypes(rows, columns), one_detection(whole_input), placement_of(*size))
    y, x = mask.nonzero()
    assert [x.min(), y.min(), x.max() + 1, y.max() + 1] == pytest.approx(expected, abs=1.5)
    assert len(x) == pytest.approx((expected[2] - expected[0]) * (expected[3] - expected[1]), rel=0.03)


def test_masks_are_cut_to_their_own_boxes() -> None:
    prototypes = blob_prototypes(slice(0, 16), slice(0, 16))  # everywhere
    detections = one_detection((16, 24, 32, 40), (0, 0, 64, 64))
    small, all_of_it = whole_masks(prototypes, detections, placement_of(200, 100))
    y, x = small.nonzero()
    assert [x.min(), y.min(), x.max() + 1, y.max() + 1] == [50, 25, 100, 75]
    assert small.sum() == 50 * 50
    assert all_of_it.all()
    at_prototypes = prototype_masks(prototypes, detections, SIZE_PX)
    assert at_prototypes.shape == (2, 16, 16)
    assert at_prototypes[0].nonzero().amin(0).tolist() == [6, 4]
    assert at_prototypes[0].nonzero().amax(0).tolist() == [9, 7]
    assert at_prototypes[1].all()


def test_many_masks_and_none_are_finished() -> None:
    prototypes = blob_prototypes(slice(0, 16), slice(0, 16))
    many = one_detection(*[(0.0, 16.0, float(k + 1), 48.0) for k in range(40)])
    widths = whole_masks(prototypes, many, placement_of(64, 32)).any(1).sum(1)
    assert widths.tolist() == list(range(1, 41))
    none = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 32))
    assert list(photo_masks(prototypes, none, placement_of(64, 32))) == []
    assert prototype_masks(prototypes, none, SIZE_PX).shape == (0, 16, 16)
