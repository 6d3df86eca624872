"""Samples, batches and loaders of a YOLO-format segmentation data set.

Order is a pure function of (seed, epoch), augmentation of (seed, epoch, index): neither depends on the number of ranks
or loader workers. Every sample is used exactly once per epoch, and all ranks take the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from utils.augment import (
    FILL,
    AugmentConfig,
    Scene,
    blend,
    compose,
    large_to_small,
    letterbox_matrix,
    mosaic_matrices,
    paste_mirrored,
    polygon_boxes,
    random_view,
    sample_generator,
    seen_window,
    transform_points,
    visible_outlines,
    warp_into,
)
from utils.cache import PackedImages, load_photo, open_or_build, unreadable
from utils.colour import draw_gains, jitter_colour
from utils.dataset_yaml import DatasetSpec, label_file_for
from utils.errors import DataErrors, UserError
from utils.images import ImageError, fit_long_side, letterbox
from utils.labels import LabelError, read_yolo_label
from utils.runtime import die_with_parent, heed_only_the_parent
from utils.target_masks import draw_masks

MODEL_STRIDE = 32  # the coarsest level of the network: sides of the input are multiples of it
SIZE_STREAM = 1  # sets the random numbers of a batch's size apart from those of a sample

NO_GAINS = (1.0, 1.0, 1.0)

Key = tuple[int, ...]  # (epoch, index), or (epoch, index, size in pixels) where batches differ in size


@dataclass(frozen=True)
class Photo:
    """One photograph's file and labels; polygons are float32 (V, 2) normalised xy, y down."""

    file: Path
    class_ids: np.ndarray
    polygons: list[np.ndarray]


@dataclass(frozen=True)
class Sample:
    """One network input with its targets, all in pixels of the (S, S) input.

    image uint8 (S, S, 3) RGB; class_ids int64 (N,); boxes float32 (N, 4) xyxy; masks int32 (S/4, S/4): 0 is background,
    k + 1 the k-th instance (smaller instances lie on top). `scale` and `pad` (left, top) map the photograph into it.
    """

    index: int
    image: np.ndarray
    class_ids: np.ndarray
    boxes: np.ndarray
    masks: np.ndarray
    polygons: list[np.ndarray]
    scale: float = 1.0
    pad: tuple[int, int] = (0, 0)
    photo_size: tuple[int, int] = (0, 0)
    colour_gains: tuple[float, ...] = NO_GAINS  # still to be applied, on the device


def read_photos(spec: DatasetSpec, split: str) -> list[Photo]:
    """Read a split's labels. A missing label file means a photograph without objects.

    Raises DataErrors (file:line), which lists every label file that cannot be used.
    """
    photos: list[Photo] = []
    problems: list[str] = []
    files = spec.image_files(split)
    for file in files:
        try:
            photos.append(_read_photo(spec, file))
        except LabelError as error:
            problems.append(str(error))
    if problems:
        raise DataErrors(
            f"{len(problems)} of {len(files)} label files of `{split}` cannot be used: {problems[0]}", problems
        )
    return photos


def _read_photo(spec: DatasetSpec, file: Path) -> Photo:
    label_file = label_file_for(file)
    if label_file.is_symlink() and not spec.holds(label_file):
        raise LabelError(f"{label_file}: a link that leaves {spec.root}")
    if not label_file.exists():
        return Photo(file, np.zeros(0, np.int64), [])
    labels = read_yolo_label(label_file, len(spec.names))
    return Photo(file, labels.class_ids, labels.polygons)


def count_classes(photos: list[Photo], num_classes: int) -> np.ndarray:
    """Return how many objects of each class the photographs show: int64 (num_classes,)."""
    class_ids = [np.zeros(0, np.int64), *(photo.class_ids for photo in photos)]
    return np.bincount(np.concatenate(class_ids), minlength=num_classes)


