"""Charts of what `profile_gpu.py` finds: one device at several batch sizes."""

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
_MEMORY_COLORS = {
    "process": _figure_color(7),
    "weights": _BLUE,
    "averaged weights": _SKY,
    "optimizer": _GREEN,
    "input": _PINK,
    "activations": _ORANGE,
    "gradients": _RED,
    "temporary": _figure_color(3),
}


def plot_profile(
    profiles: Sequence[BatchProfile], best_batch_size: int, title: str, capacity_bytes: int | None, path: Path
) -> None:
    """Draw images/s, the phases of a step, the peak memory by kind and what the device was doing over the batch size.

    The best batch is marked; the device's memory, `capacity_bytes`, is a line where it is known.
    """
    figure, (speed, phases, memory, busy) = _figure(2, 2, cell_width=6.2, cell_height=4.0)
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
        room = 1.55 if axes is memory else 1.35
        finish_axes(axes, [str(profile.batch_size) for profile in profiles], "batch size", room=room)
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
    parts = {
        kind: ([profile.memory_bytes[kind] / _GIB for profile in profiles], color)
        for kind, color in _MEMORY_COLORS.items()
        if any(profile.memory_bytes.get(kind) for profile in profiles)
    }
    stack_bars(axes, parts, [profile.allocated_bytes / _GIB for profile in profiles])
    reserved = [profile.reserved_bytes for profile in profiles if profile.reserved_bytes is not None]
    if reserved:
        sizes = [size / _GIB for size in reserved]
        axes.plot(range(len(sizes)), sizes, "v", color="0.3", markersize=5, label="reserved by PyTorch")
    if capacity_bytes:
        axes.axhline(capacity_bytes / _GIB, color=_RED, linestyle="--", linewidth=1.2, label="the device has")
    line = "line: measured peak of tensors" if reserved else "line: peak of the whole process (RSS)"
    axes.set(title=f"memory at the peak ({line})", ylabel="GiB")


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
    axes.set_title("during the measured steps")


def stack_bars(axes: Axes, parts: Mapping[str, tuple[Sequence[float], Any]], totals: Sequence[float]) -> None:
    """Draw stacked bars, {label: (values, colour)} from the bottom up, a line at the measured total, and its value."""
    bottom = np.zeros(len(totals))
    for label, (values, color) in parts.items():
        axes.bar(range(len(values)), values, 0.6, bottom=bottom, color=color, label=label)
        bottom = bottom + np.array(values)
    for position, (top, total) in enumerate(zip(bottom, totals, strict=True)):
        axes.plot([position - 0.34, position + 0.34], [total, total], color="black", linewidth=1.4)
        place = (position, max(top, total))
        axes.annotate(f"{total:.4g}", place, (0, 3), textcoords="offset points", ha="center", fontsize=8)


def finish_axes(
    axes: Axes, labels: Sequence[str], axis_name: str, *, has_legend: bool = True, room: float = 1.35
) -> None:
    """Set ticks, limits and style; call it after everything is drawn."""
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_ylim(0, room * max(axes.dataLim.ymax, 0) or 1)  # for the legend
    axes.set_xlabel(axis_name, fontsize=9)
    axes.title.set_fontsize(10)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if has_legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", reverse=True, ncols=2)
