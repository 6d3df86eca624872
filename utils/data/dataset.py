"""Photographs and labels as training samples. A sample depends only on (seed, epoch, index)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from utils.common.errors import DataErrors, UserError
from utils.data.augment import (
    AugmentConfig,
    Draw,
    Scene,
    Tile,
    blend,
    compose,
    draw_gains,
    jitter_colour,
    letterbox_matrix,
    mosaic_matrices,
    paste_mirrored,
    random_view,
    sample_generator,
    seen_window,
    warp_into,
)
from utils.data.cache import PackedImages, load_photo, open_or_build, unreadable_message
from utils.data.dataset_yaml import DatasetSpec, label_file_for
from utils.data.images import FILL, ImageError, fit_long_side, letterbox, scaled_size
from utils.data.labels import LabelError, Photo, read_yolo_label
from utils.data.loader import Key
from utils.data.polygons import large_to_small, polygon_boxes, transform_points, visible_outlines
from utils.data.target_masks import draw_masks
from utils.data.windows import WindowedPhotos

NO_GAINS = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Sample:
    """One network input with its targets, all in pixels of the (S, S) input.

    image uint8 (S, S, 3) RGB; class_ids int64 (N,); boxes float32 (N, 4) xyxy; masks int32 (S/4, S/4): 0 is background,
    k + 1 the k-th instance (smaller instances lie on top). `scale` and `pad` (left, top) map the photograph to it.
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
    colour_gains: tuple[float, ...] = NO_GAINS  # to be applied on the device


def read_photos(spec: DatasetSpec, split: str, announce: Callable[[str], None] | None = None) -> list[Photo]:
    """Read a split's labels. A missing label file means a photograph without objects.

    Announces what was skipped. Raises DataErrors, which lists every unusable label file as file:line.
    """
    photos: list[Photo] = []
    problems: list[str] = []
    files = spec.image_files(split, announce)
    holds_folder = functools.cache(spec.holds)
    for file in files:
        try:
            photos.append(_read_photo(spec, file, holds_folder))
        except LabelError as error:
            problems.append(str(error))
    if problems:
        raise DataErrors(
            f"{len(problems)} of {len(files)} label files of `{split}` cannot be used: {problems[0]}", problems
        )
    return photos


def _read_photo(spec: DatasetSpec, file: Path, holds_folder: Callable[[Path], bool]) -> Photo:
    label_file = find_label_file(spec, file, holds_folder)
    if label_file is None:
        return Photo(file, np.zeros(0, np.int64), [])
    return Photo(file, *read_yolo_label(label_file, len(spec.names)))


def find_label_file(spec: DatasetSpec, file: Path, holds_folder: Callable[[Path], bool]) -> Path | None:
    """Return a photograph's label file, None if there is none. Raises LabelError for one that leaves the data set.

    `holds_folder` is `spec.holds`, which may remember its answers.
    """
    label_file = label_file_for(file)
    if not holds_folder(label_file.parent) or (label_file.is_symlink() and not spec.holds(label_file)):
        raise LabelError(f"{label_file}: {spec.problem_with(label_file)}")
    return label_file if label_file.exists() or label_file.is_symlink() else None  # a broken link is an error


def count_classes(photos: list[Photo], num_classes: int) -> np.ndarray:
    """Return the number of objects of each class: int64 (num_classes,)."""
    class_ids = [np.zeros(0, np.int64), *(photo.class_ids for photo in photos)]
    return np.bincount(np.concatenate(class_ids), minlength=num_classes)


