"""Figures without pyplot, and how they are saved."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.common.files import write_bytes_atomic
from utils.plots.colors import class_color, luminance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure_color(class_id: int) -> tuple[float, ...]:
    """Return a class's colour for lines on white paper: white becomes grey, yellow darker."""
    color = np.array(class_color(int(class_id)))
    if color.min() > 235:
        color = np.array((120, 120, 120))
    elif luminance(color) > 190:
        color = color * 8 // 10
    return tuple(float(value) / 255 for value in color)


def new_figure(columns: int, rows: int, *, cell_width: float, cell_height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure without pyplot, which would keep every figure and choose a backend for the whole process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * cell_width, rows * cell_height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save_figure(figure: Figure, path: Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip(".") or "png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, buffer.getvalue())
