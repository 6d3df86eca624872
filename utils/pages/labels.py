"""A figure with the statistics of a data set's labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from utils.pages.figures import figure_color, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_CLASSES = 30  # bars; the other classes are summed in one more bar
_SMALLEST_SHARE = 1e-3  # of the photograph's side: lower end of the size axes
_BINS = 48  # along each axis of a 2D histogram


def plot_label_statistics(
    class_ids: np.ndarray, boxes: np.ndarray, objects_per_photo: np.ndarray, names: Sequence[str], path: Path
) -> None:
    """Draw histograms: objects per class, objects per photograph, centres and sizes of objects.

    class_ids int (N,); boxes float (N, 4) xyxy as shares of the photograph; objects_per_photo int (photographs,).
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    figure, (classes, counts, places, sizes) = new_figure(2, 2, cell_width=5.6, cell_height=4.4)
    empty = int((objects_per_photo == 0).sum())
    title = f"{len(class_ids):,} objects in {len(objects_per_photo):,} photographs"
    figure.suptitle(title + (f", {empty:,} of them without any" if empty else ""), fontsize=11)
    _class_panel(classes, class_ids, names)

    most = max(int(np.percentile(objects_per_photo, 99)), 1) if len(objects_per_photo) else 1
    width = -(-(most + 1) // 40)  # objects per bar, a whole number
    edges = np.arange(0, most + 1 + width, width) - 0.5
    shown = np.minimum(objects_per_photo, edges[-1] - 0.5)
    heights, _ = np.histogram(shown, bins=edges)
    counts.bar((edges[:-1] + edges[1:]) / 2, heights, 0.9 * width, color=figure_color(4))
    beyond = int((objects_per_photo > edges[-1]).sum())
    last = f" (last bar: also {beyond:,} with more)" if beyond else ""
    counts.set(title="objects per photograph", xlabel=f"objects{last}", ylabel="photographs")
    counts.xaxis.set_major_locator(MaxNLocator(integer=True))
    counts.yaxis.set_major_locator(MaxNLocator(integer=True))

    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    places.hist2d(
        centres[:, 0], centres[:, 1], bins=_BINS, range=((0, 1), (0, 1)), cmap="YlGnBu", cmin=1, norm=PowerNorm(0.5)
    )
    places.set(title="centres of objects", xlabel="from the left", ylabel="from the top", xlim=(0, 1), ylim=(1, 0))
    places.set_aspect("equal")

    extent = np.clip(boxes[:, 2:] - boxes[:, :2], _SMALLEST_SHARE, 1)
    bins = np.geomspace(_SMALLEST_SHARE, 1, _BINS + 1)
    sizes.hist2d(extent[:, 0], extent[:, 1], bins=(bins, bins), cmap="YlGnBu", cmin=1, norm=PowerNorm(0.5))
    sizes.set(title="sizes of objects", xlabel="width / photograph's width", ylabel="height / photograph's height")
    sizes.set(xscale="log", yscale="log")
    sizes.set_aspect("equal")
    for axes in (classes, counts, places, sizes):
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _class_panel(axes: Axes, class_ids: np.ndarray, names: Sequence[str]) -> None:
    totals = np.bincount(class_ids, minlength=len(names))
    order = np.arange(len(names)) if len(names) <= _MOST_CLASSES else np.argsort(-totals, kind="stable")
    shown, rest = order[:_MOST_CLASSES], order[_MOST_CLASSES:]
    labels = [names[number] for number in shown]
    values, colors = totals[shown].tolist(), [figure_color(number) for number in shown]
    if len(rest):
        labels.append(f"{len(rest)} more")
        values.append(int(totals[rest].sum()))
        colors.append((0.6,) * 3)
    bars = axes.barh(range(len(values)), values, color=colors)
    axes.bar_label(bars, [f"{value:,}" for value in values], fontsize=8, padding=3)
    axes.set_yticks(range(len(values)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max([*values, 1]))
    axes.set(title="objects of each class", xlabel="objects")
