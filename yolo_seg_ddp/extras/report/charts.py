"""The report's charts as SVG: curves of all classes, reliability diagram, confusion matrix.

CSS classes (report.css) set the colours that depend on the colour scheme. report.js shows the
values under the pointer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from yolo_seg_ddp.pages.figures import MAX_CLASSES_SHOWN
from yolo_seg_ddp.pages.markup import Markup, element, joined
from yolo_seg_ddp.utils.text import PALETTE, class_color, counted

WIDTH, HEIGHT = 460, 310  # of a chart, in SVG units
LEFT, TOP, RIGHT, BOTTOM = 46, 12, 448, 268  # of the axes; report.js has the same numbers
POINTS = 101  # per curve: steps of 0.01, as in 101-point AP
_DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Line:
    """A curve over 0 to 1: `values` (1000,) in 0 to 1. class_id None: the mean. model: 0 for A, 1
    for B.
    """

    name: str
    values: np.ndarray
    class_id: int | None
    model: int = 0


def class_style(class_id: int, num_classes: int) -> str:
    """Return the CSS for the colour and dashes of a class's line; "" with more than
    MAX_CLASSES_SHOWN classes.
    """
    if num_classes > MAX_CLASSES_SHOWN:
        return ""
    red, green, blue = class_color(class_id)
    dashes = _DASHES[class_id // len(PALETTE) % len(_DASHES)]
    return f"stroke:rgb({red} {green} {blue})" + (f";stroke-dasharray:{dashes}" if dashes else "")


def curve_chart(
    title: str,
    x_name: str,
    y_name: str,
    lines: Sequence[Line],
    num_classes: int,
    mark: float | None = None,
) -> Markup:
    """Draw curves, with the means on top and a vertical line at x = `mark`."""
    drawn = [
        _polyline(line, num_classes)
        for line in sorted(lines, key=lambda line: line.class_id is None)
    ]
    if mark is not None:
        x = f"{_x(mark):.1f}"
        drawn.append(element("line", x1=x, x2=x, y1=TOP, y2=BOTTOM, class_="mark"))
    cursor = element(
        "line", x1=LEFT, x2=LEFT, y1=TOP, y2=BOTTOM, class_="cursor", visibility="hidden"
    )
    summary = ", ".join(
        f"{line.name}: highest {line.values.max():.3f} at "
        f"{int(line.values.argmax()) / (len(line.values) - 1):.2f}"
        for line in lines
        if line.class_id is None
    )
    return _chart(title, x_name, y_name, [*drawn, cursor], summary, class_="curves")


def reliability_chart(title: str, calibration: Mapping[str, Any]) -> Markup:
    """Draw precision over confidence in bins, the line of perfect calibration, and the number of
    detections per bin.
    """
    bins = [row for row in calibration["bins"] if row["num_detections"]]
    most = max((row["num_detections"] for row in bins), default=0)
    parts = []
    for row in bins:
        left = _x(row["low"]) + 1
        width = _x(row["high"]) - _x(row["low"]) - 2
        top = _y(row["precision"])
        tip = (
            f"confidence {row['confidence']:.3f}, precision {row['precision']:.3f}, "
            f"{counted(row['num_detections'], 'detection')}"
        )
        count_height = 30 * row["num_detections"] / most
        place = {"x": f"{left:.1f}", "width": f"{width:.1f}"}
        parts += [
            element(
                "rect",
                **place,
                y=f"{top:.1f}",
                height=f"{BOTTOM - top:.1f}",
                class_="bar",
                data_tip=tip,
            ),
            element(
                "rect",
                **place,
                y=f"{BOTTOM - count_height:.1f}",
                height=f"{count_height:.1f}",
                class_="count",
            ),
            element(
                "circle", cx=f"{_x(row['confidence']):.1f}", cy=f"{top:.1f}", r=3.5, class_="dot"
            ),
        ]
    parts.append(element("line", x1=LEFT, y1=BOTTOM, x2=RIGHT, y2=TOP, class_="ideal"))
    words = ", ".join(
        f"{row['low']:.2f} to {row['high']:.1f}: {row['precision']:.2f}" for row in bins
    )
    return _chart(title, "confidence", "precision", parts, words, class_="reliability")


def confusion_chart(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> Markup:
    """Draw a confusion matrix (nc + 1, nc + 1) normalised by column, with numbers up to
    MAX_CLASSES_SHOWN classes.
    """
    counts = np.asarray(matrix, np.int64)
    totals = counts.sum(axis=0)
    is_large = len(names) > MAX_CLASSES_SHOWN
    cell, size = (15, 11) if is_large else (48, 13)
    longest = max(map(len, [*names, "background"]))
    left = min(190, 16 + round(longest * size * 0.58))
    top = left if is_large else round(left * 0.75)
    parts = []
    rows, columns = [*names, "missed"], [*names, "background"]
    for position, (row_name, column_name) in enumerate(zip(rows, columns, strict=True)):
        middle = (position + 0.5) * cell
        turned = f"rotate({-90 if is_large else -45} {left + middle:.1f} {top - 6})"
        fits = round(left / size / 0.58) - 1
        parts += [
            element(
                "text",
                _cut(row_name, fits),
                x=left - 6,
                y=f"{top + middle + size * 0.35:.1f}",
                class_="row",
            ),
            element(
                "text",
                _cut(column_name, fits),
                x=f"{left + middle:.1f}",
                y=top - 6,
                transform=turned,
            ),
        ]
    side = cell * len(counts)
    parts.append(element("rect", x=left, y=top, width=side, height=side, class_="empty"))
    for row, column in zip(*np.nonzero(counts), strict=True):
        share = counts[row, column] / totals[column]
        x, y = left + column * cell, top + row * cell
        kind = "hit" if row == column else "error"
        opacity = f"{0.08 + 0.92 * share:.2f}"
        box: dict[str, Any] = {
            "x": int(x),
            "y": int(y),
            "width": cell - 1,
            "height": cell - 1,
            "fill_opacity": opacity,
        }
        parts.append(
            element(
                "rect",
                **box,
                class_=kind,
                data_r=int(row),
                data_c=int(column),
                data_n=int(counts[row, column]),
            )
        )
        if not is_large:
            ink = " on" if share > 0.5 else ""
            middle = int(x) + cell // 2
            parts += [
                element(
                    "text", f"{100 * share:.0f} %", x=middle, y=int(y) + 22, class_=f"cell{ink}"
                ),
                element(
                    "text",
                    str(counts[row, column]),
                    x=middle,
                    y=int(y) + 37,
                    class_=f"cell small{ink}",
                ),
            ]
    width = left + side + (8 if is_large else round(left * 0.5))
    height = top + side + 8
    label = "Confusion matrix; the table below lists its largest off-diagonal entries"
    view = {"viewBox": f"0 0 {width} {height}", "role": "img", "aria_label": label}
    style = f"width:{width}px;min-width:{min(width, 1200) if is_large else min(width, 560)}px"
    return element("svg", *parts, class_="confusion", style=f"{style};font-size:{size}px", **view)


def _polyline(line: Line, num_classes: int) -> Markup:
    sampled = line.values[np.linspace(0, len(line.values) - 1, POINTS).round().astype(int)]
    points = Markup(
        " ".join(f"{_x(i / (POINTS - 1)):.5g},{_y(value):.1f}" for i, value in enumerate(sampled))
    )
    if line.class_id is None:
        return element("polyline", points=points, class_=f"mean m{line.model}", data_name=line.name)
    style = class_style(line.class_id, num_classes) or None
    kind = f"class m{line.model}"
    return element(
        "polyline",
        points=points,
        class_=kind,
        style=style,
        data_class=line.class_id,
        data_name=line.name,
    )


def _chart(
    title: str, x_name: str, y_name: str, parts: Sequence[str], summary: str, *, class_: str
) -> Markup:
    ticks = []
    for step in range(6):
        value = step / 5
        x, y = f"{_x(value):.1f}", f"{_y(value):.1f}"
        ticks += [
            element("line", x1=x, x2=x, y1=TOP, y2=BOTTOM, class_="grid"),
            element("line", x1=LEFT, x2=RIGHT, y1=y, y2=y, class_="grid"),
            element("text", f"{value:.1f}", x=x, y=BOTTOM + 16, class_="tick"),
            element(
                "text", f"{value:.1f}", x=LEFT - 6, y=f"{_y(value) + 4:.1f}", class_="tick side"
            ),
        ]
    middle = (TOP + BOTTOM) / 2
    names = [
        element("text", x_name, x=(LEFT + RIGHT) / 2, y=HEIGHT - 8, class_="axis"),
        element(
            "text", y_name, x=13, y=middle, class_="axis", transform=f"rotate(-90 13 {middle})"
        ),
    ]
    frame = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "role": "img", "aria_label": f"{title}. {summary}"}
    axes = {"data_x": x_name, "data_y": y_name}
    svg = element("svg", *ticks, *parts, *names, class_=class_, **frame, **axes)
    return element("figure", element("figcaption", title), svg)


def _x(value: float) -> float:
    return LEFT + value * (RIGHT - LEFT)


def _y(value: float) -> float:
    return BOTTOM - value * (BOTTOM - TOP)


def _cut(text: str, most: int) -> Markup:
    return joined(text if len(text) <= most else text[: max(most - 1, 1)] + "…")
