"""Draws one photograph, a pole top with hardware and wires in front of a backdrop, and its annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from utils.data.sample import parts
from utils.data.sample.backdrop import finish, paint_backdrop, paint_branch
from utils.data.sample.canvas import Annotation, Canvas, Frame, area, clip

SAMPLE_LINE_WIDTH_PX = 14  # default width of the sample's wires; use it as --line-width of parse_labels.py
_SIZES = ((1280, 960), (1280, 720), (960, 1280))
_SIZE_SHARES = (0.70, 0.15, 0.15)
_ARM_Y = 70.0  # below the pole top
_MIN_WIRE_GAP_PX = 46.0
# A photograph of a chosen long side, as a drone takes it from further away.
_PORTRAIT_SHARE = 0.15
_DISTANT_SCALES = (0.28, 0.6)  # of the parts, relative to the photograph's width
_DISTANT_WIRE_PX = (4.5, 7.6)  # a conductor is 0.9 to 1.03 times as wide, a cable 1 to 1.29 times: 4 to 10 px
_DISTANT_WIRE_GAP = 10.0  # units
_MIN_VISIBLE_SHARE = 0.2  # less visible objects are not annotated


@dataclass(frozen=True)
class Scene:
    """An upright photograph, RGB uint8 (height, width, 3), and its annotations, which may extend beyond the edges."""

    image: np.ndarray
    annotations: list[Annotation]


@dataclass(frozen=True)
class _Rig:
    """Positions of the pole, its arms and the feet of its insulators, in order of painting."""

    pole: Frame
    arms: list[tuple[Frame, float, float]]  # frame, left and right end along x
    insulators: list[Frame]
    tilt_deg: float


def draw_scene(seed: int, index: int, wire_width_px: float | None = None, long_side_px: int | None = None) -> Scene:
    """Draw photograph `index`. Depends only on its arguments.

    Without `long_side_px` it has about 1280 x 960 pixels, and wires are about `wire_width_px` wide (None: 14). With it,
    the photograph has that long side and a ratio of 3:2, the line is further away, and wires are 4 to 10 pixels wide
    unless `wire_width_px` is given.
    """
    rng = np.random.default_rng((seed, index))
    if long_side_px is None:
        width_px, height_px = _SIZES[rng.choice(len(_SIZES), p=_SIZE_SHARES)]
        zoom, wire_width = 1.0, wire_width_px or SAMPLE_LINE_WIDTH_PX
    else:
        sides = long_side_px, round(long_side_px * 2 / 3)
        width_px, height_px = sides[::-1] if rng.random() < _PORTRAIT_SHARE else sides
        zoom = long_side_px / _SIZES[0][0]
        wire_width = (wire_width_px or rng.uniform(*_DISTANT_WIRE_PX)) / zoom
    sun: Literal[-1, 1] = 1 if rng.random() < 0.5 else -1
    canvas = Canvas(width_px, height_px, sun, zoom)
    annotations = paint_backdrop(canvas, rng)
    rig = _plan_rig(canvas, rng, is_distant=long_side_px is not None)
    if rng.random() < 0.2:
        annotations.append(_paint_second_pole(canvas, rng, rig))
    annotations += _paint_pole_and_cables(canvas, rng, rig, wire_width)
    annotations += _paint_hardware(canvas, rng, rig)
    annotations += _paint_insulators_and_conductors(canvas, rng, rig, wire_width)
    if rng.random() < 0.3:
        branch = Annotation("vegetation", paint_branch(canvas, rng))
        # Sometimes an unknown class is annotated, which parse_labels.py must report.
        annotations += [branch] if rng.random() < 0.06 else []
    finish(canvas, rng)
    return Scene(canvas.image, [seen for drawn in annotations for seen in _outline_by_hand(drawn, canvas, rng)])


def _plan_rig(canvas: Canvas, rng: np.random.Generator, is_distant: bool) -> _Rig:
    scale = float(np.clip(np.exp(rng.normal(0, 0.2)), 0.7, 1.4)) * min(1.0, canvas.width / 1150)
    scale *= min(1.0, canvas.height / 850)
    min_gap = _MIN_WIRE_GAP_PX
    if is_distant:
        scale, min_gap = scale * rng.uniform(*_DISTANT_SCALES), _DISTANT_WIRE_GAP
    pole = Frame(
        canvas.width * rng.uniform(0.38, 0.62),
        canvas.height * rng.uniform(0.17, 0.27),
        scale,
        float(np.clip(rng.normal(0, 2.5), -6, 6)),
    )
    layout = rng.choice(["flat", "delta", "double"], p=[0.45, 0.3, 0.25])
    spacing = rng.uniform(165, 205)
    # The arm must be tilted so that wires of neighbouring insulators do not overlap.
    needed_deg = float(np.degrees(np.arcsin(min(0.42, min_gap / (spacing * scale)))))
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
    return _Rig(pole, arms, feet, tilt_deg)


def _paint_second_pole(canvas: Canvas, rng: np.random.Generator, rig: _Rig) -> Annotation:
    side = -1 if rig.pole.x_px > canvas.width / 2 else 1
    x_px = rig.pole.x_px + side * canvas.width * rng.uniform(0.26, 0.36)
    frame = Frame(
        x_px, rig.pole.y_px + rng.uniform(60, 200), rig.pole.scale * rng.uniform(0.7, 0.85), rig.pole.angle_deg
    )
    return Annotation("pole", parts.paint_pole(canvas, rng, frame, _length_past_edge(canvas, frame)))


def _paint_pole_and_cables(canvas: Canvas, rng: np.random.Generator, rig: _Rig, wire_width: float) -> list[Annotation]:
    found = [Annotation("pole", parts.paint_pole(canvas, rng, rig.pole, _length_past_edge(canvas, rig.pole)))]
    num_cables = int(rng.integers(1, 4)) if rng.random() < 0.66 else 0
    level, slope_deg, sag = rng.uniform(500, 580), rng.uniform(-3, 3), rng.uniform(0.06, 0.13)
    for number in range(num_cables):
        clamp = rig.pole.child(0, level + number * rng.uniform(82, 110))
        path = _wire_path(canvas, (clamp.x_px, clamp.y_px), slope_deg + rig.pole.angle_deg, sag, 0)
        parts.paint_cable(canvas, path, rng.uniform(14, 18) * wire_width / SAMPLE_LINE_WIDTH_PX)
        found.append(Annotation("other_wire", path, is_line=True))
    return found


def _paint_hardware(canvas: Canvas, rng: np.random.Generator, rig: _Rig) -> list[Annotation]:
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
        parts.paint_jumper(canvas, top, bushing, 3 * min(1.0, rig.pole.scale / 0.7))
    return found


def _paint_insulators_and_conductors(
    canvas: Canvas, rng: np.random.Generator, rig: _Rig, wire_width: float
) -> list[Annotation]:
    found, grooves = [], []
    colour, num_sheds, is_bright = parts.porcelain(rng), int(rng.integers(2, 5)), rng.random() < 0.6
    for foot in rig.insulators:
        found.append(Annotation("insulator", parts.paint_insulator(canvas, foot, colour, num_sheds)))
        grooves.append(foot.place([(0, -parts.INSULATOR_HEIGHT + 4)])[0])
    slope_deg, sag = rng.uniform(-3, 3) + rig.pole.angle_deg * 0.5, rng.uniform(0.02, 0.07)
    only_side = int(rng.choice([-1, 1])) if rng.random() < 0.12 else 0  # the line ends at this pole
    for groove in grooves:
        path = _wire_path(canvas, groove, slope_deg, sag * rng.uniform(0.9, 1.1), only_side)
        parts.paint_conductor(canvas, rng, path, is_bright, rng.uniform(12.6, 14.4) * wire_width / SAMPLE_LINE_WIDTH_PX)
        found.append(Annotation("conductor", path, is_line=True))
    return found


def _wire_path(
    canvas: Canvas, support: np.ndarray | tuple[float, float], slope_deg: float, sag: float, only_side: int
) -> np.ndarray:
    """Return a wire (n, 2) from edge to edge over its support, or only to the left (-1) or right (1) of it.

    It sags on both sides as a parabola, an approximation of a catenary. `sag` is the drop at a distance of the
    photograph's width from the support, as a share of that width.
    """
    x, y = float(support[0]), float(support[1])
    width = canvas.width
    left = np.linspace(-12, x, 6) if only_side <= 0 else np.array([x])
    right = np.linspace(x, width + 12, 6)[1:] if only_side >= 0 else np.array([])
    across = np.concatenate([left, right])
    away = np.abs(across - x) / width
    fall = sag * width * (2 * away - away**2)
    return np.stack([across, y + np.tan(np.radians(slope_deg)) * (across - x) + fall], axis=1)


def _length_past_edge(canvas: Canvas, frame: Frame) -> float:
    return (canvas.height - frame.y_px + 120) / frame.scale


def _outline_by_hand(drawn: Annotation, canvas: Canvas, rng: np.random.Generator) -> list[Annotation]:
    """Simulate an annotator: small errors, no annotation of barely visible objects, one line per visible stretch."""
    points = drawn.points + rng.normal(0, 0.8, drawn.points.shape) / canvas.zoom
    if drawn.is_line:
        stretches = _visible_stretches(points, canvas.height)
        return [Annotation(drawn.name, stretch * canvas.zoom, True) for stretch in stretches]
    shown = clip(points, canvas.width, canvas.height)
    is_shown = len(shown) >= 3 and area(shown) > _MIN_VISIBLE_SHARE * area(points)
    return [Annotation(drawn.name, points * canvas.zoom)] if is_shown else []


def _visible_stretches(path: np.ndarray, height: float) -> list[np.ndarray]:
    """Split a wire (n, 2), sorted by x, where it leaves the photograph at the top or bottom."""
    if ((path[:, 1] >= 0) & (path[:, 1] < height)).all():
        return [path]
    x = np.linspace(path[0, 0], path[-1, 0], 240)
    y = np.interp(x, path[:, 0], path[:, 1])
    is_inside = np.concatenate([[False], (y >= 0) & (y < height), [False]])
    starts, ends = np.flatnonzero(is_inside[1:] & ~is_inside[:-1]), np.flatnonzero(is_inside[:-1] & ~is_inside[1:])
    picks = [np.linspace(start, end - 1, 7).round().astype(int) for start, end in zip(starts, ends, strict=True)]
    return [np.stack([x[pick], y[pick]], axis=1) for pick in picks if pick[-1] - pick[0] >= 12]
