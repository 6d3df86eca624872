"""Paints what lies behind a pole in a photograph of full size: ground in perspective, roads, fences, trees, houses, shadows.

Fences, cracks, road markings, twigs and shadows of wires are thin lines but no wires; they are not labelled.
"""

import cv2
import numpy as np

from utils.sources.sample.backdrop import paint_house
from utils.sources.sample.canvas import Annotation, Canvas, Frame, shade, vary
from utils.sources.sample.texture import Ground, clouds, enlarged, grain, mixed, times
from utils.sources.sample.trees import paint_crown, paint_tree, shade_crowns

_FOCAL_PX = 3750.0  # of a camera with 5472 pixels over 24 mm (in terms of 35 mm film)
_VIEWS = ("above", "ahead", "woods")
_VIEW_SHARES = (0.55, 0.3, 0.15)
_GROUNDS = ("meadow", "dry grass", "gravel", "soil")
_GROUND_SHARES = (0.45, 0.25, 0.12, 0.18)
_SHADOW_CELL_PX = 4  # shadows are computed at a quarter of the photograph


def paint_surroundings(canvas: Canvas, rng: np.random.Generator) -> list[Annotation]:
    """Paint everything behind the line; return the background structures."""
    height, width = canvas.image.shape[:2]
    view = str(rng.choice(_VIEWS, p=_VIEW_SHARES))
    horizon_px = height * (rng.uniform(0.22, 0.5) if view == "ahead" else -rng.uniform(0.3, 1.2))
    ground = Ground((height, width), horizon_px, rng.uniform(0.55, 0.9), _FOCAL_PX)
    if view == "ahead":
        _paint_sky(canvas, rng, ground.first_row)
    if view == "woods":
        ground.paint(canvas.image, rng.uniform(0, 360), [("leaves", None)])
        shade_crowns(canvas, rng)
        return []
    roads = [_Road(rng)] if rng.random() < 0.55 else []
    _paint_ground(canvas, rng, ground, roads)
    if view == "ahead":
        _paint_far_trees(canvas, rng, ground)
    _cast_shadows(canvas, rng, ground)
    for road in roads:
        road.paint_markings(canvas, rng, ground)
    buildings = _paint_buildings(canvas, rng, ground) if rng.random() < 0.6 else []
    if rng.random() < 0.55:
        _paint_fence(canvas, rng, ground)
    places = np.stack([rng.uniform(-22, 22, 9), rng.uniform(0, 45, 9)], axis=1)[: rng.integers(1, 10)]
    for place in places[np.argsort(-places[:, 1])]:  # the farthest first
        (x_px, y_px), radius_m = ground.photo_points(place[None])[0], rng.uniform(0.5, 2.4)
        paint_tree(canvas, rng, x_px, y_px, radius_m * float(ground.px_per_m(y_px)))
    return buildings


def expose(canvas: Canvas, rng: np.random.Generator) -> None:
    """Apply uneven light, colour cast, the blur of a lens and sensor noise, in place."""
    height, width = canvas.image.shape[:2]
    across = np.linspace(-0.5, 0.5, 40)[None, :, None] * canvas.sun
    down = np.linspace(-0.5, 0.5, 30)[:, None, None]
    falloff = 1 + across * rng.uniform(0, 0.16) + down * rng.uniform(-0.12, 0.12) - (across**2 + down**2) * 0.25
    warmth = rng.uniform(-0.05, 0.05)
    cast = np.array([1 + warmth, 1.0, 1 - warmth]) * rng.uniform(0.82, 1.16)
    gain = np.clip(falloff * cast * 128, 0, 255).astype(np.uint8)
    times(canvas.image, cv2.resize(gain, (width, height), interpolation=cv2.INTER_LINEAR_EXACT))
    if rng.random() < 0.7:
        cv2.GaussianBlur(canvas.image, (3, 3), rng.uniform(0.35, 0.8), dst=canvas.image)
    strength = int(rng.integers(6, 22))  # of 128
    noise = np.roll(grain().astype(np.int16) * strength >> 7, rng.integers(0, 1024, 2).tolist(), (0, 1))
    lighter, darker = noise.clip(min=0).astype(np.uint8), (-noise).clip(min=0).astype(np.uint8)
    for top in range(0, height, len(noise)):
        for left in range(0, width, len(noise)):
            part = canvas.image[top : top + len(noise), left : left + len(noise)]
            rows, columns = part.shape[:2]
            part[:] = cv2.subtract(cv2.add(part, lighter[:rows, :columns]), darker[:rows, :columns])


