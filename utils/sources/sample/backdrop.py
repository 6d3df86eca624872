"""Paints the surroundings of the line (sky, ground, trees, buildings) and the light, haze and grain of a camera."""

import functools

import cv2
import numpy as np

from utils.sources.sample.canvas import Annotation, Canvas, Colour, Frame, ellipse, shade, vary

_TILE_PX = 1024
# The darkest and the lightest colour; noise chooses between them.
_GROUNDS: dict[str, tuple[Colour, Colour]] = {
    "meadow": ((70, 92, 40), (152, 168, 90)),
    "dry grass": ((128, 112, 66), (196, 180, 124)),
    "gravel": ((124, 117, 108), (192, 185, 174)),
    "soil": ((98, 74, 52), (160, 130, 98)),
    "forest": ((22, 44, 22), (104, 132, 62)),
}
_WALLS: tuple[Colour, ...] = ((226, 214, 190), (206, 196, 184), (184, 92, 74), (214, 202, 148), (236, 232, 226))
_ROOFS: tuple[Colour, ...] = ((158, 62, 46), (132, 58, 44), (84, 66, 62), (176, 84, 58))
_WINDOW: Colour = (62, 78, 96)


def paint_backdrop(canvas: Canvas, rng: np.random.Generator) -> list[Annotation]:
    """Paint everything behind the line, blurred and hazy; return the background structures."""
    kind = str(rng.choice(list(_GROUNDS)))
    looks_down = kind == "forest" or rng.random() < 0.4
    horizon_px = 0 if looks_down else round(canvas.height_px * rng.uniform(0.3, 0.62))
    if not looks_down:
        _paint_sky(canvas, rng, horizon_px)
    _paint_ground(canvas, rng, kind, horizon_px)
    if kind == "forest":
        _paint_crowns(canvas, rng)
    elif rng.random() < 0.35:
        _paint_fields(canvas, rng, horizon_px)
    if kind != "forest" and rng.random() < 0.45:
        _paint_road(canvas, rng, horizon_px)
    if horizon_px:
        _paint_tree_line(canvas, rng, horizon_px)
    buildings = _paint_buildings(canvas, rng, horizon_px) if rng.random() < 0.66 else []
    for _ in range(int(rng.integers(0, 5))):
        y_px = rng.uniform(horizon_px + 40, canvas.height_px)
        _paint_bush(canvas, rng, rng.uniform(0, canvas.width_px), y_px, rng.uniform(40, 110))
    cv2.GaussianBlur(canvas.image, (0, 0), rng.uniform(0.7, 1.6), dst=canvas.image)
    haze = rng.uniform(0.04, 0.26)
    cv2.addWeighted(canvas.image, 1 - haze, canvas.image, 0, 214 * haze, dst=canvas.image)
    return buildings


def paint_branch(canvas: Canvas, rng: np.random.Generator) -> np.ndarray:
    """Paint a leafy branch in the foreground, from the left or right edge; return its outline."""
    side = 1 if rng.random() < 0.5 else -1
    root = Frame(0 if side > 0 else canvas.width_px, canvas.height_px * rng.uniform(0.15, 0.95))
    length_px, rise_px = rng.uniform(130, 330), rng.uniform(-150, 60)
    fractions = np.linspace(0, 1, 6)[:, None]
    twig = root.place(fractions * (side * length_px, rise_px) + rng.normal(0, 9, (6, 2)) * fractions)
    canvas.line(twig, (66, 50, 34), 7)
    green = vary(rng, (66, 104, 40), 0.25)
    everything = [twig]
    for light in (0.6, 0.8, 1.0, 1.25):
        leaves = []
        for _ in range(34):
            at = twig[0] + (twig[-1] - twig[0]) * rng.uniform(0.05, 1.1) + rng.normal(0, 30, 2)
            blade = ellipse(0, 0, rng.uniform(9, 17), rng.uniform(4, 7), 8)
            leaves.append(Frame(at[0], at[1], 1.0, rng.uniform(0, 180)).place(blade))
        canvas.fill(leaves, shade(green, light))
        everything += leaves
    hull = cv2.convexHull(np.concatenate(everything).astype(np.float32))
    return hull[:, 0].astype(np.float64)


