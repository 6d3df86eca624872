"""An evaluated model, and its detections on tiles in the place of those on whole photographs, for
`evaluate.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.data.dataset import Photo, Sample, SegmentationDataset
from yolo_seg_ddp.data.images import ImageError, read_image, unreadable_message
from yolo_seg_ddp.predict.detections import Detections, PhotoPrediction, boxes_to_input
from yolo_seg_ddp.predict.photo_masks import Letterbox
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.devices import Precision
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.threads import ordered_map
from yolo_seg_ddp.yolo.loss import SegmentationLoss

KEPT_PHOTOGRAPHS = 64  # at most about 3 MB each


class TileSearch:
    """Predicts on tiles of the photographs of samples; use it as the `find` of `evaluate`.

    `num_without_mask` counts its detections with an empty mask. The first photographs' predictions
    are kept: the report shows some photographs again. `progress` counts those of all calls.
    `threads` read photographs ahead.
    """

    def __init__(
        self,
        predictor: Predictor,
        photos: Sequence[Photo],
        progress: Progress | None = None,
        threads: int = 1,
    ) -> None:
        self.predictor = predictor
        self.threads = threads
        self.photos = photos
        self._progress = progress or Progress("photographs", len(photos), is_shown=False)
        self._kept: dict[int, PhotoPrediction] = {}
        self.num_without_mask = 0

    @property
    def settings(self) -> dict[str, float]:
        """The tiles' side in pixels of the photographs and their overlap, for metrics.json."""
        tiling = self.predictor.tiling
        return {"tiles": tiling.size_px, "overlap": tiling.overlap} if tiling else {}

    def __call__(
        self, samples: Sequence[Sample], placements: Sequence[Letterbox]
    ) -> Iterator[tuple[Detections, Sequence[Region]]]:
        """Yield each sample's detections, with boxes in the input's pixels, and masks in the
        photograph's.
        """
        indices = [sample.index for sample in samples]
        kept = [self._kept[index] for index in indices if index in self._kept]
        predictions = kept if len(kept) == len(indices) else self._predict(indices)
        for placement, prediction in zip(placements, predictions, strict=True):
            boxes = boxes_to_input(torch.from_numpy(prediction.boxes), placement)
            yield replace(prediction.detections, boxes=boxes), prediction.masks

    def _predict(self, indices: list[int]) -> Iterator[PhotoPrediction]:
        images = ordered_map(
            lambda index: read_photo(self.photos[index].file), indices, self.threads
        )
        found = self.predictor.predict(zip(indices, images, strict=True))
        for index, _, prediction in self._progress(found):
            self.num_without_mask += prediction.num_without_mask
            if len(self._kept) < KEPT_PHOTOGRAPHS:
                self._kept[index] = prediction
            yield prediction


@dataclass(frozen=True)
class Candidate:
    """An evaluated model and the split at its input size: it can process single images again as in
    the evaluation.
    """

    path: str
    model: nn.Module
    criterion: SegmentationLoss | None  # as `criterion_of` returns it
    dataset: SegmentationDataset
    names: tuple[str, ...]
    device: torch.device
    precision: Precision
    in_photo: bool  # whether boxes are compared in the photographs' pixels
    limits: dict[str, Any]  # the further arguments of `detect`
    # what finds the detections instead of the model on whole photographs
    find: TileSearch | None = None


def read_photo(
    file: Path, min_long_side_px: int | None = None, full_above_px: int | None = None
) -> np.ndarray:
    """Read a photograph as `read_image` does. Raises UserError if it cannot be read."""
    try:
        return read_image(file, min_long_side_px, full_above_px)
    except ImageError as error:
        raise UserError(unreadable_message(file, error)) from error
