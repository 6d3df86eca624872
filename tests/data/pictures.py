"""Drawn pictures whose colours tell the classes, for the tests of the
optional parts of the recipe.
"""

from typing import Any

import cv2
import numpy as np

from tests.support.in_memory import InMemory
from yolo_seg_ddp.data.augment import Augmentation, Scene
from yolo_seg_ddp.data.dataset import Photo, Sample, SegmentationDataset
from yolo_seg_ddp.data.polygons import large_to_small

NAMES = ("pole", "transformer", "wire", "box")
COLOURS = np.array([[250, 20, 20], [20, 250, 20], [20, 20, 250], [250, 250, 20]])
COLOURLESS = Augmentation(hsv_h=0, hsv_s=0, hsv_v=0)
SIZE_PX = 128
WORST_LABEL = 0.1  # edges are smooth: a thin wire, enlarged, has few pixels of its full colour


class Pictures(InMemory):
    """Photographs in memory: a pole, a transformer on it, a wire across everything, a box; smaller
    lies on top.
    """

    def __init__(self, count: int, size: tuple[int, int] = (160, 120)) -> None:
        self.size = size  # (width, height)
        self.photos = [Photo(None, *self.labels(number)) for number in range(count)]  # type: ignore[arg-type]

    def labels(self, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        rng = np.random.default_rng(number)
        pole, wire, (left, top) = (
            rng.uniform(0.1, 0.8),
            rng.uniform(0.2, 0.4),
            rng.uniform(0.5, 0.8, 2),
        )
        bars = [
            (pole, 0.2, pole + 0.08, 0.95),
            (pole - 0.02, 0.3, pole + 0.1, 0.45),
            (left, top, left + 0.15, top + 0.15),
        ]
        outlines = [np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]]) for x1, y1, x2, y2 in bars]
        outlines.append(np.array([[0, wire], [1, wire + 0.1], [1, wire + 0.16], [0, wire + 0.06]]))
        return np.array([0, 1, 3, 2]), [outline.astype(np.float32) for outline in outlines]

    def whole(self, number: int) -> np.ndarray:
        image = np.full((*self.size[::-1], 3), 60, np.uint8)
        class_ids, polygons = self.photos[number].class_ids, self.photos[number].polygons
        shown = [(polygon * self.size).astype(np.float32) for polygon in polygons]
        for position in sorted(range(len(shown)), key=lambda k: -cv2.contourArea(shown[k])):
            fixed = np.rint((shown[position] - 0.5) * 16).astype(np.int32)
            cv2.fillPoly(image, [fixed], COLOURS[class_ids[position]].tolist(), shift=4)
        return image


def box(left: float, top: float, width: float, height: float) -> np.ndarray:
    corners = [[left, top], [left + width, top], [left + width, top + height], [left, top + height]]
    return np.array(corners, np.float32).clip(0, 1)


def rectangle(left: float, top: float, right: float, bottom: float) -> np.ndarray:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], float)


class Apart(Pictures):
    """Photographs whose objects do not overlap: a cut could change which of two is smaller and lies
    on top.
    """

    def labels(self, number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        x, y = np.random.default_rng(number).uniform(0, 0.08, 2)
        outlines = [
            box(x, 0.2, 0.06, 0.75),
            box(0.3 + x, 0.3 + y, 0.2, 0.2),
            box(0.6 + x, 0.6 + y, 0.15, 0.15),
        ]
        outlines.append(np.array([[0.1, 0.05], [1, 0.15], [1, 0.18], [0.1, 0.08]], np.float32))
        return np.array([0, 1, 3, 2]), outlines


PICTURES, APART = Pictures(6), Apart(6)


def dataset_of(
    config: Augmentation | None, pictures: Pictures = PICTURES, **options: int
) -> SegmentationDataset:
    given: dict[str, Any] = {"packed": pictures, "augment": config, "mosaic_epochs": 9, **options}
    return SegmentationDataset(pictures.photos, SIZE_PX, **given)


def samples_of(
    config: Augmentation | None,
    mosaic_epochs: int = 9,
    epochs: int = 3,
    pictures: Pictures = PICTURES,
) -> list[Sample]:
    data = dataset_of(config, pictures, mosaic_epochs=mosaic_epochs)
    return [data[epoch, index] for epoch in range(epochs) for index in range(len(data))]


def content(sample: Sample) -> list[bytes]:
    arrays = (sample.image, sample.class_ids, sample.boxes, sample.masks, *sample.polygons)
    return [array.tobytes() for array in arrays]


def worst_label(sample: Sample | Scene) -> float:
    """Return the largest share of an object's visible inside, a pixel off every edge, that shows
    another colour.
    """
    order = large_to_small(sample.polygons).tolist()
    owner = np.zeros(sample.image.shape[:2], np.int32)
    for position in order:
        cv2.fillPoly(
            owner,
            [np.rint((sample.polygons[position] - 0.5) * 16).astype(np.int32)],
            position + 1,
            shift=4,
        )
    worst = 0.0
    for position in order:
        inside = (
            cv2.erode(
                (owner == position + 1).astype(np.uint8), np.ones((5, 5), np.uint8), borderValue=1
            )
            > 0
        )
        if inside.sum() > 20:
            distance = np.abs(
                sample.image[inside].astype(int) - COLOURS[sample.class_ids[position]]
            ).max(-1)
            worst = max(worst, float((distance > 95).mean()))
    return worst


def unlabelled_pixels(sample: Sample) -> int:
    """Count strongly coloured pixels more than two pixels away from every label of any class."""
    labelled = np.zeros(sample.image.shape[:2], np.uint8)
    for polygon in sample.polygons:
        cv2.fillPoly(labelled, [np.rint(polygon - 0.5).astype(np.int32)], 1)
    image = sample.image.astype(int)
    is_coloured = image.max(-1) - image.min(-1) > 100
    return int((is_coloured & (cv2.dilate(labelled, np.ones((5, 5), np.uint8)) == 0)).sum())
