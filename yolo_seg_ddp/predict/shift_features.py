"""What photographs are like, for telling whether a flight is like those that
a model was judged on.
"""

from __future__ import annotations

import numpy as np
import torch

from yolo_seg_ddp.predict.detections import Detections
from yolo_seg_ddp.predict.photo_masks import Letterbox

COUNTED = 0.25  # confidence from which detections count for what a photograph is like
# Of a photograph: logarithm of the number of detections, their mean confidence, logarithm of their
# mean side, brightness, contrast.
FEATURES = (
    ("fewer objects", "more objects"),
    ("less certain objects", "more certain objects"),
    ("smaller objects", "larger objects"),
    ("darker", "brighter"),
    ("hazier", "clearer"),
)


def image_statistics(
    prototypes: torch.Tensor, canvas: np.ndarray, placement: Letterbox
) -> np.ndarray:
    """Return a photograph's brightness and contrast in the network's input (S, S, 3), and its mean
    prototypes: float64 (2 + 32,).

    They are logarithms of the 95th percentile, which haze changes little, and of how far the 5th is
    below it.
    """
    (left, top), (width, height) = placement.pad, placement.inner_size
    dark, bright = np.percentile(canvas[top : top + height, left : left + width], (5, 95))
    return np.array(
        [np.log1p(bright), np.log1p(bright - dark), *prototypes.float().mean(dim=(1, 2)).tolist()],
        np.float64,
    )


def photo_features(detections: Detections, statistics: np.ndarray, size_px: int) -> np.ndarray:
    """Return what a photograph is like, float64 (5 + 32,): FEATURES, and the means of the network's
    prototypes.

    detections: with boxes in pixels of the input, whose side is `size_px`. statistics: of
    `image_statistics`.
    What needs a detection is NaN without.
    """
    scores = detections.scores.numpy()
    counted = scores >= COUNTED
    confidence = scale = np.nan
    if counted.any():
        extents = detections.boxes[:, 2:] - detections.boxes[:, :2]
        sides = extents.clamp(min=1e-3).prod(dim=1).sqrt().numpy()[counted]
        confidence = scores[counted].mean()
        scale = np.log(sides.mean() / size_px)
    return np.array([np.log1p(counted.sum()), confidence, scale, *statistics], np.float64)


def mean_features(features: np.ndarray) -> np.ndarray:
    """Return a group's features (5 + 32,): the means of its photographs', (n, 5 + 32), without what
    is not known.
    """
    known = np.isfinite(features)
    sums = np.where(known, features, 0).sum(axis=0)
    return np.divide(
        sums, known.sum(axis=0), out=np.full(features.shape[1], np.nan), where=known.any(axis=0)
    )


def deviations(features: np.ndarray) -> np.ndarray:
    """Return how far each row of features (n, 5 + 32) is from the others in FEATURES, and in all
    together: (n, 6).

    What all are together is their root mean square, which counts only where it is larger than that
    of the others. All rows are treated alike, so the deviations of exchangeable rows are
    exchangeable.
    """
    apart = _standardised(features)
    together = _standardised(np.sqrt((apart**2).mean(axis=1, keepdims=True))).clip(min=0)
    return np.hstack([apart[:, : len(FEATURES)], together])


def _standardised(rows: np.ndarray) -> np.ndarray:
    """Return how far each row (n, k) is from the mean of the others, in their standard deviations;
    0 for what is not known.
    """
    known = np.isfinite(rows)
    others = len(rows) - 1
    apart = np.where(known, rows - mean_features(rows), 0)
    means = (apart.sum(axis=0) - apart) / others
    variances = ((apart**2).sum(axis=0) - apart**2) / others - means**2
    return np.where(known, (apart - means) / np.sqrt(variances.clip(min=1e-12)), 0)
