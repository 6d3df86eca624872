"""Draws wires into training pictures, with exact labels: copy-paste that needs nothing to copy.

A wire between two supports hangs in a catenary. Seen from a drone it is a thin band, lighter or
darker than what is below it, alone or in a group of nearly parallel ones. Poles, crossarms and
shadows have straight edges too. Bars without labels teach the network that these are not wires.
docs/research/wires.md says what both bring.
"""

import math
from dataclasses import dataclass

import cv2
import numpy as np

from yolo_seg_ddp.data.augment import Scene
from yolo_seg_ddp.data.polygons import areas, draw_index_map, visible_outlines

MAX_GROUPS = 2
MAX_IN_GROUP = 4
SPACING = (0.03, 0.4)  # between the wires of a group, as a share of the picture's side
LENGTH = (0.5, 4.0)  # of a span, as a share of the picture's side
MAX_SAG = 0.12  # of a span's length
MAX_SPREAD = math.radians(4)  # by which wires of one group differ in direction
WIDTH_PX = (1.5, 8.0)  # where the picture has no labelled wire
WIDTH_GAIN = (0.7, 1.4)  # relative to a labelled wire of the picture
BLUR_PX = (0.3, 1.0)  # over which an edge goes from the wire's colour to the picture's
# by which one side of a round wire is lighter, and the other one darker, than its middle
MAX_SHADE = 0.6
GREY = (10.0, 250.0)
MIN_CONTRAST = 25.0  # of 255, between a wire and the mean of the picture
TINT = 8.0  # standard deviation of each colour around the grey
MAX_BARS = 2  # in a picture
BAR_WIDTH_GAIN = (3.0, 15.0)  # relative to a wire
BAR_LENGTH = (0.3, 2.0)  # as a share of the picture's side
SHADOWS = 0.3  # of all bars
SHADOW = (0.3, 0.75)  # of the ground's brightness
SHADOW_BLUR_PX = (1.0, 6.0)
MAX_TEXTURE = 0.6  # of the picture's own contrast
RIM_WIDTH = (0.08, 0.4)  # of a bar's width, in half of the solid bars
RIM_BRIGHTNESS = (0.4, 1.8)  # relative to the bar
STEP_PX = 8.0  # between two points of a wire


def draw_wires(scene: Scene, class_ids: tuple[int, ...], rng: np.random.Generator) -> Scene:
    """Return the scene with one or two groups of one to four wires in front of what is there, and
    bars behind all objects.

    Each group has one of `class_ids`, with equal chance, and the width of a labelled object of this
    class in the picture. The outlines, float64 (V, 2) in pixels, enclose the drawn bands.
    """
    image = scene.image.astype(np.float32)
    draw_bars(image, scene, class_ids, rng)
    new_ids: list[int] = []
    outlines: list[np.ndarray] = []
    for _ in range(rng.integers(1, MAX_GROUPS + 1)):
        class_id = int(rng.choice(class_ids))
        width, colour = _random_width(scene, class_id, rng), _random_colour(scene.image, rng)
        shade, blur = rng.uniform(-MAX_SHADE, MAX_SHADE), rng.uniform(*BLUR_PX)
        for line in _random_group(len(image), rng):
            visible = visible_outlines(
                np.array([class_id]), band(line, width), np.zeros(1, np.int64), len(image)
            )
            if visible[0]:
                cover = _cover(line, width, blur, len(image))
                _paint(image, cover, cover.lit(colour, shade))
                new_ids += visible[0]
                outlines += visible[1]
    drawn = image.round().clip(0, 255).astype(np.uint8)
    return Scene(drawn, scene.class_ids + new_ids, scene.polygons + outlines)


def draw_bars(
    image: np.ndarray, scene: Scene, class_ids: tuple[int, ...], rng: np.random.Generator
) -> None:
    """Draw up to two straight bars without labels on an RGB image float32 (S, S, 3) in place,
    behind the labelled objects.
    """
    labelled = draw_index_map(scene.polygons, len(image)) > 0
    before = image[labelled]
    for _ in range(rng.integers(0, MAX_BARS + 1)):
        width = _random_width(scene, int(rng.choice(class_ids)), rng) * math.exp(
            rng.uniform(*np.log(BAR_WIDTH_GAIN))
        )
        angle, length = (
            rng.uniform(0, math.pi),
            len(image) * math.exp(rng.uniform(*np.log(BAR_LENGTH))),
        )
        line = catenary(rng.uniform(0, len(image), 2), angle, length, 0.0)
        if rng.random() < SHADOWS:
            cover = _cover(line, width, rng.uniform(*SHADOW_BLUR_PX), len(image))
            _paint(image, cover, image[cover.rows, cover.columns] * rng.uniform(*SHADOW))
            continue
        # The texture comes from another place of the picture.
        elsewhere = np.roll(scene.image, rng.integers(len(image), size=2), axis=(0, 1))
        middle, contrast = cv2.mean(scene.image)[:3], rng.uniform(0, MAX_TEXTURE)
        colour = _random_colour(scene.image, rng)
        shade, blur = rng.uniform(-MAX_SHADE, MAX_SHADE), rng.uniform(*BLUR_PX)
        parts = [(line, width, shade, 1.0)]
        if rng.random() < 0.5:
            share = rng.uniform(*RIM_WIDTH)
            across = np.array([-math.sin(angle), math.cos(angle)]) * width * (1 - share) / 2
            parts.append((line + across, width * share, 0.0, rng.uniform(*RIM_BRIGHTNESS)))
        for part, part_width, part_shade, brightness in parts:
            cover = _cover(part, part_width, blur, len(image))
            solid = colour + (elsewhere[cover.rows, cover.columns] - middle) * contrast
            _paint(image, cover, cover.lit(solid * brightness, part_shade))
    image[labelled] = before


