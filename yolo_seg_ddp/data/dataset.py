"""Photographs and labels as training samples. A sample depends only on (seed, epoch, index)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from yolo_seg_ddp.data.augment import (
    Augmentation,
    Scene,
    Tile,
    blend,
    compose,
    draw_gains,
    jitter_colour,
    letterbox_matrix,
    mosaic_matrices,
    paste_mirrored,
    paste_objects,
    random_view,
    sample_generator,
    seen_window,
    warp_into,
)
from yolo_seg_ddp.data.drawn_wires import draw_wires
from yolo_seg_ddp.data.images import (
    FILL,
    ImageError,
    fit_long_side,
    letterbox,
    load_photo,
    scaled_size,
    unreadable_message,
)
from yolo_seg_ddp.data.labels import (
    BOXED,
    ROUGH,
    Photo,
    count_classes,
    find_label_file,
    read_photos,
    split_regions,
)
from yolo_seg_ddp.data.loader import Key
from yolo_seg_ddp.data.packed_images import PackedImages
from yolo_seg_ddp.data.polygons import (
    large_to_small,
    polygon_boxes,
    transform_points,
    visible_outlines,
)
from yolo_seg_ddp.data.target_masks import draw_masks
from yolo_seg_ddp.data.windows import WindowedPhotos
from yolo_seg_ddp.utils.errors import UserError

NO_GAINS = (1.0, 1.0, 1.0)
UNKNOWN = -2  # in a mask: the pixel may belong to an object that has no outline


@dataclass(frozen=True)
class Sample:
    """One network input with its targets, all in pixels of the (S, S) input.

    image uint8 (S, S, 3) RGB; class_ids int64 (N,); boxes float32 (N, 4) xyxy; masks int32 (S/4,
    S/4): 0 is background, k + 1 the k-th instance (smaller instances lie on top), -1 a region to
    ignore, below all of them, UNKNOWN where a box lies on an outline. The photograph fills
    `inner_size` (width, height) of its pixels, from `pad` (left, top) on. ignored, ignored_ids,
    rough, unsearched, boxed: as in Photo. A region that is a whole photograph has no pixels in
    `masks`: it says nothing about the outlines of others.
    """

    index: int
    image: np.ndarray
    class_ids: np.ndarray
    boxes: np.ndarray
    masks: np.ndarray
    polygons: list[np.ndarray]
    inner_size: tuple[int, int] = (0, 0)
    pad: tuple[int, int] = (0, 0)
    colour_gains: tuple[float, ...] = NO_GAINS  # to be applied on the device
    ignored_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    ignored: list[np.ndarray] = field(default_factory=list)
    rough: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    unsearched: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    boxed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass
class Batch:
    """Samples as tensors: images uint8 (B, S, S, 3) RGB, and a row for each of the N targets of all
    images.
    """

    images: torch.Tensor
    batch_index: torch.Tensor  # int64 (N,), ascending: the target's image
    class_ids: torch.Tensor  # int64 (N,)
    boxes: torch.Tensor  # float32 (N, 4) xyxy pixels
    # int32 (B, S/4, S/4): k + 1 is the image's k-th target row, below 0 as in a Sample
    masks: torch.Tensor
    colour_gains: torch.Tensor | None  # float32 (B, 3), if colours are to be changed on the device
    samples: list[Sample]
    # Regions to ignore, if there are any, a map for each of the K classes of all images: bool (K,
    # S/4, S/4), and int64 (2, K), the map's image and class.
    ignored: torch.Tensor | None = None
    ignored_of: torch.Tensor | None = None
    # bool (N,) each: the objects with a rough outline, and those with a box alone, if there are any
    rough: torch.Tensor | None = None
    boxed: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    def pin_memory(self) -> Batch:
        """Copy the tensors to page-locked memory. Called by the DataLoader."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.pin_memory())
        self._share_pixels()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the samples' pixels: the batch's tensors already carry them, in shared
        memory.
        """
        nothing = np.zeros(0, np.uint8)
        samples = [replace(sample, image=nothing, masks=nothing) for sample in self.samples]
        return {**vars(self), "samples": samples}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._share_pixels()

    def _share_pixels(self) -> None:
        """Make each sample's image and masks views of the batch's tensors."""
        pixels = zip(self.samples, self.images.numpy(), self.masks.numpy(), strict=True)
        self.samples = [
            replace(sample, image=image, masks=masks) for sample, image, masks in pixels
        ]


def collate(samples: list[Sample]) -> Batch:
    """Stack samples into a Batch."""
    counts = torch.tensor([len(sample.class_ids) for sample in samples])
    gains = [sample.colour_gains for sample in samples]
    keys = [
        (image, k)
        for image, sample in enumerate(samples)
        for k in np.unique(sample.ignored_ids).tolist()
    ]
    of_keys = [
        list(itertools.compress(samples[n].ignored, samples[n].ignored_ids == k)) for n, k in keys
    ]
    maps = [draw_masks(outlines, len(samples[0].image)) > 0 for outlines in of_keys]
    rough, boxed = (
        np.concatenate(
            [np.isin(np.arange(len(sample.class_ids)), getattr(sample, of)) for sample in samples]
        )
        for of in ("rough", "boxed")
    )
    return Batch(
        # In a loader worker `default_collate` writes directly into shared memory.
        images=default_collate([torch.from_numpy(sample.image) for sample in samples]),
        batch_index=torch.repeat_interleave(torch.arange(len(samples)), counts),
        class_ids=torch.from_numpy(np.concatenate([sample.class_ids for sample in samples])),
        boxes=torch.from_numpy(np.concatenate([sample.boxes for sample in samples])),
        masks=default_collate([torch.from_numpy(sample.masks) for sample in samples]),
        colour_gains=None
        if all((row == NO_GAINS) for row in gains)
        else torch.tensor(gains, dtype=torch.float32),
        samples=samples,
        ignored=torch.from_numpy(np.stack(maps)) if maps else None,
        ignored_of=torch.tensor(keys).T.contiguous() if keys else None,
        rough=torch.from_numpy(rough) if rough.any() else None,
        boxed=torch.from_numpy(boxed) if boxed.any() else None,
    )


__all__ = [
    "Batch",
    "Photo",
    "Sample",
    "SegmentationDataset",
    "collate",
    "count_classes",
    "find_label_file",
    "read_photos",
]


@dataclass(eq=False)
class SegmentationDataset(Dataset[Sample]):
    """The samples of a split at `size_px`; indexed by (epoch, index) or (epoch, index, size_px).

    Samples are letterboxed if `augment` is None, else augmented. Mosaic, mixup, copy-paste and
    drawn wires end before epoch `mosaic_epochs`. With `colours_on_device` a sample has its colour
    gains instead of changed colours. With `windowed` a sample shows a window in the place of a
    photograph, and there are as many samples as windows; letterboxed samples show the same windows
    in all epochs. `skipped` are the photographs that were left out, by their path in the data set,
    with a message each. `digests` are those of the photographs' contents that are at hand, with the
    files' sizes and times, by path.
    """

    photos: list[Photo]
    size_px: int
    _: KW_ONLY
    packed: PackedImages | None = None
    windowed: WindowedPhotos | None = None
    augment: Augmentation | None = None
    mosaic_epochs: int = 0
    seed: int = 0
    colours_on_device: bool = False
    skipped: dict[str, str] = field(default_factory=dict)
    digests: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    not_packed: str = ""  # why its photographs are decoded each time

    collate = staticmethod(collate)  # for the loader

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

    def labels(self, index: int) -> Photo:
        """Return the labels of a letterboxed sample."""
        return self.photos[index] if self.windowed is None else self.windowed.tile(0, index).labels

    def _letterboxed(self, index: int, size_px: int) -> Sample:
        if self.windowed is not None:
            return self._letterboxed_window(self.windowed.tile(0, index), index, size_px)
        photo, image = self.photos[index], self.image(index)
        canvas, inner_size, pad = letterbox(image, size_px)
        class_ids, outlines = photo.with_regions()
        polygons = [polygon * np.array(inner_size) + np.array(pad) for polygon in outlines]
        return self._finish(index, canvas, class_ids, polygons, inner_size=inner_size, pad=pad)

    def _letterboxed_window(self, tile: Tile, index: int, size_px: int) -> Sample:
        canvas = np.full((size_px, size_px, 4), FILL, np.uint8)
        matrix = letterbox_matrix(*tile.shape, size_px)
        tile.draw(canvas, matrix)
        class_ids, outlines = tile.labels.with_regions()
        polygons = [transform_points(polygon * tile.shape[::-1], matrix) for polygon in outlines]
        image = cv2.cvtColor(canvas, cv2.COLOR_RGBA2RGB)
        inner_size = scaled_size(*tile.shape[::-1], matrix[0, 0])
        pad = (round(matrix[0, 2]), round(matrix[1, 2]))
        return self._finish(index, image, class_ids, polygons, inner_size=inner_size, pad=pad)

    def _augmented(self, epoch: int, index: int, size_px: int, config: Augmentation) -> Sample:
        rng = sample_generator(self.seed, epoch, index)
        may_mix = epoch < self.mosaic_epochs
        scene = self._scene((epoch, index, size_px), may_mix, config, rng)
        if may_mix and config.paste and rng.random() < config.paste and self._pasted_classes:
            scene = paste_objects(
                scene, self._donor(size_px, config, rng), config.wire_classes, rng
            )
        if may_mix and config.mixup and rng.random() < config.mixup:
            other = int(rng.integers(len(self)))
            scene = blend(scene, self._scene((epoch, other, size_px), may_mix, config, rng), rng)
        gains = draw_gains(config, rng)
        class_ids = np.array(scene.class_ids, np.int64)
        if self.colours_on_device:
            return self._finish(
                index, scene.image, class_ids, scene.polygons, colour_gains=tuple(gains.tolist())
            )
        return self._finish(index, jitter_colour(scene.image, gains), class_ids, scene.polygons)

    def _scene(
        self, key: Key, may_mix: bool, config: Augmentation, rng: np.random.Generator
    ) -> Scene:
        """Draw a sample's photograph or window in a random view; with `may_mix` possibly a mosaic
        of four, pasted objects and drawn wires.
        """
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
        scene = _drawn(tiles, [compose(view, matrix) for matrix in placed], size_px)
        if may_mix and config.copy_paste:
            scene = paste_mirrored(scene, config.copy_paste, rng)
        if may_mix and config.draw_wires and rng.random() < config.draw_wires:
            scene = draw_wires(scene, config.drawn_classes or config.wire_classes, rng)
        return scene

    @cached_property
    def _pasted_classes(self) -> dict[int, list[int]]:
        """The classes whose objects are pasted, all but the thin ones, each with the photographs
        that have some.
        """
        thin = self.augment.wire_classes if self.augment else ()
        numbered = [
            (class_id, n)
            for n, photo in enumerate(self.photos)
            for class_id in np.unique(photo.class_ids).tolist()
        ]
        classes = {class_id for class_id, _ in numbered if class_id not in thin}
        return {
            class_id: [n for other, n in numbered if other == class_id]
            for class_id in sorted(classes)
        }

    def _donor(self, size_px: int, config: Augmentation, rng: np.random.Generator) -> Scene:
        """Draw a photograph, or a window, with an object of a class that is pasted: each class with
        equal chance.
        """
        class_id, photos = list(self._pasted_classes.items())[
            int(rng.integers(len(self._pasted_classes)))
        ]
        photo = photos[int(rng.integers(len(photos)))]
        on_window = self.windowed.tile_on_object(photo, class_id, rng) if self.windowed else None
        tile = on_window or self._tile(0, photo, size_px)
        view = random_view(size_px, size_px, config, rng)
        return _drawn([tile], [compose(view, letterbox_matrix(*tile.shape, size_px))], size_px)

    def _tile(self, epoch: int, index: int, size_px: int) -> Tile:
        if self.windowed is not None:
            return self.windowed.tile(epoch, index)
        packed = self.packed
        if packed is not None and max(packed.shape(index)) <= size_px:
            shape = packed.shape(index)
            return Tile(
                self.photos[index], shape, partial(_draw_rows, shape, partial(packed.read, index))
            )
        # Shrink by area averaging first: warping to a much smaller size would break up thin wires.
        image = fit_long_side(self.image(index), size_px)
        shape = (image.shape[0], image.shape[1])
        return Tile(
            self.photos[index],
            shape,
            partial(_draw_rows, shape, lambda rows: image[rows.start : rows.stop]),
        )

    def _finish(
        self,
        index: int,
        image: np.ndarray,
        class_ids: np.ndarray,
        polygons: list[np.ndarray],
        **placement: Any,
    ) -> Sample:
        """Set regions to ignore apart, sort the instances from large to small and draw the masks,
        small ones on top.
        """
        size_px = image.shape[0]
        class_ids, polygons, ignored_ids, ignored, rough, unsearched, boxed = split_regions(
            np.asarray(class_ids, np.int64), polygons
        )
        order = large_to_small(polygons)
        polygons = [polygons[position] for position in order]
        boxes = polygon_boxes(polygons).astype(np.float32).clip(0, size_px)
        masks = draw_masks(polygons, size_px)
        is_boxed = np.isin(order, boxed)
        if is_boxed.any():
            # Somewhere in a box lies its object. What the box hides of a larger outline is unknown.
            outlined = draw_masks(list(itertools.compress(polygons, ~is_boxed)), size_px)
            masks[np.append(False, is_boxed)[masks] & (outlined > 0)] = UNKNOWN
        is_drawn = ~np.isin(np.arange(len(ignored)), unsearched)
        if drawn := list(itertools.compress(ignored, is_drawn.tolist())):
            masks[(masks == 0) & (draw_masks(drawn, size_px) > 0)] = -1
        placement |= {
            "ignored_ids": ignored_ids,
            "ignored": ignored,
            "unsearched": unsearched,
            "rough": np.flatnonzero(np.isin(order, rough)),
            "boxed": np.flatnonzero(is_boxed),
        }
        return Sample(index, image, class_ids[order], boxes, masks, polygons, **placement)


def _drawn(tiles: list[Tile], matrices: list[np.ndarray], size_px: int) -> Scene:
    """Draw tiles through (2, 3) maps into one picture, with the labels that are visible."""
    # Four channels: OpenCV needs 60 % of the time that it needs for three.
    canvas = np.full((size_px, size_px, 4), FILL, np.uint8)
    seen = []
    for tile, matrix in zip(tiles, matrices, strict=True):
        tile.draw(canvas, matrix)
        height, width = tile.shape
        of_unit_square = np.hstack([matrix[:, :2] * (width, height), matrix[:, 2:]])
        seen.append((tile.labels, of_unit_square))
    class_ids, polygons = _visible(seen, size_px)
    return Scene(cv2.cvtColor(canvas, cv2.COLOR_RGBA2RGB), class_ids, polygons)


def _draw_rows(
    shape: tuple[int, int],
    read: Callable[[range], np.ndarray],
    canvas: np.ndarray,
    matrix: np.ndarray,
) -> None:
    """Draw the visible part of an image of (height, width) through a (2, 3) map; `read` returns
    rows of the image.
    """
    rows, columns = seen_window(matrix, shape, canvas.shape[0])
    if rows:
        corner = np.array([[1, 0, columns.start], [0, 1, rows.start]])
        warp_into(canvas, read(rows)[:, columns.start : columns.stop], compose(matrix, corner))


def _visible(
    tiles: list[tuple[Photo, np.ndarray]], size_px: int
) -> tuple[list[int], list[np.ndarray]]:
    """Return classes and outlines of visible objects and regions; each photograph has a (2, 3) map
    from normalised points.
    """
    labels = [
        (*photo.with_regions(), matrix)
        for photo, matrix in tiles
        if photo.polygons or photo.ignored
    ]
    for class_ids, _, matrix in labels:
        # Of a turned box only the class is known.
        if matrix[0, 1] or matrix[1, 0]:
            class_ids[class_ids >= BOXED] -= BOXED - ROUGH
    if not labels:
        return [], []
    class_ids = np.concatenate([of_photo for of_photo, _, _ in labels])
    points = np.concatenate(
        [transform_points(np.concatenate(outlines), matrix) for _, outlines, matrix in labels]
    )
    lengths = [len(polygon) for _, outlines, _ in labels for polygon in outlines]
    return visible_outlines(class_ids, points, np.cumsum([0, *lengths[:-1]]), size_px)
