"""A stand-in for a network: it finds red and green things in its input, and is exact at the
photograph's scale.
"""

from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from yolo_seg_ddp.predict import tiles
from yolo_seg_ddp.predict.detections import Detections, Letterbox
from yolo_seg_ddp.predict.regions import Runs

NAMES = ("wire", "pole")
COLOURS = ((255, 0, 0), (0, 255, 0))
BACKGROUND = 114


class ColourNetwork(nn.Module):
    """Has what the code asks of a model."""

    stride = (8, 16, 32)

    def __init__(self) -> None:
        super().__init__()
        self.names = dict(enumerate(NAMES))
        self.args: dict[str, Any] = {"imgsz": 320}
        self.batch_sizes: list[int] = []

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batch_sizes.append(len(images))
        return {"proto": (images * 255).round()}


def paint(truth: list[tuple[int, np.ndarray]], size: tuple[int, int]) -> np.ndarray:
    """Draw masks in their classes' colours: RGB uint8 (H, W, 3)."""
    photo = np.full((size[1], size[0], 3), BACKGROUND, np.uint8)
    for class_id, mask in truth:
        photo[mask] = COLOURS[class_id]
    return photo


def _parts(prototypes: torch.Tensor) -> list[tuple[int, np.ndarray]]:
    red, green, _ = prototypes.numpy()
    found = []
    for class_id, excess in enumerate((red - green, green - red)):
        if excess.max() > 60:
            count, labels = cv2.connectedComponents((excess > 60).view(np.uint8))
            found += [(class_id, labels == label) for label in range(1, count)]
    return found


def detect(
    outputs: dict[str, torch.Tensor], *_: Any, max_detections: int = 300, **__: Any
) -> list[Detections]:
    """Find each connected part; confident about large ones."""
    found = []
    for image in outputs["proto"]:
        parts = _parts(image)
        scores = [0.3 + 0.6 * min(mask.sum(), 9000) / 9000 for _, mask in parts]
        order = np.argsort(-np.array(scores), kind="stable")[:max_detections]
        boxes = [_box(parts[position][1]) for position in order]
        found.append(
            Detections(
                torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
                torch.tensor([scores[position] for position in order], dtype=torch.float32),
                torch.tensor([parts[position][0] for position in order], dtype=torch.int64),
                torch.from_numpy(order.astype(np.float32))[:, None],
            )
        )
    return found


def _box(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def photo_runs(
    prototypes: torch.Tensor, found: Detections, placement: Letterbox, thin: tuple[int, ...]
) -> Iterator[Runs]:
    """Yield the parts' masks in photograph pixels."""
    parts = _parts(prototypes)
    (left, top), (width, height) = placement.pad, placement.inner_size
    for position in found.coefficients[:, 0].int().tolist():
        inner = parts[position][1][top : top + height, left : left + width].astype(np.uint8)
        mask = cv2.resize(inner, placement.photo_size, interpolation=cv2.INTER_NEAREST).view(bool)
        yield Runs.of(mask)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiles be predicted with this network's detections."""
    monkeypatch.setattr(tiles, "detect", detect)
    monkeypatch.setattr(tiles, "photo_runs", photo_runs)
