from pathlib import Path

import numpy as np
import pytest
import torch

from tests.prepare.parsing.tool_folder import whole
from yolo_seg_ddp.data.dataset import Photo, Sample
from yolo_seg_ddp.data.drawn_wires import band
from yolo_seg_ddp.data.label_shapes import choose_thin_classes
from yolo_seg_ddp.evaluation import native_masks
from yolo_seg_ddp.evaluation.native_masks import fill_outline, masks_in_photo, place, region_iou
from yolo_seg_ddp.predict.detections import Detections, photo_masks
from yolo_seg_ddp.utils.errors import UsageError

PHOTO_SIZE = (400, 300)


@pytest.fixture
def scene() -> tuple[Sample, Detections, torch.Tensor]:
    """Nine overlapping targets and 40 detections on a network input of 128 pixels."""
    rng = np.random.default_rng(3)
    centres = rng.uniform([20, 30], [108, 98], (9, 2))
    turns = np.linspace(0, 2 * np.pi, 20, endpoint=False)
    circle = np.stack([np.cos(turns), np.sin(turns)], axis=1)
    polygons = [
        (place + circle * rng.uniform(3, 40)).clip([0, 16], [128, 112]).astype(np.float32)
        for place in centres
    ]
    boxes = np.array([[*polygon.min(0), *polygon.max(0)] for polygon in polygons], np.float32)
    ids = rng.integers(0, 2, 9)
    sample = Sample(
        0,
        np.zeros((128, 128, 3), np.uint8),
        ids,
        boxes,
        np.zeros((32, 32)),
        polygons,
        (128, 96),
        (0, 16),
    )
    chosen = rng.integers(0, 9, 40)
    generator = torch.Generator().manual_seed(3)
    found = Detections(
        torch.from_numpy(boxes[chosen] + rng.normal(0, 2, (40, 4)).astype(np.float32)),
        torch.linspace(0.9, 0.1, 40),
        torch.from_numpy(ids[chosen]),
        torch.randn(40, 32, generator=generator),
    )
    return sample, found, torch.randn(32, 32, 32, generator=generator)


def test_a_pixel_belongs_to_an_outline_when_its_centre_lies_inside() -> None:
    region = fill_outline(np.array([[2.0, 1.0], [5.0, 1.0], [5.0, 3.0], [2.0, 3.0]]), (10, 10))
    assert (region.left, region.top, region.mask.shape) == (2, 1, (2, 3))
    assert region.mask.all()
    shifted = fill_outline(np.array([[2.6, 1.0], [5.4, 1.0], [5.4, 2.4], [2.6, 2.4]]), (10, 10))
    assert np.argwhere(whole(shifted, 10, 10)).tolist() == [[1, 3], [1, 4]]


def test_outlines_past_the_edge_or_without_any_pixel_centre_still_have_pixels() -> None:
    beyond = fill_outline(np.array([[-5.0, -5.0], [3.0, -5.0], [3.0, 2.0], [-5.0, 2.0]]), (10, 10))
    assert whole(beyond, 10, 10).sum() == 6
    tiny = fill_outline(np.array([[4.6, 7.6], [4.9, 7.6], [4.9, 7.9]]), (10, 10))
    assert np.argwhere(whole(tiny, 10, 10)).tolist() == [[7, 4]]
    assert fill_outline(
        np.array([[10.0, 10.0], [10.0, 10.0], [10.0, 10.0]]), (10, 10)
    ).mask.tolist() == [[True]]


def joined_iou(parts: list[native_masks.PhotoMasks]) -> tuple[np.ndarray, np.ndarray]:
    iou, areas = zip(*map(region_iou, parts), strict=True)
    return np.concatenate(iou, axis=1), np.concatenate(areas)


def test_overlap_is_that_of_whole_masks_and_the_parts_change_nothing(
    scene: tuple[Sample, Detections, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, found, prototypes = scene
    placement = place(sample, PHOTO_SIZE)
    (together,) = masks_in_photo(
        sample, found, photo_masks(prototypes, found, placement), placement
    )
    iou, areas = region_iou(together)
    truth, masks = (
        np.stack([whole(one, *PHOTO_SIZE) for one in regions])
        for regions in (together.truth, together.found)
    )
    shared = np.einsum("myx,nyx->mn", truth.astype(float), masks.astype(float))
    union = truth.sum((1, 2))[:, None] + masks.sum((1, 2)) - shared
    same_class = sample.class_ids[:, None] == found.class_ids.numpy()
    np.testing.assert_allclose(iou, np.where(same_class, shared / union, 0))
    assert iou.max() > 0.3
    assert areas.tolist() == masks.sum(axis=(1, 2)).tolist()
    # Objects in front of one another keep their whole outlines.
    assert truth.sum(axis=0).max() > 1

    monkeypatch.setattr(native_masks, "PIXELS_PER_PART", 20_000)
    parts = list(
        masks_in_photo(sample, found, photo_masks(prototypes, found, placement), placement)
    )
    assert len(parts) > 3
    assert all(sum(region.mask.size for region in part.found[:-1]) < 20_000 for part in parts)
    assert [len(part.found) for part in parts] == [len(part.detections) for part in parts]
    assert torch.cat([part.detections.scores for part in parts]).tolist() == found.scores.tolist()
    np.testing.assert_array_equal(joined_iou(parts)[0], iou)
    np.testing.assert_array_equal(joined_iou(parts)[1], areas)
    (nothing,) = masks_in_photo(sample, found[:0], [], placement)
    assert region_iou(nothing)[0].shape == (9, 0)


def test_target_areas_are_counted_in_pixels_of_the_photograph(
    scene: tuple[Sample, Detections, torch.Tensor],
) -> None:
    sample = scene[0]
    small, large = (
        native_masks.target_areas(sample, place(sample, size)) for size in (PHOTO_SIZE, (800, 600))
    )
    np.testing.assert_allclose(large, small * 4, rtol=1e-4)
    outlines = native_masks.outlines_in_photo(sample, place(sample, PHOTO_SIZE))
    filled = [fill_outline(outline, PHOTO_SIZE).mask.sum() for outline in outlines]
    np.testing.assert_allclose(filled, small, rtol=0.03)


def test_thin_classes_are_found_by_their_labels_or_named() -> None:
    along = [np.array([np.cos(angle), np.sin(angle)]) for angle in (0, 0.4, 1.2)]
    size = (6000, 300)
    wires = [(band(200 + np.outer([-120, 120], way), 4) / size).astype(np.float32) for way in along]
    # 60 x 180 pixels
    box = np.array([(0.1, 0.1), (0.11, 0.1), (0.11, 0.7), (0.1, 0.7)], np.float32)
    photos = [
        Photo(Path(f"{index}.jpg"), np.array([2, 0]), [one, box]) for index, one in enumerate(wires)
    ]
    photos += [Photo(Path("empty.jpg"), np.zeros(0, np.int64), [])]
    names = ("pole", "guy", "wire")

    def chosen(*asked: str) -> tuple[int, ...]:
        return choose_thin_classes(asked, photos, lambda index: size, names)

    assert chosen("auto") == (2,)  # 60 times as long as wide
    assert chosen("none") == ()
    assert chosen("wire", "guy") == (1, 2)
    with pytest.raises(
        UsageError,
        match=r"--thin-classes wires: not one of pole, guy, wire \(did you mean wire\?\)",
    ):
        chosen("wires")
