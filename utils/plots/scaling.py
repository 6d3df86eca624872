"""Charts of what `benchmark_ddp.py` finds: several processes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.plots.charts import _figure, _figure_color, _save_figure
from utils.plots.speed import finish_axes, stack_bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _GREEN, _ORANGE, _SKY, _RED, _PINK = (_figure_color(index) for index in (4, 2, 0, 1, 5, 6))
_SCALING_COLORS = {"weak": _BLUE, "strong": _ORANGE}
_PART_COLORS = {
    "compute": ("compute_ms", _BLUE),
    "communication": ("communication_ms", _RED),
    "data wait": ("data_ms", _PINK),
    "imbalance": ("waiting_ms", _ORANGE),
}

Row = Mapping[str, Any]


def plot_scaling(rows: Sequence[Row], points: Sequence[Row], predicted: Sequence[Row], title: str, path: Path) -> None:
    """Draw images/s, efficiency, where a step's time goes, the all-reduce by message size, and the prediction.

    rows: of `utils.scaling.summarise`; points: of `median_points`; predicted: of `utils.scaling_model.predict`.
    """
    figure, panels = _figure(3, 2, cell_width=5.0, cell_height=3.8)
    speed, efficiency, split, bandwidth, latency, prediction = panels
    figure.suptitle(title, fontsize=11)
    counts = sorted({row["processes"] for row in rows})
    kinds = [kind for kind in _SCALING_COLORS if any(row["scaling"] == kind for row in rows)]
    labels = [str(count) for count in counts]
    _throughput_panel(speed, rows, counts, kinds)
    finish_axes(speed, labels, "processes")
    _efficiency_panel(efficiency, rows, counts, kinds)
    finish_axes(efficiency, labels, "processes", has_legend=len(kinds) > 1)

    parts = {label: ([row[key] for row in rows], color) for label, (key, color) in _PART_COLORS.items()}
    stack_bars(split, parts, [row["step_ms"] for row in rows])
    split.set(title="one training step (line: by the host's clock)", ylabel="ms")
    scalings = [f"\n{row['scaling']}" if len(kinds) > 1 else "" for row in rows]
    finish_axes(split, [f"{row['processes']}{kind}" for row, kind in zip(rows, scalings, strict=True)], "processes")

    _allreduce_panel(bandwidth, points, "bus_gb_per_s", "all-reduce by itself: bus bandwidth", "GB/s")
    _allreduce_panel(latency, points, "ms", "all-reduce by itself: time", "ms")
    _prediction_panel(prediction, predicted)
    _save_figure(figure, path)


def _throughput_panel(axes: Axes, rows: Sequence[Row], counts: Sequence[int], kinds: Sequence[str]) -> None:
    start = rows[0]["images_per_s"] / counts[0]  # one process's share with the fewest
    axes.plot([start * count for count in counts], color="0.6", linestyle="--", linewidth=1.2, label="in proportion")
    for kind in kinds:
        mine = [row for row in rows if row["scaling"] == kind]
        middle = [row["images_per_s"] for row in mine]
        below = [row["images_per_s"] - row["images_per_s_min"] for row in mine]
        above = [row["images_per_s_max"] - row["images_per_s"] for row in mine]
        style: dict[str, Any] = {"color": _SCALING_COLORS[kind], "marker": "o", "capsize": 4, "linewidth": 1.8}
        axes.errorbar(range(len(mine)), middle, [below, above], label=f"{kind} scaling", **style)
    axes.set(title="throughput (median, smallest, largest round)", ylabel="images/s")


def _efficiency_panel(axes: Axes, rows: Sequence[Row], counts: Sequence[int], kinds: Sequence[str]) -> None:
    width = 0.7 / len(kinds)
    for number, kind in enumerate(kinds):
        values = [100 * row["efficiency"] for row in rows if row["scaling"] == kind]
        at = np.arange(len(values)) + (number - (len(kinds) - 1) / 2) * width
        bars = axes.bar(at, values, width * 0.9, color=_SCALING_COLORS[kind], label=kind)
        axes.bar_label(bars, fmt="%.0f %%", fontsize=8, padding=2)
    axes.axhline(100, color="0.6", linestyle="--", linewidth=1.2)
    axes.set(title=f"efficiency (with {counts[0]}: 100 %)", ylabel="%")


def _allreduce_panel(axes: Axes, points: Sequence[Row], key: str, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if not points:
        axes.text(0.5, 0.5, "one process sends nothing", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    for number, count in enumerate(sorted({point["processes"] for point in points})):
        mine = [point for point in points if point["processes"] == count]
        color = (_BLUE, _ORANGE, _GREEN, _RED, _SKY, _PINK)[number % 6]
        sizes = [point["bytes"] for point in mine]
        axes.plot(sizes, [point[key] for point in mine], "o-", color=color, markersize=4, label=f"{count} processes")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [2**power for power in range(10, 31, 4)]
    axes.set_xticks(ticks, ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "1 GiB"])
    axes.set_xlim(min(point["bytes"] for point in points) / 2, max(point["bytes"] for point in points) * 2)
    axes.set_xlabel("message", fontsize=9)
    axes.set_ylabel(unit)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def _prediction_panel(axes: Axes, predicted: Sequence[Row]) -> None:
    measured = [row for row in predicted if row["images_per_s_measured"] is not None]
    further = [row for row in predicted if row["images_per_s_measured"] is None]
    counts = sorted({row["processes"] for row in predicted})
    if measured:
        start = measured[0]["images_per_s_measured"] / measured[0]["processes"]
        line = [start * count for count in counts]
        axes.plot(counts, line, color="0.6", linestyle="--", linewidth=1.2, label="in proportion")
        values = [row["images_per_s_measured"] for row in measured]
        axes.plot([row["processes"] for row in measured], values, "o-", color=_BLUE, label="measured")
        values = [row["images_per_s_model"] for row in measured]
        axes.plot([row["processes"] for row in measured], values, "x", color=_RED, markersize=7, label="model")
    if further:
        at = [row["processes"] for row in further]
        values = [row["images_per_s_model"] for row in further]
        style: dict[str, Any] = {"color": _RED, "markerfacecolor": "none", "linestyle": ":", "marker": "o"}
        axes.plot(at, values, label="PREDICTION, not measured", **style)
        for row in further:
            text = f"{row['efficiency_model']:.0%}, link: {row['link']}"
            place = (row["processes"], row["images_per_s_model"])
            axes.annotate(text, place, (5, -14), textcoords="offset points", fontsize=7, color="0.3")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlim(counts[0] / 1.3, counts[-1] * 4.5)  # for what is written beside the last point
    axes.yaxis.set_major_formatter("{x:.4g}")
    axes.set(title="weak scaling: model fitted to what was measured", ylabel="images/s")
    axes.title.set_fontsize(10)
    axes.set_xlabel("processes", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="upper left")