def finish(canvas: Canvas, rng: np.random.Generator) -> None:
    """Apply uneven light, colour cast, slight blur and sensor noise, in place."""
    image, height, width = canvas.image, canvas.height_px, canvas.width_px
    across = np.linspace(-0.5, 0.5, 40)[None, :] * canvas.sun
    down = np.linspace(-0.5, 0.5, 30)[:, None]
    falloff = 1 + across * rng.uniform(0, 0.24) + down * rng.uniform(-0.16, 0.16) - (across**2 + down**2) * 0.2
    warmth = rng.uniform(-0.06, 0.06)
    cast = np.array([1 + warmth, 1.0, 1 - warmth]) * rng.uniform(0.78, 1.14)
    gain = cv2.resize(np.clip(falloff[..., None] * cast * 128, 0, 255).astype(np.uint8), (width, height))
    cv2.multiply(image, gain, dst=image, scale=1 / 128)
    if rng.random() < 0.4:
        cv2.GaussianBlur(image, (0, 0), rng.uniform(0.4, 0.9), dst=image)
    strength = rng.uniform(0.03, 0.14)
    left, top = rng.integers(0, 200, 2)
    grain = _grain()[top : top + height, left : left + width]
    cv2.addWeighted(image, 1.0, grain, strength, -128 * strength, dst=image)


def _paint_sky(canvas: Canvas, rng: np.random.Generator, horizon_px: int) -> None:
    zenith = np.array(vary(rng, (112, 156, 206), 0.16))
    low = np.array(vary(rng, (206, 218, 228), 0.06))
    blend = np.linspace(0, 1, horizon_px)[:, None, None]
    sky = np.broadcast_to(zenith + (low - zenith) * blend, (horizon_px, canvas.width_px, 3)).astype(np.uint8)
    clouds = _crop_noise(rng, canvas.width_px, horizon_px, 4.0)
    opacity = np.clip((clouds.astype(np.float32) - 118) / 90, 0, rng.uniform(0.1, 0.85))[..., None]
    canvas.image[:horizon_px] = sky + (244 - sky.astype(np.float32)) * opacity


def _paint_ground(canvas: Canvas, rng: np.random.Generator, kind: str, horizon_px: int) -> None:
    width, height = canvas.width_px, canvas.height_px - horizon_px
    coarse = _crop_noise(rng, width, height, 3.0)
    if horizon_px:  # the texture gets smaller and flatter towards the horizon
        source = np.array([[330, 0], [694, 0], [694, 1000], [330, 1000]], np.float32)
        target = np.array([[-width, height], [2 * width, height], [width * 0.7, -4], [width * 0.3, -4]], np.float32)
        matrix = cv2.getPerspectiveTransform(source, target)
        fine = cv2.warpPerspective(
            _noise(), matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP
        )
    else:
        fine = _crop_noise(rng, width, height, 1.2)
    dark, light = (np.array(vary(rng, colour, 0.1)) for colour in _GROUNDS[kind])
    palette = np.clip(np.linspace(dark, light, 256), 0, 255).astype(np.uint8)[:, None]
    share = rng.uniform(0.25, 0.5)
    canvas.image[horizon_px:] = cv2.applyColorMap(cv2.addWeighted(coarse, share, fine, 1 - share, 0), palette)


def _paint_crowns(canvas: Canvas, rng: np.random.Generator) -> None:
    """Paint tree crowns seen from above, each a few discs lighter towards the sun, under one texture of leaves."""
    green = vary(rng, (58, 84, 40), 0.15)
    centres = rng.uniform((-40, -40), (canvas.width_px + 40, canvas.height_px + 40), (170, 2))
    for x_px, y_px in centres[np.argsort(centres[:, 1])]:
        radius, tone = rng.uniform(34, 72), rng.uniform(0.75, 1.15)
        for step, light in enumerate((0.55, 0.85, 1.05, 1.22)):
            size, shift = radius * (1 - 0.24 * step), radius * 0.13 * step
            blob = ellipse(x_px + canvas.sun * shift, y_px - shift, size, size, 14)
            canvas.fill(blob + rng.normal(0, size * 0.07, blob.shape), shade(green, light * tone))
    leaves = cv2.cvtColor(_crop_noise(rng, canvas.width_px, canvas.height_px, 1.0), cv2.COLOR_GRAY2RGB)
    cv2.multiply(canvas.image, cv2.addWeighted(leaves, 0.5, leaves, 0, 64), dst=canvas.image, scale=1 / 128)


