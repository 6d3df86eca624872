"""The hardware of a distribution line. Each function paints one part and returns its outline in the photograph.

Parts are drawn in a `Frame` with a unit of one pixel at scale 1. Their sizes fit a photograph 1280 pixels wide, taken a
few metres from the pole top.
"""

import math

import cv2
import numpy as np

from utils.sources.sample.canvas import Canvas, Colour, Frame, along, ellipse, shade, vary

POLE_HALF_WIDTH = 30.0
ARM_HALF_THICKNESS = 18.0
INSULATOR_HEIGHT = 92.0
CAN_HALF_WIDTH = 84.0
CAN_HEIGHT = 205.0
_STEEL: Colour = (92, 94, 98)
_DARK: Colour = (38, 38, 42)
_POLES: tuple[Colour, ...] = ((104, 76, 54), (118, 92, 70), (92, 72, 58), (132, 116, 102))
_ARMS: tuple[Colour, ...] = ((204, 166, 112), (190, 156, 112), (214, 182, 134))
_PORCELAINS: tuple[Colour, ...] = ((120, 50, 30), (138, 62, 36), (226, 226, 222), (104, 164, 142))
_BUSHING = np.array([(11.0, 4.0), (17.0, -8.0), (10.0, -18.0), (15.0, -28.0), (8.0, -44.0)])  # right half
_PORCELAIN_SHARES = (0.35, 0.25, 0.25, 0.15)
_STRAND_PX = 9  # from one strand of a conductor to the next, along the wire
_LASHING_PX = 46  # from one turn of the wire around a cable to the next


def paint_pole(canvas: Canvas, rng: np.random.Generator, frame: Frame, length: float) -> np.ndarray:
    """Paint a pole from its top at the origin, `length` units down."""
    top, bottom = POLE_HALF_WIDTH, POLE_HALF_WIDTH * (1 + length / 6000)
    left = frame.place([(-top, 0), (-bottom, length)])
    right = frame.place([(top, 0), (bottom, length)])
    colour = vary(rng, _POLES[rng.integers(len(_POLES))], 0.12)
    outline = canvas.round_body(left, right, colour, 12)
    for _ in range(26):
        across, start = rng.uniform(0.05, 0.95), rng.uniform(0, 0.95)
        side = along(left, right, across)
        grain = np.stack([along(side[0], side[1], start), along(side[0], side[1], start + rng.uniform(0.03, 0.16))])
        canvas.line(grain, shade(colour, rng.uniform(0.4, 0.75)), int(rng.integers(1, 3)))
    canvas.fill(frame.place(ellipse(0, 1, top, top * 0.22)), shade(colour, 1.25))
    return outline


def paint_crossarm(canvas: Canvas, rng: np.random.Generator, frame: Frame, left: float, right: float) -> np.ndarray:
    """Paint a wooden arm along x from `left` to `right`, with its shadow on the pole, braces and bolts."""
    half = ARM_HALF_THICKNESS
    canvas.fill(frame.place([(-34, half), (34, half), (34, half + 20), (-34, half + 20)]), _DARK)
    for foot in (left * 0.55, right * 0.55):
        canvas.line(frame.place([(foot, half - 4), (0, half + 130)]), _STEEL, 6 * frame.scale)
    colour = vary(rng, _ARMS[rng.integers(len(_ARMS))])
    near, far = half * rng.uniform(0.92, 1.0), half * rng.uniform(1.0, 1.12)  # one end is nearer to the camera
    upper = frame.place([(left, -near), (right, -far)])
    lower = frame.place([(left, near), (right, far)])
    for start, light in ((0.0, 1.18), (0.24, 1.0), (0.62, 0.88), (0.86, 0.62)):
        canvas.fill(np.concatenate([along(upper, lower, start), lower[::-1]]), shade(colour, light))
    for _ in range(14):
        side = along(upper, lower, rng.uniform(0.2, 0.9))
        start = rng.uniform(0, 0.9)
        grain = np.stack([along(side[0], side[1], start), along(side[0], side[1], start + rng.uniform(0.04, 0.2))])
        canvas.line(grain, shade(colour, rng.uniform(0.68, 0.82)), 1)
    canvas.fill(frame.place(ellipse(0, 0, 8, 8, 12)), _STEEL)
    return np.concatenate([upper, lower[::-1]])


