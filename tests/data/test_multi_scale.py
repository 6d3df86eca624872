"""Batches of several sizes: all ranks take the same size, and labels fit it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.data.pictures import COLOURLESS, SIZE_PX, WORST_LABEL, content, dataset_of, worst_label
from tests.support.in_memory import InMemory
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.dataset import Photo, SegmentationDataset
from yolo_seg_ddp.data.loader import EpochBatches, multi_scale_sizes
from yolo_seg_ddp.data.target_masks import MASK_STRIDE


@pytest.mark.parametrize(
    ("size_px", "low", "high"),
    [(640, 320, 960), (96, 64, 128), (64, 64, 96), (672, 352, 992), (1280, 640, 1920)],
)
def test_sizes_are_multiples_of_32_within_half_of_the_size(
    size_px: int, low: int, high: int
) -> None:
    sizes = multi_scale_sizes(size_px)
    assert (sizes[0], sizes[-1]) == (low, high)
    assert all(size % 32 == 0 and (size >= size_px / 2) and size <= size_px * 1.5 for size in sizes)
    assert size_px in sizes


def keys_of(
    rank: int, world_size: int, epoch: int, start_batch: int = 0, seed: int = 5
) -> list[list[tuple[int, ...]]]:
    batches = EpochBatches(48, 4 // world_size, rank, world_size, seed, multi_scale_sizes(640))
    batches.epoch, batches.start_batch = epoch, start_batch
    return list(batches)


def test_all_ranks_take_the_same_size_at_any_world_size_and_after_a_resume() -> None:
    alone = keys_of(0, 1, epoch=2)
    sizes = [{key[2] for key in batch} for batch in alone]
    assert {len(size) for size in sizes} == {1}
    assert len(set.union(*sizes)) > 5
    for rank in range(2):
        assert [{key[2] for key in batch} for batch in keys_of(rank, 2, epoch=2)] == sizes
    assert keys_of(0, 1, epoch=2, start_batch=7) == alone[7:]
    others = (keys_of(0, 1, epoch=3), keys_of(0, 1, epoch=2, seed=6))
    assert all([{key[2] for key in batch} for batch in other] != sizes for other in others)
    batches = EpochBatches(48, 4, 0, 1, 5)
    batches.epoch = 2
    assert list(batches) == [[key[:2] for key in batch] for batch in alone], "without several sizes"


@pytest.mark.parametrize("size_px", [64, 96, 192])
def test_a_sample_of_another_size_has_all_its_labels_at_that_size(size_px: int) -> None:
    data = dataset_of(COLOURLESS)
    for index in range(6):
        sample, usual = data[0, index, size_px], data[0, index]
        assert sample.image.shape == (size_px, size_px, 3)
        assert sample.masks.shape == (size_px // MASK_STRIDE,) * 2
        assert worst_label(sample) < WORST_LABEL
        # The same view at another size: as many objects, each where it was, but for those too small
        # to keep.
        scale = size_px / SIZE_PX
        assert abs(len(sample.class_ids) - len(usual.class_ids)) <= 1
        if sample.class_ids.tolist() == usual.class_ids.tolist():
            # Objects as large as one another may change places.
            ours, theirs = (
                np.array(sorted(map(tuple, np.rint(box))))
                for box in (sample.boxes, usual.boxes * scale)
            )
            np.testing.assert_allclose(ours, theirs, atol=1)
    assert content(data[0, 1, SIZE_PX]) == content(data[0, 1])


def test_smaller_sizes_average_the_photographs_first() -> None:
    # A comb of lines, one pixel in eight: skipping pixels would make it darker here and lighter
    # there.
    class Comb(InMemory):
        def whole(self, _: int) -> np.ndarray:
            image = np.zeros((256, 256, 3), np.uint8)
            image[:, ::8] = 240
            return image

    still = Augmentation(
        **dict[str, Any]({field.name: 0 for field in dataclasses.fields(Augmentation)})
    )
    data = SegmentationDataset(
        [Photo(None, np.zeros(0, np.int64), [])],  # type: ignore[arg-type]
        256,
        packed=Comb(),  # type: ignore[arg-type]
        augment=still,
    )
    assert data[0, 0, 32].image.mean() == pytest.approx(30, abs=1)
    assert data[0, 0, 32].image.std() < 2
