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
_PHASE_COLORS = dict(zip(PHASES, (_PINK, _SKY, _ORANGE, _BLUE, _GREEN), strict=True))


def plot_profile(profiles: Sequence[BatchProfile], title: str, capacity_bytes: int | None, path: Path) -> None:
    """Draw images/s, the phases of a step and the peak memory over the batch size; `capacity_bytes` as a line."""
    figure, (speed, phases, memory) = _figure(3, 1, cell_width=4.6, cell_height=4.0)
    figure.suptitle(title, fontsize=11)
    positions = np.arange(len(profiles))
    labels = [str(profile.batch_size) for profile in profiles]
    _speed_panel(speed, profiles)

    parts = {phase: [profile.phase_ms[phase] for profile in profiles] for phase in PHASES}
    _stack(phases, positions, {phase: (parts[phase], _PHASE_COLORS[phase]) for phase in PHASES})
    phases.set(title="one training step", ylabel="ms")

    has_reserved = profiles[0].reserved_bytes is not None
    width = 0.38 if has_reserved else 0.6
    allocated = [profile.allocated_bytes / _GIB for profile in profiles]
    reserved = [(profile.reserved_bytes or 0) / _GIB for profile in profiles]
    bars = [("tensors" if has_reserved else "whole process (RSS)", allocated, _BLUE)]
    bars += [("reserved", reserved, _SKY)] if has_reserved else []
    for number, (label, values, color) in enumerate(bars):
        offset = (number - (len(bars) - 1) / 2) * width
        drawn = memory.bar(positions + offset, values, width, color=color, label=label)
        memory.bar_label(drawn, fmt="%.2g", fontsize=7, padding=2)
    if capacity_bytes:
        memory.axhline(capacity_bytes / _GIB, color=_RED, linestyle="--", linewidth=1.2, label="the device has")
    memory.set(title="peak memory", ylabel="GiB")
    for axes in (speed, phases, memory):
        _finish(axes, positions, labels, "batch size")
    _save_figure(figure, path)


def _speed_panel(axes: Axes, profiles: Sequence[BatchProfile]) -> None:
    speeds = [profile.images_per_s for profile in profiles]
    best = profiles.index(best_profile(profiles))
    axes.plot(range(len(speeds)), speeds, color=_BLUE, marker="o", linewidth=1.8)
    axes.plot([best], [speeds[best]], "o", markersize=12, markerfacecolor="none", markeredgecolor=_RED, label="best")
    for position, speed in enumerate(speeds):
        axes.annotate(f"{speed:.3g}", (position, speed), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="throughput", ylabel="images/s")


def plot_scaling(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw a scaling benchmark's summary rows: images/s, efficiency, where a step's time goes, all-reduce."""
    figure, (speed, efficiency, split, reduce) = _figure(2, 2, cell_width=5.4, cell_height=3.7)
    figure.suptitle(title, fontsize=11)
    counts = sorted({row["processes"] for row in rows})
    positions = np.arange(len(counts))
    kinds = list(dict.fromkeys(row["scaling"] for row in rows))
    base = next(row for row in rows if row["processes"] == counts[0])
    ideal = [base["images_per_s"] * count / counts[0] for count in counts]
    speed.plot(positions, ideal, color="0.6", linestyle="--", linewidth=1.2, label="in proportion")
    width = 0.7 / len(kinds)
    for number, kind in enumerate(kinds):
        color = (_BLUE, _ORANGE)[number % 2]
        mine = [row for row in rows if row["scaling"] == kind]
        at = np.array([counts.index(row["processes"]) for row in mine])
        middle = [row["images_per_s"] for row in mine]
        spread = [[row["images_per_s"] - row["images_per_s_min"] for row in mine]]
        spread += [[row["images_per_s_max"] - row["images_per_s"] for row in mine]]
        speed.errorbar(at, middle, spread, color=color, marker="o", capsize=4, linewidth=1.8, label=f"{kind} scaling")
        offset = (number - (len(kinds) - 1) / 2) * width
        bars = efficiency.bar(
            at + offset, [100 * row["efficiency"] for row in mine], width * 0.9, color=color, label=kind
        )
        efficiency.bar_label(bars, fmt="%.0f %%", fontsize=8, padding=2)
    efficiency.axhline(100, color="0.6", linestyle="--", linewidth=1.2)
    speed.set(title="throughput (median, smallest and largest of the repeats)", ylabel="images/s")
    efficiency.set(title=f"efficiency per process, {counts[0]} = 100 %", ylabel="%")
    for axes in (speed, efficiency):
        _finish(
            axes, positions, [str(count) for count in counts], "processes", has_legend=axes is speed or len(kinds) > 1
        )
    _split_panel(split, rows, len(kinds) > 1)
    _reduce_panel(reduce, rows)
    _save_figure(figure, path)


def _split_panel(axes: Axes, rows: Sequence[Mapping[str, Any]], names_scaling: bool) -> None:
    parts = {"own work": "compute_ms", "wait for the slowest": "waiting_ms", "communication": "communication_ms"}
    colors = (_BLUE, _ORANGE, _RED)
    stacks = {
        # Noise can make a difference of two measurements negative; a bar cannot be.
        label: ([max(row[key], 0.0) for row in rows], color)
        for (label, key), color in zip(parts.items(), colors, strict=True)
    }
    positions = np.arange(len(rows))
    _stack(axes, positions, stacks)
    labels = [f"{row['processes']}\n{row['scaling']}" if names_scaling else str(row["processes"]) for row in rows]
    axes.set(title="one training step", ylabel="ms")
    _finish(axes, positions, labels, "processes")


def _reduce_panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    by_count = {row["processes"]: row["allreduce_gb_per_s"] for row in rows if row["allreduce_gb_per_s"] is not None}
    positions = np.arange(len(by_count))
    if by_count:
        bars = axes.bar(positions, list(by_count.values()), 0.6, color=_GREEN)
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=2)
    else:
        axes.text(0.5, 0.5, "one process sends nothing", transform=axes.transAxes, ha="center", va="center")
    axes.set(title="all-reduce of all gradients, alone", ylabel="bus bandwidth, GB/s")
    _finish(axes, positions, [str(count) for count in by_count], "processes")


def _stack(axes: Axes, positions: np.ndarray, parts: Mapping[str, tuple[Sequence[float], Any]]) -> None:
    """Draw stacked bars, {label: (values, colour)} from the bottom up, with their total on top."""
    bottom = np.zeros(len(positions))
    for label, (values, color) in parts.items():
        axes.bar(positions, values, 0.6, bottom=bottom, color=color, label=label)
        bottom = bottom + np.array(values)
    for position, total in zip(positions, bottom, strict=True):
        axes.annotate(f"{total:.4g}", (position, total), (0, 3), textcoords="offset points", ha="center", fontsize=8)


def _finish(
    axes: Axes, positions: np.ndarray, labels: Sequence[str], axis_name: str, *, has_legend: bool = True
) -> None:
    axes.set_xticks(positions, labels)
    axes.set_xlim(-0.6, max(len(positions), 1) - 0.4)
    axes.set_ylim(0, 1.35 * axes.dataLim.ymax if axes.dataLim.ymax > 0 else 1)  # room for the legend
    axes.set_xlabel(axis_name, fontsize=9)
    axes.title.set_fontsize(10)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", reverse=True, ncols=2)
