"""Shapes that several tools draw: ellipses, turned boxes, objects with several labels."""

import math
from collections.abc import Sequence

import numpy as np

ELLIPSE_CORNERS = 64


def several_labels(labels: Sequence[str]) -> str:
    """Return the message about an object with several classes; empty for one class."""
    others = ", ".join(labels[1:])
    return f"has the labels {labels[0]}, {others}; the first is used, keep one" if others else ""


def ellipse_corners(
    centre: np.ndarray, radii: Sequence[float], turn_rad: float = 0.0
) -> np.ndarray:
    """Return an ellipse, rotated as by `turned`, as points (ELLIPSE_CORNERS, 2).

    Raises ValueError for an empty one.
    """
    if min(radii) <= 0:
        raise ValueError(f"radii {radii[0]:g} and {radii[1]:g}; both must be above 0")
    angles = np.linspace(0, 2 * np.pi, ELLIPSE_CORNERS, endpoint=False)
    return turned(
        centre + np.stack([np.cos(angles), np.sin(angles)], axis=1) * radii, centre, turn_rad
    )


def turned(points: np.ndarray, centre: np.ndarray, turn_rad: float) -> np.ndarray:
    """Turn points (V, 2) about a centre, clockwise in a picture whose y points down."""
    cosine, sine = math.cos(turn_rad), math.sin(turn_rad)
    return (points - centre) @ np.array([[cosine, sine], [-sine, cosine]]) + centre
