"""Draws one photograph, a pole top with hardware and wires in front of a backdrop, and its annotations."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from utils.sources.mask_rings import ring_area
from utils.sources.sample import parts
from utils.sources.sample.backdrop import finish, paint_backdrop, paint_branch
from utils.sources.sample.canvas import Annotation, Canvas, Frame, clip

SAMPLE_LINE_WIDTH_PX = 14  # default width of the sample's wires; use it as --line-width of parse_labels.py
_SIZES = ((1280, 960), (1280, 720), (960, 1280))
_SIZE_SHARES = (0.70, 0.15, 0.15)
_ARM_Y = 70.0  # below the pole top
_MIN_WIRE_GAP_PX = 46.0
_MIN_VISIBLE_SHARE = 0.2  # less visible objects are not annotated


@dataclass(frozen=True)
class Scene:
    """An upright photograph, RGB uint8 (height, width, 3), and its annotations, which may extend beyond the edges."""

    image: np.ndarray
    annotations: list[Annotation]


@dataclass(frozen=True)
class Rig:
    """Positions of the pole, its arms and the feet of its insulators, in order of painting."""

    pole: Frame
    arms: list[tuple[Frame, float, float]]  # frame, left and right end along x
    insulators: list[Frame]
    tilt_deg: float


def draw_scene(seed: int, index: int, wire_width_px: float = SAMPLE_LINE_WIDTH_PX) -> Scene:
    """Draw photograph `index` with wires about `wire_width_px` wide. Depends only on its arguments."""
    rng = np.random.default_rng((seed, index))
    width_px, height_px = _SIZES[rng.choice(len(_SIZES), p=_SIZE_SHARES)]
    sun: Literal[-1, 1] = 1 if rng.random() < 0.5 else -1
    canvas = Canvas(width_px, height_px, sun)
    annotations = paint_backdrop(canvas, rng)
    rig = _plan_rig(canvas, rng)
    if rng.random() < 0.2:
        annotations.append(_paint_second_pole(canvas, rng, rig))
    annotations += _paint_pole_and_cables(canvas, rng, rig, wire_width_px)
    annotations += paint_hardware(canvas, rng, rig)
    annotations += _paint_insulators_and_conductors(canvas, rng, rig, wire_width_px)
    if rng.random() < 0.3:
        branch = Annotation("vegetation", paint_branch(canvas, rng))
        # Sometimes an unknown class is annotated, which parse_labels.py must report.
        annotations += [branch] if rng.random() < 0.06 else []
    finish(canvas, rng)
    return Scene(canvas.image, [seen for drawn in annotations for seen in outline_by_hand(drawn, canvas, rng)])


def _plan_rig(canvas: Canvas, rng: np.random.Generator) -> Rig:
    scale = float(np.clip(np.exp(rng.normal(0, 0.2)), 0.7, 1.4)) * min(1.0, canvas.width_px / 1150)
    scale *= min(1.0, canvas.height_px / 850)
    pole = Frame(
        canvas.width_px * rng.uniform(0.38, 0.62),
        canvas.height_px * rng.uniform(0.17, 0.27),
        scale,
        float(np.clip(rng.normal(0, 2.5), -6, 6)),
    )
    return arrange_rig(rng, pole)


def arrange_rig(rng: np.random.Generator, pole: Frame) -> Rig:
    """Choose the arms of a pole and the places of their insulators."""
    scale = pole.scale
    layout = rng.choice(["flat", "delta", "double"], p=[0.45, 0.3, 0.25])
    spacing = rng.uniform(165, 205)
    # The arm must be tilted so that wires of neighbouring insulators do not overlap.
    needed_deg = float(np.degrees(np.arcsin(min(0.42, _MIN_WIRE_GAP_PX / (spacing * scale)))))
    tilt_deg = max(rng.uniform(9, 17), needed_deg) * (1 if rng.random() < 0.5 else -1)
    if layout == "flat":
        places = [(-1.5, 0), (-0.5, 0), (0.5, 0), (1.5, 0)] if rng.random() < 0.5 else [(-1.5, 0), (0.55, 0), (1.5, 0)]
        levels = [_ARM_Y]
    elif layout == "delta":
        places, levels = [(-1.4, 0), (1.4, 0)], [_ARM_Y + 60]
    else:
        places, levels = [(-1.3, 0), (1.3, 0), (-1.3, 1), (1.3, 1)], [_ARM_Y, _ARM_Y + 190]
    half = max(abs(place) for place, _ in places) * spacing + rng.uniform(26, 60)
    arms = [(pole.child(0, level, tilt_deg), -half, half) for level in levels]
    feet = [arms[level][0].child(place * spacing, -parts.ARM_HALF_THICKNESS, -tilt_deg) for place, level in places]
    if layout == "delta":
        feet.append(pole.child(0, 2))
    return Rig(pole, arms, feet, tilt_deg)


def _paint_second_pole(canvas: Canvas, rng: np.random.Generator, rig: Rig) -> Annotation:
    side = -1 if rig.pole.x_px > canvas.width_px / 2 else 1
    x_px = rig.pole.x_px + side * canvas.width_px * rng.uniform(0.26, 0.36)
    frame = Frame(
        x_px, rig.pole.y_px + rng.uniform(60, 200), rig.pole.scale * rng.uniform(0.7, 0.85), rig.pole.angle_deg
    )
    return Annotation("pole", parts.paint_pole(canvas, rng, frame, length_past_edge(canvas, frame)))


def _paint_pole_and_cables(
    canvas: Canvas, rng: np.random.Generator, rig: Rig, wire_width_px: float
) -> list[Annotation]:
    found = [Annotation("pole", parts.paint_pole(canvas, rng, rig.pole, length_past_edge(canvas, rig.pole)))]
    num_cables = int(rng.integers(1, 4)) if rng.random() < 0.66 else 0
    level, slope_deg, sag = rng.uniform(500, 580), rng.uniform(-3, 3), rng.uniform(0.06, 0.13)
    for number in range(num_cables):
        clamp = rig.pole.child(0, level + number * rng.uniform(82, 110))
        path = wire_path(canvas, (clamp.x_px, clamp.y_px), slope_deg + rig.pole.angle_deg, sag, 0)
        parts.paint_cable(canvas, path, rng.uniform(14, 18) * wire_width_px / SAMPLE_LINE_WIDTH_PX)
        found.append(Annotation("other_wire", path, is_line=True))
    return found


def paint_hardware(canvas: Canvas, rng: np.random.Generator, rig: Rig) -> list[Annotation]:
    """Paint transformers, arms and cutouts, back to front."""
    found, bushings, tops = [], [], []
    if rng.random() < 0.6:
        for side in rng.permutation([-1, 1])[: 1 + int(rng.random() < 0.3)]:
            x = int(side) * (parts.POLE_HALF_WIDTH + parts.CAN_HALF_WIDTH + 6)
            can = rig.pole.child(x, rng.uniform(290, 330) + (50 if len(rig.arms) > 1 else 0))
            found.append(Annotation("transformers", parts.paint_transformer(canvas, rng, can, -int(side))))
            bushings.append(np.array([can.x_px, can.y_px]) - (0, 40 * can.scale))
    for frame, left, right in rig.arms:
        found.append(Annotation("crossarm", parts.paint_crossarm(canvas, rng, frame, left, right)))
    if rng.random() < 0.66:
        arm, left, right = rig.arms[-1]
        places = rng.permutation([left * 0.82, left * 0.42, right * 0.42, right * 0.82])[: rng.integers(1, 4)]
        for x in places:
            hung = arm.child(float(x), parts.ARM_HALF_THICKNESS + 4, -rig.tilt_deg + rng.uniform(-8, 8))
            found.append(Annotation("cutouts", parts.paint_cutout(canvas, rng, hung, 1 if x > 0 else -1)))
            tops.append(hung.place([(0, 116)])[0])
    for top, bushing in zip(tops, bushings, strict=False):
        parts.paint_jumper(canvas, top, bushing)
    return found


def _paint_insulators_and_conductors(
    canvas: Canvas, rng: np.random.Generator, rig: Rig, wire_width_px: float
) -> list[Annotation]:
    found, grooves = [], []
    colour, num_sheds, is_bright = parts.porcelain(rng), int(rng.integers(2, 5)), rng.random() < 0.6
    for foot in rig.insulators:
        found.append(Annotation("insulator", parts.paint_insulator(canvas, foot, colour, num_sheds)))
        grooves.append(foot.place([(0, -parts.INSULATOR_HEIGHT + 4)])[0])
    slope_deg, sag = rng.uniform(-3, 3) + rig.pole.angle_deg * 0.5, rng.uniform(0.02, 0.07)
    only_side = int(rng.choice([-1, 1])) if rng.random() < 0.12 else 0  # the line ends at this pole
    for groove in grooves:
        path = wire_path(canvas, groove, slope_deg, sag * rng.uniform(0.9, 1.1), only_side)
        parts.paint_conductor(
            canvas, rng, path, is_bright, rng.uniform(12.6, 14.4) * wire_width_px / SAMPLE_LINE_WIDTH_PX
        )
        found.append(Annotation("conductor", path, is_line=True))
    return found


def wire_path(
    canvas: Canvas,
    support: np.ndarray | tuple[float, float],
    slope_deg: float,
    sag: float,
    only_side: int,
    points_per_side: int = 6,
) -> np.ndarray:
    """Return a wire (n, 2) from edge to edge over its support, or only to the left (-1) or right (1) of it.

    It sags on both sides as a parabola, an approximation of a catenary. `sag` is the drop at a distance of the
    photograph's width from the support, as a share of that width.
    """
    x, y = float(support[0]), float(support[1])
    width = canvas.width_px
    left = np.linspace(-12, x, points_per_side) if only_side <= 0 else np.array([x])
    right = np.linspace(x, width + 12, points_per_side)[1:] if only_side >= 0 else np.array([])
    across = np.concatenate([left, right])
    away = np.abs(across - x) / width
    fall = sag * width * (2 * away - away**2)
    return np.stack([across, y + np.tan(np.radians(slope_deg)) * (across - x) + fall], axis=1)


def length_past_edge(canvas: Canvas, frame: Frame) -> float:
    """Return the length, in the units of a part, from its origin to below the photograph's lower edge."""
    return (canvas.height_px - frame.y_px + 120) / frame.scale


