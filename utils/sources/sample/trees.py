"""Trees of a photograph of full size: crowns with leaves, woods seen from above, and thin twigs in the foreground."""

import cv2
import numpy as np

from utils.sources.sample.canvas import Canvas, Frame, ellipse, shade, vary
from utils.sources.sample.texture import pyramid, times

_FIELD_CELL_PX = 8  # the shading of crowns is computed at an eighth of the photograph


def paint_twigs(canvas: Canvas, rng: np.random.Generator) -> None:
    """Paint a thin branch in the foreground, from the left or right edge, with or without leaves."""
    side = 1 if rng.random() < 0.5 else -1
    root = np.array([0.0 if side > 0 else canvas.width_px, canvas.height_px * rng.uniform(0.2, 0.95)])
    length_px, has_leaves = rng.uniform(500, 1100), rng.random() < 0.6
    bark, green = vary(rng, (74, 58, 44), 0.2), vary(rng, (70, 104, 44), 0.2)
    waiting = [(root, side * length_px, rng.uniform(-0.4, 0.2), rng.uniform(9, 16))]
    while waiting:
        start, across_px, rise, width_px = waiting.pop()
        parts = np.linspace(0, 1, 9)[:, None]
        path = (
            start
            + parts * np.array([across_px, across_px * side * rise])
            + rng.normal(0, 0.012, (9, 2)) * parts * abs(across_px)
        )
        for number in range(8):
            canvas.line(path[number : number + 2], bark, width_px * (1 - 0.08 * number))
        if width_px > 3.5:
            waiting += [
                (path[at], across_px * rng.uniform(0.35, 0.6), rise + rng.uniform(-0.9, 0.9), width_px * 0.55)
                for at in rng.integers(2, 9, 4).tolist()
            ]
        elif has_leaves:
            for at in path[rng.integers(2, 9, 7)]:
                blade = Frame(at[0], at[1], 1.0, rng.uniform(0, 360)).place(
                    ellipse(14, 0, rng.uniform(12, 20), rng.uniform(5, 8), 10)
                )
                canvas.fill(blade, shade(green, rng.uniform(0.55, 1.3)))


def paint_tree(canvas: Canvas, rng: np.random.Generator, x_px: float, y_px: float, radius_px: float) -> None:
    """Paint a tree or bush that stands at a point: its shadow, trunk and crown."""
    crown_px = y_px - radius_px * rng.uniform(0.8, 1.6)
    trunk = np.array([(x_px, y_px), (x_px, crown_px)])
    canvas.line(trunk, vary(rng, (78, 62, 46), 0.1), max(2.0, radius_px * 0.12))
    paint_crown(canvas, rng, x_px, crown_px, radius_px)


def paint_crown(canvas: Canvas, rng: np.random.Generator, x_px: float, y_px: float, radius_px: float) -> None:
    """Paint a crown as clumps of leaves, each lighter on the side of the sun, with a ragged edge."""
    clumps = np.concatenate([rng.normal(0, 0.38, (14, 2)), rng.uniform(0.3, 0.62, (14, 1))], axis=1) * radius_px
    reach = 1.5 * radius_px
    left, top = int(max(0, x_px - reach)), int(max(0, y_px - reach))
    right, bottom = int(min(canvas.width_px, x_px + reach)), int(min(canvas.height_px, y_px + reach))
    tone = rng.uniform(0.75, 1.2)
    if right - left < 4 or bottom - top < 4:
        return
    cell = min(_FIELD_CELL_PX, 1 + int(radius_px / 12))
    x = np.arange(left, right + cell, cell)[None] - x_px
    y = np.arange(top, bottom + cell, cell)[:, None] - y_px
    body, light = np.zeros((y.size, x.size)), np.zeros((y.size, x.size))
    for clump_x, clump_y, size in clumps[np.argsort(clumps[:, 1])]:
        depth = 1 - ((x - clump_x) ** 2 + (y - clump_y) ** 2) / size**2
        toward_sun = ((x - clump_x) * canvas.sun - (y - clump_y)) / size
        light = np.where(depth > 0, 84 + 52 * toward_sun + 26 * depth, light)
        body = np.maximum(body, depth)
    size = (x.size * cell, y.size * cell)
    fields = [
        cv2.resize(np.clip(field, 0, 255).astype(np.uint8), size, interpolation=cv2.INTER_LINEAR_EXACT)
        for field in (body * 255, light * tone)
    ]
    place = canvas.image[top:bottom, left:right]
    body_px, light_px = (field[: place.shape[0], : place.shape[1]] for field in fields)
    leaves = _tiled(rng, pyramid("leaves")[1 if radius_px < 120 else 0], place.shape[:2])
    ragged = body_px.astype(np.int16) + (leaves[..., 1].astype(np.int16) - 80) > 60
    times(leaves, np.maximum(light_px, 30))
    place[ragged] = leaves[ragged]


def _tiled(rng: np.random.Generator, tile: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    shifted = np.roll(tile, rng.integers(0, len(tile), 2).tolist(), (0, 1))
    repeats = (-(-size[0] // len(tile)), -(-size[1] // len(tile)), 1)
    return np.ascontiguousarray(np.tile(shifted, repeats)[: size[0], : size[1]])


def shade_crowns(canvas: Canvas, rng: np.random.Generator) -> None:
    """Shade the leaves of woods seen from above as crowns: round, lighter towards the sun, dark between them."""
    cell = _FIELD_CELL_PX
    field = np.full((-(-canvas.height_px // cell), -(-canvas.width_px // cell)), 34.0)
    rows, columns = field.shape
    number = rows * columns // 700
    centres = rng.uniform((-20, -20), (columns + 20, rows + 20), (number, 2))
    for x, y in centres[np.argsort(centres[:, 1])]:
        radius = int(rng.uniform(14, 44))
        low_x, low_y = max(0, int(x) - radius), max(0, int(y) - radius)
        part = field[low_y : int(max(0, y + radius)), low_x : int(max(0, x + radius))]
        if not part.size:
            continue
        across = (np.arange(part.shape[1])[None] + low_x - x) / radius
        down = (np.arange(part.shape[0])[:, None] + low_y - y) / radius
        depth = 1 - across**2 - down**2
        light = 96 + 46 * (across * canvas.sun - down) + 30 * depth + rng.uniform(-16, 16)
        part[:] = np.where(depth > 0, light, part)
    light_px = cv2.resize(
        np.clip(field, 0, 255).astype(np.uint8), (columns * cell, rows * cell), interpolation=cv2.INTER_LINEAR_EXACT
    )
    times(canvas.image, light_px[: canvas.height_px, : canvas.width_px])