def porcelain(rng: np.random.Generator) -> Colour:
    """Choose the colour of a photograph's insulators: brown or white ceramic, or green glass."""
    return vary(rng, _PORCELAINS[rng.choice(len(_PORCELAINS), p=_PORCELAIN_SHARES)], 0.1)


def paint_insulator(canvas: Canvas, frame: Frame, colour: Colour, num_sheds: int) -> np.ndarray:
    """Paint a pin insulator of stacked sheds, standing on the origin and reaching up; the groove is at its top."""
    height, foot = INSULATOR_HEIGHT, INSULATOR_HEIGHT * 0.12
    canvas.line(frame.place([(0, 8), (0, -foot)]), _STEEL, 13 * frame.scale)
    shed = (height - foot - 16) / num_sheds
    profile = [(13.0, -foot + 4)]
    rims = []
    for number in range(num_sheds):
        base, radius = -foot - number * shed, 36 - 11 * number / max(1, num_sheds - 1)
        profile += [(radius - 2, base), (radius, base - shed * 0.25), (radius * 0.58, base - shed * 0.92)]
        rims.append((radius, base))
    profile += [(17.0, -height + 14), (19.0, -height + 9), (17.0, -height), (8.0, -height - 3)]
    sides = np.array(profile)
    outline = canvas.round_body(frame.place(sides * (-1, 1)), frame.place(sides), colour, 9)
    for radius, base in rims:
        canvas.line(frame.place([(-radius + 3, base), (radius - 3, base)]), shade(colour, 0.4), 3 * frame.scale)
        glint = [(canvas.sun * radius * 0.4, base - shed * 0.3), (canvas.sun * radius * 0.3, base - shed * 0.62)]
        canvas.line(frame.place(glint), (252, 250, 244), 4 * frame.scale)
    canvas.line(frame.place([(-17, -height + 11), (17, -height + 11)]), shade(colour, 0.5), 3 * frame.scale)
    return outline


def paint_cutout(canvas: Canvas, rng: np.random.Generator, frame: Frame, side: int) -> np.ndarray:
    """Paint a fused cutout hanging from the origin: ribbed porcelain, dark contacts and a tilted white fuse tube."""
    canvas.line(frame.place([(0, -18), (0, 16), (side * 10, 26)]), _STEEL, 9 * frame.scale)
    body = vary(rng, (196, 204, 212), 0.05)
    ribs = np.linspace(28, 112, 13)
    sides = np.stack([np.where(np.arange(13) % 2 == 0, 12.0, 18.0), ribs], axis=1)
    canvas.round_body(frame.place(sides * (-1, 1)), frame.place(sides), body, 7)
    out, reach = side * rng.uniform(42, 54), rng.uniform(120, 134)
    canvas.line(frame.place([(0, 22), (side * 22, 12)]), _DARK, 15 * frame.scale)
    canvas.line(frame.place([(0, 116), (out, reach)]), _DARK, 15 * frame.scale)
    tube = np.array([(side * 22, 12.0), (out, reach)])
    normal = np.array([tube[1][1] - tube[0][1], tube[0][0] - tube[1][0]]) / math.dist(*tube) * 9
    canvas.round_body(frame.place(tube - normal * side), frame.place(tube + normal * side), (240, 236, 226), 5)
    for end in (tube[0], tube[1]):
        inner = along(end, tube.mean(axis=0), 0.24)
        canvas.line(frame.place(np.stack([end, inner])), _DARK, 22 * frame.scale)
    ring = frame.place(ellipse(out, reach + 10, 9, 9, 12))
    canvas.line(np.concatenate([ring, ring[:1]]), _DARK, 4 * frame.scale)
    corners = np.concatenate(
        [sides * (-1, 1), sides, tube - normal * 1.4, tube + normal * 1.4, ellipse(out, reach + 10, 11, 11, 8)]
    )
    return cv2.convexHull(frame.place(corners).astype(np.float32))[:, 0].astype(np.float64)


