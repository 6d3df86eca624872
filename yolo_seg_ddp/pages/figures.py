"""The figures of a run, drawn with matplotlib (imported on first use) and without pyplot.

Training curves, precision-recall curves, confusion matrix, statistics of a data set's labels.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from yolo_seg_ddp.run.records import Record, number_of
from yolo_seg_ddp.utils.files import write_bytes_atomic
from yolo_seg_ddp.utils.text import PALETTE, class_color, counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# more curves are grey and have no legend; a larger confusion matrix shows no numbers
MAX_CLASSES_SHOWN = 20
_MOST_CLASS_BARS = 30  # the other classes are summed in one more bar
_SMALLEST_SHARE = 1e-3  # of the photograph's side: lower end of the size axes
_BINS = 48  # along each axis of a 2D histogram
# the largest loss as a multiple of the smallest: one outlier would flatten the rest of the curve
_LOG_FROM = 20
_CURVES = {  # name in the file: the curve, its label, the label of its axis
    "PR": ("precision_at_recall", "precision", "recall"),
    "P": ("precision", "precision", "confidence"),
    "R": ("recall", "recall", "confidence"),
    "F1": ("f1", "F1", "confidence"),
}

# (title, {label of a curve: its name in the records})
Panels = Sequence[tuple[str, Mapping[str, str]]]


def figure_color(class_id: int) -> tuple[float, ...]:
    """Return `class_color` as matplotlib needs it, RGB 0-1."""
    return tuple(value / 255 for value in class_color(int(class_id)))


def new_figure(
    columns: int, rows: int, *, cell_width: float, cell_height: float
) -> tuple[Figure, list[Axes]]:
    """Make a figure and its axes, cell sizes in inches. pyplot is avoided: it keeps every figure
    and sets a global backend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * cell_width, rows * cell_height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the file's ending."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip(".") or "png", dpi=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, buffer.getvalue())


