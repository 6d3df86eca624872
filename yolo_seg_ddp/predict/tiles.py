"""Predicts on overlapping tiles of large photographs, on larger and coarser tiles, and on each
whole photograph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.data.images import FILL, letterbox
from yolo_seg_ddp.data.target_masks import MASK_STRIDE
from yolo_seg_ddp.predict.detections import (
    Detections,
    Letterbox,
    PhotoPrediction,
    boxes_to_input,
    detect,
    photo_runs,
    raw_outputs,
)
from yolo_seg_ddp.predict.merge_tiles import MergedInstance, TileDetection, join_tiles
from yolo_seg_ddp.predict.options import OVERLAP
from yolo_seg_ddp.predict.overview import best_first, longest_side, merge_coarse_level, without_mask
from yolo_seg_ddp.predict.postprocess import Context, MeanWithWhole, Step
from yolo_seg_ddp.predict.regions import Corners, LazyRegions
from yolo_seg_ddp.yolo.inputs import prepare_images
from yolo_seg_ddp.yolo.model import (
    YoloModel,
    numbers_by_class,
    trained_label_lengths,
    trained_windows,
    trained_wire_labels,
)

MIN_OVERLAP_PX = 128
# how many of a photograph's most confident pieces are joined, per detection that may result
PIECES_PER_DETECTION = 16
# A piece is joined if it has this share of the confidence of the best piece of its class: fewer
# change AP by under 0.001.
LEAST_RELATIVE_SCORE = 0.01
COARSER = 4  # a tile's side relative to that of the next smaller ones
WHOLE_PHOTO = -1  # in place of a tile's number: the whole photograph


@dataclass(frozen=True)
class Tiling:
    """The side of the smallest tiles in pixels of the photograph, and the share of a side by which
    neighbours overlap.

    larger: whether larger tiles follow, between these and the whole photograph.
    """

    size_px: int
    overlap: float = OVERLAP
    larger: bool = True

    def tiles_of(self, photo: np.ndarray) -> list[list[Corners]]:
        """Return the tiles of a photograph (H, W, 3), size by size; none if it is no larger than
        one tile.

        Each size is COARSER times the one before, as long as the photograph is at least twice as
        long as a tile.
        """
        height, width = photo.shape[:2]
        if max(height, width) <= self.size_px:
            return []
        sizes = [self.size_px]
        while self.larger and 2 * COARSER * sizes[-1] <= max(height, width):
            sizes.append(COARSER * sizes[-1])
        return [cut_tiles(width, height, size_px, self.overlap) for size_px in sizes]


def choose_tiling(tiles: str, overlap: float, model: YoloModel, size_px: int) -> Tiling | None:
    """Return the tiling that `--tiles auto|off|SIZE` and `--overlap` ask for; None: whole
    photographs only.

    `auto` cuts tiles if the model was trained on windows, at the highest scale of these. A model
    that was trained on windows of one scale only gets no larger tiles.
    """
    windows = trained_windows(model)
    larger = not windows or windows["low_scale"] < windows["high_scale"]
    if tiles.isdecimal():
        return Tiling(int(tiles), overlap, larger)
    return (
        Tiling(round(size_px / windows["high_scale"]), overlap, larger)
        if windows and tiles == "auto"
        else None
    )


def overlap_px(size_px: int, share: float) -> int:
    """Return by how many pixels neighbouring tiles overlap: a share of their side, at least 128 px
    or half of it.
    """
    return max(round(share * size_px), min(MIN_OVERLAP_PX, size_px // 2))


def cut_tiles(width: int, height: int, size_px: int, share: float = OVERLAP) -> list[Corners]:
    """Return tiles of `size_px` that cover a photograph, row by row; none for a photograph no
    larger than one tile.

    The last tile of a row or column ends at the photograph's edge. A photograph narrower than a
    tile has narrower tiles.
    """
    if max(width, height) <= size_px:
        return []
    step = size_px - overlap_px(size_px, share)
    return [
        (left, top, min(left + size_px, width), min(top + size_px, height))
        for top in _starts(height, size_px, step)
        for left in _starts(width, size_px, step)
    ]


def _starts(length: int, size_px: int, step: int) -> list[int]:
    last = max(length - size_px, 0)
    return [*range(0, last, step), last]


@dataclass(frozen=True)
class Predictor:
    """A model and how it is applied to a stream of photographs, `batch_size` tiles or photographs
    at a time.

    limits: the further keyword arguments of `detect`. max_detections: for each tile, and for each
    photograph. thin: the classes whose detections become lines, or keep their masks if they are
    curved. steps: what is done with each photograph's merged prediction.
    """

    model: nn.Module
    size_px: int
    device: torch.device
    batch_size: int
    tiling: Tiling | None
    limits: dict[str, Any]
    max_detections: int = 300
    autocast_dtype: torch.dtype | None = None
    thin: tuple[int, ...] = ()
    steps: tuple[Step, ...] = (MeanWithWhole(),)

    @torch.no_grad()
    def predict(
        self, photos: Iterable[tuple[Any, np.ndarray]]
    ) -> Iterator[tuple[Any, np.ndarray, PhotoPrediction]]:
        """Find objects in photographs, RGB uint8 (H, W, 3) of any sizes; yield them in order with
        their keys.

        A batch may hold tiles of several photographs. Masks are made one photograph at a time.
        """
        batch: list[_View] = []
        for key, photo in photos:
            tiles = self.tiling.tiles_of(photo) if self.tiling else []
            state = _Open(
                key,
                photo,
                self.size_px,
                tiles,
                [0.0] * (PIECES_PER_DETECTION * self.max_detections),
            )
            for number in state.views:
                start_s = time.perf_counter()
                batch.append(_View.of(state, number))
                state.spent_s[0] += time.perf_counter() - start_s
                if len(batch) == self.batch_size:
                    yield from self._run(batch)
                    batch = []
        if batch:
            yield from self._run(batch)

    def _run(self, batch: list[_View]) -> Iterator[tuple[Any, np.ndarray, PhotoPrediction]]:
        clock_s = [time.perf_counter()]
        canvases = np.stack([view.canvas for view in batch])
        if any(view.state.tiles for view in batch):
            # Always the same size, so that a last, smaller batch is computed in the same way on any
            # number of ranks.
            missing = self.batch_size - len(batch)
            canvases = np.concatenate(
                [canvases, np.full((missing, *canvases.shape[1:]), FILL, np.uint8)]
            )
        images = prepare_images(torch.from_numpy(canvases), self.device)
        clock_s.append(time.perf_counter())

        outputs = raw_outputs(self.model, images, self.autocast_dtype)
        strides = [float(stride) for stride in self.model.stride]  # type: ignore[union-attr]
        detections_of_views = detect(
            outputs,
            strides,
            self.size_px,
            max_detections=self.max_detections,
            thin=self.thin,
            **self.limits,
        )
        # `detect` has waited for the device.
        clock_s.append(time.perf_counter())
        shares_s = np.diff(clock_s) / len(batch)

        for view, detections, prototypes in zip(
            batch, detections_of_views, outputs["proto"], strict=False
        ):
            start_s = time.perf_counter()
            state, prediction = view.state, None
            state.best_score = max(state.best_score, detections.best_score)
            if view.number == WHOLE_PHOTO:
                state.seen = [
                    step.see(prototypes, view.canvas, view.placement) for step in self.steps
                ]

            if not state.tiles:
                masks = [
                    runs.region()
                    for runs in photo_runs(prototypes, detections, view.placement, self.thin)
                ]
                boxes = view.placement.boxes_to_photo(detections.boxes).numpy()
                num_bare = sum(not region.mask.size for region in masks)
                prediction = PhotoPrediction(detections, masks, boxes, num_without_mask=num_bare)
                prediction = self._finished(prediction, view.placement, state)
            else:
                state.add(view, detections, prototypes, self.thin)
                if view.number == state.views[-1]:
                    prediction = self._join(state)

            state.spent_s += [*shares_s, time.perf_counter() - start_s]
            if prediction is not None:
                prediction = replace(prediction, best_score=state.best_score, spent_s=state.spent_s)
                yield state.key, state.photo, prediction

    def _join(self, state: _Open) -> PhotoPrediction:
        pieces = [piece for piece in state.pieces if state.is_joined(piece.class_id, piece.score)]
        pieces.sort(key=lambda piece: piece.order)
        objects: list[MergedInstance] = []

        # 1. The tiles, from the smallest to the largest ones.
        first, finer_px = 0, 0
        for level in state.levels:
            numbers = range(first, first + len(level))
            joined = join_tiles(
                [piece for piece in pieces if piece.tile in numbers],
                state.tiles,
                self.limits["iou"],
            )
            side_px = longest_side(level)
            mask_px = MASK_STRIDE * side_px / self.size_px
            objects = (
                merge_coarse_level(objects, joined, state.tiles, finer_px, side_px, mask_px)
                if first
                else joined
            )
            first, finer_px = numbers.stop, side_px

        # 2. The pass over the whole photograph.
        whole = [
            MergedInstance((piece,))
            for piece in pieces
            if piece.tile == WHOLE_PHOTO and not piece.mask.is_empty
        ]
        side_px = max(state.photo.shape[:2])
        mask_px = MASK_STRIDE * side_px / self.size_px
        objects = merge_coarse_level(objects, whole, state.tiles, finer_px, side_px, mask_px)

        # 3. Detections whose mask is empty, and the confidences.
        if bare := without_mask(pieces, objects, state.tiles, self.limits["iou"]):
            objects = sorted([*objects, *bare], key=best_first)
        objects = self._judged_by_length(objects)
        # An object that is short, or that a coarser pass missed, may have less now.
        least = self.limits["confidence"]
        objects = [
            instance
            for instance in objects
            if instance.score >= least or not (instance.others or instance.factor < 1)
        ]
        objects = objects[: self.max_detections]

        # 4. The prediction.
        boxes = np.array([instance.box for instance in objects], np.float32).reshape(-1, 4)
        scores = torch.tensor([instance.score for instance in objects], dtype=torch.float32)
        class_ids = torch.tensor([instance.class_id for instance in objects], dtype=torch.int64)
        assert state.whole is not None
        in_input = boxes_to_input(torch.from_numpy(boxes), state.whole)
        detections = Detections(in_input, scores, class_ids, torch.zeros(len(objects), 0))
        num_bare = sum(instance.pieces[0].mask.is_empty for instance in objects)
        prediction = PhotoPrediction(
            detections,
            LazyRegions(objects, MergedInstance.region),
            boxes,
            num_without_mask=num_bare,
        )
        return self._finished(prediction, state.whole, state, whole)

    def _judged_by_length(self, objects: list[MergedInstance]) -> list[MergedInstance]:
        """Lower the confidence of objects that are short for their class (docs/research/tiles.md,
        rule 7); return all, best first.
        """
        windows = trained_windows(self.model)
        if not windows or not self.tiling:
            return objects
        # Of each class the median in pixels, and the spread.
        lengths = numbers_by_class(trained_label_lengths(self.model), 2)
        curved = trained_wire_labels(self.model)["wires_bent"] if self.thin else ()
        # a tile's side over that of the training
        scale = windows["high_scale"] * self.tiling.size_px / self.size_px
        judged = []
        for instance in objects:
            if instance.class_id in lengths and (
                instance.class_id not in self.thin or instance.class_id in curved
            ):
                median_px, spread = lengths[instance.class_id]
                length_px = float((instance.box[2:] - instance.box[:2]).max())
                deviation = min(0.0, math.log(max(length_px, 1.0) / (scale * median_px)) / spread)
                instance = replace(instance, factor=1 / (1 + deviation**2))
            judged.append(instance)
        return sorted(judged, key=best_first)

    def _finished(
        self,
        prediction: PhotoPrediction,
        placement: Letterbox,
        state: _Open,
        whole: Sequence[MergedInstance] = (),
    ) -> PhotoPrediction:
        tiles = state.levels[0] if state.levels else ()
        least = self.limits["confidence"]
        context = Context(
            state.photo, placement, least, self.max_detections, tiles, state.pieces, whole
        )
        for step, seen in zip(self.steps, state.seen, strict=True):
            prediction = step(prediction, context, seen)
        return prediction


@dataclass
class _Open:
    """A photograph, some of whose views are still to be computed, and its detections so far."""

    key: Any
    photo: np.ndarray
    size_px: int  # of the network's input
    levels: list[list[Corners]]  # tiles, the smallest first
    # as many of the highest as pieces are joined, ascending; 0 while there are fewer
    best_scores: list[float]
    best_of_class: dict[int, float] = field(default_factory=dict)
    pieces: list[TileDetection] = field(default_factory=list)
    whole: Letterbox | None = None  # where the whole photograph lies in the input
    seen: list[Any] = field(default_factory=list)  # what each step keeps of the whole photograph
    best_score: float = 0.0  # as in PhotoPrediction
    spent_s: np.ndarray = field(default_factory=lambda: np.zeros(3))

    @cached_property
    def tiles(self) -> list[Corners]:
        """The tiles of all sizes."""
        return [tile for level in self.levels for tile in level]

    @cached_property
    def views(self) -> list[int]:
        """The numbers of what the network sees: the whole photograph, and the tiles that are not
        all padding.
        """
        parts = (self.photo[top:bottom, left:right] for left, top, right, bottom in self.tiles)
        return [WHOLE_PHOTO, *(number for number, part in enumerate(parts) if (part != FILL).any())]

    def is_joined(self, class_id: int, score: float) -> bool:
        """Return whether a piece is confident enough to be joined, as far as is known so far."""
        return score >= max(
            self.best_scores[0], LEAST_RELATIVE_SCORE * self.best_of_class[class_id]
        )

    def add(
        self,
        view: _View,
        detections: Detections,
        prototypes: torch.Tensor,
        thin: tuple[int, ...],
    ) -> None:
        """Add a view's detections that can still be joined, about a third of all; only their masks
        are drawn.

        Further views can only raise the confidence that a piece needs.
        """
        scored = list(zip(detections.class_ids.tolist(), detections.scores.tolist(), strict=True))
        self.best_scores = sorted([*self.best_scores, *(score for _, score in scored)])[
            -len(self.best_scores) :
        ]
        for class_id, score in scored:
            self.best_of_class[class_id] = max(self.best_of_class.get(class_id, 0.0), score)
        kept = [number for number, one in enumerate(scored) if self.is_joined(*one)]
        detections = detections[kept]
        if view.number == WHOLE_PHOTO:
            self.whole = view.placement
        left, top = view.corner
        boxes = view.placement.boxes_to_photo(detections.boxes).numpy() + np.array(
            [left, top, left, top], np.float32
        )
        masks = photo_runs(prototypes, detections, view.placement, thin)
        for number, box, mask in zip(kept, boxes, masks, strict=True):
            self.pieces.append(
                TileDetection(view.number, *scored[number], box, mask.moved(left, top))
            )


@dataclass(frozen=True)
class _View:
    """One input of the network: a tile, or the whole photograph, letterboxed."""

    state: _Open
    number: int  # of the tile, or WHOLE_PHOTO
    corner: tuple[int, int]  # left, top in the photograph
    placement: Letterbox
    canvas: np.ndarray

    @classmethod
    def of(cls, state: _Open, number: int) -> _View:
        """Cut a view out of a photograph."""
        height, width = state.photo.shape[:2]
        left, top, right, bottom = (
            (0, 0, width, height) if number == WHOLE_PHOTO else state.tiles[number]
        )
        canvas, inner_size, pad = letterbox(state.photo[top:bottom, left:right], state.size_px)
        placement = Letterbox(state.size_px, inner_size, pad, (right - left, bottom - top))
        return cls(state, number, (left, top), placement, canvas)
