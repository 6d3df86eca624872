"""Turns a model's raw outputs into detections with masks, alike in validation, evaluation and inference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from utils.data.images import letterbox
from utils.yolo.boxes import anchor_points, decode_boxes
from utils.yolo.inputs import prepare_images

MAX_CANDIDATES = 30_000  # per image, before non-maximum suppression; YOLOv8's limit
CLASS_OFFSET_PX = 7680  # between the boxes of different classes, so that one suppression keeps the classes apart


@dataclass(frozen=True)
class Detections:
    """One image's detections, best first: boxes float32 (n, 4) xyxy in input pixels, coefficients float32 (n, 32)."""

    boxes: torch.Tensor
    scores: torch.Tensor  # float32 (n,)
    class_ids: torch.Tensor  # int64 (n,)
    coefficients: torch.Tensor

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True)
class Placement:
    """Where a photograph of (width, height) pixels lies in the square input: scaled, then padded by (left, top)."""

    size_px: int
    scale: float
    pad: tuple[int, int]
    photo_size: tuple[int, int]

    @property
    def inner_size(self) -> tuple[int, int]:
        """Width and height of the photograph inside the input, in input pixels."""
        return max(round(self.photo_size[0] * self.scale), 1), max(round(self.photo_size[1] * self.scale), 1)

    def boxes_to_photo(self, boxes: torch.Tensor) -> torch.Tensor:
        """Map xyxy boxes (n, 4) from input to photograph pixels, clipped to the photograph."""
        inner = boxes.new_tensor(self.inner_size * 2)
        photo = boxes.new_tensor(self.photo_size * 2)
        return ((boxes - boxes.new_tensor(self.pad * 2)) / inner * photo).clamp(min=0).minimum(photo)


@dataclass(frozen=True)
class PhotoPrediction:
    """The detections of a photograph, with masks bool (n, H, W) and boxes float32 (n, 4) xyxy in its pixels."""

    found: Detections
    masks: np.ndarray
    boxes: np.ndarray

    @property
    def class_ids(self) -> np.ndarray:
        """The class of each detection, int64 (n,)."""
        return self.found.class_ids.cpu().numpy()


@torch.no_grad()
def predict_photos(
    model: nn.Module, photos: list[np.ndarray], size_px: int, device: torch.device, **limits: Any
) -> Iterator[PhotoPrediction]:
    """Find objects in photographs, RGB uint8 (H, W, 3) of any sizes, in one pass; `limits` are those of `detect`.

    Masks have the photograph's size and are made one photograph at a time, when the iterator reaches it.
    """
    if not photos:
        return
    placed = [letterbox(photo, size_px) for photo in photos]
    images = torch.from_numpy(np.stack([canvas for canvas, _, _ in placed]))
    outputs = raw_outputs(model, prepare_images(images, device))
    strides = [float(stride) for stride in model.stride]  # type: ignore[union-attr]
    for position, found in enumerate(detect(outputs, strides, size_px, **limits)):
        (height, width), (_, scale, pad) = photos[position].shape[:2], placed[position]
        placement = Placement(size_px, scale, pad, (width, height))
        masks = photo_masks(outputs["proto"][position], found, placement)
        yield PhotoPrediction(found, masks, placement.boxes_to_photo(found.boxes).cpu().numpy())