def plot_training_curves(
    records: Iterable[Record], path: Path, chosen: Panels | None = None, best: int = 0
) -> None:
    """Draw the epoch records of metrics.jsonl, one panel for each metric that they contain.

    Panels, unless they are `chosen`: the loss, each of its parts (`train_<part>`, `val_<part>`),
    box mAP, mask mAP, learning rate, images per second. Records without `epoch` are ignored. A
    dotted line marks epoch `best`.
    """
    from matplotlib.ticker import MaxNLocator

    epochs = [record for record in records if math.isfinite(number_of(record.get("epoch")))]
    panels = []
    for title, lines in _training_panels(epochs) if chosen is None else chosen:
        points = {label: _points(epochs, name) for label, name in lines.items()}
        points = {label: series for label, series in points.items() if series[0]}
        if points:
            panels.append((title, points))
    # fewest empty panels
    columns = min(max(1, len(panels)), min((4, 3), key=lambda width: -len(panels) % width))
    figure, grid = new_figure(
        columns, max(1, math.ceil(len(panels) / columns)), cell_width=3.6, cell_height=2.7
    )
    for axes, (title, points) in zip(grid, panels, strict=False):
        for position, (label, (epoch_values, values)) in enumerate(points.items()):
            color = figure_color((4, 5, 2)[position % 3])
            # A single epoch is only visible as a point.
            marker = "o" if len(values) <= 30 else None
            axes.plot(
                epoch_values,
                values,
                color=color,
                marker=marker,
                markersize=3.5,
                linewidth=1.5,
                label=label,
            )
        if best:
            axes.axvline(best, color="0.4", linestyle=":", linewidth=1.3)
            figure.supxlabel(f"dotted: epoch {best} is the best, kept as best.pt", fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("epoch", fontsize=8)
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        left, right = axes.get_xlim()
        # A single epoch has no width.
        if right - left < 1:
            axes.set_xlim((left + right) / 2 - 1, (left + right) / 2 + 1)
        lowest, highest = (
            limit(limit(values) for _, values in points.values()) for limit in (min, max)
        )
        if chosen is None and not title.endswith("loss"):
            axes.set_ylim(0, 1.08 * highest or 1)
        elif chosen is None and highest > _LOG_FROM * lowest > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        if len(points) > 1:
            axes.legend(fontsize=8, frameon=False)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if not panels:
        grid[0].text(0.5, 0.5, "no epochs yet", ha="center", va="center")
    save_figure(figure, path)


def plot_curves(curves: Mapping[str, Any], names: Sequence[str], folder: Path) -> None:
    """Draw the curves of boxes and masks at IoU 0.5, for each class and their mean, into files
    named as by Ultralytics.

    Precision over recall (`BoxPR_curve.png`, `MaskPR_curve.png`); precision, recall and F1 over
    confidence (`BoxP_curve.png`, `BoxR_curve.png`, `BoxF1_curve.png`, …), with the values at the
    confidence of the highest mean F1. curves: of `precision_recall_curves`
    (yolo_seg_ddp/evaluation/metrics/summary.py).
    """
    for kind, curve in curves.items():
        axis, best = curve["axis"], curve["best_confidence"]
        for name, (key, label, x_label) in _CURVES.items():
            figure, (axes,) = new_figure(1, 1, cell_width=9.0, cell_height=5.5)
            heights = curve[key]
            if name == "PR":
                _draw_classes(axes, curve, names, heights, curve["average_precision"][:, 0])
                legend = "AP at IoU 0.5"
            else:
                _draw_classes(axes, curve, names, heights, heights[:, np.searchsorted(axis, best)])
                axes.axvline(best, color="0.4", linewidth=1, linestyle=":")
                legend = f"{label} at confidence {best:.2f}"
            if len(heights):
                axes.legend(
                    loc="upper left",
                    bbox_to_anchor=(1.01, 1),
                    fontsize=9,
                    frameon=False,
                    title=legend,
                )
            title = f"{kind.capitalize()}: {label} over {x_label} at IoU 0.5"
            axes.set(title=title, xlabel=x_label, ylabel=label, xlim=(0, 1), ylim=(0, 1.02))
            axes.grid(alpha=0.25)
            save_figure(figure, folder / f"{kind.capitalize()}{name}_curve.png")


def _draw_classes(
    axes: Axes,
    curve: Mapping[str, Any],
    names: Sequence[str],
    heights: np.ndarray,
    values: np.ndarray,
) -> None:
    """Draw each class's curve, heights (k, 1000), and their mean; the labels give the values (k,)
    and their mean.
    """
    class_ids = curve["class_ids"]
    is_legible = len(class_ids) <= MAX_CLASSES_SHOWN
    for row, class_id in enumerate(class_ids):
        label = f"{names[class_id]}  {values[row]:.3f}" if is_legible else None
        color = figure_color(class_id) if is_legible else "0.75"
        style, width = (
            (("-", "--", ":")[class_id // len(PALETTE) % 3], 1.4) if is_legible else ("-", 0.7)
        )
        axes.plot(
            curve["axis"], heights[row], color=color, linestyle=style, linewidth=width, label=label
        )
    if len(class_ids):
        label = f"mean of {counted(len(class_ids), 'class')}  {values.mean():.3f}"
        axes.plot(curve["axis"], heights.mean(axis=0), color="black", linewidth=2.8, label=label)
    else:
        axes.text(0.5, 0.5, "no targets", ha="center", va="center")


def plot_confusion_matrix(matrix: Any, names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix (nc + 1, nc + 1), normalised by column.

    Rows are predicted classes, the last one missed; columns are true classes, the last one
    background. A column without entries stays blank.
    """
    counts = np.asarray(matrix, dtype=np.float64)
    totals = counts.sum(axis=0, keepdims=True)
    shares = np.divide(counts, totals, out=np.full_like(counts, np.nan), where=totals > 0)
    is_large = len(names) > MAX_CLASSES_SHOWN
    size_inches = max(10.0, 0.17 * len(counts)) if is_large else max(6.5, 0.8 * len(counts))
    figure, (axes,) = new_figure(1, 1, cell_width=size_inches * 1.15, cell_height=size_inches)
    picture = axes.imshow(np.ma.masked_invalid(shares), cmap="Blues", vmin=0, vmax=1)
    colorbar = figure.colorbar(picture, ax=axes, fraction=0.04, pad=0.02)
    positions = np.arange(len(counts))
    font_size = 7 if is_large else 9
    title_size = 8 + 0.5 * size_inches
    axes.set_xticks(
        positions, [*names, "background"], fontsize=font_size, rotation=90 if is_large else 45
    )
    for label in () if is_large else axes.get_xticklabels():
        label.set(horizontalalignment="right", rotation_mode="anchor")
    axes.set_yticks(positions, [*names, "missed"], fontsize=font_size)
    colorbar.set_label("share of the column", fontsize=title_size)
    axes.set_xlabel("true class", fontsize=title_size)
    axes.set_ylabel("predicted class", fontsize=title_size)
    axes.set_title("Confusion matrix, normalised by column", fontsize=title_size + 1)
    axes.set_xticks(positions[:-1] + 0.5, minor=True)
    axes.set_yticks(positions[:-1] + 0.5, minor=True)
    axes.grid(which="minor", color="0.9", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    for row, column in () if is_large else zip(*np.nonzero(counts), strict=True):
        share = shares[row, column]
        text = f"{share:.2f}\n{counts[row, column]:.0f}"
        color = "white" if share > 0.5 else "black"
        axes.text(
            column, row, text, ha="center", va="center", fontsize=7.5, color=color, linespacing=1.1
        )
    save_figure(figure, path)


def _training_panels(epochs: Sequence[Mapping[str, Any]]) -> Panels:
    """Return (title, {label: record key}) of every possible panel."""
    keys = dict.fromkeys(key for record in epochs for key in record)
    parts = dict.fromkeys(
        key.partition("_")[2]
        for key in keys
        if key.startswith(("train_", "val_"))
        and not key.endswith("_loss")
        and not key.endswith("_s")
    )
    maps = {"mAP50": "map50", "mAP50-95": "map50_95"}
    return [
        ("loss", {"train": "train_loss", "validation": "val_loss"}),
        *(
            (f"{part} loss", {"train": f"train_{part}", "validation": f"val_{part}"})
            for part in parts
        ),
        *(
            (f"{kind} mAP", {label: f"{kind}_{name}" for label, name in maps.items()})
            for kind in ("box", "mask")
        ),
        ("learning rate", {"lr": "lr"}),
        ("images per second", {"images per second": "images_per_s"}),
    ]


def _points(epochs: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    points = sorted(
        (record["epoch"], record[name])
        for record in epochs
        if math.isfinite(number_of(record.get(name)))
    )
    return [epoch for epoch, _ in points], [value for _, value in points]


def plot_label_statistics(
    class_ids: np.ndarray,
    boxes: np.ndarray,
    objects_per_photo: np.ndarray,
    names: Sequence[str],
    path: Path,
) -> None:
    """Draw histograms: objects per class, objects per photograph, centres and sizes of objects.

    class_ids int (N,); boxes float (N, 4) xyxy as shares of the photograph; objects_per_photo int
    (photographs,).
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    figure, (classes, counts, places, sizes) = new_figure(2, 2, cell_width=5.6, cell_height=4.4)
    empty = int((objects_per_photo == 0).sum())
    title = (
        f"{counted(len(class_ids), 'object')} in {counted(len(objects_per_photo), 'photograph')}"
    )
    figure.suptitle(title + (f", {empty:,} of them without any" if empty else ""), fontsize=11)

    totals = np.bincount(class_ids, minlength=len(names))
    order = (
        np.arange(len(names))
        if len(names) <= _MOST_CLASS_BARS
        else np.argsort(-totals, kind="stable")
    )
    first = order[:_MOST_CLASS_BARS]
    rest = order[_MOST_CLASS_BARS:]
    labels = [names[number] for number in first]
    values = totals[first].tolist()
    colors = [figure_color(number) for number in first]
    if len(rest):
        labels.append(f"{len(rest)} more")
        values.append(int(totals[rest].sum()))
        colors.append((0.6,) * 3)
    bars = classes.barh(range(len(values)), values, color=colors)
    classes.bar_label(bars, [f"{value:,}" for value in values], fontsize=8, padding=3)
    classes.set_yticks(range(len(values)), labels)
    classes.invert_yaxis()
    classes.set_xlim(0, 1.18 * max([*values, 1]))
    classes.set(title="objects of each class", xlabel="objects")

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
    style: dict[str, Any] = {"cmap": "YlGnBu", "cmin": 1}
    places.hist2d(
        centres[:, 0],
        centres[:, 1],
        bins=_BINS,
        range=((0, 1), (0, 1)),
        norm=PowerNorm(0.5, vmin=0),
        **style,
    )
    places.set(
        title="centres of objects",
        xlabel="from the left",
        ylabel="from the top",
        xlim=(0, 1),
        ylim=(1, 0),
    )
    places.set_aspect("equal")

    extent = np.clip(boxes[:, 2:] - boxes[:, :2], _SMALLEST_SHARE, 1)
    bins = np.geomspace(_SMALLEST_SHARE, 1, _BINS + 1)
    sizes.hist2d(
        extent[:, 0], extent[:, 1], bins=(bins, bins), norm=PowerNorm(0.5, vmin=0), **style
    )
    sizes.set(
        title="sizes of objects",
        xlabel="width / photograph's width",
        ylabel="height / photograph's height",
    )
    sizes.set(xscale="log", yscale="log")
    sizes.set_aspect("equal")
    for axes in (classes, counts, places, sizes):
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
