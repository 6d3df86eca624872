"""Draws a photograph of the sample: a pole with its hardware and wires as plain shapes, and its
annotations.

Points are float arrays (n, 2) of x right, y down, in pixels of the upright photograph; colours are
RGB, 0 to 255.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from yolo_seg_ddp.data.mask_rings import ring_area
from yolo_seg_ddp.data.polygons import clip_outlines

Colour = Sequence[float] | np.ndarray
Points = np.ndarray | Sequence[tuple[float, float]]

# of a photograph without another size; use it as --line-width of parse_labels.py
SAMPLE_LINE_WIDTH_PX = 14.0
LARGE_LINE_WIDTHS_PX = (4.0, 10.0)
_SMALL_SIZES = ((1280, 960), (1280, 720), (960, 1280))
_SMALL_SHARES = (0.70, 0.15, 0.15)
_ARM_HALF, _INSULATOR_HEIGHT, _CAN_HALF, _CAN_HEIGHT = 18.0, 92.0, 84.0, 205.0  # pixels at scale 1
_MIN_WIRE_GAP_PX = 60.0
_MIN_VISIBLE_SHARE = 0.2  # less visible objects are not annotated
_HAND_PX = 0.8  # how far an annotator's points lie from the outline
_STEEL, _DARK = (92, 94, 98), (38, 38, 42)
_GROUNDS = ((111, 130, 65), (162, 146, 95), (158, 151, 141), (129, 102, 75), (63, 88, 42))
_WALLS, _ROOFS = ((226, 214, 190), (184, 92, 74), (236, 232, 226)), ((158, 62, 46), (84, 66, 62))
_POLES, _ARMS = (
    ((104, 76, 54), (118, 92, 70), (132, 116, 102)),
    ((204, 166, 112), (190, 156, 112), (214, 182, 134)),
)
_PORCELAINS = ((120, 50, 30), (138, 62, 36), (226, 226, 222), (104, 164, 142))


class Annotation(NamedTuple):
    """An annotated object: a class of dataset.yaml, points (n, 2), and whether they are an open
    line.
    """

    name: str
    points: np.ndarray
    is_line: bool = False


class Scene(NamedTuple):
    """An upright photograph, RGB uint8 (height, width, 3), and its annotations, which may extend
    beyond the edges.
    """

    image: np.ndarray
    annotations: list[Annotation]


@dataclass(frozen=True)
class Frame:
    """A part's coordinate frame: its origin in the photograph, pixels per unit, and clockwise
    rotation.
    """

    x_px: float
    y_px: float
    scale: float = 1.0
    angle_deg: float = 0.0

    def place(self, points: Points) -> np.ndarray:
        """Convert local points (n, 2) to pixels of the photograph."""
        cosine = math.cos(math.radians(self.angle_deg)) * self.scale
        sine = math.sin(math.radians(self.angle_deg)) * self.scale
        turned = np.asarray(points, dtype=np.float64) @ np.array([[cosine, sine], [-sine, cosine]])
        return turned + np.array([self.x_px, self.y_px])

    def child(self, x: float, y: float, angle_deg: float = 0.0) -> Frame:
        """Return a frame with its origin at the local point (x, y),
        rotated relative to this one.
        """
        (origin,) = self.place([(x, y)])
        return Frame(origin[0], origin[1], self.scale, self.angle_deg + angle_deg)


def draw_scene(
    seed: int, index: int, long_side_px: int | None = None, wire_width_px: float | None = None
) -> Scene:
    """Draw photograph `index`: 1280 pixels long with wires of 14 pixels, or 3:2 of the given size
    with wires of 4 to 10.

    The pixels of a part do not depend on the photograph's size. Depends only on the arguments.
    """
    rng = np.random.default_rng((seed, index))
    width_px, height_px = _SMALL_SIZES[rng.choice(len(_SMALL_SIZES), p=_SMALL_SHARES)]
    if long_side_px is not None:
        sides = long_side_px, round(long_side_px * 2 / 3)
        width_px, height_px = sides if width_px > height_px else sides[::-1]
    drawing = Drawing(rng, width_px, height_px)
    drawing.paint_background()
    small = min(1.0, width_px / 1150, height_px / 850)
    scale = float(np.clip(math.exp(rng.normal(0, 0.2)), 0.7, 1.4)) * (
        small if long_side_px is None else 1.15
    )
    place = rng.uniform((0.38, 0.17), (0.62, 0.27)) * (width_px, height_px)
    pole = Frame(place[0], place[1], scale, float(np.clip(rng.normal(0, 2.5), -6, 6)))
    if rng.random() < 0.2:
        side = math.copysign(width_px * rng.uniform(0.26, 0.36), width_px / 2 - pole.x_px)
        drawing.paint_pole(
            Frame(pole.x_px + side, pole.y_px + rng.uniform(60, 200), scale * 0.75, pole.angle_deg)
        )
    bounds = LARGE_LINE_WIDTHS_PX if long_side_px else (SAMPLE_LINE_WIDTH_PX,) * 2
    drawn_px = rng.uniform(*bounds, 12)  # also if not used: the rest must not depend on the width
    drawing.paint_line(pole, drawn_px.tolist() if wire_width_px is None else [wire_width_px] * 12)
    drawing.expose()
    return Scene(
        drawing.image,
        [seen for drawn in drawing.annotations for seen in drawing.outline_by_hand(drawn)],
    )


class Drawing:
    """A photograph, painted back to front, and the outlines of what was painted."""

    def __init__(self, rng: np.random.Generator, width_px: int, height_px: int) -> None:
        self.rng, self.size_px = rng, (width_px, height_px)
        self.image = np.zeros((height_px, width_px, 3), np.uint8)
        self.annotations: list[Annotation] = []
        self.sunny = float(rng.choice([0.28, 0.72]))  # the brightest place across a cylinder

    def paint_background(self) -> None:
        """Paint sky, ground with fields, and houses."""
        rng, (width_px, height_px) = self.rng, self.size_px
        horizon_px = round(height_px * rng.uniform(0.3, 0.62)) if rng.random() < 0.6 else 0
        rows = np.linspace(0, 1, max(horizon_px, 1))[:horizon_px, None, None]
        self.image[:horizon_px] = np.rint(
            self.pick([(120, 160, 205)]) * (1 - rows) + np.array((186, 204, 222)) * rows
        )
        self.image[horizon_px:] = np.rint(self.pick(_GROUNDS))
        for _ in range(int(rng.integers(2, 6))):  # fields, roads
            top, left, right = rng.uniform((horizon_px, 0, 0), (height_px, width_px, width_px))
            low, shift = top + rng.uniform(0.05, 0.3) * height_px, rng.uniform(-0.4, 0.4) * width_px
            self.fill(
                [(left, top), (right, top), (right + shift, low), (left + shift, low)],
                self.pick(_GROUNDS),
            )
        coarse = rng.integers(0, 60, (height_px // 24 + 2, width_px // 24 + 2), np.uint8)
        cloth = cv2.resize(coarse, (width_px, height_px), interpolation=cv2.INTER_LINEAR)[..., None]
        ground = self.image[horizon_px:]
        ground[:] = np.clip(ground.astype(np.int16) + cloth[horizon_px:] - 30, 0, 255)
        for _ in range(int(rng.integers(0, 4))):
            self._paint_house(
                Frame(
                    rng.uniform(0, width_px),
                    rng.uniform(horizon_px + 80, height_px),
                    rng.uniform(0.8, 1.6),
                )
            )

    def _paint_house(self, frame: Frame) -> None:
        half, height, roof = self.rng.uniform((70, 70, 40), (150, 130, 80))
        wall = [(-half, 0), (half, 0), (half, -height), (-half, -height)]
        gable = [
            (half + 14, -height),
            (half * 0.7, -height - roof),
            (-half * 0.7, -height - roof),
            (-half - 14, -height),
        ]
        self.fill(frame.place(wall), self.pick(_WALLS))
        self.fill(frame.place(gable), self.pick(_ROOFS))
        for x in (-0.6, 0.1):
            panes = [
                (half * x, -30),
                (half * (x + 0.4), -30),
                (half * (x + 0.4), -height * 0.75),
                (half * x, -height * 0.75),
            ]
            self.fill(frame.place(panes), (62, 78, 96))
        self.add("background_structure", frame.place([*wall[:3], *gable, wall[3]]))

    def paint_pole(self, frame: Frame) -> None:
        """Paint a pole from its top at the origin to below the photograph.

        Its outline begins at the top, counterclockwise.
        """
        length = (self.size_px[1] - frame.y_px + 120) / frame.scale
        sides = np.array([(30, 0), (30 * (1 + length / 6000), length)])
        self.add("pole", self.cylinder(frame, sides, self.pick(_POLES)))

    def paint_line(self, pole: Frame, widths_px: list[float]) -> None:
        """Paint a pole with cables, arms, hardware, insulators and conductors."""
        rng, widths = self.rng, iter(widths_px)
        spacing, layout = rng.uniform(165, 205), rng.integers(3)
        places = [
            [(-1.5, 0), (0.4, 0), (1.5, 0)],
            [(-1.4, 0), (1.4, 0)],
            [(-1.3, 0), (1.3, 0), (-1.3, 1), (1.3, 1)],
        ]
        # The arm is tilted so far that wires of neighbouring insulators do not overlap.
        needed_deg = math.degrees(math.asin(min(0.42, _MIN_WIRE_GAP_PX / (spacing * pole.scale))))
        tilt_deg = max(rng.uniform(9, 17), needed_deg) * float(rng.choice([-1, 1]))
        half = max(abs(x) for x, _ in places[layout]) * spacing + rng.uniform(26, 60)
        arms = [pole.child(0, level, tilt_deg) for level in ((70,), (190,), (70, 300))[layout]]
        feet = [
            arms[level].child(x * spacing, -_ARM_HALF, -tilt_deg) for x, level in places[layout]
        ]
        feet += [pole.child(0, 2)] if layout == 1 else []

        self.paint_pole(pole)
        level, slope_deg, sag = rng.uniform((500, -3, 0.06), (580, 3, 0.13))
        for number in range(int(rng.integers(0, 4))):
            clamp = pole.child(0, level + number * rng.uniform(82, 110))
            path = self.wire_path(
                np.array([clamp.x_px, clamp.y_px]), clamp.x_px, slope_deg + pole.angle_deg, sag, 0
            )
            self.paint_wire("other_wire", path, _DARK, next(widths))
        for side in rng.permutation([-1, 1])[: rng.choice(3, p=(0.4, 0.5, 0.1))]:
            self._paint_transformer(pole.child(side * rng.uniform(120, 132), rng.uniform(300, 380)))
        for arm in arms:
            self._paint_arm(arm, half)
        for x in rng.permutation([-0.82, -0.42, 0.42, 0.82])[
            : rng.choice(4, p=(0.4, 0.2, 0.2, 0.2))
        ]:
            self._paint_cutout(
                arms[-1].child(float(x) * half, _ARM_HALF + 4, -tilt_deg + rng.uniform(-8, 8)),
                1 if x > 0 else -1,
            )
        porcelain, metal = (
            self.pick(_PORCELAINS),
            self.pick([(196, 200, 204), (118, 122, 128)], 0.04),
        )
        for foot in feet:
            self._paint_insulator(foot, porcelain)
        slope_deg, sag = rng.uniform(-3, 3) + pole.angle_deg * 0.5, rng.uniform(0.01, 0.05)
        # the line ends at this pole
        only_side = int(rng.choice([-1, 1])) if rng.random() < 0.12 else 0
        for foot in feet:
            groove = foot.place([(0, 4 - _INSULATOR_HEIGHT)])[0]
            path = self.wire_path(groove, pole.x_px, slope_deg, sag, only_side)
            self.paint_wire("conductor", path, metal, next(widths))

    def _paint_arm(self, frame: Frame, half: float) -> None:
        for foot in (-half * 0.55, half * 0.55):
            self.segment(
                frame.place([(foot, _ARM_HALF - 4), (0, _ARM_HALF + 130)]), 6 * frame.scale, _STEEL
            )
        colour = self.pick(_ARMS)
        outline = [(-half, -_ARM_HALF), (half, -_ARM_HALF), (half, _ARM_HALF), (-half, _ARM_HALF)]
        self.fill(frame.place(outline), colour * 1.15)
        self.fill(frame.place([(-half, 0), (half, 0), *outline[2:]]), colour * 0.8)
        self.add("crossarm", frame.place(outline))

    def _paint_transformer(self, frame: Frame) -> None:
        height = _CAN_HEIGHT * self.rng.uniform(0.92, 1.12)
        for x in (-0.42, 0.42):
            bushing = np.array([(14, 0), (14, -44), (7, -48)])
            self.cylinder(frame.child(_CAN_HALF * x, -12), bushing, np.array((122, 62, 40)))
        can = np.array(
            [
                (_CAN_HALF * 0.8, -14),
                (_CAN_HALF, 0),
                (_CAN_HALF, height),
                (_CAN_HALF * 0.6, height + 18),
            ]
        )
        outline = self.cylinder(frame, can, self.pick([(142, 152, 162)], 0.12))
        self.fill(frame.place([(-16, 92), (16, 92), (16, 122), (-16, 122)]), (214, 200, 96))
        self.add(
            "transformers",
            np.concatenate([outline, frame.place([(49, -60), (21, -60), (-21, -60), (-49, -60)])]),
        )

    def _paint_cutout(self, frame: Frame, side: int) -> None:
        body = np.stack(
            [np.where(np.arange(13) % 2 == 0, 12.0, 18.0), np.linspace(0, 112, 13)], axis=1
        )
        outline = self.cylinder(frame, body, self.pick([(196, 204, 212)], 0.05))
        end = (side * self.rng.uniform(42, 54), self.rng.uniform(120, 134))
        tube = frame.place([(side * 22, 12), end])
        self.segment(np.concatenate([frame.place([(0, 12)]), tube[:1]]), 15 * frame.scale, _DARK)
        self.segment(np.concatenate([frame.place([(0, 108)]), tube[1:]]), 15 * frame.scale, _DARK)
        self.segment(tube, 18 * frame.scale, (240, 236, 226))
        corners = np.concatenate([outline, tube + 9 * frame.scale, tube - 9 * frame.scale])
        self.add("cutouts", cv2.convexHull(corners.astype(np.float32))[:, 0].astype(np.float64))

    def _paint_insulator(self, frame: Frame, colour: np.ndarray) -> None:
        sheds = [
            (radius * part, -y)
            for radius, y in ((36, 12), (31, 36), (26, 60))
            for part in (1.0, 0.6)
        ]
        sides = np.array(
            [(x, y - 12 * (number % 2)) for number, (x, y) in enumerate(sheds)]
            + [(17, -78), (17, -92)]
        )
        self.segment(frame.place([(0, 8), (0, -12)]), 13 * frame.scale, _STEEL)
        self.add("insulator", self.cylinder(frame, sides, colour))

    def wire_path(
        self, support: np.ndarray, pole_x: float, slope_deg: float, sag: float, only_side: int
    ) -> np.ndarray:
        """Return a wire (n, 2) from edge to edge over its support, or only to the left (-1) or
        right (1) of the pole.

        It sags on both sides of the pole as a parabola, an approximation of a catenary: all wires
        of a line are parallel. `sag` is the drop at a distance of the photograph's width from the
        pole, as a share of that width.
        """
        width_px, (x, y) = self.size_px[0], support.tolist()
        across = np.linspace(x if only_side > 0 else -12, x if only_side < 0 else width_px + 12, 48)
        away = np.abs(across - pole_x) / width_px
        fall = sag * width_px * (2 * away - away**2)
        return np.stack(
            [across, y + math.tan(math.radians(slope_deg)) * (across - x) + fall], axis=1
        )

    def paint_wire(self, name: str, path: np.ndarray, colour: Colour, width_px: float) -> None:
        """Paint a wire of exact width along a path (n, 2) of ascending x, lit from above.

        Each pixel shows the share of it that the wire covers: cv2's lines are wider by 0.5 to 2.5
        pixels.
        """
        columns = np.arange(max(0, round(path[0, 0])), min(self.size_px[0], round(path[-1, 0])))
        middle = np.interp(columns + 0.5, path[:, 0], path[:, 1])
        steps = np.diff(path[:, 1]) / np.diff(path[:, 0])
        cosine = 1 / np.sqrt(
            1
            + steps[np.clip(np.searchsorted(path[:, 0], columns + 0.5) - 1, 0, len(steps) - 1)] ** 2
        )
        reach = math.ceil((width_px / 2 + 1) / cosine.min(initial=1.0)) + 1
        rows = np.floor(middle).astype(int)[:, None] + np.arange(-reach, reach + 1)
        distance = (rows + 0.5 - middle[:, None]) * cosine[:, None]
        cover = np.clip(width_px / 2 + 0.5 - np.abs(distance), 0, 1)
        cover[(rows < 0) | (rows >= self.size_px[1])] = 0
        used = cover > 0
        places, share = (
            (rows[used], np.broadcast_to(columns[:, None], rows.shape)[used]),
            cover[used][:, None],
        )
        light = (1.05 - 0.9 * distance / width_px)[used][:, None]
        shown = np.clip(np.asarray(colour) * light, 0, 255)
        self.image[places] = np.rint(self.image[places] * (1 - share) + shown * share).astype(
            np.uint8
        )
        self.add(name, path, is_line=True)

    def expose(self) -> None:
        """Add the grain of a camera and the light of the day."""
        grain = self.rng.integers(-7, 8, self.image.shape[:2], np.int8)
        light = int(self.rng.integers(200, 290))  # of 256
        for channel in range(3):
            plane = self.image[..., channel]
            plane[:] = np.clip((plane.astype(np.int32) * light >> 8) + grain, 0, 255)

    def add(self, name: str, points: np.ndarray, is_line: bool = False) -> None:
        """Note the outline of what was painted."""
        self.annotations.append(Annotation(name, points, is_line))

    def pick(self, colours: Sequence[Colour], amount: float = 0.1) -> np.ndarray:
        """Choose a colour (3,) and change its brightness by up to `amount`."""
        return np.asarray(colours[int(self.rng.integers(len(colours)))]) * (
            1 + self.rng.uniform(-amount, amount)
        )

    def fill(self, outline: Points, colour: Colour) -> None:
        """Fill an outline."""
        # cv2: 1/16 pixel
        corners = np.rint((np.clip(outline, -16_000, 16_000) - 0.5) * 16).astype(np.int32)
        cv2.fillPoly(self.image, [corners], np.clip(colour, 0, 255).tolist(), cv2.LINE_AA, 4)

    def segment(self, ends: np.ndarray, width_px: float, colour: Colour) -> None:
        """Paint a straight bar between two points (2, 2)."""
        along = ends[1] - ends[0]
        aside = along[::-1] * (-1, 1) / np.hypot(*along) * width_px / 2
        self.fill(
            np.array([ends[0] - aside, ends[1] - aside, ends[1] + aside, ends[0] + aside]), colour
        )

    def cylinder(self, frame: Frame, side: np.ndarray, colour: np.ndarray) -> np.ndarray:
        """Fill a body of revolution, whose right side (n, 2) is given, with light from the sun;
        return its outline (2n, 2).
        """
        left, right = frame.place(side * (-1, 1)), frame.place(side)
        for start in np.arange(9) / 9:  # each strip reaches to the far side, so that no seam shows
            light = 0.45 + 0.7 * max(0.0, math.cos((start - self.sunny) * math.pi * 0.85))
            self.fill(np.concatenate([left + (right - left) * start, right[::-1]]), colour * light)
        return np.concatenate([left, right[::-1]])

    def outline_by_hand(self, drawn: Annotation) -> list[Annotation]:
        """Simulate an annotator: small errors, nothing that is barely visible, of a wire what lies
        in the photograph.
        """
        if drawn.is_line:
            x = np.linspace(drawn.points[0, 0], drawn.points[-1, 0], 240)
            y = np.interp(x, *drawn.points.T)
            shown = np.flatnonzero((y >= 0) & (y < self.size_px[1]))
            if len(shown) < 12:
                return []
            picks = np.linspace(shown[0], shown[-1], 12).round().astype(int)
            path = np.stack([x[picks], y[picks]], axis=1)
            return [Annotation(drawn.name, path + self.rng.normal(0, _HAND_PX, path.shape), True)]
        points = drawn.points + self.rng.normal(0, _HAND_PX, drawn.points.shape)
        shown = clip(points, self.size_px)
        is_shown = len(shown) >= 3 and ring_area(shown) > _MIN_VISIBLE_SHARE * ring_area(points)
        return [Annotation(drawn.name, points)] if is_shown else []


def clip(outline: np.ndarray, size_px: tuple[int, int], margin_px: float = 0.0) -> np.ndarray:
    """Clip an outline (n, 2) to the photograph's edges moved outwards by the margin; may return an
    empty array (0, 2).
    """
    sides = (side + 2 * margin_px for side in size_px)
    return (
        clip_outlines(outline + margin_px, np.zeros(len(outline), np.int64), *sides)[0] - margin_px
    )
