"""Samples, batches and loaders: every image once, the same pixels for any number of ranks and workers, thin wires kept."""

from __future__ import annotations

import os
import signal
import subprocess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.conftest import run_script
from utils.common.errors import UserError
from utils.data.augment import AugmentConfig
from utils.data.dataset import Batch, SegmentationDataset, collate, open_images, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.data.labels import format_yolo_label
from utils.data.loader import EpochBatches, ShardBatches, get_dataloader
from utils.data.target_masks import MASK_STRIDE

SIZE_PX = 64
SHAPES = [(48, 64), (64, 40), (96, 128), (64, 64), (30, 90), (50, 50), (80, 60)]
COLOURS = [(250, 20, 20), (20, 250, 20)]
BARS = [
    np.array([[0.1, 0.2], [0.6, 0.2], [0.6, 0.5], [0.1, 0.5]]),
    np.array([[0.3, 0.6], [0.9, 0.6], [0.9, 0.9], [0.3, 0.9]]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write seven pictures of two bars each; the last has no label file."""
    root = tmp_path_factory.mktemp("set")
    (root / "images").mkdir()
    (root / "labels").mkdir()
    for number, (height, width) in enumerate(SHAPES):
        image = np.random.default_rng(number).integers(50, 70, (height, width, 3), dtype=np.uint8)
        for bar, colour in zip(BARS, COLOURS, strict=True):
            (left, top), (right, bottom) = np.rint(bar[[0, 2]] * (width, height)).astype(int)
            image[top:bottom, left:right] = colour
        cv2.imwrite(str(root / "images" / f"{number}.png"), image[..., ::-1])
        if number < len(SHAPES) - 1:
            (root / "labels" / f"{number}.txt").write_text(format_yolo_label(enumerate(BARS)))
    (root / "data.yaml").write_text("train: images\nnames: [first, second]\n")
    return root


@pytest.fixture
def plain_set(folder: Path) -> SegmentationDataset:
    return SegmentationDataset(read_photos(load_dataset_yaml(folder / "data.yaml"), "train"), SIZE_PX)


@pytest.fixture
def augmented_set(plain_set: SegmentationDataset) -> SegmentationDataset:
    return SegmentationDataset(plain_set.photos, SIZE_PX, augment=AugmentConfig(), mosaic_epochs=9)


# --- order ---------------------------------------------------------------------------------------------------------


def epoch_of(num_samples: int, batch_size: int, world_size: int, epoch: int = 0) -> list[list[list[tuple[int, int]]]]:
    """Return each rank's list of batches."""
    ranks = [EpochBatches(num_samples, batch_size, rank, world_size, seed=5) for rank in range(world_size)]
    for batches in ranks:
        batches.epoch = epoch
    assert {len(batches) for batches in ranks} == {len(list(batches)) for batches in ranks}
    return [list(batches) for batches in ranks]


def check_epoch(num_samples: int, batch_size: int, world_size: int) -> list[int]:
    """Assert what holds for every epoch; return the sizes of all batches."""
    per_rank = epoch_of(num_samples, batch_size, world_size, epoch=2)
    keys = [key for rank in per_rank for batch in rank for key in batch]
    assert sorted(keys) == [(2, index) for index in range(num_samples)]
    assert len({len(rank) for rank in per_rank}) == 1
    sizes = [len(batch) for rank in per_rank for batch in rank]
    assert min(sizes) > 0  # no rank may be left without an image while others compute gradients
    return sizes


@pytest.mark.parametrize("batch_size", [2, 4, 16])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [3, 4, 5, 7, 37, 64])
def test_every_sample_comes_once_and_every_rank_has_as_many_batches(
    num_samples: int, world_size: int, batch_size: int
) -> None:
    sizes = check_epoch(num_samples, batch_size, world_size)
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize(("num_samples", "world_size"), [(7, 1), (6, 2), (3, 2), (7, 2), (5, 3), (37, 3)])
def test_batches_of_one_leave_no_rank_without_an_image(num_samples: int, world_size: int) -> None:
    assert max(check_epoch(num_samples, 1, world_size)) <= 2  # one cannot give an odd image away


@pytest.mark.parametrize("num_samples", [8, 37, 64])
def test_one_rank_and_two_with_the_same_global_batch_see_the_same_batches(num_samples: int) -> None:
    (alone,) = epoch_of(num_samples, 4, 1)
    first, second = epoch_of(num_samples, 2, 2)
    assert len(alone) == len(first)
    for together, left, right in zip(alone, first, second, strict=True):
        assert together[0::2] == left
        assert together[1::2] == right


def test_order_changes_with_epoch_and_seed_only() -> None:
    assert epoch_of(37, 4, 1) == epoch_of(37, 4, 1)

    def order(seed: int, epoch: int) -> list[int]:
        batches = EpochBatches(37, 4, 0, 1, seed)
        batches.epoch = epoch
        return [index for batch in batches for _, index in batch]

    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert order(0, 0) != list(range(37))


@pytest.mark.parametrize(("num_samples", "world_size"), [(1, 2), (2, 3), (0, 1)])
def test_fewer_images_than_processes_are_refused(num_samples: int, world_size: int) -> None:
    with pytest.raises(UserError, match=f"{num_samples} training images cannot feed {world_size} processes"):
        EpochBatches(num_samples, 4, 0, world_size, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_samples", [0, 1, 2, 7, 64])
def test_shards_cover_a_split_exactly_even_when_some_are_empty(num_samples: int, world_size: int) -> None:
    shards = [ShardBatches(num_samples, 4, rank, world_size) for rank in range(world_size)]
    indices = [index for shard in shards for batch in shard for _, index in batch]
    assert sorted(indices) == list(range(num_samples))
    for shard in shards:
        sizes = [len(batch) for batch in shard]
        assert len(sizes) == len(shard)
        assert all(0 < size <= 4 for size in sizes)


def test_an_empty_shard_makes_an_empty_loader(plain_set: SegmentationDataset) -> None:
    assert list(get_dataloader(plain_set, ShardBatches(2, 4, 2, 3), 0, False)) == []


# --- loaders -------------------------------------------------------------------------------------------------------


def content(batch: Batch) -> list[bytes]:
    """Return every tensor's bytes, and which samples they are."""
    tensors = (batch.images, batch.batch_index, batch.class_ids, batch.boxes, batch.masks)
    return [bytes(str([sample.index for sample in batch.samples]), "ascii"), *(t.numpy().tobytes() for t in tensors)]


def test_workers_change_nothing_in_any_epoch_nor_in_the_middle_of_one(augmented_set: SegmentationDataset) -> None:
    loaders = [
        get_dataloader(augmented_set, EpochBatches(len(SHAPES), 2, 0, 1, seed=0), workers, False) for workers in (0, 1)
    ]
    seen = []
    for epoch, start_batch in ((0, 0), (1, 0), (1, 2), (0, 0)):
        for loader in loaders:
            loader.set_epoch(epoch, start_batch)
        here, worker = ([content(batch) for batch in loader] for loader in loaders)
        assert here == worker
        seen.append(here)
    assert len(seen[0]) == 4
    assert seen[0] != seen[1]
    assert seen[2] == seen[1][2:]
    assert seen[3] == seen[0]


def test_a_stop_told_to_a_loader_process_too_costs_no_batch(augmented_set: SegmentationDataset) -> None:
    """The launcher sends a stop to a rank's whole process group, and the rank wants batches until all ranks agree."""
    loader = get_dataloader(augmented_set, EpochBatches(len(SHAPES), 1, 0, 1, seed=0), 1, False, prefetch=1)
    batches = iter(loader)
    next(batches)
    (worker,) = batches._workers  # type: ignore[attr-defined]
    for name in ("TERM", "INT", "USR1"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    assert len(list(batches)) == len(SHAPES) - 1
    assert worker.is_alive()  # it persists from epoch to epoch
    os.kill(worker.pid, signal.SIGTERM)  # its own rank may end it
    worker.join(10)
    assert worker.exitcode == 0


LEAVES_A_LOADER_OPEN = """
from torch.utils.data import DataLoader
from utils.data.loader import prepare_worker

batches = iter(DataLoader(list(range(8)), num_workers=1, persistent_workers=True, worker_init_fn=prepare_worker))
next(batches)
raise RuntimeError("in the middle of an epoch")
"""


def test_a_process_that_fails_in_the_middle_of_an_epoch_ends() -> None:
    """Python waits at its end for the helpers to which it has sent SIGTERM."""
    done = run_script("python", "-c", LEAVES_A_LOADER_OPEN, timeout_s=60)
    assert done.returncode == 1
    assert "in the middle of an epoch" in done.stderr


def test_pixels_travel_once_between_processes(augmented_set: SegmentationDataset) -> None:
    (here, *_), (sent, *_) = (
        list(get_dataloader(augmented_set, EpochBatches(len(SHAPES), 4, 0, 1, seed=0), workers, False))
        for workers in (0, 1)
    )
    assert len(ForkingPickler.dumps(here)) < here.images.numel() / 2
    for position, (ours, theirs) in enumerate(zip(here.samples, sent.samples, strict=True)):
        np.testing.assert_array_equal(theirs.image, ours.image)
        np.testing.assert_array_equal(theirs.masks, ours.masks)
        assert np.shares_memory(theirs.image, sent.images[position].numpy())
        assert np.shares_memory(theirs.masks, sent.masks[position].numpy())


def test_shards_of_two_ranks_hold_the_pixels_of_one(plain_set: SegmentationDataset) -> None:
    def images(rank: int, world_size: int) -> dict[int, bytes]:
        loader = get_dataloader(plain_set, ShardBatches(len(SHAPES), 3, rank, world_size), 0, False)
        return {sample.index: sample.image.tobytes() for batch in loader for sample in batch.samples}

    assert {**images(0, 2), **images(1, 2)} == images(0, 1)


def test_a_batch_names_each_target_by_its_image(plain_set: SegmentationDataset) -> None:
    batch = collate([plain_set[0, 6], plain_set[0, 0], plain_set[0, 1]])
    assert len(batch) == 3
    assert batch.images.shape == (3, SIZE_PX, SIZE_PX, 3)
    assert batch.images.dtype == torch.uint8
    assert batch.batch_index.tolist() == [1, 1, 2, 2]
    assert batch.boxes.shape == (4, 4)
    assert batch.masks.shape == (3, SIZE_PX // 4, SIZE_PX // 4)
    empty = collate([plain_set[0, 6]])
    assert (empty.boxes.shape, empty.class_ids.dtype, empty.boxes.dtype) == ((0, 4), torch.int64, torch.float32)
    assert empty.masks.max() == 0


def test_the_packed_cache_changes_no_sample(plain_set: SegmentationDataset, tmp_path: Path) -> None:
    said: list[str] = []
    packed = open_images(plain_set.photos, SIZE_PX, tmp_path, "train", said.append)
    assert packed is not None
    assert len(said) == 1
    cached = SegmentationDataset(plain_set.photos, SIZE_PX, packed=packed)
    for index in range(len(SHAPES)):
        assert cached[0, index].image.tobytes() == plain_set[0, index].image.tobytes()


# --- samples -------------------------------------------------------------------------------------------------------


def test_letterboxed_boxes_match_outlines_masks_and_pixels(plain_set: SegmentationDataset) -> None:
    for index, (height, width) in enumerate(SHAPES[:-1]):
        sample = plain_set[0, index]
        longer = max(height, width)
        shown = np.array([width, height]) * SIZE_PX / longer
        assert sorted(sample.class_ids.tolist()) == [0, 1]
        for position, class_id in enumerate(sample.class_ids):
            polygon, box = sample.polygons[position], sample.boxes[position]
            np.testing.assert_allclose(box, [*polygon.min(0), *polygon.max(0)], atol=1e-4)
            expected = BARS[class_id] * shown + (SIZE_PX - shown) / 2
            np.testing.assert_allclose(polygon, expected, atol=1.01)  # whole pixels of padding and size
            x1, y1, x2, y2 = np.rint(box).astype(int)
            part = sample.image[y1 + 1 : y2 - 1, x1 + 1 : x2 - 1]
            assert np.abs(part.astype(int) - COLOURS[class_id]).max() < 60
            rows, columns = (sample.masks == position + 1).nonzero()
            mask_box = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) * MASK_STRIDE
            assert np.abs(mask_box - box).max() <= 1.25 * MASK_STRIDE


def test_a_photograph_without_label_file_has_no_objects(plain_set: SegmentationDataset) -> None:
    sample = plain_set[0, 6]
    assert len(sample.class_ids) == len(sample.polygons) == 0
    assert sample.boxes.shape == (0, 4)
    assert sample.masks.max() == 0


def test_a_wrong_label_is_named_by_file_and_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "images").symlink_to(folder / "images")
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "3.txt").write_text("0 0.1 0.1 0.5 0.1 0.5 0.5\n7 0.1 0.1 0.5 0.1 0.5 0.5\n")
    # The linked photographs lie elsewhere: `path` must be a folder that holds both.
    root, place = folder.parent, tmp_path.relative_to(folder.parent)
    (tmp_path / "data.yaml").write_text(f"path: {root}\ntrain: {place}/images\nnames: [first, second]\n")
    with pytest.raises(UserError, match=r"3\.txt:2"):
        read_photos(load_dataset_yaml(tmp_path / "data.yaml"), "train")


def test_small_objects_lie_on_top_of_large_ones(plain_set: SegmentationDataset) -> None:
    small = np.array([[20.0, 20], [36, 20], [36, 36], [20, 36]])
    large = np.array([[8.0, 8], [56, 8], [56, 56], [8, 56]])
    for polygons, class_ids in (([small, large], [3, 5]), ([large, small], [5, 3])):
        image = np.zeros((SIZE_PX, SIZE_PX, 3), np.uint8)
        sample = plain_set._finish(0, image, np.array(class_ids), polygons)
        assert sample.class_ids.tolist() == [5, 3]
        assert sample.boxes.tolist() == [[8, 8, 56, 56], [20, 20, 36, 36]]
        assert sample.masks[7, 7] == 2
        assert sample.masks[3, 3] == 1
        assert (sample.masks == 2).sum() >= 16
        assert sample.masks[0, 0] == 0