class SegmentationDataset(Dataset[Sample]):
    """Photographs of one split as network inputs of `size_px`; indexed by (epoch, index) or (epoch, index, size_px).

    With `augment` None samples are letterboxed, else augmented; `mosaic_epochs` is the first epoch without mosaic. With
    `colours_on_device` a sample brings its colour gains along instead of having them applied.
    """

    def __init__(
        self,
        photos: list[Photo],
        size_px: int,
        *,
        packed: PackedImages | None = None,
        augment: AugmentConfig | None = None,
        mosaic_epochs: int = 0,
        seed: int = 0,
        colours_on_device: bool = False,
    ) -> None:
        self.photos = photos
        self.size_px = size_px
        self.packed = packed
        self.augment = augment
        self.mosaic_epochs = mosaic_epochs
        self.seed = seed
        self.colours_on_device = colours_on_device

    def __len__(self) -> int:
        return len(self.photos)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key[:2]
        size_px = key[2] if len(key) > 2 else self.size_px
        if self.augment is None:
            return self._letterboxed(index, size_px)
        return self._augmented(epoch, index, size_px, self.augment)

    def image(self, index: int) -> np.ndarray:
        """Return a photograph as RGB uint8 (H, W, 3), its long side at most the data set's `size_px`."""
        if self.packed is not None:
            return self.packed.read(index)
        file = self.photos[index].file
        try:
            return load_photo(file, self.size_px)
        except ImageError as error:
            raise UserError(unreadable(file, error)) from error

    def _letterboxed(self, index: int, size_px: int) -> Sample:
        photo, image = self.photos[index], self.image(index)
        height, width = image.shape[:2]
        canvas, scale, pad = letterbox(image, size_px)
        resized = np.array([max(round(width * scale), 1), max(round(height * scale), 1)])
        polygons = [polygon * resized + np.array(pad) for polygon in photo.polygons]
        return self._finish(index, canvas, photo.class_ids, polygons, scale=scale, pad=pad, photo_size=(width, height))

    def _augmented(self, epoch: int, index: int, size_px: int, config: AugmentConfig) -> Sample:
        rng = sample_generator(self.seed, epoch, index)
        may_mix = epoch < self.mosaic_epochs
        scene = self._scene(index, size_px, may_mix, config, rng)
        if may_mix and config.mixup and rng.random() < config.mixup:
            other = int(rng.integers(len(self.photos)))
            scene = blend(scene, self._scene(other, size_px, may_mix, config, rng), rng)
        gains = draw_gains(config, rng)
        class_ids = np.array(scene.class_ids, np.int64)
        if self.colours_on_device:
            left_to_do = tuple(gains.tolist())
            return self._finish(index, scene.image, class_ids, scene.polygons, colour_gains=left_to_do)
        return self._finish(index, jitter_colour(scene.image, gains), class_ids, scene.polygons)

    def _scene(self, index: int, size_px: int, may_mix: bool, config: AugmentConfig, rng: np.random.Generator) -> Scene:
        """Draw one photograph, or with `may_mix` perhaps a mosaic of four and pasted objects, through a random view."""
        use_mosaic = may_mix and rng.random() < config.mosaic
        indices = [index, *rng.integers(len(self.photos), size=3).tolist()] if use_mosaic else [index]
        windows = [self._window_reader(position, size_px) for position in indices]
        shapes = [shape for shape, _ in windows]
        if use_mosaic:
            view = random_view(2 * size_px, size_px, config, rng)
            placed = mosaic_matrices(shapes, size_px, rng)
        else:
            view = random_view(size_px, size_px, config, rng)
            placed = [letterbox_matrix(*shapes[0], size_px)]
        # Four channels: OpenCV warps them in 60 % of the time that it takes for three.
        canvas = np.full((size_px, size_px, 4), FILL, np.uint8)
        tiles = []
        for position, ((height, width), read), matrix in zip(indices, windows, placed, strict=True):
            total = compose(view, matrix)
            rows, columns = seen_window(total, (height, width), size_px)
            if rows:
                corner = np.array([[1, 0, columns.start], [0, 1, rows.start]])
                warp_into(canvas, read(rows)[:, columns.start : columns.stop], compose(total, corner))
            of_unit_square = np.hstack([total[:, :2] * (width, height), total[:, 2:]])
            tiles.append((self.photos[position], of_unit_square))
        class_ids, polygons = _visible(tiles, size_px)
        scene = Scene(cv2.cvtColor(canvas, cv2.COLOR_RGBA2RGB), class_ids, polygons)
        return paste_mirrored(scene, config.copy_paste, rng) if may_mix and config.copy_paste else scene

    def _window_reader(self, index: int, size_px: int) -> tuple[tuple[int, int], Callable[[range], np.ndarray]]:
        """Return (height, width) of a photograph and what reads some of its rows, so that unseen ones are not read."""
        packed = self.packed
        if packed is not None and max(packed.shape(index)) <= size_px:
            return packed.shape(index), lambda rows: packed.read(index, rows)
        # A small batch's photographs are averaged down first: drawn at half their size wires would break up.
        image = fit_long_side(self.image(index), size_px)
        return (image.shape[0], image.shape[1]), lambda rows: image[rows.start : rows.stop]

    def _finish(
        self, index: int, image: np.ndarray, class_ids: np.ndarray, polygons: list[np.ndarray], **placement: Any
    ) -> Sample:
        """Order the instances from large to small, so that small ones lie on top of the mask, and draw it."""
        size_px = image.shape[0]
        order = large_to_small(polygons)
        polygons = [polygons[position] for position in order]
        boxes = polygon_boxes(polygons).astype(np.float32).clip(0, size_px)
        masks = draw_masks(polygons, size_px)
        class_ids = np.asarray(class_ids, np.int64)[order] if len(order) else np.zeros(0, np.int64)
        return Sample(index, image, class_ids, boxes, masks, polygons, **placement)


