"""Synthetic batches."""

from __future__ import annotations

import torch

from utils.measure.synthetic import synthetic_batch, training_colours


def test_a_synthetic_batch_is_what_the_loader_would_give() -> None:
    batch = synthetic_batch(2, 160, 5, objects_per_image=12)
    assert batch.images.shape == (2, 160, 160, 3)
    assert batch.images.dtype == torch.uint8
    assert batch.masks.shape == (2, 40, 40)
    assert batch.masks.dtype == torch.int32
    assert batch.batch_index.tolist() == [0] * 12 + [1] * 12
    assert batch.boxes.dtype == torch.float32
    low, high = batch.boxes[:, :2], batch.boxes[:, 2:]
    assert (low >= 0).all()
    assert (high <= 160).all()
    assert (high > low).all()
    assert set(batch.class_ids.tolist()) <= set(range(5))
    seen = {int(value) for value in batch.masks[0].unique()}
    assert 6 < len(seen) <= 13  # background, and most of the twelve; the largest lie below
    assert max(seen) == 12


def test_a_synthetic_batch_follows_from_its_arguments() -> None:
    first, again = (synthetic_batch(1, 64, 3, seed=4) for _ in range(2))
    other = synthetic_batch(1, 64, 3, seed=5)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.boxes, again.boxes)
    assert not torch.equal(first.boxes, other.boxes)


def test_images_without_objects_can_be_asked_for() -> None:
    batch = synthetic_batch(2, 64, 3, objects_per_image=0)
    assert batch.boxes.shape == (0, 4)
    assert not batch.masks.any()


def test_a_batch_for_a_gpu_has_colour_gains_and_nothing_else_changes() -> None:
    plain, coloured = (
        synthetic_batch(2, 64, 3, objects_per_image=2, colours=training_colours(torch.device(name)))
        for name in ("cpu", "cuda")
    )
    assert plain.colour_gains is None
    assert coloured.colour_gains is not None
    assert coloured.colour_gains.shape == (2, 3)
    assert 0.3 <= float(coloured.colour_gains.min()) < 1 < float(coloured.colour_gains.max()) <= 1.7
    assert torch.equal(plain.images, coloured.images)
    assert torch.equal(plain.boxes, coloured.boxes)