def weather(
    canvas: Canvas, rng: np.random.Generator, outline: np.ndarray, strength: int, grain_deg: float | None
) -> None:
    """Roughen the surface inside an outline: wood whose grain runs at an angle (0 is to the right), or stains (None).

    `strength`, 0 to 128, is the largest change of brightness in 128ths.
    """
    height, width = canvas.image.shape[:2]
    low = np.clip(np.floor(outline.min(0)).astype(int), 0, (width, height))
    high = np.clip(np.ceil(outline.max(0)).astype(int), 0, (width, height))
    columns, rows = (high - low).tolist()
    if columns < 2 or rows < 2:
        return
    if grain_deg is None:
        large, small = (enlarged(rng, clouds(), (rows, columns), zoom) for zoom in (2.0, 1.0))
        noise = (large >> 1) + (small >> 1)
    else:
        noise = _wood(rng, rows, columns, grain_deg)
    inside = np.zeros((rows, columns), np.uint8)
    cv2.fillPoly(inside, [np.rint(outline - low).astype(np.int32)], 1)
    change = (noise.astype(np.int16) - 128) * strength // 128
    gain = np.where(inside > 0, np.clip(128 + change, 0, 255), 128).astype(np.uint8)
    times(canvas.image[low[1] : high[1], low[0] : high[0]], gain)


