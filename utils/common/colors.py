"""The colour of each class, in charts and on photographs."""

from __future__ import annotations

from collections.abc import Sequence

# Six of Okabe and Ito's colours, which colour-blind people can distinguish (jfly.uni-koeln.de/color, 2008). Their yellow and
# black are crimson and violet here: all eight are visible on white, on black and on photographs, and in the simulations of
# Machado et al. (2009) any two are at least 16 apart (CIE76). Further classes get darker, then duller shades.
PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (225, 0, 75),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (128, 64, 255),
)


def class_color(class_id: int) -> tuple[int, int, int]:
    """Return a class's RGB colour. From the 25th class on, colours repeat."""
    red, green, blue = PALETTE[class_id % len(PALETTE)]
    shade = class_id // len(PALETTE) % 3
    if shade == 1:
        return red * 6 // 10, green * 6 // 10, blue * 6 // 10
    if shade == 2:
        return (red + 128) // 2, (green + 128) // 2, (blue + 128) // 2
    return red, green, blue


def contrast_color(color: Sequence[int]) -> tuple[int, int, int]:
    """Return black or white, which stands out from an RGB colour: for text on it and for edges beside it (ITU-R BT.601)."""
    return (0, 0, 0) if 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 110 else (255, 255, 255)