def _paint_fields(canvas: Canvas, rng: np.random.Generator, horizon_px: int) -> None:
    """Tint a few strips of land and draw furrows towards a vanishing point."""
    width, height = canvas.width_px, canvas.height_px
    vanishing = np.array([width * rng.uniform(-0.2, 1.2), horizon_px - (20 if horizon_px else 3000)])
    edges = np.sort(rng.uniform(-1.2, 2.2, 5)) * width
    land = canvas.image.copy()
    for number in range(0, 4, 2):
        near = [(edges[number], height), (edges[number + 1], height)]
        canvas.fill(np.array([vanishing, *near]), vary(rng, (146, 136, 82), 0.3))
        for foot in np.arange(edges[number], edges[number + 1], 46):
            canvas.line(np.array([vanishing, (foot, height)]), (84, 78, 50), 5)
    canvas.image[:horizon_px] = land[:horizon_px]
    share = rng.uniform(0.3, 0.6)
    cv2.addWeighted(canvas.image, share, land, 1 - share, 0, dst=canvas.image)


def _paint_road(canvas: Canvas, rng: np.random.Generator, horizon_px: int) -> None:
    width, height = canvas.width_px, canvas.height_px
    asphalt = vary(rng, (122, 120, 118), 0.15)
    far_x, near_x = rng.uniform(-0.2, 1.2, 2) * width
    far_px, near_px = (12.0, rng.uniform(240, 420)) if horizon_px else (rng.uniform(130, 200),) * 2
    far = [(far_x - far_px, horizon_px), (far_x + far_px, horizon_px)]
    canvas.fill(np.array([*far, (near_x + near_px, height), (near_x - near_px, height)]), asphalt)
    for start in np.arange(0.05, 1.0, 0.13):
        here, there = start**2 if horizon_px else start, (start + 0.06) ** 2 if horizon_px else start + 0.06
        dash = [(far_x + (near_x - far_x) * part, horizon_px + (height - horizon_px) * part) for part in (here, there)]
        canvas.line(np.array(dash), (206, 204, 192), 2 + 5 * here)


def _paint_tree_line(canvas: Canvas, rng: np.random.Generator, horizon_px: int) -> None:
    green = vary(rng, (74, 96, 62), 0.15)
    x_px = np.linspace(-20, canvas.width_px + 20, 60)
    for depth, light in ((34, 1.15), (18, 0.9)):
        tops = horizon_px - depth * rng.uniform(0.3, 1.6) * rng.uniform(0.5, 1.3, 60)
        crowns = np.stack([x_px, tops], axis=1)
        floor = np.array([[x_px[-1], horizon_px + 6.0], [x_px[0], horizon_px + 6.0]])
        canvas.fill(np.concatenate([crowns, floor]), shade(green, light))


def _paint_bush(canvas: Canvas, rng: np.random.Generator, x_px: float, y_px: float, size_px: float) -> None:
    green = vary(rng, (64, 88, 42), 0.2)
    canvas.fill(
        ellipse(x_px - canvas.sun * size_px * 0.4, y_px + size_px * 0.42, size_px, size_px * 0.3), shade(green, 0.5)
    )
    for light in (0.7, 0.85, 1.0, 1.15):
        for _ in range(4):
            drift_px = (light - 0.7) * size_px * 0.5  # lighter leaves lie higher and nearer to the sun
            at = rng.normal(0, size_px * 0.26, 2) + np.array([canvas.sun * drift_px * 0.6, -drift_px])
            radius = size_px * rng.uniform(0.22, 0.42)
            canvas.fill(ellipse(x_px + at[0], y_px + at[1], radius, radius * 0.85, 12), shade(green, light))


def _paint_buildings(canvas: Canvas, rng: np.random.Generator, horizon_px: int) -> list[Annotation]:
    """Paint one or two buildings, at the left and right, where the pole hides little of them."""
    buildings = []
    sides = rng.permutation([0.17, 0.83])[: 1 + int(rng.random() < 0.45)]
    for side in sides:
        size_px = rng.uniform(230, 400)
        x_px = canvas.width_px * side + rng.uniform(-50, 50) - size_px * 0.7
        lowest = min(horizon_px + 60 + size_px * 0.5, canvas.height_px * 0.9)
        frame = Frame(x_px, rng.uniform(lowest, max(lowest + 1, canvas.height_px * 0.96)), size_px)
        outline = paint_house(canvas, rng, frame)
        buildings.append(Annotation("background_structure", outline))
    return buildings