def _visible(tiles: list[tuple[Photo, np.ndarray]], size_px: int) -> tuple[list[int], list[np.ndarray]]:
    """Return classes and outlines of what is seen of photographs, each with its (2, 3) map from the unit square."""
    tiles = [(photo, matrix) for photo, matrix in tiles if photo.polygons]
    if not tiles:
        return [], []
    class_ids = np.concatenate([photo.class_ids for photo, _ in tiles])
    points = np.concatenate([transform_points(np.concatenate(photo.polygons), matrix) for photo, matrix in tiles])
    lengths = [len(polygon) for photo, _ in tiles for polygon in photo.polygons]
    return visible_outlines(class_ids, points, np.cumsum([0, *lengths[:-1]]), size_px)


@dataclass
class Batch:
    """Samples as tensors: images uint8 (B, S, S, 3) RGB; the N targets of all images in one row each."""

    images: torch.Tensor
    batch_index: torch.Tensor  # int64 (N,), ascending: which image
    class_ids: torch.Tensor  # int64 (N,)
    boxes: torch.Tensor  # float32 (N, 4) xyxy pixels
    masks: torch.Tensor  # int32 (B, S/4, S/4): k + 1 is the image's k-th target row
    colour_gains: torch.Tensor | None  # float32 (B, 3), where colours are left to the device
    samples: list[Sample]

    def __len__(self) -> int:
        return len(self.images)

    def pin_memory(self) -> Batch:
        """Copy the tensors to page-locked memory (called by the loader)."""
        for name in ("images", "batch_index", "class_ids", "boxes", "masks", "colour_gains"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).pin_memory())
        self._share_pixels()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave the samples' pixels out: between processes they travel once, as tensors in shared memory."""
        nothing = np.zeros(0, np.uint8)
        samples = [replace(sample, image=nothing, masks=nothing) for sample in self.samples]
        return {**vars(self), "samples": samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_pixels()

    def _share_pixels(self) -> None:
        """Let each sample's image and masks be views of the batch's."""
        pixels = zip(self.samples, self.images.numpy(), self.masks.numpy(), strict=True)
        self.samples = [replace(sample, image=image, masks=masks) for sample, image, masks in pixels]


def collate(samples: list[Sample]) -> Batch:
    """Stack samples into a Batch."""
    counts = torch.tensor([len(sample.class_ids) for sample in samples])
    gains = [sample.colour_gains for sample in samples]
    return Batch(
        # In a loader's worker this stacks straight into the memory that the processes share.
        images=default_collate([torch.from_numpy(sample.image) for sample in samples]),
        batch_index=torch.repeat_interleave(torch.arange(len(samples)), counts),
        class_ids=torch.from_numpy(np.concatenate([sample.class_ids for sample in samples])),
        boxes=torch.from_numpy(np.concatenate([sample.boxes for sample in samples])),
        masks=default_collate([torch.from_numpy(sample.masks) for sample in samples]),
        colour_gains=None if all((row == NO_GAINS) for row in gains) else torch.tensor(gains, dtype=torch.float32),
        samples=samples,
    )


def multi_scale_sizes(size_px: int) -> tuple[int, ...]:
    """Return the sides that batches may have around `size_px`: within half of it, multiples of 32, at least 64."""
    low = max(-(-size_px // (2 * MODEL_STRIDE)) * MODEL_STRIDE, 2 * MODEL_STRIDE)
    return tuple(range(low, size_px * 3 // 2 + 1, MODEL_STRIDE))


class EpochBatches(Sampler[list[Key]]):
    """This rank's batches of an epoch as lists of (epoch, index), or of (epoch, index, size) with `sizes_px`.

    The epoch's order is cut into ceil(N / global batch) groups whose sizes differ by at most one, one for each optimizer
    step, and each group is dealt out to the ranks and their `batches_per_group` (accumulation): every sample exactly once,
    the same number of batches on every rank, no tiny last batch, no padding. With one global batch size the groups are
    the same at any world size and accumulation. A group's size in pixels is drawn out of `sizes_px` by (seed, epoch,
    number of the group): all ranks agree without a word.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size_per_gpu: int,
        rank: int,
        world_size: int,
        seed: int,
        sizes_px: tuple[int, ...] = (),
        batches_per_group: int = 1,
    ) -> None:
        if num_samples < world_size:
            raise UserError(
                f"{num_samples} training images cannot feed {world_size} processes; start at most {num_samples}"
            )
        shares = world_size * batches_per_group
        if num_samples < shares:
            raise UserError(
                f"{num_samples} training images cannot fill {world_size} processes x --accumulate {batches_per_group}; "
                f"use --accumulate {num_samples // world_size} at most"
            )
        self.num_samples, self.rank, self.world_size, self.seed = num_samples, rank, world_size, seed
        # The second bound leaves no batch without an image where there are next to none; one may then hold one more.
        self.num_groups = min(-(-num_samples // (batch_size_per_gpu * shares)), num_samples // shares)
        self.batches_per_group = batches_per_group
        self.sizes_px = sizes_px
        self.epoch, self.start_batch = 0, 0

    def __len__(self) -> int:
        return self.num_groups * self.batches_per_group

    def __iter__(self) -> Iterator[list[Key]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.num_samples)
        groups = np.array_split(order, self.num_groups)
        shares = self.world_size * self.batches_per_group
        for number in range(self.start_batch, len(self)):
            group, part = divmod(number, self.batches_per_group)
            size = self._size_of(group)
            share = groups[group][part * self.world_size + self.rank :: shares]
            yield [(self.epoch, int(index), *size) for index in share]

    def _size_of(self, group: int) -> tuple[int, ...]:
        if not self.sizes_px:
            return ()
        rng = np.random.default_rng((self.seed, self.epoch, group, SIZE_STREAM))
        return (int(rng.choice(self.sizes_px)),)


class ShardBatches(Sampler[list[Key]]):
    """This rank's share of a split, in order, each image exactly once over all ranks; a share may be empty."""

    def __init__(self, num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
        self.indices = range(rank, num_samples, world_size)
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[start : start + self.batch_size]]


class EpochLoader(DataLoader[Batch]):
    """A DataLoader that can be told the epoch and the batch to begin with; right with persistent workers too."""

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Choose what the next pass yields. The epoch travels with each index, so running workers need no message."""
        sampler = self.batch_sampler
        assert isinstance(sampler, EpochBatches)
        sampler.epoch, sampler.start_batch = epoch, start_batch


def get_dataloader(
    dataset: SegmentationDataset, batches: Sampler[Any], num_workers: int, pin_memory: bool, prefetch: int = 4
) -> EpochLoader:
    """Build the loader of one rank. Workers use one OpenCV thread each: the ranks share the cores already."""
    return EpochLoader(
        dataset,  # type: ignore[arg-type] # samples go in, collate makes batches of them
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        persistent_workers=num_workers > 0,
        prefetch_factor=prefetch if num_workers > 0 else None,
        worker_init_fn=prepare_worker,
    )


def open_images(
    photos: list[Photo], size_px: int, folder: Path, split: str, announce: Callable[[str], None]
) -> PackedImages | None:
    """Open (or build) the packed cache of a split; None when the disk has no room for it."""
    index = open_or_build([photo.file for photo in photos], size_px, folder, split, announce)
    return PackedImages(index) if index is not None else None


def prepare_worker(worker: int) -> None:
    """Make a loader process one of several: one thread, deaf to a launcher's stop, and no life without its rank.

    torchrun sends a stop to a rank's whole process group. The rank then still needs batches until all ranks stop at the
    same step; a loader process that had ended would end the rank with an error. It ends with its rank, at once: left
    to itself it would notice a killed one up to five seconds later.
    """
    heed_only_the_parent()
    die_with_parent(only_under_torchrun=False)
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
