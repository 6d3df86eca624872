"""Charts of speed: one device at several batch sizes, and several processes together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.plots.charts import _figure, _figure_color, _save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from utils.profiling import BatchProfile

_GIB = 2**30
_BLUE, _GREEN, _ORANGE, _SKY, _RED, _PINK = (_figure_color(index) for index in (4, 2, 0, 1, 5, 6))
_PHASE_COLORS = {"input": _PINK, "forward": _SKY, "loss": _ORANGE, "backward": _BLUE, "optimizer": _GREEN}
_SCALING_COLORS = {"weak": _BLUE, "strong": _ORANGE}
_STEP_PARTS = {
    "own work": ("compute_ms", _BLUE),
    "wait for the slowest": ("waiting_ms", _ORANGE),
    "communication": ("communication_ms", _RED),
}


def plot_profile(
    profiles: Sequence[BatchProfile], best_batch_size: int, title: str, capacity_bytes: int | None, path: Path
) -> None:
    """Draw images/s, the phases of a step and the peak memory over the batch size.

    The best batch is marked; the device's memory, `capacity_bytes`, is a line where it is known.
    """
    figure, (speed, phases, memory) = _figure(3, 1, cell_width=4.6, cell_height=4.0)
    figure.suptitle(title, fontsize=11)
    _speed_panel(speed, profiles, best_batch_size)
    parts = {
        phase: ([profile.phase_ms[phase] for profile in profiles], color) for phase, color in _PHASE_COLORS.items()
    }
    _stack(phases, parts, [profile.step_ms for profile in profiles])
    phases.set(title="one training step", ylabel="ms")
    _memory_panel(memory, profiles, capacity_bytes)
    for axes in (speed, phases, memory):
        _finish(axes, [str(profile.batch_size) for profile in profiles], "batch size")
    _save_figure(figure, path)


def plot_scaling(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the rows of `utils.scaling.summarise`: images/s, efficiency, where a step's time goes, all-reduce."""
    figure, (speed, efficiency, split, reduce) = _figure(2, 2, cell_width=5.4, cell_height=3.7)
    figure.suptitle(title, fontsize=11)
    counts = sorted({row["processes"] for row in rows})
    kinds = [kind for kind in _SCALING_COLORS if any(row["scaling"] == kind for row in rows)]
    labels = [str(count) for count in counts]
    _throughput_panel(speed, rows, counts, kinds)
    _finish(speed, labels, "processes")

    width = 0.7 / len(kinds)
    for number, kind in enumerate(kinds):
        values = [100 * row["efficiency"] for row in rows if row["scaling"] == kind]
        at = np.arange(len(values)) + (number - (len(kinds) - 1) / 2) * width
        bars = efficiency.bar(at, values, width * 0.9, color=_SCALING_COLORS[kind], label=kind)
        efficiency.bar_label(bars, fmt="%.0f %%", fontsize=8, padding=2)
    efficiency.axhline(100, color="0.6", linestyle="--", linewidth=1.2)
    efficiency.set(title=f"efficiency (with {counts[0]}: 100 %)", ylabel="%")
    _finish(efficiency, labels, "processes", has_legend=len(kinds) > 1)

    # Noise can make a difference of two measurements negative; a bar cannot be.
    parts = {label: ([max(row[key], 0.0) for row in rows], color) for label, (key, color) in _STEP_PARTS.items()}
    _stack(split, parts, [row["step_ms"] for row in rows])
    split.set(title="one training step", ylabel="ms")
    scalings = [f"\n{row['scaling']}" if len(kinds) > 1 else "" for row in rows]
    _finish(split, [f"{row['processes']}{kind}" for row, kind in zip(rows, scalings, strict=True)], "processes")
    _reduce_panel(reduce, rows, counts)
    _save_figure(figure, path)


