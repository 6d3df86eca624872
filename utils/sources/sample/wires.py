"""Wires of exact width: each pixel shows the share of it that the wire covers. cv2's lines are wider by 0.5 to 2.5 pixels."""

from __future__ import annotations

import numpy as np

from utils.sources.sample.canvas import Canvas, Colour

_STRAND_PX = 9  # from one strand of a conductor to the next, along the wire
_LASHING_PX = 46  # from one turn of the wire around a cable to the next


def paint_thin_wire(canvas: Canvas, path: np.ndarray, colour: Colour, width_px: float, is_stranded: bool) -> None:
    """Paint a wire along a path (n, 2), lit from above; of a cable that is not stranded one sees the lashing wire.

    The path may run in any direction, but its x must ascend, or its y if it is steep.
    """
    is_steep = abs(path[-1, 1] - path[0, 1]) > abs(path[-1, 0] - path[0, 0])
    image = canvas.image.transpose(1, 0, 2) if is_steep else canvas.image
    along, across = (path[:, 1], path[:, 0]) if is_steep else (path[:, 0], path[:, 1])
    columns = np.arange(max(0, round(along[0])), min(image.shape[1], round(along[-1])))
    middle = np.interp(columns + 0.5, along, across)
    steps = np.diff(across) / np.diff(along)
    slope = steps[np.clip(np.searchsorted(along, columns + 0.5) - 1, 0, len(steps) - 1)]
    cosine = 1 / np.sqrt(1 + slope**2)
    reach = int(np.ceil((width_px / 2 + 1) / cosine.min(initial=1.0))) + 1
    rows = np.floor(middle).astype(int)[:, None] + np.arange(-reach, reach + 1)
    distance = (rows + 0.5 - middle[:, None]) * cosine[:, None]
    cover = np.clip(width_px / 2 + 0.5 - np.abs(distance), 0, 1)
    cover[(rows < 0) | (rows >= len(image))] = 0
    light = _light(2 * distance / width_px, columns[:, None], is_stranded)
    used = cover > 0
    places = (rows[used], np.broadcast_to(columns[:, None], rows.shape)[used])
    share = cover[used][:, None]
    shown = np.minimum(np.array(colour) * light[used][:, None], 255.0)
    image[places] = np.rint(image[places] * (1 - share) + shown * share).astype(np.uint8)


def _light(side: np.ndarray, along_px: np.ndarray, is_stranded: bool) -> np.ndarray:
    """Return the light on a wire at `side`, -1 (upper edge) to 1 (lower edge), and at a place along it."""
    light = 1.08 - 0.42 * side - 0.22 * side**2
    if is_stranded:
        phase = (along_px + np.rint(3 * side).astype(int)) % _STRAND_PX
        return light * np.where(phase < 2, 0.84, 1.0)
    phase = (along_px + np.rint(4 * side).astype(int)) % _LASHING_PX
    return np.where(phase < 3, 3.2, light)
