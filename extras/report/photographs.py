"""photographs.html: the worst photographs at full size, to zoom into, with outlines of labels and predictions over them.

The page and its folder of pictures, `photographs/`, lie beside report.html. It loads nothing else and runs only its own script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

from utils.common.files import write_bytes_atomic, write_text_atomic
from utils.common.text import contrast_color, counted
from utils.pages.markup import Markup, document, element
from utils.predict.regions import Region

PAGE, FOLDER = "photographs.html", "photographs"
MAX_PHOTOS = 6
MIN_LONG_SIDE_PX = 1281  # smaller ones are shown large enough in report.html
_SIMPLIFY_PX = 0.75


@dataclass(frozen=True)
class Shape:
    """An object's outlines in pixels of the photograph, each (V, 2), its class, colour, and the kind of error or ""."""

    outlines: list[np.ndarray]
    name: str
    color: tuple[int, int, int]
    error: str
    score: float | None = None  # of a prediction


@dataclass(frozen=True)
class FullView:
    """A photograph at full size: its name, width and height, JPEG bytes, and what is drawn over it."""

    file: str
    size: tuple[int, int]
    jpeg: bytes
    truth: list[Shape]
    predictions: list[Shape]


def region_outlines(region: Region) -> list[np.ndarray]:
    """Return a mask's outlines, holes included, in pixels of the photograph: float64 (V, 2) each."""
    contours, _ = cv2.findContours(region.mask.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    simple = [cv2.approxPolyDP(contour, _SIMPLIFY_PX, True)[:, 0] for contour in contours]
    return [part + np.array([region.left + 0.5, region.top + 0.5]) for part in simple]


def write_photographs(folder: Path, views: Sequence[FullView]) -> None:
    """Write the page and its pictures beside report.html, and remove those of an earlier evaluation."""
    pictures = folder / FOLDER
    for old in [*pictures.glob("[0-9].jpg"), folder / PAGE]:
        old.unlink(missing_ok=True)
    if not views:
        return
    pictures.mkdir(exist_ok=True)
    for number, view in enumerate(views):
        write_bytes_atomic(pictures / f"{number}.jpg", view.jpeg)
    write_text_atomic(folder / PAGE, build_photographs(views))


def build_photographs(views: Sequence[FullView]) -> str:
    """Return the page."""
    # A confused object has a label and a prediction, and is one error.
    shapes = ([*view.truth, *(one for one in view.predictions if one.error == "false")] for view in views)
    numbers = [counted(sum(one.error != "" for one in found), "error") for found in shapes]
    names = [element("option", f"{view.file}: {numbers[at]}", value=at) for at, view in enumerate(views)]
    toggles = [
        element(
            "label",
            element("input", type="checkbox", id=f"show-{name}", checked=True),
            label,
            title=f"show them or not: {key}",
        )
        for name, label, key in (("truth", "Labels (dashed)", "t"), ("predictions", "Predictions", "p"))
    ]
    buttons = [
        element("button", label, type="button", id=name, title=title)
        for name, label, title in (
            ("zoom-in", "+", "enlarge: + or the mouse wheel"),
            ("zoom-out", "−", "reduce: − or the mouse wheel"),
            ("fit", "Whole", "whole photograph: 0"),
            ("actual", "1:1", "one pixel of the photograph on one pixel of the screen: 1"),
            ("next-error", "Next error", "show the next error: e"),
        )
    ]
    return document(
        "Photographs at full size",
        Path(__file__),
        "img-src 'self' file: data:",
        element(
            "header",
            element("a", "Report", href="report.html"),
            element("label", "Most errors first: ", for_="photo"),
            element("select", *names, id="photo", title="the next one: n"),
            *toggles,
            *buttons,
            element("output", id="scale"),
        ),
        element(
            "main",
            *(_world(number, view) for number, view in enumerate(views)),
            id="stage",
            tabindex="0",
            aria_label="Photograph; drag or use the arrow keys to move, plus and minus to zoom",
        ),
        element("nav", *(_errors(number, view) for number, view in enumerate(views)), aria_label="Errors"),
    )


def _world(number: int, view: FullView) -> Markup:
    width, height = view.size
    # The script sets the picture's source when it is shown first: six of them take half a gigabyte of memory.
    picture = element(
        "img", alt=view.file, width=width, height=height, data_src=f"{FOLDER}/{number}.jpg", draggable="false"
    )
    groups = [
        element("g", *(_shape(shape) for shape in shapes), class_=kind)
        for kind, shapes in (("predictions", view.predictions), ("truth", view.truth))
    ]
    drawing = element("svg", *groups, viewBox=f"0 0 {width} {height}", width=width, height=height)
    return element("div", picture, drawing, class_="world", hidden=True, data_width=width, data_height=height)


def _shape(shape: Shape) -> Markup:
    steps = []
    for outline in shape.outlines:
        points = " ".join(f"{x:g},{y:g}" for x, y in np.round(outline, 1).tolist())
        steps.append(f"M{points}Z")
    words = shape.name + ("" if shape.score is None else f" {shape.score:.2f}")
    words += f": {shape.error}" if shape.error else ""
    edge = f"--edge:rgb{contrast_color(shape.color)}"
    return element("path", element("title", words), d=Markup(" ".join(steps)), stroke=f"rgb{shape.color}", style=edge)


def _errors(number: int, view: FullView) -> Markup:
    """Return the list of a photograph's errors, those of a kind and class as one entry; each click shows the next."""
    groups: dict[tuple[str, str, tuple[int, int, int]], list[str]] = {}
    for shape in (*view.truth, *view.predictions):
        if shape.error and shape.outlines:
            points = np.concatenate(shape.outlines)
            box = " ".join(f"{value:.0f}" for value in (*points.min(axis=0), *points.max(axis=0)))
            groups.setdefault((shape.error, shape.name, shape.color), []).append(box)
    items = []
    for (error, name, color), boxes in sorted(groups.items(), key=lambda group: -len(group[1])):
        key = element("span", class_=f"key {error}", style=f"--color:rgb{color}")
        words = f"{len(boxes)} × {error}: {name}"
        items.append(element("li", element("button", key, words, type="button", data_boxes=";".join(boxes))))
    return element("ol", *items, hidden=True, data_photo=number)
