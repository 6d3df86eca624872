"""Proves that an export predicts what the torch model predicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from utils.common.progress import Progress
from utils.data.dataset import Photo, SegmentationDataset
from utils.data.images import letterbox, read_image
from utils.data.loader import ShardBatches, get_dataloader
from utils.evaluation.evaluate import AP_LIMITS, PhotoPixels, criterion_of, evaluate
from utils.evaluation.native_masks import sizes_on_disk
from utils.evaluation.tile_search import TileSearch
from utils.export.parity import (
    OUTPUTS,
    bounds_of,
    compare_ap,
    compare_facts,
    compare_outputs,
    decoded_outputs,
    masks_alike,
)
from utils.predict.exported import ExportedModel, ExportFacts
from utils.predict.tiles import Predictor, Tiling
from utils.yolo.inputs import prepare_images

PHOTOGRAPHS_FOR_OUTPUTS = 4
BATCH_SIZE = 8


@dataclass(frozen=True)
class Proof:
    """What was found: failures, one line each; raw outputs' largest differences; AP of each class beside torch's."""

    failures: list[str]
    largest: dict[str, float] = field(default_factory=dict)
    per_class: list[dict[str, Any]] = field(default_factory=list)
    mask_iou: tuple[float, float] | None = None  # mean and lowest, before suppression


class Judge:
    """Compares exports with one torch model on the same photographs, resized by this project.

    With a tiling AP is measured on tiles, in the photographs' pixels; without, on whole photographs as in training.
    """

    def __init__(
        self,
        photos: Sequence[Photo],
        names: tuple[str, ...],
        size_px: int,
        device: torch.device,
        tiling: Tiling | None,
        workers: int = 0,
    ) -> None:
        self.photos, self.names, self.size_px = list(photos), names, size_px
        self.device, self.tiling, self.workers = device, tiling, workers
        self.inputs = network_inputs(self.photos[:PHOTOGRAPHS_FOR_OUTPUTS], size_px, device)
        self._outputs: dict[str, torch.Tensor] = {}
        self._metrics: dict[str, Any] = {}

    def learn(self, reference: nn.Module) -> None:
        """Take the torch model's outputs and AP as the truth."""
        self._outputs = decoded_outputs(reference, self.inputs)
        self._metrics = self.metrics(reference)

    def prove(self, export: ExportedModel, facts: ExportFacts, ap_tolerance: float | None = None) -> Proof:
        """Compare an export with the torch model and with the facts that it was made to carry."""
        failures = compare_facts(facts, export)
        if failures:
            return Proof(failures)
        bounds = bounds_of(export.kind, facts.precision, ap_tolerance)
        outputs = decoded_outputs(export, self.inputs)
        largest, failures = compare_outputs(self._outputs, outputs, bounds)
        if len(largest) < len(OUTPUTS):  # of another shape or not finite: nothing to measure AP on
            return Proof(failures, largest)
        per_class, too_far = compare_ap(self._metrics, self.metrics(export), bounds)
        return Proof(too_far + failures, largest, per_class, masks_alike(self._outputs, outputs))

    def metrics(self, model: nn.Module) -> dict[str, Any]:
        """Return this project's metrics of a model on the photographs."""
        dataset = SegmentationDataset(self.photos, self.size_px)
        batches = ShardBatches(len(dataset), BATCH_SIZE, 0, 1)
        loader = get_dataloader(dataset, batches, self.workers, self.device.type == "cuda")
        criterion = criterion_of(model)
        if self.tiling is None:
            batches_shown = Progress("batches", len(loader))(loader)
            return evaluate(model, batches_shown, self.names, criterion, self.device).metrics
        predictor = Predictor(model, self.size_px, self.device, BATCH_SIZE, self.tiling, AP_LIMITS)
        find = TileSearch(predictor, self.photos, Progress("photographs", len(self.photos)))
        pixels = PhotoPixels(sizes_on_disk(self.photos), compare=True, find=find)
        return evaluate(model, loader, self.names, criterion, self.device, photo=pixels).metrics


def network_inputs(photos: Sequence[Photo], size_px: int, device: torch.device) -> torch.Tensor:
    """Return each photograph and its lower right quarter, letterboxed: float32 (2 n, 3, S, S) in 0..1."""
    canvases = []
    for photo in photos:
        image = read_image(photo.file)
        height, width = image.shape[:2]
        canvases += [letterbox(part, size_px)[0] for part in (image, image[height // 2 :, width // 2 :])]
    return prepare_images(torch.from_numpy(np.stack(canvases)), device)