def _wood(rng: np.random.Generator, rows: int, columns: int, grain_deg: float) -> np.ndarray:
    """Return streaks, uint8 (rows, columns): 1 to 3 pixels wide and some 50 long."""
    is_steep = 45 < abs(grain_deg) < 135
    length, breadth = (rows, columns) if is_steep else (columns, rows)
    number = length + breadth
    streaks = rng.integers(0, 256, (number, length // 48 + 2), np.uint8)
    streaks = cv2.resize(streaks, (length + 48, number), interpolation=cv2.INTER_LINEAR_EXACT)[:, :length]
    lean = np.tan(np.radians(90 - grain_deg if is_steep else grain_deg))
    shift = np.rint(lean * np.arange(length)).astype(int)
    noise = streaks[(np.arange(breadth)[:, None] - shift[None]) % number, np.arange(length)[None]]
    return noise.T if is_steep else noise


def _paint_sky(canvas: Canvas, rng: np.random.Generator, horizon_px: int) -> None:
    zenith, low = np.array(vary(rng, (104, 150, 206), 0.16)), np.array(vary(rng, (206, 218, 228), 0.06))
    blend = np.linspace(0, 1, horizon_px + 1)[:, None, None]
    sky = (zenith + (low - zenith) * blend).astype(np.uint8)
    cover = enlarged(rng, clouds(), (horizon_px + 1, canvas.width_px), 21.0)
    opacity = cv2.LUT(cover, np.clip((np.arange(256) - 115) * rng.uniform(0.4, 2.2), 0, 225).astype(np.uint8))
    image = canvas.image[: horizon_px + 1]
    image[:] = sky
    image[:] = mixed(image, np.full_like(image, 244), opacity)


class _Road:
    """A straight road over the ground, (n, 2) in metres: it starts at `start_m` and runs at an angle to the view."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.start = np.array([rng.uniform(-14, 14), -3.0])
        lean = np.radians(rng.uniform(-55, 55))
        self.ahead = np.array([np.sin(lean), np.cos(lean)])
        self.right = np.array([self.ahead[1], -self.ahead[0]])
        self.width_m, self.is_paved = rng.uniform(3.2, 6.8), rng.random() < 0.7

    def strip(self, left_m: float, right_m: float, from_m: float = 0.0, to_m: float = 250.0) -> np.ndarray:
        """Return the outline of a strip along the road; sides are metres to the right of its middle."""
        along = np.linspace(from_m**0.5, to_m**0.5, 50)[:, None] ** 2 * self.ahead + self.start
        return np.concatenate([along + left_m * self.right, (along + right_m * self.right)[::-1]])

    def layers(self, canvas: Canvas, ground: Ground) -> list[tuple[str, np.ndarray | None]]:
        half = self.width_m / 2
        verge = _mask(canvas, ground.photo_points(self.strip(-half - 0.7, half + 0.7)))
        if self.is_paved:
            return [("gravel", verge // 2), ("asphalt", _mask(canvas, ground.photo_points(self.strip(-half, half))))]
        ruts = [_mask(canvas, ground.photo_points(self.strip(side - 0.3, side + 0.3))) for side in (-0.8, 0.8)]
        return [("gravel", verge // 3 * 2), ("soil", np.maximum(*ruts))]

    def paint_markings(self, canvas: Canvas, rng: np.random.Generator, ground: Ground) -> None:
        """Paint lines, cracks and strips of tar on a paved road."""
        if not self.is_paved:
            return
        half, paint = self.width_m / 2, vary(rng, (214, 210, 196), 0.08)
        strips = [self.strip(side - 0.06, side + 0.06) for side in (-half + 0.25, half - 0.25)]
        if self.width_m > 4.5:
            strips += [self.strip(-0.06, 0.06, start, start + 2.5) for start in np.arange(0, 120, 6.0)]
        for strip in strips:
            outline = ground.photo_points(strip)
            canvas.fill(outline, paint)
            weather(canvas, rng, outline, 50, None)
        for _ in range(int(rng.integers(3, 12))):
            steps = np.stack([rng.normal(0, 0.25, 14), rng.uniform(0.1, 0.7, 14)], axis=1).cumsum(axis=0)
            across, away = steps[:, :1] + rng.uniform(-half, half), steps[:, 1:] + rng.uniform(0, 25)
            crack = ground.photo_points(np.clip(across, -half, half) * self.right + away * self.ahead + self.start)
            canvas.line(crack, shade((52, 52, 54), rng.uniform(0.7, 1.3)), rng.uniform(1, 5))


def _mask(canvas: Canvas, outline: np.ndarray) -> np.ndarray:
    mask = np.zeros((canvas.height_px, canvas.width_px), np.uint8)
    cv2.fillPoly(mask, [np.rint(outline * 16).clip(-500_000, 500_000).astype(np.int32)], 255, cv2.LINE_AA, 4)
    return mask


def _paint_ground(canvas: Canvas, rng: np.random.Generator, ground: Ground, roads: list[_Road]) -> None:
    size = canvas.image.shape[:2]
    first, second = rng.choice(_GROUNDS, 2, replace=False, p=_GROUND_SHARES).tolist()
    cover = enlarged(rng, clouds(), size, rng.uniform(6, 20))
    patches = cv2.LUT(cover, np.clip((np.arange(256) - int(rng.integers(130, 190))) * 8, 0, 220).astype(np.uint8))
    layers: list[tuple[str, np.ndarray | None]] = [(first, None), (second, patches)]
    for road in roads:
        layers += road.layers(canvas, ground)
    ground.paint(canvas.image, rng.uniform(0, 360), layers)
    below = canvas.image[ground.first_row :]
    dry = enlarged(rng, clouds(), below.shape[:2], rng.uniform(16, 40))
    tint = np.array(vary(rng, (128, 128, 128), 0.12))
    gains = np.rint((np.arange(256)[:, None, None] + 288) * tint / 416).astype(np.uint8)
    times(below, cv2.LUT(cv2.merge([dry] * 3), gains))


def _paint_far_trees(canvas: Canvas, rng: np.random.Generator, ground: Ground) -> None:
    rows = ground.first_row + np.sort(rng.uniform(-6, 26, 70))
    for y_px in rows:
        paint_crown(canvas, rng, rng.uniform(0, canvas.width_px), y_px - 20, rng.uniform(22, 75))
    haze = canvas.image[max(0, ground.first_row - 120) : ground.first_row + 160]
    share = np.interp(np.arange(len(haze)), (0, 120, len(haze)), (40, 90, 0)).astype(np.uint8)
    haze[:] = mixed(haze, np.full_like(haze, 205), np.repeat(share[:, None], haze.shape[1], axis=1))


def _cast_shadows(canvas: Canvas, rng: np.random.Generator, ground: Ground) -> None:
    """Darken the ground under parallel soft lines, the shadows of the wires, and under a pole's."""
    if rng.random() < 0.35:
        return
    cell = _SHADOW_CELL_PX
    field = np.zeros((-(-canvas.height_px // cell), -(-canvas.width_px // cell)), np.uint8)
    lean, place, gap = np.radians(rng.uniform(-80, 80)), rng.uniform(-8, 8), rng.uniform(0.7, 1.2)
    ahead = np.array([np.sin(lean), np.cos(lean)])
    lines = [(place + gap * number, 1) for number in range(int(rng.integers(2, 5)))] + [(place + rng.uniform(-2, 2), 9)]
    for across, width_px in lines:
        points = np.linspace(-40, 120, 60)[:, None] * ahead + (across * np.array([ahead[1], -ahead[0]]))
        path = np.rint(ground.photo_points(points) / cell * 16).clip(-500_000, 500_000).astype(np.int32)
        cv2.polylines(field, [path], False, 110, width_px * 2, cv2.LINE_AA, 4)
    cv2.GaussianBlur(field, (5, 5), 1.0, dst=field)
    whole = cv2.resize(field, (field.shape[1] * cell, field.shape[0] * cell), interpolation=cv2.INTER_LINEAR_EXACT)
    below = canvas.image[ground.first_row :]
    strength = np.asarray(whole, np.uint8)[ground.first_row : canvas.height_px, : canvas.width_px]
    times(below, 128 - (strength >> 1))


def _paint_fence(canvas: Canvas, rng: np.random.Generator, ground: Ground) -> None:
    """Paint posts and the wires or rails between them."""
    lean = np.radians(rng.uniform(-85, 85))
    ahead = np.array([np.sin(lean), np.cos(lean)])
    start = np.array([rng.uniform(-10, 10), rng.uniform(2, 18)])
    feet = ground.photo_points(start + np.arange(-40, 41)[:, None] * 2.4 * ahead)
    inside = (feet[:, 1] > ground.first_row + 2) & (feet[:, 1] < canvas.height_px * 1.2)
    feet = feet[inside & (np.abs(feet[:, 0] - canvas.width_px / 2) < canvas.width_px)]
    if len(feet) < 2:
        return
    is_wire, post = rng.random() < 0.6, vary(rng, (132, 118, 102), 0.2)
    per_m = ground.px_per_m(feet[:, 1])[:, None]
    for level in (0.35, 0.65, 0.95, 1.15):
        rail = feet - per_m * np.array([0, level])
        for number in range(len(rail) - 1):
            width_px = 0.012 * per_m[number, 0] if is_wire else 0.06 * per_m[number, 0]
            canvas.line(rail[number : number + 2], shade((150, 150, 148) if is_wire else post, 0.9), width_px)
    for foot, scale in zip(feet, per_m[:, 0], strict=True):
        half, top = 0.05 * scale, 1.25 * scale
        sides = [foot + np.array([[side * half, -top], [side * half, 0]]) for side in (-1, 1)]
        canvas.round_body(sides[0], sides[1], post, 4)


def _paint_buildings(canvas: Canvas, rng: np.random.Generator, ground: Ground) -> list[Annotation]:
    """Paint one or two houses at the left and right, where the pole hides little of them."""
    buildings = []
    for side in rng.permutation([0.16, 0.84])[: 1 + int(rng.random() < 0.4)]:
        y_px = rng.uniform(max(ground.first_row + 250, canvas.height_px * 0.35), canvas.height_px * 1.05)
        size_px = rng.uniform(5, 9) * float(ground.px_per_m(min(y_px, canvas.height_px - 1)))
        size_px = min(size_px, canvas.width_px * 0.3)
        frame = Frame(
            canvas.width_px * side + rng.uniform(-0.08, 0.08) * canvas.width_px - size_px * 0.7, y_px, size_px
        )
        outline = paint_house(canvas, rng, frame)
        weather(canvas, rng, outline, 44, None)
        weather(canvas, rng, outline, 30, 90.0)
        buildings.append(Annotation("background_structure", outline))
    return buildings
