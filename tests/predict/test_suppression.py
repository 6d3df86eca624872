"""Suppression of a batch at once keeps what torchvision keeps of each image alone, in the same order."""

from __future__ import annotations

import pytest
import torch
from torchvision.ops import nms

from utils.predict import detections as predict
from utils.predict.detections import CLASS_OFFSET_PX, decode, detect, suppress

SIZE_PX, STRIDES, NUM_CLASSES = 64, [8.0, 16.0, 32.0], 3


def clustered(seed: int, count: int, *, on_grid: bool, few_scores: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return boxes in clusters, best first, and their scores. On a grid many IoUs equal the limit exactly."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.rand(count // 6 + 1, 2, generator=rng) * 300
    centre = centres[torch.randint(len(centres), (count,), generator=rng)] + torch.randn(count, 2, generator=rng) * 5
    half = torch.rand(count, 2, generator=rng) * 30 + 5
    boxes = torch.cat([centre - half, centre + half], 1)
    scores = torch.rand(count, generator=rng)
    boxes = (boxes / 5).round() * 5 if on_grid else boxes
    scores = (scores * 8).round() / 8 if few_scores else scores
    order = scores.sort(descending=True, stable=True).indices
    return boxes[order] + CLASS_OFFSET_PX * (seed % 4), scores[order]


@pytest.mark.parametrize("iou", [0.3, 0.5, 0.6, 0.7])
@pytest.mark.parametrize("on_grid", [False, True])
def test_what_stays_is_what_torchvision_keeps_of_each_image_even_at_the_limit(iou: float, on_grid: bool) -> None:
    counts = (700, 0, 1, 40, 300)
    images = [clustered(seed, count, on_grid=on_grid, few_scores=on_grid) for seed, count in enumerate(counts)]
    boxes = torch.stack([torch.cat([one, torch.ones(700 - len(one), 4)]) for one, _ in images])
    is_candidate = torch.arange(700) < torch.tensor(counts)[:, None]
    positions, numbers, is_settled = suppress(boxes, is_candidate, iou, 90)
    assert is_settled
    for (alone, scores), position, number in zip(images, positions, numbers.tolist(), strict=True):
        assert position[:number].tolist() == nms(alone, scores, iou)[:90].tolist()
    assert numbers[0] == 90


def noisy_outputs() -> dict[str, torch.Tensor]:
    """Return outputs for three images: crowded with some equal scores, empty, and with a few objects."""
    rng = torch.Generator().manual_seed(7)
    scores = torch.randn(3, NUM_CLASSES, 84, generator=rng) * 2
    scores[0, 1] = scores[0, 1].round()
    scores[1] = -9
    scores[2, :, 9:] = -9
    return {
        "boxes": torch.randn(3, 4 * 16, 84, generator=rng),
        "scores": scores,
        "mask_coefficient": torch.randn(3, 32, 84, generator=rng),
    }


def plainly(outputs: dict[str, torch.Tensor], multi_label: bool, classes: tuple[int, ...] | None) -> list[torch.Tensor]:
    """Return each image's detections as rows (box, score, class, first coefficient), one candidate after the other."""
    boxes, probabilities = decode(outputs, STRIDES, SIZE_PX)
    found = []
    for image in range(len(boxes)):
        rows = []
        for anchor, of_classes in enumerate(probabilities[image]):
            named = (
                of_classes if classes is None else of_classes * torch.tensor([float(c in classes) for c in range(3)])
            )
            for class_id in range(NUM_CLASSES) if multi_label else [int(named.argmax())]:
                if named[class_id] > 0.25:
                    first = outputs["mask_coefficient"][image, 0, anchor]
                    rows.append(torch.tensor([*boxes[image, anchor], named[class_id], class_id, first]))
        table = torch.stack(rows) if rows else torch.zeros(0, 7)
        table = table[table[:, 4].sort(descending=True, stable=True).indices[: predict.MAX_CANDIDATES]]
        apart = table[:, :4] + table[:, 5:6] * CLASS_OFFSET_PX
        found.append(table[nms(apart, table[:, 4], 0.6)[:20]])
    return found


@pytest.mark.parametrize("at_once", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("most_candidates", [30_000, 40])
@pytest.mark.parametrize(
    ("multi_label", "classes"), [(True, None), (False, None), (True, (1,)), (False, (0, 2)), (True, ())]
)
@pytest.mark.parametrize("rounds", [12, 1])
def test_detections_of_a_batch_are_those_of_a_plain_search(
    at_once: bool,
    most_candidates: int,
    multi_label: bool,
    classes: tuple[int, ...] | None,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one round chains of overlaps are too long, which must be noticed."""
    monkeypatch.setattr(predict, "MAX_CANDIDATES", most_candidates)
    monkeypatch.setattr(predict, "ROUNDS", rounds)
    if at_once:
        monkeypatch.setattr(predict, "_suppress", predict._suppress_at_once)
    outputs = noisy_outputs()
    found = detect(
        outputs, STRIDES, SIZE_PX, confidence=0.25, iou=0.6, max_detections=20, multi_label=multi_label, classes=classes
    )
    for detections, table in zip(found, plainly(outputs, multi_label, classes), strict=True):
        rows = [
            detections.boxes,
            detections.scores[:, None],
            detections.class_ids[:, None],
            detections.coefficients[:, :1],
        ]
        torch.testing.assert_close(torch.cat(rows, 1), table, rtol=0, atol=0)