def raw_outputs(
    model: nn.Module, images: torch.Tensor, autocast_dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Run a YOLOv8-seg model in evaluation mode on (B, 3, S, S) in 0..1; return its dictionary of raw outputs."""
    with torch.autocast(images.device.type, autocast_dtype or torch.bfloat16, enabled=autocast_dtype is not None):
        outputs = model(images)
    return outputs[1] if isinstance(outputs, tuple) else outputs


def decode(outputs: dict[str, torch.Tensor], strides: list[float], size_px: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return boxes (B, A, 4) xyxy in input pixels and class probabilities (B, A, classes), in float32.

    The model's own decoding is not used: under bf16 autocast it rounds coordinates to whole pixels.
    """
    bins = outputs["boxes"].float().transpose(1, 2)
    points, stride_column = anchor_points(strides, size_px, bins.device)
    return decode_boxes(bins, points) * stride_column, outputs["scores"].float().transpose(1, 2).sigmoid()


def detect(
    outputs: dict[str, torch.Tensor],
    strides: list[float],
    size_px: int,
    *,
    confidence: float,
    iou: float,
    max_detections: int = 300,
    multi_label: bool = False,
    classes: tuple[int, ...] | None = None,
) -> list[Detections]:
    """Suppress overlapping boxes of the same class and return each image's detections.

    `multi_label` lets one anchor give detections of several classes, as AP is measured. Unlike in Ultralytics, there is
    no time limit.
    """
    boxes, probabilities = decode(outputs, strides, size_px)
    coefficients = outputs["mask_coefficient"].float().transpose(1, 2)
    if classes is not None:
        wanted = torch.zeros(probabilities.shape[-1], device=probabilities.device)
        wanted[list(classes)] = 1.0
        probabilities = probabilities * wanted
    return [
        _suppress(*image, confidence, iou, max_detections, multi_label)
        for image in zip(boxes, probabilities, coefficients, strict=True)
    ]


def _suppress(
    boxes: torch.Tensor,
    probabilities: torch.Tensor,
    coefficients: torch.Tensor,
    confidence: float,
    iou: float,
    max_detections: int,
    multi_label: bool,
) -> Detections:
    if multi_label:
        anchor, class_ids = (probabilities > confidence).nonzero(as_tuple=True)
        scores = probabilities[anchor, class_ids]
    else:
        best, best_class = probabilities.max(1)
        anchor = (best > confidence).nonzero(as_tuple=True)[0]
        scores, class_ids = best[anchor], best_class[anchor]
    if len(scores) > MAX_CANDIDATES:
        scores, kept = scores.topk(MAX_CANDIDATES)
        anchor, class_ids = anchor[kept], class_ids[kept]
    candidates = boxes[anchor]
    from torchvision.ops import nms  # takes 1.3 s: a wrong option is reported before

    kept = nms(candidates + class_ids[:, None] * CLASS_OFFSET_PX, scores, iou)[:max_detections]
    return Detections(candidates[kept], scores[kept], class_ids[kept], coefficients[anchor[kept]])


def prototype_masks(prototypes: torch.Tensor, detections: Detections, size_px: int) -> torch.Tensor:
    """Return masks at prototype resolution, cut to their boxes: bool (n, h, w) from prototypes (32, h, w)."""
    _, height, width = prototypes.shape
    masks = (detections.coefficients @ prototypes.float().flatten(1)).view(-1, height, width) > 0
    return masks & _inside(detections.boxes * (width / size_px), height, width)


def photo_masks(prototypes: torch.Tensor, detections: Detections, placement: Placement) -> np.ndarray:
    """Return masks in photograph pixels, cut to their boxes: bool (n, H, W). Made 16 at a time to bound memory."""
    width, height = placement.photo_size
    result = np.zeros((len(detections), height, width), bool)
    logits = (detections.coefficients @ prototypes.float().flatten(1)).view(-1, *prototypes.shape[1:])
    boxes = placement.boxes_to_photo(detections.boxes)
    left, top = placement.pad
    inner_width, inner_height = placement.inner_size
    for start in range(0, len(detections), 16):
        part = slice(start, start + 16)
        at_input = F.interpolate(logits[part][None], (placement.size_px,) * 2, mode="bilinear")
        inner = at_input[..., top : top + inner_height, left : left + inner_width]
        full = F.interpolate(inner, (height, width), mode="bilinear")[0]
        result[part] = ((full > 0) & _inside(boxes[part], height, width)).cpu().numpy()
    return result


def _inside(boxes: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return which pixels (n, height, width) lie in xyxy boxes (n, 4) given in the same pixels."""
    x1, y1, x2, y2 = boxes.T[..., None]
    columns, rows = torch.arange(width, device=boxes.device), torch.arange(height, device=boxes.device)
    return ((columns >= x1) & (columns < x2))[:, None, :] & ((rows >= y1) & (rows < y2))[:, :, None]