def paint_transformer(canvas: Canvas, rng: np.random.Generator, frame: Frame, pole_side: int) -> np.ndarray:
    """Paint a pole-mounted can, the middle of its lid at the origin: fins, bands, lid and two bushings on top."""
    half, height = CAN_HALF_WIDTH, CAN_HEIGHT * rng.uniform(0.92, 1.12)
    grey = vary(rng, (142, 152, 162), 0.12)
    for level in (0.25, 0.75):
        canvas.line(
            frame.place([(0, height * level), (pole_side * (half + 26), height * level)]), _DARK, 14 * frame.scale
        )
    bend = ellipse(0, height, half, 20, 40)[:21]  # the lower half, right to left
    left = frame.place([(-half, 0), *bend[:10:-1]])
    right = frame.place([(half, 0), *bend[:10]])
    canvas.round_body(left, right, grey, 14)
    canvas.fill(frame.place(bend), shade(grey, 0.62))
    for across in np.linspace(-0.8, 0.8, 9):
        x, drop = half * across, 14 * math.sqrt(1 - across**2)
        canvas.line(frame.place([(x, 42 + drop), (x, height - 18 + drop)]), shade(grey, 0.56), 3 * frame.scale)
    canvas.fill(frame.place(ellipse(0, 8, half + 6, 22, 28)), shade(grey, 0.5))
    canvas.fill(frame.place(ellipse(0, 0, half + 6, 22, 28)), shade(grey, 1.12))
    x_left, x_right = -half * 0.42, half * 0.42
    for x in (x_left, x_right):
        bushing = frame.child(x, 0)
        canvas.round_body(bushing.place(_BUSHING * (-1, 1)), bushing.place(_BUSHING), (122, 62, 40), 5)
    plate = [(-16, 92), (16, 92), (16, 122), (-16, 122)]
    canvas.fill(frame.place(plate), (214, 200, 96))
    left_bushing = [(x_left - 10, -20), (x_left - 8, -44), (x_left + 8, -44), (x_left + 11, -20)]
    right_bushing = [(x_right - 11, -20), (x_right - 8, -44), (x_right + 8, -44), (x_right + 10, -18)]
    lid_right = [(half * 0.8, -13), (half + 6, 0), (half + 5, 12)]
    lid_left = [(-half - 5, 12), (-half - 6, 0), (-half * 0.8, -13)]
    return frame.place([*left_bushing, *right_bushing, *lid_right, *bend, *lid_left])


def paint_conductor(canvas: Canvas, rng: np.random.Generator, path: np.ndarray, bright: bool, width_px: float) -> None:
    """Paint a bare wire along a path (n, 2): bright new aluminium or weathered grey, lit from above."""
    colour = vary(rng, (206, 210, 214) if bright else (168, 172, 178), 0.04)
    canvas.line(path, shade(colour, 0.42), width_px)
    canvas.line(path - (0, width_px * 0.12), colour, width_px * 0.62)
    canvas.line(path - (0, width_px * 0.24), shade(colour, 1.2), width_px * 0.2)


def paint_cable(canvas: Canvas, path: np.ndarray, width_px: float) -> None:
    """Paint a communication cable along a path (n, 2): a black bundle with a steel wire lashed around it."""
    canvas.line(path, (22, 22, 25), width_px)
    canvas.line(path - (0, width_px * 0.22), (58, 58, 64), width_px * 0.2)
    x = np.arange(path[0, 0], path[-1, 0], 42.0)
    y = np.interp(x, path[:, 0], path[:, 1])
    for at_x, at_y in zip(x, y, strict=True):
        lashing = np.array([(at_x - 6, at_y + width_px / 2), (at_x + 6, at_y - width_px / 2)])
        canvas.line(lashing, (128, 128, 130), 2)


def paint_jumper(canvas: Canvas, start: np.ndarray, end: np.ndarray) -> None:
    """Paint a thin slack lead between two points, which is not annotated."""
    slack = (abs(end[0] - start[0]) + abs(end[1] - start[1])) * 0.16
    parts = np.linspace(0, 1, 9)[:, None]
    canvas.line(start + (end - start) * parts + np.sin(parts * math.pi) * (0, slack), (48, 48, 50), 3)


def paint_thin_wire(canvas: Canvas, path: np.ndarray, colour: Colour, width_px: float, is_stranded: bool) -> None:
    """Paint a wire of exact width along a path (n, 2), lit from above. A cable that is not stranded shows its lashing.

    Each pixel shows the share of it that the wire covers: cv2's lines are wider by 0.5 to 2.5 pixels.
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