def outline_by_hand(drawn: Annotation, canvas: Canvas, rng: np.random.Generator) -> list[Annotation]:
    """Simulate an annotator: small errors, no annotation of barely visible objects, one line per visible stretch."""
    points = drawn.points + rng.normal(0, 0.8, drawn.points.shape)
    if drawn.is_line:
        return [Annotation(drawn.name, stretch, True) for stretch in _visible_stretches(points, canvas.height_px)]
    shown = clip(points, canvas.width_px, canvas.height_px)
    is_shown = len(shown) >= 3 and ring_area(shown) > _MIN_VISIBLE_SHARE * ring_area(points)
    return [Annotation(drawn.name, points)] if is_shown else []


def _visible_stretches(path: np.ndarray, height_px: int) -> list[np.ndarray]:
    """Split a wire (n, 2), sorted by x, where it leaves the photograph at the top or bottom."""
    if ((path[:, 1] >= 0) & (path[:, 1] < height_px)).all():
        return [path]
    x = np.linspace(path[0, 0], path[-1, 0], 240)
    y = np.interp(x, path[:, 0], path[:, 1])
    is_inside = np.concatenate([[False], (y >= 0) & (y < height_px), [False]])
    starts, ends = np.flatnonzero(is_inside[1:] & ~is_inside[:-1]), np.flatnonzero(is_inside[:-1] & ~is_inside[1:])
    picks = [np.linspace(start, end - 1, 7).round().astype(int) for start, end in zip(starts, ends, strict=True)]
    return [np.stack([x[pick], y[pick]], axis=1) for pick in picks if pick[-1] - pick[0] >= 12]
