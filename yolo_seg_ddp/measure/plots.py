"""Figures of profile_gpu.py and benchmark_ddp.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from yolo_seg_ddp.measure.scaling import STEP_PARTS
from yolo_seg_ddp.measure.step_timer import PHASES
from yolo_seg_ddp.pages.figures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from yolo_seg_ddp.measure.profiling import BatchProfile

_GIB = 2**30


def plot_profile(
    profiles: Sequence[BatchProfile], best: BatchProfile, title: str, path: Path
) -> None:
    """Draw images/s, the phases of a step and peak memory over the batch size."""
    figure, (speed, phases, memory) = new_figure(3, 1, cell_width=5, cell_height=4)
    figure.suptitle(title)
    sizes = [str(profile.batch_size) for profile in profiles]
    speed.plot(sizes, [profile.images_per_s for profile in profiles], "o-")
    speed.plot(
        [str(best.batch_size)],
        [best.images_per_s],
        "o",
        markersize=12,
        fillstyle="none",
        label="best",
    )
    _finish(speed, "throughput", "batch size", "images/s")
    _stack(
        phases,
        sizes,
        {phase: [profile.phase_ms[phase] for profile in profiles] for phase in PHASES},
    )
    _finish(phases, "one training step", "batch size", "ms")
    kinds = {"tensors": "allocated_bytes", "reserved by PyTorch": "reserved_bytes"}
    if best.reserved_bytes is None:
        kinds = {"the process (RSS)": "allocated_bytes"}
    for label, name in kinds.items():
        memory.plot(
            sizes, [getattr(profile, name) / _GIB for profile in profiles], "o-", label=label
        )
    _finish(memory, "memory at the peak", "batch size", "GiB")
    save_figure(figure, path)


def plot_scaling(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw images/s, efficiency and the parts of a step over the number of processes; `rows` of
    `scaling.summarise`.
    """
    figure, (speed, efficiency, parts) = new_figure(3, 1, cell_width=5, cell_height=4)
    figure.suptitle(title)
    counts = [str(row["processes"]) for row in rows]
    alone = rows[0]["images_per_s"] / rows[0]["processes"]
    speed.plot(counts, [row["images_per_s"] for row in rows], "o-", label="measured")
    speed.plot(counts, [alone * row["processes"] for row in rows], "--", label="in proportion")
    _finish(speed, "throughput", "processes", "images/s")
    bars = efficiency.bar(counts, [100 * row["efficiency"] for row in rows])
    efficiency.bar_label(bars, fmt="%.0f %%")
    _finish(efficiency, f"efficiency (with {counts[0]}: 100 %)", "processes", "%")
    _stack(
        parts, counts, {title: [row[name] for row in rows] for name, title in STEP_PARTS.items()}
    )
    _finish(parts, "one training step", "processes", "ms")
    save_figure(figure, path)


def _stack(axes: Axes, labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    bottom = np.zeros(len(labels))
    for part, values in parts.items():
        axes.bar(labels, values, bottom=bottom, label=part)
        bottom = bottom + np.array(values)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(0, 1.15 * axes.dataLim.ymax)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
