"""One colour for each class, in charts and on photographs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Okabe and Ito's eight colours, told apart by colour-blind people too (jfly.uni-koeln.de/color, 2008); their black,
# which is lost on dark photographs, is white here. Further classes take darker, then lighter shades of the same.
PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (255, 255, 255),
)


def class_color(class_id: int) -> tuple[int, int, int]:
    """Return a class's RGB colour; the first eight are the colour-blind-safe ones of Okabe and Ito."""
    red, green, blue = PALETTE[class_id % len(PALETTE)]
    shade = class_id // len(PALETTE) % 3
    if shade == 1:
        return red * 6 // 10, green * 6 // 10, blue * 6 // 10
    if shade == 2:
        return (red + 255) // 2, (green + 255) // 2, (blue + 255) // 2
    return red, green, blue


def luminance(color: Sequence[int] | np.ndarray) -> float:
    """Return the brightness of an RGB colour, 0-255 (ITU-R BT.601)."""
    return float(0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2])
