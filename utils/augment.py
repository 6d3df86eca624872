"""Augmentation of one sample as a pure function of (seed, epoch, index): any worker count and world size see equal pixels.

Geometry is one affine map per photograph, straight from the stored pixels into the output: mosaic, scale, translation,
rotation and flips cost a single interpolation. Polygons go through the same map at their own vertices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np

FILL = 114  # the grey YOLO pads with


@dataclass(frozen=True)
class AugmentConfig:
    """Strengths, named and defaulted as in the recipe YOLOv8's weights were trained with."""

    mosaic: float = 1.0  # probability
    degrees: float = 0.0  # rotation, +- degrees
    translate: float = 0.1  # +- fraction of the image size
    scale: float = 0.5  # gain in [1 - scale, 1 + scale]
    fliplr: float = 0.5  # probability
    flipud: float = 0.0  # probability
    hsv_h: float = 0.015  # +- fraction of the hue circle
    hsv_s: float = 0.7  # +- relative
    hsv_v: float = 0.4  # +- relative


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random numbers that belong to one sample of one epoch."""
    return np.random.default_rng((seed, epoch, index))


def letterbox_matrix(height: int, width: int, size_px: int) -> np.ndarray:
    """Return the (2, 3) map that centres a (height, width) photograph in a square, touching its border."""
    scale = size_px / max(height, width)
    return np.array([[scale, 0, (size_px - width * scale) / 2], [0, scale, (size_px - height * scale) / 2]])


def mosaic_matrices(shapes: list[tuple[int, int]], size_px: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Place four photographs of (height, width) around a random centre of a canvas of twice the size.

    Returns one (2, 3) map per photograph, into canvas pixels; each photograph has its long side at `size_px`.
    """
    centre_x, centre_y = rng.uniform(size_px / 2, 1.5 * size_px, 2)
    matrices = []
    for tile, (height, width) in enumerate(shapes):
        scale = size_px / max(height, width)
        left = centre_x - width * scale if tile % 2 == 0 else centre_x
        top = centre_y - height * scale if tile < 2 else centre_y
        matrices.append(np.array([[scale, 0, left], [0, scale, top]]))
    return matrices


def random_view(canvas_px: int, size_px: int, config: AugmentConfig, rng: np.random.Generator) -> np.ndarray:
    """Return a random (2, 3) map from a canvas (its centre stays near the centre) into the (size_px, size_px) output."""
    angle = math.radians(rng.uniform(-config.degrees, config.degrees))
    gain = rng.uniform(1 - config.scale, 1 + config.scale)
    shift_x, shift_y = rng.uniform(0.5 - config.translate, 0.5 + config.translate, 2) * size_px
    cosine, sine = math.cos(angle) * gain, math.sin(angle) * gain
    linear = np.array([[cosine, sine], [-sine, cosine]])
    if rng.random() < config.fliplr:
        linear[0] *= -1
        shift_x = size_px - shift_x
    if rng.random() < config.flipud:
        linear[1] *= -1
        shift_y = size_px - shift_y
    offset = np.array([shift_x, shift_y]) - linear @ np.full(2, canvas_px / 2)
    return np.hstack([linear, offset[:, None]])


def compose(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Return the (2, 3) map that applies `inner`, then `outer`."""
    return np.hstack([outer[:, :2] @ inner[:, :2], outer[:, :2] @ inner[:, 2:] + outer[:, 2:]])


def warp_into(output: np.ndarray, image: np.ndarray, matrix: np.ndarray) -> None:
    """Draw `image` (H, W, 3) through a (2, 3) map of pixel corners into `output`, touching only what it covers."""
    height, width = image.shape[:2]
    corners = transform_points(np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64), matrix)
    x0, y0 = np.maximum(np.floor(corners.min(0)).astype(int), 0)
    x1, y1 = np.minimum(np.ceil(corners.max(0)).astype(int), (output.shape[1], output.shape[0]))
    if x1 <= x0 or y1 <= y0:
        return
    # OpenCV maps pixel centres; ours maps pixel corners: shift by half a pixel on both sides.
    centred = matrix.copy()
    centred[:, 2] += matrix[:, :2] @ np.full(2, 0.5) - 0.5 - np.array([x0, y0])
    # A view of a larger array would be copied by OpenCV, so the part is drawn on its own and put back.
    part = np.ascontiguousarray(output[y0:y1, x0:x1])
    cv2.warpAffine(
        image,
        centred,
        (int(x1 - x0), int(y1 - y0)),
        dst=part,
        flags=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_TRANSPARENT,
    )
    output[y0:y1, x0:x1] = part


def transform_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Map points (N, 2) through a (2, 3) affine."""
    return points @ matrix[:, :2].T + matrix[:, 2]


def clip_polygon(points: np.ndarray, size_px: float) -> np.ndarray:
    """Clip a polygon (N, 2) to the square [0, size_px]²; the result may be empty (0, 2).

    Sutherland and Hodgman 1974. Clamping vertices instead would bend every wire that leaves the picture.
    """
    for axis in (0, 1):
        for limit, sign in ((0.0, 1.0), (size_px, -1.0)):
            distance = (points[:, axis] - limit) * sign
            if len(points) == 0 or distance.min() >= 0:
                continue
            points = _clip_half_plane(points, distance)
    return points


def _clip_half_plane(points: np.ndarray, distance: np.ndarray) -> np.ndarray:
    inside = distance >= 0
    following, following_distance = np.roll(points, -1, axis=0), np.roll(distance, -1)
    crosses = inside != (following_distance >= 0)
    gap = np.where(crosses, distance - following_distance, 1.0)
    crossing = points + (following - points) * (distance / gap)[:, None]
    # Each edge gives its start when inside, then its crossing: interleave the two and keep what is wanted.
    both = np.stack([points, crossing], axis=1).reshape(-1, 2)
    return both[np.stack([inside, crosses], axis=1).reshape(-1)]


def jitter_colour(image: np.ndarray, config: AugmentConfig, rng: np.random.Generator) -> np.ndarray:
    """Vary hue, saturation and value of an RGB uint8 image by one random gain each."""
    gains = 1 + rng.uniform(-1, 1, 3) * (config.hsv_h, config.hsv_s, config.hsv_v)
    if config.hsv_h == config.hsv_s == config.hsv_v == 0:
        return image
    levels = np.arange(256)
    hue = ((levels * gains[0]) % 180).astype(np.uint8)
    saturation = np.clip(levels * gains[1], 0, 255).astype(np.uint8)
    saturation[0] = 0  # grey stays grey
    value = np.clip(levels * gains[2], 0, 255).astype(np.uint8)
    table = np.stack([hue, saturation, value], axis=-1)[None]
    return cv2.cvtColor(cv2.LUT(cv2.cvtColor(image, cv2.COLOR_RGB2HSV), table), cv2.COLOR_HSV2RGB)
