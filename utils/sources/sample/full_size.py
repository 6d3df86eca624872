"""Draws a photograph of a drone camera's full size, with wires 4 to 10 pixels wide, and its annotations.

The pixels of a part do not depend on the photograph's size: a smaller photograph shows less of the same scene.
"""

from typing import Literal

import numpy as np

from utils.sources.sample import parts
from utils.sources.sample.canvas import Annotation, Canvas, Colour, Frame, vary
from utils.sources.sample.scene import (
    Rig,
    Scene,
    arrange_rig,
    length_past_edge,
    outline_by_hand,
    paint_hardware,
    wire_path,
)
from utils.sources.sample.surroundings import expose, paint_surroundings, weather
from utils.sources.sample.trees import paint_twigs

_CONDUCTOR_PX, _CABLE_PX, _GUY_PX = (4.0, 7.0), (6.0, 10.0), (4.0, 5.0)
_POINTS_PER_SIDE = 6  # of a labelled wire
_FINE = 80  # points of a painted wire on each side of its pole
_WOOD, _STAINS = 46, 34


def draw_full_scene(seed: int, index: int, long_side_px: int, wire_width_px: float | None = None) -> Scene:
    """Draw photograph `index`, 3:2 or 2:3; depends only on its arguments. Wires are 4 to 10 pixels wide, or as given."""
    rng = np.random.default_rng((seed, index, long_side_px))
    short_side_px = round(long_side_px * 2 / 3)
    is_upright = rng.random() < 0.12
    width_px, height_px = (short_side_px, long_side_px) if is_upright else (long_side_px, short_side_px)
    sun: Literal[-1, 1] = 1 if rng.random() < 0.5 else -1
    canvas = Canvas(width_px, height_px, sun, pixel_centre=0.5)
    annotations = paint_surroundings(canvas, rng)
    if rng.random() < 0.3:
        annotations.append(_paint_far_pole(canvas, rng))
    pole = Frame(
        width_px * rng.uniform(0.32, 0.68),
        height_px * rng.uniform(0.14, 0.42),
        rng.uniform(1.05, 1.6),
        float(np.clip(rng.normal(0, 2.5), -6, 6)),
    )
    rig = arrange_rig(rng, pole)
    found = [_paint_pole(canvas, rng, rig.pole)]
    found += _paint_cables(canvas, rng, rig, wire_width_px)
    found += paint_hardware(canvas, rng, rig)
    for drawn in found:
        if drawn.name in ("crossarm", "transformers", "cutouts"):
            weather(canvas, rng, drawn.points, _STAINS, _angle_of(drawn) if drawn.name == "crossarm" else None)
    found += _paint_line(canvas, rng, rig, wire_width_px)
    if rng.random() < 0.45:
        paint_twigs(canvas, rng)
    expose(canvas, rng)
    return Scene(canvas.image, [seen for drawn in annotations + found for seen in outline_by_hand(drawn, canvas, rng)])


def _width(rng: np.random.Generator, bounds: tuple[float, float], asked: float | None) -> float:
    drawn = rng.uniform(*bounds)
    return drawn if asked is None else asked


def _angle_of(arm: Annotation) -> float:
    across, down = arm.points[1] - arm.points[0]
    return float(np.degrees(np.arctan2(down, across)))


def _paint_pole(canvas: Canvas, rng: np.random.Generator, frame: Frame) -> Annotation:
    outline = parts.paint_pole(canvas, rng, frame, length_past_edge(canvas, frame))
    weather(canvas, rng, outline, _WOOD, 90 + frame.angle_deg)
    return Annotation("pole", outline)


def _paint_far_pole(canvas: Canvas, rng: np.random.Generator) -> Annotation:
    x_px = canvas.width_px * rng.choice([rng.uniform(0.05, 0.25), rng.uniform(0.75, 0.95)])
    frame = Frame(float(x_px), canvas.height_px * rng.uniform(0.2, 0.5), rng.uniform(0.5, 0.8))
    return _paint_pole(canvas, rng, frame)


