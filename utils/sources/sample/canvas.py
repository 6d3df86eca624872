"""Anti-aliased drawing with sub-pixel vertices, and coordinate frames for the parts of a scene.

Points are float arrays (n, 2) of x right, y down, in pixels of the upright photograph; colours are RGB, 0 to 255.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import cv2
import numpy as np

Colour = tuple[float, float, float]
_SHIFT = 4  # cv2 takes corners as integers of 1/16 pixel
_FAR_PX = 16_000.0


class Annotation(NamedTuple):
    """An annotated object: a class of dataset.yaml, points (n, 2), and whether they are an open line."""

    name: str
    points: np.ndarray
    is_line: bool = False


@dataclass(frozen=True)
class Frame:
    """A part's coordinate frame: its origin in the photograph, pixels per unit, and clockwise rotation."""

    x_px: float
    y_px: float
    scale: float = 1.0
    angle_deg: float = 0.0

    def place(self, points: np.ndarray | Sequence[tuple[float, float]]) -> np.ndarray:
        """Convert local points (n, 2) to pixels of the photograph."""
        cosine = math.cos(math.radians(self.angle_deg)) * self.scale
        sine = math.sin(math.radians(self.angle_deg)) * self.scale
        turned = np.asarray(points, dtype=np.float64) @ np.array([[cosine, sine], [-sine, cosine]])
        return turned + np.array([self.x_px, self.y_px])

    def child(self, x: float, y: float, angle_deg: float = 0.0) -> Frame:
        """Return a frame with its origin at the local point (x, y), rotated relative to this one."""
        (origin,) = self.place([(x, y)])
        return Frame(origin[0], origin[1], self.scale, self.angle_deg + angle_deg)


class Canvas:
    """A photograph, painted back to front: RGB uint8 (height, width, 3). `sun`: -1 is at the left, 1 at the right.

    pixel_centre: the coordinates of the first pixel's centre, 0.5 where the photograph covers 0 to `width_px`.
    """

    def __init__(self, width_px: int, height_px: int, sun: Literal[-1, 1], pixel_centre: float = 0.0) -> None:
        self.image = np.zeros((height_px, width_px, 3), np.uint8)
        self.width_px, self.height_px, self.sun, self.pixel_centre = width_px, height_px, sun, pixel_centre

    def fill(self, outlines: np.ndarray | list[np.ndarray], colour: Colour) -> None:
        """Fill one outline, or several at once by the even-odd rule."""
        many = outlines if isinstance(outlines, list) else [outlines]
        cv2.fillPoly(self.image, [self._fixed_point(outline) for outline in many], colour, cv2.LINE_AA, _SHIFT)

    def line(self, points: np.ndarray, colour: Colour, width_px: float) -> None:
        """Draw an open line."""
        width = max(1, round(width_px))
        cv2.polylines(self.image, [self._fixed_point(points)], False, colour, width, cv2.LINE_AA, _SHIFT)

    def round_body(self, left: np.ndarray, right: np.ndarray, colour: Colour, num_strips: int = 9) -> np.ndarray:
        """Fill the area between two sides, each (n, 2), shaded like a cylinder; return its outline (2n, 2)."""
        for step in range(num_strips):
            start = step / num_strips
            # Each strip extends to the far side, so that anti-aliased edges leave no seams.
            near = left + (right - left) * start
            self.fill(np.concatenate([near, right[::-1]]), shade(colour, _cylinder_light(start, self.sun)))
        return np.concatenate([left, right[::-1]])

    def _fixed_point(self, points: np.ndarray) -> np.ndarray:
        return np.rint(np.clip(points - self.pixel_centre, -_FAR_PX, _FAR_PX) * (1 << _SHIFT)).astype(np.int32)


def shade(colour: Colour, factor: float) -> Colour:
    """Return the colour multiplied by `factor`, within 0..255."""
    red, green, blue = (float(min(255.0, max(0.0, channel * factor))) for channel in colour)
    return red, green, blue


def vary(rng: np.random.Generator, colour: Colour, amount: float = 0.08) -> Colour:
    """Return the colour with brightness and channels changed randomly by about `amount`."""
    red, green, blue = np.array(colour) * (1 + rng.uniform(-amount, amount) + rng.normal(0, amount / 6, 3))
    return shade((red, green, blue), 1.0)


def ellipse(centre_x: float, centre_y: float, radius_x: float, radius_y: float, num_points: int = 20) -> np.ndarray:
    """Return the vertices (num_points, 2) of an ellipse."""
    angles = np.linspace(0, 2 * math.pi, num_points, endpoint=False)
    return np.stack([centre_x + radius_x * np.cos(angles), centre_y + radius_y * np.sin(angles)], axis=1)


def along(start: np.ndarray, end: np.ndarray, fraction: float) -> np.ndarray:
    """Return the point or points at `fraction` of the way from start to end."""
    return start + (end - start) * fraction


def clip(outline: np.ndarray, width_px: float, height_px: float, margin_px: float = 0.0) -> np.ndarray:
    """Clip a polygon to the photograph's edges moved outwards by the margin; may return an empty array (0, 2).

    Sutherland and Hodgman, "Reentrant polygon clipping", CACM 17 (1974).
    """
    low, right, bottom = -margin_px, width_px + margin_px, height_px + margin_px
    for axis, limit, sign in ((0, low, 1), (0, right, -1), (1, low, 1), (1, bottom, -1)):
        if len(outline) == 0:
            break
        depth = (outline[:, axis] - limit) * sign  # positive inside
        kept: list[np.ndarray] = []
        for position in range(len(outline)):
            before, here = depth[position - 1], depth[position]
            if (before < 0) != (here < 0):
                kept.append(along(outline[position - 1], outline[position], before / (before - here)))
            if here >= 0:
                kept.append(outline[position])
        outline = np.array(kept).reshape(-1, 2)
    return outline


def _cylinder_light(across: float, sun: int) -> float:
    """Return the light at 0 (left) to 1 (right) across a cylinder: brightest a quarter in from the sunny side."""
    facing = math.cos((across - (0.28 if sun < 0 else 0.72)) * math.pi * 0.85)
    return 0.45 + 0.70 * max(0.0, facing)