@dataclass
class Batch:
    """Samples as tensors: images uint8 (B, S, S, 3) RGB, and a row for each of the N targets of all images."""

    images: torch.Tensor
    batch_index: torch.Tensor  # int64 (N,), ascending: the target's image
    class_ids: torch.Tensor  # int64 (N,)
    boxes: torch.Tensor  # float32 (N, 4) xyxy pixels
    masks: torch.Tensor  # int32 (B, S/4, S/4): k + 1 is the image's k-th target row
    colour_gains: torch.Tensor | None  # float32 (B, 3), if colours are to be changed on the device
    samples: list[Sample]

    def __len__(self) -> int:
        return len(self.images)

    def pin_memory(self) -> Batch:
        """Copy the tensors to page-locked memory. Called by the DataLoader."""
        for name in ("images", "batch_index", "class_ids", "boxes", "masks", "colour_gains"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).pin_memory())
        self._share_pixels()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the samples' pixels: the batch's tensors already carry them, in shared memory."""
        nothing = np.zeros(0, np.uint8)
        samples = [replace(sample, image=nothing, masks=nothing) for sample in self.samples]
        return {**vars(self), "samples": samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_pixels()

    def _share_pixels(self) -> None:
        """Make each sample's image and masks views of the batch's tensors."""
        pixels = zip(self.samples, self.images.numpy(), self.masks.numpy(), strict=True)
        self.samples = [replace(sample, image=image, masks=masks) for sample, image, masks in pixels]


def collate(samples: list[Sample]) -> Batch:
    """Stack samples into a Batch."""
    counts = torch.tensor([len(sample.class_ids) for sample in samples])
    gains = [sample.colour_gains for sample in samples]
    return Batch(
        # In a loader worker `default_collate` writes directly into shared memory.
        images=default_collate([torch.from_numpy(sample.image) for sample in samples]),
        batch_index=torch.repeat_interleave(torch.arange(len(samples)), counts),
        class_ids=torch.from_numpy(np.concatenate([sample.class_ids for sample in samples])),
        boxes=torch.from_numpy(np.concatenate([sample.boxes for sample in samples])),
        masks=default_collate([torch.from_numpy(sample.masks) for sample in samples]),
        colour_gains=None if all((row == NO_GAINS) for row in gains) else torch.tensor(gains, dtype=torch.float32),
        samples=samples,
    )


class SegmentationDataset(Dataset[Sample]):
    """The samples of a split at `size_px`; indexed by (epoch, index) or (epoch, index, size_px).

    Samples are letterboxed if `augment` is None, else augmented. Mosaic, mixup and copy-paste end before epoch
    `mosaic_epochs`. With `colours_on_device` a sample has its colour gains instead of changed colours. With `windowed` an
    augmented sample shows a window in the place of a photograph, and there are as many samples as windows. `skipped`
    are the photographs that were left out, by their path in the data set, with a message each.
    """

    def __init__(
        self,
        photos: list[Photo],
        size_px: int,
        *,
        packed: PackedImages | None = None,
        windowed: WindowedPhotos | None = None,
        augment: AugmentConfig | None = None,
        mosaic_epochs: int = 0,
        seed: int = 0,
        colours_on_device: bool = False,
        skipped: dict[str, str] | None = None,
    ) -> None:
        self.photos = photos
        self.size_px = size_px
        self.packed = packed
        self.windowed = windowed
        self.augment = augment
        self.mosaic_epochs = mosaic_epochs
        self.seed = seed
        self.colours_on_device = colours_on_device
        self.skipped = skipped or {}

    collate = staticmethod(collate)

    def __len__(self) -> int:
        return len(self.photos) if self.windowed is None else len(self.windowed.windows)

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key[:2]
        size_px = key[2] if len(key) > 2 else self.size_px
        if self.augment is None:
            return self._letterboxed(index, size_px)
        return self._augmented(epoch, index, size_px, self.augment)

    def image(self, index: int) -> np.ndarray:
        """Return a photograph as RGB uint8 (H, W, 3) with a long side of at most `self.size_px`."""
        if self.packed is not None:
            return self.packed.read(index)
        file = self.photos[index].file
        try:
            return load_photo(file, self.size_px)
        except ImageError as error:
            raise UserError(unreadable_message(file, error)) from error

    def _letterboxed(self, index: int, size_px: int) -> Sample:
        photo, image = self.photos[index], self.image(index)
        height, width = image.shape[:2]
        canvas, scale, pad = letterbox(image, size_px)
        resized = np.array(scaled_size(width, height, scale))
        polygons = [polygon * resized + np.array(pad) for polygon in photo.polygons]
        return self._finish(index, canvas, photo.class_ids, polygons, scale=scale, pad=pad, photo_size=(width, height))

    def _augmented(self, epoch: int, index: int, size_px: int, config: AugmentConfig) -> Sample:
        rng = sample_generator(self.seed, epoch, index)
        may_mix = epoch < self.mosaic_epochs
        scene = self._scene((epoch, index, size_px), may_mix, config, rng)
        if may_mix and config.mixup and rng.random() < config.mixup:
            other = int(rng.integers(len(self)))
            scene = blend(scene, self._scene((epoch, other, size_px), may_mix, config, rng), rng)
        gains = draw_gains(config, rng)
        class_ids = np.array(scene.class_ids, np.int64)
        if self.colours_on_device:
            return self._finish(index, scene.image, class_ids, scene.polygons, colour_gains=tuple(gains.tolist()))
        return self._finish(index, jitter_colour(scene.image, gains), class_ids, scene.polygons)

    def _scene(self, key: Key, may_mix: bool, config: AugmentConfig, rng: np.random.Generator) -> Scene:
        """Draw a sample's photograph or window in a random view; with `may_mix` possibly a mosaic of four, and pasted
        objects."""
        epoch, index, size_px = key
        use_mosaic = may_mix and rng.random() < config.mosaic
        indices = [index, *rng.integers(len(self), size=3).tolist()] if use_mosaic else [index]
        tiles = [self._tile(epoch, position, size_px) for position in indices]
        if use_mosaic:
            view = random_view(2 * size_px, size_px, config, rng)
            placed = mosaic_matrices([tile.shape for tile in tiles], size_px, rng)
        else:
            view = random_view(size_px, size_px, config, rng)
            placed = [letterbox_matrix(*tiles[0].shape, size_px)]
        # Four channels: OpenCV needs 60 % of the time that it needs for three.
        canvas = np.full((size_px, size_px, 4), FILL, np.uint8)
        seen = []
        for tile, matrix in zip(tiles, placed, strict=True):
            total = compose(view, matrix)
            tile.draw(canvas, total)
            height, width = tile.shape
            of_unit_square = np.hstack([total[:, :2] * (width, height), total[:, 2:]])
            seen.append((tile.labels, of_unit_square))
        class_ids, polygons = _visible(seen, size_px)
        scene = Scene(cv2.cvtColor(canvas, cv2.COLOR_RGBA2RGB), class_ids, polygons)
        return paste_mirrored(scene, config.copy_paste, rng) if may_mix and config.copy_paste else scene

    def _tile(self, epoch: int, index: int, size_px: int) -> Tile:
        if self.windowed is not None:
            return self.windowed.tile(epoch, index)
        packed = self.packed
        if packed is not None and max(packed.shape(index)) <= size_px:
            shape = packed.shape(index)
            return Tile(self.photos[index], shape, _row_drawer(shape, lambda rows: packed.read(index, rows)))
        # Shrink by area averaging first: warping to a much smaller size would break up thin wires.
        image = fit_long_side(self.image(index), size_px)
        shape = (image.shape[0], image.shape[1])
        return Tile(self.photos[index], shape, _row_drawer(shape, lambda rows: image[rows.start : rows.stop]))

    def _finish(
        self, index: int, image: np.ndarray, class_ids: np.ndarray, polygons: list[np.ndarray], **placement: Any
    ) -> Sample:
        """Sort the instances from large to small and draw the masks, where small ones lie on top."""
        size_px = image.shape[0]
        order = large_to_small(polygons)
        polygons = [polygons[position] for position in order]
        boxes = polygon_boxes(polygons).astype(np.float32).clip(0, size_px)
        masks = draw_masks(polygons, size_px)
        class_ids = np.asarray(class_ids, np.int64)[order] if len(order) else np.zeros(0, np.int64)
        return Sample(index, image, class_ids, boxes, masks, polygons, **placement)


def _row_drawer(shape: tuple[int, int], read: Callable[[range], np.ndarray]) -> Draw:
    """Return a function that draws an image of (height, width), of which `read` returns rows."""

    def draw(canvas: np.ndarray, matrix: np.ndarray) -> None:
        rows, columns = seen_window(matrix, shape, canvas.shape[0])
        if rows:
            corner = np.array([[1, 0, columns.start], [0, 1, rows.start]])
            warp_into(canvas, read(rows)[:, columns.start : columns.stop], compose(matrix, corner))

    return draw


def _visible(tiles: list[tuple[Photo, np.ndarray]], size_px: int) -> tuple[list[int], list[np.ndarray]]:
    """Return classes and outlines of visible objects; each photograph has a (2, 3) map from normalised points."""
    tiles = [(photo, matrix) for photo, matrix in tiles if photo.polygons]
    if not tiles:
        return [], []
    class_ids = np.concatenate([photo.class_ids for photo, _ in tiles])
    points = np.concatenate([transform_points(np.concatenate(photo.polygons), matrix) for photo, matrix in tiles])
    lengths = [len(polygon) for photo, _ in tiles for polygon in photo.polygons]
    return visible_outlines(class_ids, points, np.cumsum([0, *lengths[:-1]]), size_px)


def open_images(
    photos: list[Photo],
    size_px: int,
    folder: Path,
    split: str,
    announce: Callable[[str], None],
    *,
    skips_bad: bool = False,
) -> PackedImages | None:
    """Open or build a split's packed cache; None if the disk has no room for it.

    With `skips_bad` its index says which photographs it holds.
    """
    index = open_or_build([photo.file for photo in photos], size_px, folder, split, announce, skips_bad=skips_bad)
    return PackedImages(index) if index is not None else None