def _paint_cables(canvas: Canvas, rng: np.random.Generator, rig: Rig, wire_width_px: float | None) -> list[Annotation]:
    """Paint communication cables, a lead to a house, and guy wires."""
    found: list[Annotation] = []
    slope_deg, sag, level = rng.uniform(-9, 9), rng.uniform(0.02, 0.09), rng.uniform(500, 640)
    for number in range(int(rng.integers(0, 4))):
        clamp = rig.pole.child(0, level + number * rng.uniform(70, 120))
        width_px = _width(rng, _CABLE_PX, wire_width_px)
        support = np.array([clamp.x_px, clamp.y_px])
        found.append(_paint_span(canvas, "other_wire", support, (slope_deg, sag, 0), (30, 30, 33), width_px, False))
    if rng.random() < 0.4:
        start = rig.pole.place([(0, rng.uniform(400, 480))])[0]
        side = int(rng.choice([-1, 1]))
        span = (side * rng.uniform(4, 22), rng.uniform(0.01, 0.05), side)
        width_px = _width(rng, _CABLE_PX, wire_width_px)
        found.append(_paint_span(canvas, "other_wire", start, span, (44, 44, 46), width_px, True))
    if rng.random() < 0.35:
        top, lean = rig.pole.place([(0, 130.0)])[0], rng.uniform(0.35, 0.7) * rng.choice([-1, 1])
        path = top + np.linspace(0, canvas.height_px - top[1] + 20, 5)[:, None] * np.array([lean, 1.0])
        parts.paint_thin_wire(canvas, path, vary(rng, (150, 152, 156)), _width(rng, _GUY_PX, wire_width_px), True)
        found.append(Annotation("other_wire", _inside_sides(path, canvas.width_px), is_line=True))
    return found


def _inside_sides(path: np.ndarray, width_px: int) -> np.ndarray:
    """Sort a straight path (n, 2) by x and end it where it leaves the photograph."""
    ordered = path[np.argsort(path[:, 0])]
    x = np.linspace(max(ordered[0, 0], -8.0), min(ordered[-1, 0], width_px + 8.0), 5)
    return np.stack([x, np.interp(x, ordered[:, 0], ordered[:, 1])], axis=1)


def _paint_span(
    canvas: Canvas,
    name: str,
    support: np.ndarray,
    span: tuple[float, float, int],
    colour: Colour,
    width_px: float,
    is_stranded: bool,
) -> Annotation:
    """Paint a wire over its support; `span` is its slope in degrees, its sag and its side (see `wire_path`)."""
    parts.paint_thin_wire(canvas, wire_path(canvas, support, *span, _FINE), colour, width_px, is_stranded)
    return Annotation(name, wire_path(canvas, support, *span, _POINTS_PER_SIDE), is_line=True)


def _paint_line(canvas: Canvas, rng: np.random.Generator, rig: Rig, wire_width_px: float | None) -> list[Annotation]:
    """Paint the insulators and the conductors on them."""
    found, grooves = [], []
    colour, num_sheds, is_bright = parts.porcelain(rng), int(rng.integers(2, 5)), rng.random() < 0.5
    for foot in rig.insulators:
        outline = parts.paint_insulator(canvas, foot, colour, num_sheds)
        weather(canvas, rng, outline, _STAINS, None)
        found.append(Annotation("insulator", outline))
        grooves.append(foot.place([(0, -parts.INSULATOR_HEIGHT + 4)])[0])
    # Against the tilt of the arm, so that the wires do not cover each other.
    slope_deg, sag = -np.sign(rig.tilt_deg) * rng.uniform(-3, 13), rng.uniform(0.01, 0.06)
    only_side = int(rng.choice([-1, 1])) if rng.random() < 0.12 else 0  # the line ends at this pole
    metal = vary(rng, (188, 192, 196) if is_bright else (138, 140, 144), 0.05)
    for groove in grooves:
        span = (slope_deg, sag * rng.uniform(0.9, 1.1), only_side)
        width_px = _width(rng, _CONDUCTOR_PX, wire_width_px)
        found.append(_paint_span(canvas, "conductor", groove, span, metal, width_px, True))
    return found