def paint_house(canvas: Canvas, rng: np.random.Generator, frame: Frame) -> np.ndarray:
    """Paint a house or shed one unit wide, the lower left corner of its front at the origin; return its outline."""
    is_shed = rng.random() < 0.25
    wall, roof = vary(rng, _WALLS[rng.integers(len(_WALLS))]), vary(rng, _ROOFS[rng.integers(len(_ROOFS))])
    height, deep, rise = rng.uniform(0.32, 0.46), rng.uniform(0.3, 0.48), rng.uniform(0.2, 0.32)
    foot, back = (1 + deep, -0.1), (1 + deep, -height - 0.04)
    if is_shed:  # a flat roof seen from above: the ridge is at the back
        rise, peak, ridge = 0.14, (1 + deep, -height - 0.14), (deep * 0.8, -height - 0.14)
    else:
        peak, ridge = (1 + deep * 0.5, -height - rise), (deep * 0.4, -height - rise)
    shadow = [(0, 0), (1, 0), foot, (1 + deep + 0.2, 0.02), (1.1, 0.12), (0.1, 0.12)]
    canvas.fill(frame.place(shadow), (62, 62, 54))
    end_light, front_light = (0.68, 1.02) if canvas.sun < 0 else (1.02, 0.78)
    canvas.fill(frame.place([(1, 0), foot, back, peak, (1, -height)]), shade(wall, end_light))
    canvas.fill(frame.place([(0, 0), (1, 0), (1, -height), (0, -height)]), shade(wall, front_light))
    eave = [(-0.04, -height + 0.03), (1.02, -height + 0.03)]
    canvas.fill(frame.place([*eave, peak, ridge]), roof)
    for part in np.linspace(0.12, 0.88, 6):
        ends = [
            (start[0] + (end[0] - start[0]) * part, eave[0][1] - (rise + 0.03) * part)
            for start, end in ((eave[0], ridge), (eave[1], peak))
        ]
        canvas.line(frame.place(ends), shade(roof, 0.84), 2)
    if is_shed:
        for x in np.linspace(0.03, 0.97, 24):
            canvas.line(frame.place([(x, 0), (x, -height + 0.04)]), shade(wall, front_light * 0.86), 2)
        canvas.fill(frame.place([(0.56, 0), (0.56, -height * 0.8), (0.88, -height * 0.8), (0.88, 0)]), shade(roof, 0.8))
    else:
        _paint_windows(canvas, frame, int(rng.integers(2, 5)), height, shade(wall, 1.15))
    return frame.place([(0, 0), (1, 0), foot, back, peak, ridge, eave[0], (0, -height + 0.03)])


def _paint_windows(canvas: Canvas, frame: Frame, number: int, height: float, trim: Colour) -> None:
    for column in range(number):
        x, top = (column + 0.5) / number - 0.06, -height * 0.74
        pane = [(x, top), (x + 0.12, top), (x + 0.12, top * 0.4), (x, top * 0.4)]
        canvas.fill(frame.place(pane), _WINDOW)
        canvas.line(frame.place([*pane, pane[0]]), trim, 3)


def _crop_noise(rng: np.random.Generator, width_px: int, height_px: int, zoom: float) -> np.ndarray:
    """Return a random piece of the noise, enlarged by about `zoom`, as uint8 (height_px, width_px)."""
    across = min(_TILE_PX, round(width_px / zoom))
    down = min(_TILE_PX, max(2, round(height_px / zoom)))
    left, top = rng.integers(0, _TILE_PX - across + 1), rng.integers(0, _TILE_PX - down + 1)
    piece = _noise()[top : top + down, left : left + across]
    return cv2.resize(piece, (width_px, height_px), interpolation=cv2.INTER_LINEAR)


@functools.cache
def _noise() -> np.ndarray:
    """Return fractal noise, uint8 (_TILE_PX, _TILE_PX), with a mean of about 128, the same in every process."""
    rng = np.random.default_rng(20220501)
    total = np.zeros((_TILE_PX, _TILE_PX), np.float32)
    for octave in range(1, 10):
        cells = rng.standard_normal((1 << octave, 1 << octave)).astype(np.float32)
        total += cv2.resize(cells, (_TILE_PX, _TILE_PX), interpolation=cv2.INTER_CUBIC) * 0.84**octave
    total = (total - total.mean()) / total.std()
    return np.clip(128 + 52 * total, 0, 255).astype(np.uint8)


@functools.cache
def _grain() -> np.ndarray:
    """Return sensor noise, uint8 (1500, 1500, 3), mean 128, standard deviation 40."""
    noise = np.random.default_rng(20220502).standard_normal((1500, 1500, 3), dtype=np.float32)
    return np.clip(128 + 40 * noise, 0, 255).astype(np.uint8)
