"""Figures of profile_gpu.py and benchmark_ddp.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.measure.scaling import STEP_PARTS
from utils.pages.figures import figure_color, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from utils.measure.profiling import BatchProfile

Row = Mapping[str, Any]
_GIB = 2**30
_BLUE, _GREEN, _ORANGE, _SKY, _RED, _PINK = (figure_color(index) for index in (4, 2, 0, 1, 5, 6))
_PHASE_COLORS = {"input": _PINK, "forward": _SKY, "loss": _ORANGE, "backward": _BLUE, "optimizer": _GREEN}
_SCALING_COLORS = {"weak": _BLUE, "strong": _ORANGE}
_PART_COLORS = dict(zip(STEP_PARTS, (_BLUE, _RED, _PINK, _ORANGE), strict=True))


# --- profile_gpu.py ------------------------------------------------------------------------------------------------


def plot_profile(
    profiles: Sequence[BatchProfile], best_batch_size: int, title: str, capacity_bytes: int | None, path: Path
) -> None:
    """Draw images/s, the phases of a step, peak memory, and the device's utilisation over the batch size.

    The best batch size is marked. A line shows the device's memory, `capacity_bytes`, where it is known.
    """
    figure, (speed, phases, memory, busy) = new_figure(2, 2, cell_width=6.2, cell_height=4.0)
    figure.suptitle(title, fontsize=11)
    _speed_panel(speed, profiles, best_batch_size)
    parts = {
        phase: ([profile.phase_ms[phase] for profile in profiles], color) for phase, color in _PHASE_COLORS.items()
    }
    stack_bars(phases, parts, [profile.step_ms for profile in profiles])
    phases.set(title="one training step", ylabel="ms")
    _memory_panel(memory, profiles, capacity_bytes)
    _busy_panel(busy, profiles)
    for axes in (speed, phases, memory, busy):
        finish_axes(axes, [str(profile.batch_size) for profile in profiles], "batch size")
    save_figure(figure, path)


def _speed_panel(axes: Axes, profiles: Sequence[BatchProfile], best_batch_size: int) -> None:
    speeds = [profile.images_per_s for profile in profiles]
    best = [profile.batch_size for profile in profiles].index(best_batch_size)
    axes.plot(range(len(speeds)), speeds, color=_BLUE, marker="o", linewidth=1.8)
    axes.plot([best], [speeds[best]], "o", markersize=12, markerfacecolor="none", markeredgecolor=_RED, label="best")
    for position, speed in enumerate(speeds):
        axes.annotate(f"{speed:.3g}", (position, speed), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="throughput", ylabel="images/s")


def _memory_panel(axes: Axes, profiles: Sequence[BatchProfile], capacity_bytes: int | None) -> None:
    reserved = [profile.reserved_bytes for profile in profiles if profile.reserved_bytes is not None]
    name = "tensors" if reserved else "the process (RSS)"
    peaks = [profile.allocated_bytes / _GIB for profile in profiles]
    stack_bars(axes, {name: (peaks, _ORANGE)}, peaks)
    if reserved:
        sizes = [size / _GIB for size in reserved]
        axes.plot(range(len(sizes)), sizes, "v", color="0.3", markersize=5, label="reserved by PyTorch")
    if capacity_bytes:
        axes.axhline(capacity_bytes / _GIB, color=_RED, linestyle="--", linewidth=1.2, label="the device has")
    axes.set(title="memory at the peak", ylabel="GiB")


def _busy_panel(axes: Axes, profiles: Sequence[BatchProfile]) -> None:
    names = {"cpu_util": ("CPU busy, %", 100, _BLUE), "gpu_util": ("GPU busy, %", 100, _BLUE)}
    names |= {"gpu_power_w": ("power, W", 1, _ORANGE), "gpu_temperature_c": ("temperature, °C", 1, _RED)}
    for name, (label, factor, color) in names.items():
        found = [(at, profile.readings[name]) for at, profile in enumerate(profiles) if name in profile.readings]
        if found:
            values = [factor * value for _, value in found]
            axes.plot([at for at, _ in found], values, "o-", color=color, label=label, linewidth=1.6)
            for (at, _), value in zip(found, values, strict=True):
                axes.annotate(f"{value:.3g}", (at, value), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set_title("during the measured steps" if axes.has_data() else "during the measured steps: not readable")


def stack_bars(axes: Axes, parts: Mapping[str, tuple[Sequence[float], Any]], totals: Sequence[float]) -> None:
    """Draw stacked bars from `parts`, {label: (values, colour)}, and a line with its value at each measured total."""
    bottom = np.zeros(len(totals))
    for label, (values, color) in parts.items():
        axes.bar(range(len(values)), values, 0.6, bottom=bottom, color=color, label=label)
        bottom = bottom + np.array(values)
    for position, (top, total) in enumerate(zip(bottom, totals, strict=True)):
        axes.plot([position - 0.34, position + 0.34], [total, total], color="black", linewidth=1.4)
        place = (position, max(top, total))
        axes.annotate(f"{total:.4g}", place, (0, 3), textcoords="offset points", ha="center", fontsize=8)


def finish_axes(axes: Axes, labels: Sequence[str], axis_name: str, *, has_legend: bool = True) -> None:
    """Set ticks, limits and style. Call this after everything is drawn."""
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    highest = axes.dataLim.ymax if axes.has_data() else 0  # infinite without data
    axes.set_ylim(0, 1.35 * max(highest, 0) or 1)  # space for the legend
    axes.set_xlabel(axis_name, fontsize=9)
    axes.title.set_fontsize(10)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", reverse=True, ncols=2)


# --- benchmark_ddp.py ----------------------------------------------------------------------------------------------


def plot_scaling(rows: Sequence[Row], points: Sequence[Row], title: str, path: Path) -> None:
    """Draw images/s, efficiency, the parts of a step, and the all-reduce by message size.

    `rows` come from `scaling.summarise`, `points` from `scaling.median_points`.
    """
    figure, panels = new_figure(3, 2, cell_width=5.0, cell_height=3.8)
    speed, efficiency, split, bandwidth, latency, unused = panels
    unused.remove()
    figure.suptitle(title, fontsize=11)
    counts = sorted({row["processes"] for row in rows})
    kinds = [kind for kind in _SCALING_COLORS if any(row["scaling"] == kind for row in rows)]
    labels = [str(count) for count in counts]
    _throughput_panel(speed, rows, counts, kinds)
    finish_axes(speed, labels, "processes")
    _efficiency_panel(efficiency, rows, counts, kinds)
    finish_axes(efficiency, labels, "processes", has_legend=len(kinds) > 1)

    parts = {STEP_PARTS[key]: ([row[key] for row in rows], color) for key, color in _PART_COLORS.items()}
    stack_bars(split, parts, [row["step_ms"] for row in rows])
    split.set(title="one training step (line: by the host's clock)", ylabel="ms")
    scalings = [f"\n{row['scaling']}" if len(kinds) > 1 else "" for row in rows]
    finish_axes(split, [f"{row['processes']}{kind}" for row, kind in zip(rows, scalings, strict=True)], "processes")

    _allreduce_panel(bandwidth, points, "bus_gb_per_s", "all-reduce by itself: bus bandwidth", "GB/s")
    _allreduce_panel(latency, points, "ms", "all-reduce by itself: time", "ms")
    save_figure(figure, path)


def _throughput_panel(axes: Axes, rows: Sequence[Row], counts: Sequence[int], kinds: Sequence[str]) -> None:
    start = rows[0]["images_per_s"] / counts[0]  # images/s per process, with the fewest processes
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