def band(line: np.ndarray, width: float) -> np.ndarray:
    """Return the outline (2 K, 2) of a line (K, 2) of some width."""
    direction = np.gradient(line, axis=0)
    normal = direction[:, ::-1] * (-1, 1) / np.maximum(np.hypot(*direction.T), 1e-9)[:, None]
    return np.concatenate([line + normal * (width / 2), (line - normal * (width / 2))[::-1]])


def _random_width(scene: Scene, class_id: int, rng: np.random.Generator) -> float:
    same = [
        polygon
        for number, polygon in zip(scene.class_ids, scene.polygons, strict=True)
        if number == class_id
    ]
    if not same:
        return math.exp(rng.uniform(*np.log(WIDTH_PX)))
    outline = same[int(rng.integers(len(same)))]
    perimeter = float(np.hypot(*(np.roll(outline, -1, axis=0) - outline).T).sum())
    return max(
        2 * float(areas(outline, np.zeros(1, int))[0]) / perimeter * rng.uniform(*WIDTH_GAIN), 1.0
    )


def _random_colour(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an RGB colour float32 (3,), a grey with a slight tint that differs from the picture's
    mean.
    """
    low, high = GREY
    mean = float(np.mean(cv2.mean(image)[:3]))
    darker, lighter = max(mean - MIN_CONTRAST - low, 0), max(high - mean - MIN_CONTRAST, 0)
    drawn = rng.uniform(0, darker + lighter)
    grey = low + drawn if drawn < darker else high - (darker + lighter - drawn)
    return (grey + rng.normal(0, TINT, 3)).astype(np.float32)


def _random_group(size_px: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Return points (K, 2) of each wire of a group."""
    angle, centre = rng.uniform(0, math.pi), rng.uniform(0, size_px, 2)
    spacing, length = (
        size_px * math.exp(rng.uniform(*np.log(limits))) for limits in (SPACING, LENGTH)
    )
    sag = rng.uniform(-MAX_SAG, MAX_SAG) * rng.random() * length
    lines = []
    for number in range(rng.integers(1, MAX_IN_GROUP + 1)):
        turned = angle + rng.uniform(-MAX_SPREAD, MAX_SPREAD)
        across = np.array([-math.sin(turned), math.cos(turned)])
        lines.append(
            catenary(
                centre + across * number * spacing * rng.uniform(0.8, 1.2), turned, length, sag
            )
        )
    return lines


def catenary(middle: np.ndarray, angle: float, length: float, sag: float) -> np.ndarray:
    """Return points (K, 2) along a catenary of `length` and `sag` pixels around its lowest point.

    `angle`, in radians, is the chord's; a negative sag hangs to the other side. The parameter is
    the parabola's with the same sag, whose error is below a hundredth of the sag up to MAX_SAG.
    """
    x = np.linspace(-length / 2, length / 2, max(int(length / STEP_PX), 2))
    if abs(sag) < 0.5:
        y = np.zeros_like(x)
    else:
        parameter = length**2 / (8 * sag)
        y = parameter * (np.cosh(x / parameter) - 1)
    along, across = (
        np.array([math.cos(angle), math.sin(angle)]),
        np.array([-math.sin(angle), math.cos(angle)]),
    )
    return np.asarray(middle + x[:, None] * along + y[:, None] * across)


@dataclass(frozen=True)
class _Cover:
    """The pixels of a band: int64 (N,) each, how much of each it covers, from 0 to 1, and where
    that is across it, -1 to 1.
    """

    rows: np.ndarray
    columns: np.ndarray
    share: np.ndarray
    across: np.ndarray

    def lit(self, colour: np.ndarray, shade: float) -> np.ndarray:
        """Return colours (N, 3) of a round body of RGB colour (3,) or (N, 3), lighter on one side
        than on the other.
        """
        return np.asarray(colour * (1 + shade * self.across)[:, None])


def _cover(line: np.ndarray, width: float, blur: float, size_px: int) -> _Cover:
    """Return what a band along a line (K, 2) covers of a picture; its
    edges are `blur` pixels wide.
    """
    reach = width / 2 + blur + 1
    rows, columns = np.divmod(
        np.flatnonzero(draw_index_map([band(line, 2 * reach)], size_px) > 0), size_px
    )
    # In coordinates along and across the chord, where the line is a function.
    chord = (line[-1] - line[0]) / np.hypot(*(line[-1] - line[0]))
    turn = np.array([chord, [-chord[1], chord[0]]])
    place, height = turn @ (np.stack([columns, rows]) + 0.5 - line[0][:, None])
    known, heights = turn @ (line - line[0]).T
    slope = np.interp(place, known, np.gradient(heights, known))
    distance = (height - np.interp(place, known, heights)) / np.hypot(1, slope)
    share = np.clip((width / 2 - np.abs(distance)) / blur + 0.5, 0, 1) * (
        (place >= 0) & (place <= known[-1])
    )
    return _Cover(rows, columns, share, np.clip(2 * distance / width, -1, 1))


def _paint(image: np.ndarray, cover: _Cover, colours: np.ndarray) -> None:
    """Blend RGB colours (N, 3) into an image float32 (S, S, 3) in place."""
    old = image[cover.rows, cover.columns]
    image[cover.rows, cover.columns] = old + (colours - old) * cover.share[:, None]
