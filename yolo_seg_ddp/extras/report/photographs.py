"""photographs.html: a list of the photographs to filter and sort, and a large view of each, with
its errors.

The page and its folder of pictures, `photographs/`, lie beside report.html. It loads nothing else
and runs only its own script.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.evaluation.metrics.matching import CONFUSION_MIN_SCORE
from yolo_seg_ddp.evaluation.metrics.summary import KINDS_OF_ERROR
from yolo_seg_ddp.pages.markup import Markup, document, element
from yolo_seg_ddp.predict.regions import Region
from yolo_seg_ddp.utils.errors import printable
from yolo_seg_ddp.utils.files import write_bytes_atomic, write_text_atomic
from yolo_seg_ddp.utils.text import contrast_color

PAGE, FOLDER, SMALL = "photographs.html", "photographs", "small"
MAX_LISTED = 5000
MAX_BOXES = 100_000  # of all photographs together; a box takes 20 bytes
MAX_PHOTOS = 6  # at full size
MIN_LONG_SIDE_PX = 1281  # smaller ones are shown large enough without
_SIMPLIFY_PX = 0.75
RESULTS = ("correct", *KINDS_OF_ERROR)


@dataclass(frozen=True)
class Shape:
    """An object's outlines in pixels of the photograph, each (V, 2), its class, colour, and the
    kind of error or "".
    """

    outlines: list[np.ndarray]
    name: str
    color: tuple[int, int, int]
    error: str
    score: float | None = None  # of a prediction


@dataclass(frozen=True)
class FullView:
    """A photograph at full size: its width and height, JPEG bytes, and what is drawn over it."""

    size: tuple[int, int]
    jpeg: bytes
    truth: list[Shape]
    predictions: list[Shape]


@dataclass(frozen=True)
class Listed:
    """A photograph of the list: its file, width and height, a drawn picture as JPEG, and its labels
    and false detections.

    rows: int (n, 8), each with its position in RESULTS, its class, the detection's class and
    confidence in percent, both -1 if it is missed, and its box xyxy in pixels of the photograph.
    """

    file: Path
    size: tuple[int, int]
    jpeg: bytes
    rows: np.ndarray


def region_outlines(region: Region) -> list[np.ndarray]:
    """Return a mask's outlines, holes included, in pixels of the photograph:
    float64 (V, 2) each.
    """
    contours, _ = cv2.findContours(
        region.mask.astype(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE
    )
    simple = [cv2.approxPolyDP(contour, _SIMPLIFY_PX, True)[:, 0] for contour in contours]
    return [part + np.array([region.left + 0.5, region.top + 0.5]) for part in simple]


def write_photographs(
    folder: Path,
    listed: Mapping[int, Listed],
    views: Mapping[int, FullView],
    names: Sequence[str],
    model: str,
) -> None:
    """Write the page and its pictures beside report.html, and remove those of an earlier
    evaluation.

    listed, views: the photographs, and those at full size, by their position in the split.
    """
    pictures = folder / FOLDER
    for old in [*pictures.glob("[0-9].jpg"), *(pictures / SMALL).glob("[0-9]*.jpg"), folder / PAGE]:
        old.unlink(missing_ok=True)
    if not listed:
        return
    (pictures / SMALL).mkdir(parents=True, exist_ok=True)
    for number, view in enumerate(views.values()):
        write_bytes_atomic(pictures / f"{number}.jpg", view.jpeg)
    for index, photo in listed.items():
        write_bytes_atomic(pictures / SMALL / f"{index}.jpg", photo.jpeg)
    write_text_atomic(folder / PAGE, build_photographs(listed, views, names, model))


def build_photographs(
    listed: Mapping[int, Listed], views: Mapping[int, FullView], names: Sequence[str], model: str
) -> str:
    """Return the page; see `write_photographs`: photographs.html of this folder, with the list as
    JSON.

    A photograph's rows are sorted, errors first; the first MAX_BOXES errors have their boxes.
    """
    files = {index: str(photo.file.absolute()) for index, photo in listed.items()}
    root = os.path.commonpath([os.path.dirname(file) for file in files.values()])
    full = [*views]
    photos: list[dict[str, Any]] = []
    for index, photo in listed.items():
        rows = photo.rows[(-photo.rows[:, 0]).argsort(kind="stable")][
            :, [0, 1, 3, 4, 5, 6, 7, 2]
        ].tolist()
        rows = [
            row if row[0] and at < MAX_BOXES // len(listed) else row[:3]
            for at, row in enumerate(rows)
        ]
        name = printable(os.path.relpath(files[index], root), 4096)
        one = {"id": index, "file": name, "size": photo.size, "rows": rows}
        photos.append({**one, "full": full.index(index)} if index in views else one)
    command = shlex.join(
        ["python", "inference.py", "--model", model, "--source", "photographs.txt", "--save-coco"]
    )
    shown = {
        "results": RESULTS,
        "names": [printable(name, 1000) for name in names],
        "lowest": CONFUSION_MIN_SCORE,
    }
    data = json.dumps(
        {**shown, "root": root, "command": command, "photos": photos}, separators=(",", ":")
    )
    drawings = [
        element(
            "svg",
            element("g", *map(_shape, view.predictions), class_="predictions"),
            element("g", *map(_shape, view.truth), class_="truth"),
            viewBox=f"0 0 {view.size[0]} {view.size[1]}",
            width=view.size[0],
            height=view.size[1],
            data_id=index,
        )
        for index, view in views.items()
    ]
    return document(
        "Photographs",
        Path(__file__),
        "img-src 'self' file: data:",
        Markup(Path(__file__).with_suffix(".html").read_text(encoding="utf-8")),
        element("div", *drawings, id="drawings", hidden=True),
        element("script", Markup(data.replace("<", "\\u003c")), type="application/json", id="data"),
    )


def _shape(shape: Shape) -> Markup:
    steps = []
    for outline in shape.outlines:
        points = " ".join(f"{x:g},{y:g}" for x, y in np.round(outline, 1).tolist())
        steps.append(f"M{points}Z")
    words = shape.name + ("" if shape.score is None else f" {shape.score:.2f}")
    words += f": {shape.error}" if shape.error else ""
    edge = f"--edge:rgb{contrast_color(shape.color)}"
    return element(
        "path",
        element("title", words),
        d=Markup(" ".join(steps)),
        stroke=f"rgb{shape.color}",
        style=edge,
    )
