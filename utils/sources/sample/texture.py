"""Ground textures at the scale of a photograph's pixels: tiles that repeat without a seam, and the ground seen in perspective.

Tiles are RGB uint8 (TILE_PX, TILE_PX, 3). Pixels are computed in integers, so that they are equal on every processor.
"""

import functools

import cv2
import numpy as np

from utils.sources.sample.canvas import Colour

TILE_PX = 1024
TILE_PX_PER_M = 150  # a tile shows 6.8 m of ground
_PAD_PX = 32  # longer than any stroke: strokes near an edge are drawn again at the opposite one
_LEVELS = 6  # a tile and its halves, quarters, ..., against moire where the ground is far
_STRIP_PX = 64
_FRACTION_BITS = 16

# Dark, middle and light colour.
_PALETTES: dict[str, tuple[Colour, Colour, Colour]] = {
    "meadow": ((38, 52, 22), (84, 104, 48), (150, 160, 88)),
    "dry grass": ((84, 72, 40), (150, 132, 84), (214, 198, 146)),
    "gravel": ((74, 70, 66), (146, 140, 132), (206, 200, 190)),
    "soil": ((70, 52, 36), (122, 94, 68), (172, 144, 112)),
    "leaves": ((16, 26, 14), (58, 82, 36), (132, 152, 78)),
    "asphalt": ((84, 84, 86), (112, 111, 110), (150, 149, 146)),
}


