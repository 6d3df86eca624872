"""Makes and saves matplotlib figures without pyplot."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.common.colors import class_color, luminance
from utils.common.files import write_bytes_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure_color(class_id: int) -> tuple[float, ...]:
    """Return a class's colour, RGB 0-1, for a white background: white becomes grey, light colours darker."""
    color = np.array(class_color(int(class_id)))
    if color.min() > 235:
        color = np.array((120, 120, 120))
    elif luminance(color) > 190:
        color = color * 8 // 10
    return tuple(float(value) / 255 for value in color)


def new_figure(columns: int, rows: int, *, cell_width: float, cell_height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure and its axes, cell sizes in inches. pyplot would keep every figure and set the process's backend."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * cell_width, rows * cell_height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the file's ending."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip(".") or "png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, buffer.getvalue())
