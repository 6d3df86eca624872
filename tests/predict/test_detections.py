"""From raw outputs to detections: suppression per class, the way back to the photograph, masks in
the right place.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import nms

from tests.prepare.parsing.tool_folder import whole
from yolo_seg_ddp.data.images import letterbox
from yolo_seg_ddp.data.target_masks import draw_masks
from yolo_seg_ddp.predict import detections as predict
from yolo_seg_ddp.predict import mask_scores
from yolo_seg_ddp.predict.detections import (
    CLASS_OFFSET_PX,
    Detections,
    Letterbox,
    decode,
    detect,
    photo_masks,
    photo_runs,
    prototype_masks,
    suppress,
)
from yolo_seg_ddp.predict.photo_masks import SMALL_PX

SIZE_PX, STRIDES, NUM_CLASSES, NUM_BINS = 64, [8.0, 16.0, 32.0], 3, 16
NUM_ANCHORS = 64 + 16 + 4


def empty_outputs() -> dict[str, torch.Tensor]:
    return {
        "boxes": torch.zeros(1, 4 * NUM_BINS, NUM_ANCHORS),
        "scores": torch.full((1, NUM_CLASSES, NUM_ANCHORS), -20.0),
        "mask_coefficient": torch.zeros(1, 32, NUM_ANCHORS),
        "proto": torch.zeros(1, 32, SIZE_PX // 4, SIZE_PX // 4),
    }


def put(
    outputs: dict[str, torch.Tensor],
    cell: tuple[int, int],
    sides: tuple[int, ...],
    class_id: int,
    score: float,
) -> None:
    """Let the cell (column, row) of the finest level predict a box that reaches `sides` cells left,
    up, right, down.
    """
    anchor = cell[1] * 8 + cell[0]
    for side, distance in enumerate(sides):
        outputs["boxes"][0, side * NUM_BINS + distance, anchor] = 60.0
    outputs["scores"][0, class_id, anchor] = torch.logit(torch.tensor(score))


def test_boxes_are_decoded_from_the_cells_centre() -> None:
    outputs = empty_outputs()
    put(outputs, (3, 2), (1, 2, 3, 4), 1, 0.9)
    # the coarsest level has the last anchors
    outputs["boxes"][0, [1, 17, 33, 49], NUM_ANCHORS - 1] = 60.0
    boxes, probabilities = decode(outputs, STRIDES, SIZE_PX)
    # The centre is at 28, 20; the sides are 1, 2, 3 and 4 cells of 8 pixels away.
    assert boxes[0, 2 * 8 + 3].tolist() == pytest.approx(
        [28 - 8, 20 - 16, 28 + 24, 20 + 32], abs=1e-3
    )
    assert boxes[0, -1].tolist() == pytest.approx([16, 16, 80, 80], abs=1e-3)
    assert probabilities[0, 2 * 8 + 3].tolist() == pytest.approx([0, 0.9, 0], abs=1e-6)


def test_thin_boxes_of_thin_classes_are_as_sure_as_thick_ones_whatever_their_masks() -> None:
    outputs = empty_outputs()
    put(outputs, (1, 1), (1, 1, 1, 1), 0, 0.5)
    put(outputs, (3, 3), (2, 1, 2, 1), 1, 0.4)  # 16 pixels thick
    put(outputs, (3, 6), (2, 0, 2, 0), 1, 0.1)  # without thickness: three times
    (found,) = detect(outputs, STRIDES, SIZE_PX, confidence=0.2, iou=0.5, thin=(1,))
    # The first has no mask, which halves its score.
    assert found.scores.tolist() == pytest.approx([0.4 * (1 + 12 / 16), 0.3, 0.25], abs=1e-4)
    assert found.class_ids.tolist() == [1, 1, 0]


# --- suppression of a batch at once keeps what torchvision keeps of each image alone, in the same
# order ---


def clustered(
    seed: int, count: int, *, on_grid: bool, few_scores: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return boxes in clusters, best first, and their scores.

    On a grid many IoUs equal the limit exactly.
    """
    rng = torch.Generator().manual_seed(seed)
    centres = torch.rand(count // 6 + 1, 2, generator=rng) * 300
    centre = (
        centres[torch.randint(len(centres), (count,), generator=rng)]
        + torch.randn(count, 2, generator=rng) * 5
    )
    half = torch.rand(count, 2, generator=rng) * 30 + 5
    boxes = torch.cat([centre - half, centre + half], 1)
    scores = torch.rand(count, generator=rng)
    boxes = (boxes / 5).round() * 5 if on_grid else boxes
    scores = (scores * 8).round() / 8 if few_scores else scores
    order = scores.sort(descending=True, stable=True).indices
    return boxes[order] + CLASS_OFFSET_PX * (seed % 4), scores[order]


@pytest.mark.parametrize("iou", [0.3, 0.5, 0.6, 0.7])
@pytest.mark.parametrize("on_grid", [False, True])
def test_what_stays_is_what_torchvision_keeps_of_each_image_even_at_the_limit(
    iou: float, on_grid: bool
) -> None:
    counts = (700, 0, 1, 40, 300)
    images = [
        clustered(seed, count, on_grid=on_grid, few_scores=on_grid)
        for seed, count in enumerate(counts)
    ]
    boxes = torch.stack([torch.cat([one, torch.ones(700 - len(one), 4)]) for one, _ in images])
    is_candidate = torch.arange(700) < torch.tensor(counts)[:, None]
    positions, numbers, is_settled = suppress(boxes, is_candidate, iou, 90)
    assert is_settled
    for (alone, scores), position, number in zip(images, positions, numbers.tolist(), strict=True):
        assert position[:number].tolist() == nms(alone, scores, iou)[:90].tolist()
    assert numbers[0] == 90


def noisy_outputs() -> dict[str, torch.Tensor]:
    """Return outputs for three images: crowded with some equal scores, empty, and with a few
    objects.
    """
    rng = torch.Generator().manual_seed(7)
    scores = torch.randn(3, NUM_CLASSES, 84, generator=rng) * 2
    scores[0, 1] = scores[0, 1].round()
    scores[1] = -9
    scores[2, :, 9:] = -9
    return {
        "boxes": torch.randn(3, 4 * 16, 84, generator=rng),
        "scores": scores,
        "mask_coefficient": torch.randn(3, 32, 84, generator=rng),
        "proto": torch.randn(3, 32, SIZE_PX // 4, SIZE_PX // 4, generator=rng),
    }


def plain_certainty(
    prototypes: torch.Tensor, coefficients: torch.Tensor, box: torch.Tensor
) -> float:
    """Return the mean probability of a mask's pixels; 0.5 without any."""
    left, top, right, bottom = (box / 4).tolist()
    rows, columns = (
        side.to(torch.float32) for side in torch.meshgrid(*[torch.arange(16)] * 2, indexing="ij")
    )
    is_inside = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
    probabilities = torch.einsum("c,chw->hw", coefficients, prototypes)[is_inside].sigmoid()
    chosen = probabilities[probabilities > 0.5].tolist()
    return sum(chosen) / len(chosen) if chosen else 0.5


def plainly(
    outputs: dict[str, torch.Tensor],
    mask_score: bool,
    multi_label: bool,
    classes: tuple[int, ...] | None,
    confidence: float,
    iou: float,
    max_detections: int,
) -> list[torch.Tensor]:
    """Return each image's detections as rows (box, score, class, first coefficient), one candidate
    after the other.
    """
    boxes, probabilities = decode(outputs, STRIDES, SIZE_PX)
    found = []
    for image in range(len(boxes)):
        rows = []
        for anchor, of_classes in enumerate(probabilities[image]):
            is_asked = torch.tensor(
                [float(classes is None or class_id in classes) for class_id in range(3)]
            )
            named = of_classes * is_asked
            for class_id in range(NUM_CLASSES) if multi_label else [int(named.argmax())]:
                if named[class_id] > confidence:
                    weights = outputs["mask_coefficient"][image, :, anchor]
                    rows.append(
                        torch.tensor([*boxes[image, anchor], named[class_id], class_id, *weights])
                    )
        table = torch.stack(rows) if rows else torch.zeros(0, 38)
        table = table[
            table[:, 4].sort(descending=True, stable=True).indices[: predict.MAX_CANDIDATES]
        ]
        apart = table[:, :4] + table[:, 5:6] * CLASS_OFFSET_PX
        table = table[nms(apart, table[:, 4], iou)[:max_detections]]
        for row in table if mask_score else ():
            row[4] *= plain_certainty(outputs["proto"][image], row[6:], row[:4])
        table = table[table[:, 4].sort(descending=True, stable=True).indices]
        found.append(table[table[:, 4] > confidence])
    return found


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("most_candidates", [30_000, 40])
@pytest.mark.parametrize(
    ("multi_label", "classes", "limits"),
    [
        (True, None, (0.25, 0.6, 20)),
        (False, None, (0.6, 0.6, 300)),
        (True, (1,), (0.25, 0.3, 20)),
        (False, (0, 2), (0.25, 0.6, 5)),
        (True, (), (0.25, 0.6, 20)),
    ],
)
@pytest.mark.parametrize("rounds", [12, 1])
@pytest.mark.parametrize("mask_score", [True, False])
def test_detections_of_a_batch_are_those_of_a_plain_search(
    at_once: bool,
    most_candidates: int,
    multi_label: bool,
    classes: tuple[int, ...] | None,
    limits: tuple[float, float, int],
    rounds: int,
    mask_score: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one round chains of overlaps are too long, which must be noticed."""
    monkeypatch.setattr(predict, "MAX_CANDIDATES", most_candidates)
    monkeypatch.setattr(predict, "MOST_CHAINED", rounds)
    if at_once:
        monkeypatch.setattr(predict, "_suppress", predict._suppress_at_once)
    outputs = noisy_outputs()
    named: dict[str, Any] = dict(zip(("confidence", "iou", "max_detections"), limits, strict=True))
    chosen: dict[str, Any] = {
        "multi_label": multi_label,
        "classes": classes,
        "mask_score": mask_score,
    }
    found = detect(outputs, STRIDES, SIZE_PX, **named, **chosen)
    rounding = 1e-6 * mask_score
    for detections, table in zip(
        found, plainly(outputs, mask_score, multi_label, classes, *limits), strict=True
    ):
        sure, kinds = detections.scores[:, None], detections.class_ids[:, None]
        rows = torch.cat([detections.boxes, sure, kinds, detections.coefficients], 1)
        torch.testing.assert_close(rows, table, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("way", ["_certainty_on_host", "_certainty_on_device"])
def test_a_score_is_multiplied_once_by_the_mean_probability_of_the_masks_pixels_in_the_box(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_scores, "_certainty_on_host", getattr(mask_scores, way))
    outputs = empty_outputs()
    put(outputs, (3, 3), (1, 1, 1, 1), 0, 0.5)  # 20 to 36 pixels: 4 x 4 of the mask's
    put(outputs, (6, 2), (1, 1, 1, 1), 1, 0.3)  # without a pixel above 0.5
    put(outputs, (6, 6), (1, 1, 1, 1), 2, 0.48)  # its mask is everywhere
    logits = torch.full((16, 16), -5.0)
    logits[2, 5], logits[5, 4] = 9.0, 9.0  # beside the first box
    # 0.75, 0.75, 0.9, 0.25
    logits[6, 6:8], logits[8, 5], logits[7, 7] = np.log(3), np.log(9), -np.log(3)
    outputs["proto"] = torch.cat([logits[None], torch.full((31, 16, 16), 1.0)])[None]
    outputs["mask_coefficient"][:, 0] = 1
    outputs["mask_coefficient"][:, :, 6 * 8 + 6] = torch.eye(32)[1] * np.log(9)  # 0.9 everywhere
    (found,) = detect(outputs, STRIDES, SIZE_PX, confidence=0.15, iou=0.5)
    assert found.class_ids.tolist() == [2, 0]
    assert found.scores.tolist() == pytest.approx(
        [0.48 * 0.9, 0.5 * (0.75 + 0.75 + 0.9) / 3], abs=1e-6
    )
    (found,) = detect(outputs, STRIDES, SIZE_PX, confidence=0.1, iou=0.5)
    assert found.scores.tolist()[2:] == pytest.approx([0.3 * 0.5])
    (found,) = detect(outputs, STRIDES, SIZE_PX, confidence=0.49, iou=0.5)
    assert not len(found)
    assert found.best_score == pytest.approx(0.4, abs=1e-6)
    nowhere = torch.tensor([[float("nan")] * 4, [-9e9, 3, float("inf"), float("nan")]])
    assert mask_scores.mask_certainty(outputs["proto"][0], torch.ones(2, 32), nowhere).tolist() == [
        0.5,
        0.5,
    ]


# --- the way back to the photograph ---------------------------------------------------------------


def placement_of(width: int, height: int) -> Letterbox:
    """Return where the project's letterbox puts a photograph."""
    _, inner_size, pad = letterbox(np.zeros((height, width, 3), np.uint8), SIZE_PX)
    return Letterbox(SIZE_PX, inner_size, pad, (width, height))


@pytest.mark.parametrize("size", [(200, 100), (101, 333), (64, 64), (30, 17), (5472, 3648)])
def test_boxes_come_back_to_the_photograph(size: tuple[int, int]) -> None:
    width, height = size
    placement = placement_of(width, height)
    rng = np.random.default_rng(0)
    corners = np.sort(rng.uniform(0, 1, (20, 2, 2)), 1).reshape(20, 4) * (
        width,
        height,
        width,
        height,
    )
    scale = SIZE_PX / max(size)
    inside = torch.tensor(corners * scale + placement.pad * 2, dtype=torch.float32)
    one_input_pixel = 1 / scale
    assert np.abs(placement.boxes_to_photo(inside).numpy() - corners).max() < 0.51 * one_input_pixel
    whole = torch.tensor(
        [[*placement.pad, *np.add(placement.pad, placement.inner_size)]], dtype=torch.float32
    )
    assert placement.boxes_to_photo(whole).numpy() == pytest.approx(
        np.array([[0, 0, width, height]]), rel=1e-5
    )
    again = predict.boxes_to_input(placement.boxes_to_photo(inside), placement)
    torch.testing.assert_close(again, inside, rtol=0, atol=0.51)


def test_boxes_in_the_padding_are_clipped_to_the_photograph() -> None:
    boxes = placement_of(200, 100).boxes_to_photo(
        torch.tensor([[-10.0, 0, 70, 64], [10, 0, 20, 10]])
    )
    assert boxes.tolist() == [[0, 0, 200, 100], [pytest.approx(31.25), 0, pytest.approx(62.5), 0]]


EVERYWHERE = torch.full((32, SIZE_PX // 4, SIZE_PX // 4), 10.0)


def one_detection(*boxes: tuple[float, ...]) -> Detections:
    coefficients = torch.zeros(len(boxes), 32)
    coefficients[:, 0] = 1
    count = len(boxes)
    return Detections(
        torch.tensor(boxes), torch.ones(count), torch.zeros(count, dtype=torch.int64), coefficients
    )


def whole_masks(prototypes: torch.Tensor, found: Detections, placement: Letterbox) -> np.ndarray:
    """Return the masks in the whole photograph, bool (n, H, W)."""
    return np.array(
        [
            whole(region, *placement.photo_size)
            for region in photo_masks(prototypes, found, placement)
        ]
    )


def distances(logits: torch.Tensor, found: Detections, placement: Letterbox) -> torch.Tensor:
    """Return how far each mask's edge moves: twice the mean probability of its pixels that the
    input's pixels in its box are interpolated from, less one, at least 0, times the share of
    SMALL_PX that the box's shorter side has, at most 1: (n, 1, 1).
    """
    side = logits.shape[-1]
    low, high = ends_of_input_pixels(side, placement.size_px)
    moved = []
    boxes = placement.boxes_to_photo(found.boxes).ceil().long()
    for values, box in zip(logits, boxes.tolist(), strict=True):
        parts, sides = [], []
        for axis in (0, 1):
            first, last = box[axis], box[axis + 2] - 1
            inner, photo = placement.inner_size[axis], placement.photo_size[axis]
            if last < first:
                parts.append(slice(0))
                continue
            places = [max((pixel + 0.5) * inner / photo - 0.5, 0) for pixel in (first, last)]
            start, stop = (int(place) + placement.pad[axis] for place in places)
            stop = min(stop + 1, placement.size_px - 1)
            parts.append(slice(low[start], high[stop] + 1))
            sides.append(stop + 1 - start)
        near = values[parts[1], parts[0]]
        probabilities = near[near > 0].sigmoid()
        sureness = max(2 * float(probabilities.mean()) - 1, 0) if len(probabilities) else 0.0
        moved.append(sureness * min([*sides, SMALL_PX]) / SMALL_PX)
    return torch.tensor(moved)[:, None, None]


def ends_of_input_pixels(side: int, size_px: int) -> tuple[list[int], list[int]]:
    """Return between which prototype pixels each pixel of the input lies."""
    low = [int(max((pixel + 0.5) * side / size_px - 0.5, 0)) for pixel in range(size_px)]
    return low, [min(first + 1, side - 1) for first in low]


def interpolated(prototypes: torch.Tensor, found: Detections, placement: Letterbox) -> torch.Tensor:
    """Enlarge the whole mask of each detection with PyTorch, to the input and from there to the
    photograph: (n, H, W). Its edge moves inwards by a share of an input pixel.
    """
    (left, top), (width, height) = placement.pad, placement.inner_size
    logits = torch.einsum("nc,chw->nhw", found.coefficients, prototypes)
    at_input = F.interpolate(logits[None], (placement.size_px,) * 2, mode="bilinear")
    beside = -F.max_pool2d(-at_input, (1, 3), 1, (0, 1))
    least = torch.minimum(beside, -F.max_pool2d(-at_input, (3, 1), 1, (1, 0)))
    at_input = at_input + (least - at_input) * distances(logits, found, placement)
    inner = at_input[..., top : top + height, left : left + width]
    return F.interpolate(inner, placement.photo_size[::-1], mode="bilinear")[0]


@pytest.mark.parametrize(
    "size", [(200, 100), (101, 333), (64, 64), (30, 17), (1, 7), (1333, 77), (700, 900)], ids=str
)
def test_a_mask_computed_inside_its_box_is_the_whole_enlarged_one(size: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(sum(size))
    prototypes = F.interpolate(torch.randn(1, 32, 5, 5, generator=rng), (16, 16), mode="bicubic")[0]
    centre, half = (torch.rand(12, 2, generator=rng) * span for span in (64, 40))
    boxes = torch.cat([centre - half, centre + half], 1)
    boxes[0] = torch.tensor([0.0, 0, 64, 64])
    found = Detections(
        boxes, torch.ones(12), torch.zeros(12).long(), torch.randn(12, 32, generator=rng)
    )
    placement = placement_of(*size)
    values = interpolated(prototypes, found, placement)
    x1, y1, x2, y2 = placement.boxes_to_photo(boxes).T[..., None]
    columns, rows = torch.arange(size[0]), torch.arange(size[1])
    inside = ((columns >= x1) & (columns < x2))[:, None, :] & ((rows >= y1) & (rows < y2))[
        :, :, None
    ]
    expected = (values > 0) & inside
    differs = torch.from_numpy(whole_masks(prototypes, found, placement)) != expected
    assert values[differs].abs().sum() < 1e-4  # only rounding may decide otherwise
    assert differs.sum() <= 1e-5 * differs.numel() + 2
    assert 0 < expected.sum() < inside.sum()


def test_masks_in_the_photograph_were_a_pixel_of_the_input_too_wide_on_each_side() -> None:
    """A network that has learned the drawn masks by heart finds the outlines of the labels."""
    rng = np.random.default_rng(0)
    sides: list[float] = []
    thin_sides: list[float] = []
    for _ in range(100):
        low, side_px = rng.uniform(8, 24, 2), rng.uniform(16, 30, 2)
        corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]]) * side_px + low
        drawn = torch.from_numpy(draw_masks([corners], SIZE_PX)) > 0
        prototypes = torch.zeros(32, *drawn.shape)
        prototypes[0] = torch.where(drawn, 8.0, -8.0)
        found = one_detection((0, 0, SIZE_PX, SIZE_PX))
        placement = placement_of(10 * SIZE_PX, 10 * SIZE_PX)
        for too_wide, thin in ((sides, ()), (thin_sides, (0,))):
            (runs,) = photo_runs(prototypes, found, placement, thin)
            height, width = runs.region().mask.shape
            too_wide += [width / 10 - side_px[0], height / 10 - side_px[1]]
    assert abs(np.mean(sides)) < 0.5  # input pixels
    # Thin classes keep the edge, because narrow masks would fall apart.
    assert np.mean(thin_sides) == pytest.approx(2, abs=0.1)


def test_masks_at_prototype_resolution_are_cut_to_their_own_boxes() -> None:
    detections = one_detection((16, 24, 32, 40), (0, 0, 64, 64))
    at_prototypes = prototype_masks(EVERYWHERE, detections, SIZE_PX)
    assert at_prototypes.shape == (2, 16, 16)
    assert at_prototypes[0].nonzero().amin(0).tolist() == [6, 4]
    assert at_prototypes[0].nonzero().amax(0).tolist() == [9, 7]
    assert at_prototypes[1].all()


def test_many_masks_and_none_are_finished() -> None:
    many = one_detection(*[(0.0, 16.0, float(k + 1), 48.0) for k in range(40)])
    widths = whole_masks(EVERYWHERE, many, placement_of(64, 32)).any(1).sum(1)
    assert widths.tolist() == list(range(1, 41))
    none = Detections(
        torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 32)
    )
    assert list(photo_masks(EVERYWHERE, none, placement_of(64, 32))) == []
    assert prototype_masks(EVERYWHERE, none, SIZE_PX).shape == (0, 16, 16)
