"""A stand-in for a trained model: it recognises drawn photographs by their grey and answers with
spoilt truth.

Its answer to a photograph never depends on the others of the batch, so that a test sees what the
evaluation does with ranks and batches, and nothing else.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.data.dataset import Photo, Sample, SegmentationDataset
from yolo_seg_ddp.data.loader import ShardBatches, get_dataloader
from yolo_seg_ddp.evaluation.evaluate import Evaluation, evaluate
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.yolo.loss import SegmentationLoss

NAMES = ("pole", "crossarm", "insulator")
SIZE_PX = 256
STRIDES = (8, 16, 32)
NUM_BINS = 16
NUM_PROTOTYPES = 32
GREY_STEP = 5


def draw_photos(folder: Path, num_photos: int) -> list[Photo]:
    """Return photographs of 320 x 240 or 240 x 320 pixels with up to nine ellipses, 12 to 220
    pixels long, each.
    """
    photos = []
    for index in range(num_photos):
        rng = np.random.default_rng((11, index))
        size = np.array([320, 240] if index % 3 else [240, 320])
        file = folder / f"{index}.png"
        if not file.exists():
            cv2.imwrite(str(file), np.full((size[1], size[0], 3), 3 + GREY_STEP * index, np.uint8))
        count = int(rng.integers(0, 10)) if index else 3  # some have nothing, but not the first
        radii = np.exp(rng.uniform(np.log(6), np.log(110), (count, 2)))
        centres = rng.uniform(0.1, 0.9, (count, 2)) * size
        polygons = [
            (_ellipse(*pair).clip(0, size) / size).astype(np.float32)
            for pair in zip(centres, radii, strict=True)
        ]
        photos.append(Photo(file, rng.integers(0, len(NAMES), count), polygons))
    return photos


def draw_data(folder: Path, num_photos: int) -> Path:
    """Draw photographs in `folder/images`, for training and validation; return
    the data set's YAML.
    """
    (folder / "images").mkdir(parents=True)
    draw_photos(folder / "images", num_photos)
    data = folder / "dataset.yaml"
    data.write_text("path: .\ntrain: images\nval: images\nnames: [pole, wire, insulator]\n")
    return data


class Oracle(nn.Module):
    """Answers as YOLOv8-seg does in evaluation, with 3 classes,
    for photographs of `draw_photos`.
    """

    def __init__(self, photos: list[Photo]) -> None:
        super().__init__()
        head = SimpleNamespace(stride=torch.tensor(STRIDES), nc=len(NAMES), reg_max=NUM_BINS)
        self.model = [head]  # where the loss looks for what it has to know of a model
        self.dataset = SegmentationDataset(photos, SIZE_PX)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the raw outputs for (B, 3, 256, 256) in 0..1."""
        greys = (images[:, 0, SIZE_PX // 2, SIZE_PX // 2] * 255).round().int().tolist()
        answers = [_answer(self.dataset[(0, (grey - 3) // GREY_STEP)]) for grey in greys]
        return {
            name: torch.from_numpy(np.stack([answer[name] for answer in answers]))
            for name in answers[0]
        }


class WithRegions(SegmentationDataset):
    """The photographs with up to four overlapping regions to ignore each, of
    one class or of all.
    """

    def __getitem__(self, key: Any) -> Sample:
        sample = super().__getitem__(key)
        rng = np.random.default_rng((13, sample.index))
        ids, low = rng.integers(-1, len(NAMES), int(rng.integers(0, 5))), np.array(sample.pad)
        shapes = [
            _ellipse(low + rng.random(2) * sample.inner_size, np.exp(rng.uniform(3, 5, 2)))
            for _ in ids
        ]
        outlines = [shape.clip(low, low + sample.inner_size).astype(np.float32) for shape in shapes]
        return replace(sample, ignored_ids=ids, ignored=outlines)


def evaluate_oracle(
    photos: list[Photo],
    batch_size: int = 5,
    regions: bool = False,
    known: list[Photo] | None = None,
    **options: Any,
) -> Evaluation:
    """Evaluate the stand-in on this rank's share of photographs, with the options of `evaluate`.

    known: the photographs with the labels that it answers with, if they are others.
    """
    batches = ShardBatches(len(photos), batch_size, distributed.rank(), distributed.world_size())
    dataset = (WithRegions if regions else SegmentationDataset)(photos, SIZE_PX)
    loader = get_dataloader(dataset, batches, 0, False)
    model = Oracle(known or photos)
    return evaluate(model, loader, NAMES, SegmentationLoss(model), torch.device("cpu"), **options)


def _ellipse(centre: np.ndarray, radii: np.ndarray) -> np.ndarray:
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    return centre + np.stack([np.cos(turns), np.sin(turns)], axis=1) * radii


def _answer(sample: Sample) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((12, sample.index))
    sides = [SIZE_PX // stride for stride in STRIDES]
    num_anchors = sum(side * side for side in sides)
    answer = {
        "boxes": np.zeros((4 * NUM_BINS, num_anchors), np.float32),
        "scores": np.full((len(NAMES), num_anchors), -12, np.float32),
        "mask_coefficient": np.zeros((NUM_PROTOTYPES, num_anchors), np.float32),
        "proto": np.full((NUM_PROTOTYPES, SIZE_PX // 4, SIZE_PX // 4), -1, np.float32),
    }
    taken: set[int] = set()
    for number, (class_id, outline, score) in enumerate(_spoilt(sample, rng)):
        box = np.concatenate([outline.min(0), outline.max(0)])
        anchor, distances = _free_anchor(box, sides, taken)
        taken.add(anchor)
        for side, distance in enumerate(distances):
            whole = int(distance)
            bins = np.full(NUM_BINS, -30.0)
            bins[whole : whole + 2] = np.log(
                np.array([1 - distance + whole, distance - whole]) + 1e-9
            )
            answer["boxes"][side * NUM_BINS : (side + 1) * NUM_BINS, anchor] = bins
        answer["scores"][class_id, anchor] = np.log(score / (1 - score))
        answer["mask_coefficient"][number, anchor] = 4
        full = np.zeros((SIZE_PX, SIZE_PX), np.float32)
        cv2.fillPoly(full, [np.rint(outline).astype(np.int32)], 1)
        answer["proto"][number] = (
            cv2.resize(full, (SIZE_PX // 4,) * 2, interpolation=cv2.INTER_AREA) - 0.5
        )
    return answer


def _spoilt(sample: Sample, rng: np.random.Generator) -> list[tuple[int, np.ndarray, float]]:
    """Return (class, outline, confidence): most targets moved and stretched, some misnamed, and
    made-up ones.
    """
    found = []
    for class_id, polygon in zip(sample.class_ids.tolist(), sample.polygons, strict=True):
        error = rng.exponential(0.06)
        centre, extent = polygon.mean(0), np.ptp(polygon, axis=0)
        outline = (
            centre
            + (polygon - centre) * (1 + rng.normal(0, error, 2))
            + rng.normal(0, error, 2) * extent
        )
        if rng.random() < 0.9:
            named = int(rng.integers(len(NAMES))) if rng.random() < 0.1 else class_id
            found.append(
                (named, outline, float(np.clip(0.9 - 3 * error + rng.normal(0, 0.2), 0.02, 0.98)))
            )
    for _ in range(int(rng.integers(0, 4))):
        outline = _ellipse(rng.uniform(60, 200, 2), np.exp(rng.uniform(np.log(4), np.log(50), 2)))
        found.append((int(rng.integers(len(NAMES))), outline, float(rng.uniform(0.02, 0.8))))
    return found


def _free_anchor(box: np.ndarray, sides: list[int], taken: set[int]) -> tuple[int, np.ndarray]:
    """Return an anchor that nobody uses near the middle of a box, and the distances to the box's
    sides in cells.
    """
    first = 0
    for stride, side in zip(STRIDES, sides, strict=True):
        column, row = ((box[:2] + box[2:]) / 2 / stride).astype(int).clip(0, side - 1)
        for x, y in (
            (column, row),
            (min(column + 1, side - 1), row),
            (column, min(row + 1, side - 1)),
        ):
            point = np.array([x, y]) + 0.5
            distances = np.concatenate([point - box[:2] / stride, box[2:] / stride - point]).clip(0)
            anchor = first + int(y) * side + int(x)
            if distances.max() < NUM_BINS - 1.01 and anchor not in taken:
                return anchor, distances
        first += side * side
    raise AssertionError(f"no anchor is left for {box}")
