"""Checks the lines of a label file: unreadable, outside, crossing themselves, repeated, boxes,
tiny, cut by the edge.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import shapely

from yolo_seg_ddp.data.labels import OUTSIDE_TOLERANCE, LabelError, label_rows, parse_yolo_row
from yolo_seg_ddp.data.polygons import areas, join_outlines
from yolo_seg_ddp.data.target_masks import MASK_STRIDE
from yolo_seg_ddp.extras.check.findings import Finding, Mark, View
from yolo_seg_ddp.prepare.parsing.outlines import MAX_CROSSINGS, estimated_crossings

# at the trained size; a label file's six decimals give less for points on a line
MIN_AREA_PX2 = 0.05
# of an outline that crosses itself; less comes from rounded coordinates
WRONG_AREA_PX2, WRONG_SHARE = 1.0, 0.01
EDGE_PX = 0.5  # at the trained size: points nearer to the edge lie on it
SAME_POINT = 1e-4  # share of the picture
SIDES = ("left", "top", "right", "bottom")


@dataclass(frozen=True)
class Row:
    """A readable line of a label file; polygon float32 (V, 2), x and y in 0..1."""

    line: int
    class_id: int
    polygon: np.ndarray
    is_box: bool


@dataclass(frozen=True)
class Labels:
    """A photograph's label file and where it stands.

    `size` is the photograph's (width, height) at the trained size.
    """

    split: str
    photo: Path
    file: Path
    names: tuple[str, ...]
    size: tuple[float, float]

    def finding(
        self, kind: str, line: int | None, text: str, row: Row | None = None, weight: float = 0.0
    ) -> Finding:
        """Return a finding about a line, with a picture of its outline."""
        views = () if row is None else (View(self.photo, self.photo.name, (Mark(row.polygon),)),)
        return Finding(kind, self.split, self.file, text, line, weight, views=views)


def read_rows(labels: Labels) -> tuple[list[Row], list[Finding]]:
    """Read a label file; return its readable rows and what is wrong with the others."""
    rows: list[Row] = []
    findings: list[Finding] = []
    try:
        for line, fields in label_rows(labels.file):
            try:
                class_id, polygon = parse_yolo_row(fields, len(labels.names))
                rows.append(Row(line, class_id, polygon, is_box=len(fields) == 5))
            except ValueError as error:
                findings.append(labels.finding(_kind_of_unreadable(fields), line, str(error)))
    except LabelError as error:
        findings.append(
            labels.finding("unreadable_label", None, str(error).removeprefix(f"{labels.file}: "))
        )
    return rows, findings


def _kind_of_unreadable(fields: Sequence[str]) -> str:
    try:
        coordinates = np.array(fields[1:], np.float64)
    except ValueError:
        return "unreadable_label"
    if len(coordinates) < 4:
        return "no_area"
    is_outside = (coordinates < -OUTSIDE_TOLERANCE) | (coordinates > 1 + OUTSIDE_TOLERANCE)
    return "outside" if is_outside.any() and not len(coordinates) % 2 else "unreadable_label"


def check_rows(labels: Labels, rows: Sequence[Row]) -> list[Finding]:
    """Return findings about the outlines of a photograph."""
    if not rows:
        return []
    outlines = [row.polygon.astype(np.float64) * labels.size for row in rows]
    findings = _repeated(labels, rows)
    for row, outline, area in zip(
        rows, outlines, areas(*join_outlines(outlines)).tolist(), strict=True
    ):
        name = labels.names[row.class_id]
        if row.is_box:
            findings.append(
                labels.finding("box_row", row.line, f"{name} is a box, not an outline", row)
            )
        num_points = len(np.unique(row.polygon, axis=0))
        crosses = num_points >= 4 and crosses_itself(outline, area)
        if crosses:
            findings.append(
                labels.finding("crosses_itself", row.line, f"{name} crosses itself", row)
            )
        elif num_points < 3 or area < MIN_AREA_PX2:
            text = (
                f"{name} has {num_points} different points"
                if num_points < 3
                else f"{name} has no area"
            )
            findings.append(labels.finding("no_area", row.line, text, row))
        elif area < MASK_STRIDE**2:
            text = (
                f"{name} covers {area:.1f} pixels at the trained size; a pixel of the mask covers "
                f"{MASK_STRIDE**2}"
            )
            findings.append(labels.finding("tiny", row.line, text, row, -area))
        if not row.is_box and not crosses and _is_rectangle(row.polygon):
            findings.append(
                labels.finding("rectangle", row.line, f"{name} is an upright rectangle", row)
            )
        sides, share = edge_contact(outline, labels.size)
        if sides:
            text = f"{name} is cut at the {' and '.join(sides)} edge, {share:.0%} of its outline"
            findings.append(labels.finding("touches_edge", row.line, text, row, share))
    return findings


def crosses_itself(outline: np.ndarray, area: float) -> bool:
    """Return whether an outline (V, 2) in pixels crosses itself; `area` is its area by winding
    number.

    If it does, this area differs from that by the even-odd rule, which fills masks. Parts that are
    joined by bridges of zero width, as parse_labels.py writes them, have the same area by both.
    """
    if shapely.is_valid(shapely.Polygon(outline)):
        return False
    # its repair could take minutes
    if estimated_crossings(np.concatenate([outline, outline[:1]])) > MAX_CROSSINGS:
        return True
    even_odd = shapely.make_valid(shapely.Polygon(outline)).area
    return abs(even_odd - area) > max(WRONG_AREA_PX2, WRONG_SHARE * even_odd)


def edge_contact(outline: np.ndarray, size: tuple[float, float]) -> tuple[list[str], float]:
    """Return the sides of a picture of `size` along which an outline runs, and the share of its
    length that does.
    """
    steps = np.hypot(*(np.roll(outline, -1, axis=0) - outline).T)
    sides = []
    on_any = np.zeros(len(outline), bool)
    limits = itertools.product((0.0, 1.0), (0, 1))  # left, top, right, bottom
    for name, (end, axis) in zip(SIDES, limits, strict=True):
        is_near = np.abs(outline[:, axis] - end * size[axis]) < EDGE_PX
        along = is_near & np.roll(is_near, -1) & (steps > EDGE_PX)
        if along.any():
            sides.append(name)
            on_any |= along
    return sides, float(steps[on_any].sum() / max(steps.sum(), 1e-9))


def _is_rectangle(polygon: np.ndarray) -> bool:
    corners = np.unique(polygon, axis=0)
    return len(corners) == 4 and all(len(np.unique(corners[:, axis])) == 2 for axis in (0, 1))


def _repeated(labels: Labels, rows: Sequence[Row]) -> list[Finding]:
    """Return findings about rows with the same points as an earlier row; the first point and the
    direction may differ.
    """
    findings = []
    first: dict[bytes, Row] = {}
    for row in rows:
        key = np.unique(np.rint(row.polygon / SAME_POINT).astype(np.int32), axis=0).tobytes()
        earlier = first.setdefault(key, row)
        if earlier is not row:
            name, other = labels.names[row.class_id], labels.names[earlier.class_id]
            text = f"{name} repeats line {earlier.line}" + (
                "" if name == other else f", which is {other}"
            )
            findings.append(labels.finding("duplicate_line", row.line, text, row))
    return findings