@functools.cache
def pyramid(kind: str) -> list[np.ndarray]:
    """Return a kind's tile and its reductions by 2, 4, ..., the same in every process."""
    rng = np.random.default_rng((20250601, list(_PALETTES).index(kind)))
    paint = {"gravel": _paint_stones, "leaves": _paint_leaves, "meadow": _paint_blades, "dry grass": _paint_blades}
    if kind in paint:
        base = _ramp(kind)[_smooth_noise(rng, TILE_PX, (4, 16, 64)) // 3]
        tile = np.pad(base, ((_PAD_PX, _PAD_PX), (_PAD_PX, _PAD_PX), (0, 0)), mode="wrap")
        paint[kind](rng, tile, _ramp(kind))
        levels = [np.ascontiguousarray(tile[_PAD_PX:-_PAD_PX, _PAD_PX:-_PAD_PX])]
    else:
        levels = [_specks(rng, kind)]
    for _ in range(_LEVELS - 1):
        blocks = levels[-1].reshape(len(levels[-1]) // 2, 2, -1, 2, 3).astype(np.uint16)
        levels.append(((blocks.sum(axis=(1, 3)) + 2) // 4).astype(np.uint8))
    return levels


@functools.cache
def clouds() -> np.ndarray:
    """Return smooth noise of several sizes, uint8 (512, 512), that repeats without a seam; mean about 128."""
    return _smooth_noise(np.random.default_rng(20250602), 512, (128, 64, 32, 16, 8))


@functools.cache
def grain() -> np.ndarray:
    """Return sensor noise, int8 (1024, 1024, 3), standard deviation about 32, coarser in colour than in brightness."""
    rng = np.random.default_rng(20250603)
    light = rng.integers(-28, 29, (3, 1024, 1024, 1), np.int16).sum(axis=0)  # close to normal
    tint = rng.integers(-14, 15, (512, 512, 3), np.int16).repeat(2, axis=0).repeat(2, axis=1)
    return (light + tint).astype(np.int8)


def enlarged(rng: np.random.Generator, noise: np.ndarray, size: tuple[int, int], zoom: float) -> np.ndarray:
    """Return a random piece of a noise (n, n) that repeats, enlarged `zoom` times, as (height, width) = `size`."""
    height, width = size
    rows, columns = -(-height // zoom) + 2, -(-width // zoom) + 2
    top, left = rng.integers(0, len(noise), 2)
    repeats = (int((top + rows) // len(noise)) + 1, int((left + columns) // len(noise)) + 1)
    piece = np.tile(noise, repeats)[top : top + int(rows), left : left + int(columns)]
    whole = cv2.resize(
        piece, (int(piece.shape[1] * zoom), int(piece.shape[0] * zoom)), interpolation=cv2.INTER_LINEAR_EXACT
    )
    return whole[:height, :width]


class Ground:
    """A plane seen by a camera: for each row of the photograph its scale and distance, in pixels of the tiles.

    horizon_px: the row of the horizon, negative if it lies above the photograph. near_scale: pixels of a tile per pixel
    of the photograph in the last row. focal_px: the camera's focal length. Straight lines stay straight.
    """

    def __init__(self, size: tuple[int, int], horizon_px: float, near_scale: float, focal_px: float) -> None:
        self.height, self.width = size
        below = np.arange(self.height) + 1.0 - horizon_px
        self.first_row = max(0, round(horizon_px))
        self.scale = near_scale * (self.height - horizon_px) / np.maximum(below, 1.0)
        # The distance along the central line of sight to the row of the horizon, for a camera that looks down.
        slant_px = np.sqrt(focal_px**2 + (self.height / 2 - horizon_px) ** 2)
        steps = self.scale * slant_px / np.maximum(below, 1.0)
        self.distance = np.cumsum(steps[::-1])[::-1]

    def photo_points(self, points: np.ndarray) -> np.ndarray:
        """Map points of the ground, (n, 2) metres to the right of the middle and away from the last row, to pixels."""
        away = np.asarray(points)[:, 1] * TILE_PX_PER_M
        # Rows descend as distances ascend. What lies before the last row is continued at its scale.
        y = np.interp(away, self.distance[::-1], np.arange(self.height)[::-1] + 0.5)
        y = np.where(away < self.distance[-1], self.height + (self.distance[-1] - away) / self.scale[-1], y)
        return np.stack([self.width / 2 + np.asarray(points)[:, 0] * self.px_per_m(y), y], axis=1)

    def px_per_m(self, y_px: float | np.ndarray) -> np.ndarray:
        """Return the number of pixels of a horizontal metre at a row of the photograph."""
        rows = np.clip(np.asarray(y_px).astype(int), self.first_row, self.height - 1)
        return TILE_PX_PER_M / self.scale[rows]

    def paint(self, image: np.ndarray, turn_deg: float, layers: list[tuple[str, np.ndarray | None]]) -> None:
        """Paint the ground in place: kinds of ground, each over the earlier ones by its mask uint8 (height, width)."""
        for top in range(self.first_row, self.height, _STRIP_PX):
            rows = slice(top, min(top + _STRIP_PX, self.height))
            detail = max(0.0, float(np.log2(self.scale[rows].mean())))
            level, share = min(int(detail), _LEVELS - 2), round(255 * min(detail - int(detail), 1.0))
            maps = [self._look_up(rows, turn_deg, level + step) for step in range(1 + (share > 0))]
            strip = image[rows]
            for kind, mask in layers:
                cover = None if mask is None else mask[rows]
                if cover is not None and not cover.max():
                    continue
                shown = [
                    cv2.remap(pyramid(kind)[level + step], *one, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
                    for step, one in enumerate(maps)
                ]
                texture = shown[0] if len(shown) == 1 else mixed(shown[0], shown[1], share)
                strip[:] = texture if cover is None else mixed(strip, texture, cover)

    def _look_up(self, rows: slice, turn_deg: float, level: int) -> tuple[np.ndarray, np.ndarray]:
        """Return OpenCV's fixed-point maps of a strip into the tile's reduction `level`."""
        one = 1 << _FRACTION_BITS
        cosine, sine = np.cos(np.radians(turn_deg)), np.sin(np.radians(turn_deg))
        scale, away = self.scale[rows, None] / 2**level, self.distance[rows, None] / 2**level
        across = np.arange(self.width, dtype=np.int32)[None] - self.width // 2
        fixed = []
        for per_column, start in ((cosine * scale, -sine * away), (sine * scale, cosine * away)):
            # The tile repeats: 32 bits that overflow lose whole repetitions only.
            whole = np.rint(per_column * one).astype(np.int32) * across
            whole += np.rint(start * one).astype(np.int64).astype(np.int32)
            whole >>= _FRACTION_BITS - 5
            fixed.append(whole)
        place = np.empty((*fixed[0].shape, 2), np.int16)
        for axis, values in enumerate(fixed):
            place[..., axis] = (values >> 5) & ((TILE_PX >> level) - 1)
        return place, (((fixed[1] & 31) << 5) + (fixed[0] & 31)).astype(np.uint16)


def mixed(first: np.ndarray, second: np.ndarray, share: np.ndarray | int) -> np.ndarray:
    """Return the mean of two uint8 images of one shape; `share`, 0 to 255, one or (h, w), is the second's weight.

    Products of two bytes are exact in the floats that OpenCV computes with, so its rounding is equal everywhere.
    """
    if isinstance(share, int):
        return np.asarray(cv2.addWeighted(first, 1 - share / 256, second, share / 256, 0), np.uint8)
    weight = cv2.merge([share] * 3)
    rest = cv2.bitwise_not(weight)
    total = cv2.add(cv2.multiply(first, rest, dtype=cv2.CV_16U), cv2.multiply(second, weight, dtype=cv2.CV_16U))
    return np.asarray(cv2.convertScaleAbs(total, alpha=1 / 255), np.uint8)


def times(image: np.ndarray, gain: np.ndarray) -> None:
    """Multiply an image uint8 in place by `gain` / 128, uint8 (h, w) or (h, w, 3), cut at 255."""
    for top in range(0, len(image), _STRIP_PX):
        rows = slice(top, top + _STRIP_PX)
        factors = cv2.merge([gain[rows]] * 3) if gain.ndim == 2 else gain[rows]
        image[rows] = cv2.multiply(image[rows], factors, scale=1 / 128)


def _smooth_noise(rng: np.random.Generator, side_px: int, cells_px: tuple[int, ...]) -> np.ndarray:
    total = np.zeros((side_px, side_px), np.int32)
    for cell in cells_px:
        number = side_px // cell
        grid = np.pad(rng.integers(0, 256, (number, number), np.uint8), 2, mode="wrap")
        fine = cv2.resize(grid, None, fx=cell, fy=cell, interpolation=cv2.INTER_LINEAR_EXACT)
        total += fine[2 * cell : 2 * cell + side_px, 2 * cell : 2 * cell + side_px].astype(np.int32) - 128
    spread = round(float(total.std()))
    return np.clip(128 + total * 48 // spread, 0, 255).astype(np.uint8)


def _ramp(kind: str) -> np.ndarray:
    """Return a kind's 256 colours from dark to light: uint8 (256, 3)."""
    channels = [np.interp(np.arange(256), (0, 128, 255), values) for values in zip(*_PALETTES[kind], strict=True)]
    return np.stack(channels, axis=1).astype(np.uint8)


def _specks(rng: np.random.Generator, kind: str) -> np.ndarray:
    fine = rng.integers(0, 256, (TILE_PX, TILE_PX), np.uint8)
    small = _smooth_noise(rng, TILE_PX, (2, 4))
    large = _smooth_noise(rng, TILE_PX, (8, 32, 128))
    mix = (fine.astype(np.int32) + 3 * small.astype(np.int32) + 2 * large.astype(np.int32)) // 6
    return _ramp(kind)[np.clip(128 + (mix - 128) * 3 // 2, 0, 255)]


def _scattered(rng: np.random.Generator, number: int) -> np.ndarray:
    """Return random places (n, 2) in a padded tile; those near an edge come twice, so that the tile repeats."""
    places = rng.integers(0, TILE_PX, (number, 2))
    shifts = np.array([(x, y) for x in (-TILE_PX, 0, TILE_PX) for y in (-TILE_PX, 0, TILE_PX)])
    copies = (places[:, None] + shifts[None]).reshape(-1, 2)
    source = np.repeat(np.arange(number), len(shifts))
    seen = ((copies > -_PAD_PX) & (copies < TILE_PX + _PAD_PX)).all(axis=1)
    return np.concatenate([copies[seen] + _PAD_PX, source[seen, None]], axis=1)


def _paint_blades(rng: np.random.Generator, tile: np.ndarray, ramp: np.ndarray) -> None:
    """Paint grass as blades 4 to 18 pixels long in tufts of one tone, lighter ones above darker ones."""
    tufts = _smooth_noise(rng, TILE_PX, (16, 32, 128)).astype(np.int32)
    for light in (-70, -20, 20, 55):
        number = 16_000
        ends = rng.integers(-11, 12, (number, 2))
        tones = rng.integers(-35, 36, number)
        for x, y, source in _scattered(rng, number).tolist():
            tone = tufts[(y - _PAD_PX) % TILE_PX, (x - _PAD_PX) % TILE_PX] + light + tones[source]
            colour = ramp[min(max(tone, 0), 255)].tolist()
            end = (x + int(ends[source, 0]), y + int(ends[source, 1]))
            cv2.line(tile, (x, y), end, colour, 1, cv2.LINE_AA)


def _paint_stones(rng: np.random.Generator, tile: np.ndarray, ramp: np.ndarray) -> None:
    """Paint stones of 2 to 9 pixels radius with a shadow and a lit side."""
    number = 20_000
    radii, tones = 1 + rng.integers(1, 5, number) * rng.integers(1, 3, number), rng.integers(70, 240, number)
    for x, y, source in _scattered(rng, number).tolist():
        radius, tone = int(radii[source]), int(tones[source])
        cv2.circle(tile, (x + 1, y + 1), radius, ramp[tone // 3].tolist(), -1, cv2.LINE_AA)
        cv2.circle(tile, (x, y), radius - 1, ramp[tone].tolist(), -1, cv2.LINE_AA)
        if radius > 3:
            lit = ramp[min(tone + 40, 255)].tolist()
            cv2.circle(tile, (x - radius // 3, y - radius // 3), radius // 2, lit, -1, cv2.LINE_AA)


def _paint_leaves(rng: np.random.Generator, tile: np.ndarray, ramp: np.ndarray) -> None:
    """Paint leaves of 5 to 14 pixels, from the shade to the sun."""
    for light in (30, 80, 130, 190):
        number = 9_000
        longs, shorts = rng.integers(-7, 8, (number, 2)), rng.integers(1, 4, number)
        tones = rng.integers(-35, 36, number)
        for x, y, source in _scattered(rng, number).tolist():
            across, down = longs[source].tolist()
            narrow = int(shorts[source])
            side = (narrow, 0) if abs(down) > abs(across) else (0, narrow)
            blade = [
                (x - across, y - down),
                (x + side[0], y + side[1]),
                (x + across, y + down),
                (x - side[0], y - side[1]),
            ]
            colour = ramp[min(max(light + int(tones[source]), 0), 255)].tolist()
            cv2.fillConvexPoly(tile, np.array(blade, np.int32), colour, cv2.LINE_AA)
