"""The colour of each class, in charts and on photographs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Okabe and Ito's eight colours, which colour-blind people can distinguish (jfly.uni-koeln.de/color, 2008). Their black
# is white here, because black is invisible on dark photographs. Further classes get darker, then lighter shades.
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
    """Return a class's RGB colour. From the 25th class on, colours repeat."""
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