def _speed_panel(axes: Axes, profiles: Sequence[BatchProfile], best_batch_size: int) -> None:
    speeds = [profile.images_per_s for profile in profiles]
    best = [profile.batch_size for profile in profiles].index(best_batch_size)
    axes.plot(range(len(speeds)), speeds, color=_BLUE, marker="o", linewidth=1.8)
    axes.plot([best], [speeds[best]], "o", markersize=12, markerfacecolor="none", markeredgecolor=_RED, label="best")
    for position, speed in enumerate(speeds):
        axes.annotate(f"{speed:.3g}", (position, speed), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="throughput", ylabel="images/s")


def _memory_panel(axes: Axes, profiles: Sequence[BatchProfile], capacity_bytes: int | None) -> None:
    bars = {"tensors": ([profile.allocated_bytes for profile in profiles], _BLUE)}
    reserved = [profile.reserved_bytes for profile in profiles if profile.reserved_bytes is not None]
    if reserved:
        bars["reserved"] = (reserved, _SKY)
    else:
        bars = {"whole process (RSS)": bars["tensors"]}
    width = 0.7 / len(bars)
    for number, (label, (sizes, color)) in enumerate(bars.items()):
        at = np.arange(len(sizes)) + (number - (len(bars) - 1) / 2) * width
        drawn = axes.bar(at, [size / _GIB for size in sizes], width, color=color, label=label)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    if capacity_bytes:
        axes.axhline(capacity_bytes / _GIB, color=_RED, linestyle="--", linewidth=1.2, label="the device has")
    axes.set(title="peak memory", ylabel="GiB")


def _throughput_panel(
    axes: Axes, rows: Sequence[Mapping[str, Any]], counts: Sequence[int], kinds: Sequence[str]
) -> None:
    start = rows[0]["images_per_s"] / counts[0]  # one process's share with the fewest
    axes.plot([start * count for count in counts], color="0.6", linestyle="--", linewidth=1.2, label="in proportion")
    for kind in kinds:
        mine = [row for row in rows if row["scaling"] == kind]
        middle = [row["images_per_s"] for row in mine]
        below = [row["images_per_s"] - row["images_per_s_min"] for row in mine]
        above = [row["images_per_s_max"] - row["images_per_s"] for row in mine]
        style: dict[str, Any] = {"color": _SCALING_COLORS[kind], "marker": "o", "capsize": 4, "linewidth": 1.8}
        axes.errorbar(range(len(mine)), middle, [below, above], label=f"{kind} scaling", **style)
    axes.set(title="throughput (median, smallest and largest of the rounds)", ylabel="images/s")


def _reduce_panel(axes: Axes, rows: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> None:
    for position, count in enumerate(counts):
        found = [row["allreduce_gb_per_s"] for row in rows if row["processes"] == count and count > 1]
        if found:
            bars = axes.bar([position], [float(np.median(found))], 0.6, color=_GREEN)
            axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
        else:
            axes.annotate("sends\nnothing", (position, 0), (0, 4), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="all-reduce of all gradients, alone", ylabel="bus bandwidth, GB/s")
    _finish(axes, [str(count) for count in counts], "processes")


def _stack(axes: Axes, parts: Mapping[str, tuple[Sequence[float], Any]], totals: Sequence[float]) -> None:
    """Draw stacked bars, {label: (values, colour)} from the bottom up, a line at the measured total, and its value."""
    bottom = np.zeros(len(totals))
    for label, (values, color) in parts.items():
        axes.bar(range(len(values)), values, 0.6, bottom=bottom, color=color, label=label)
        bottom = bottom + np.array(values)
    for position, (top, total) in enumerate(zip(bottom, totals, strict=True)):
        axes.plot([position - 0.34, position + 0.34], [total, total], color="black", linewidth=1.4)
        place = (position, max(top, total))
        axes.annotate(f"{total:.4g}", place, (0, 3), textcoords="offset points", ha="center", fontsize=8)


def _finish(axes: Axes, labels: Sequence[str], axis_name: str, *, has_legend: bool = True) -> None:
    """Set ticks, limits and style; call it after everything is drawn."""
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(0, 1.35 * max(axes.dataLim.ymax, 0) or 1)  # room for the legend
    axes.set_xlabel(axis_name, fontsize=9)
    axes.title.set_fontsize(10)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", reverse=True, ncols=2)
