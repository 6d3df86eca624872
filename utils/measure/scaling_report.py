"""Tables of the scaling benchmark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from utils.common.text import format_bytes, format_table
from utils.measure.scaling import STEP_PARTS, Run

MAX_OTHER_LOAD = 0.05  # share of the machine's cores; above it a note is printed


def noise_note(rows: Iterable[dict[str, Any]]) -> str | None:
    """Return a line about other processes that used the machine during the measurement, or None."""
    largest = max((row["other_load"] for row in rows if row["other_load"] is not None), default=0.0)
    if largest <= MAX_OTHER_LOAD:
        return None
    return (
        f"Other processes used up to {largest:.0%} of this machine's cores during the measurement, which lowers the "
        "efficiency shown: repeat on an idle machine"
    )


def scaling_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `summarise` as a table; the parts of a step are shares of its time."""
    header = ["scaling", "processes", "batch", "images/s", "speed-up", "efficiency", "ms/step"]
    header += [*STEP_PARTS.values(), "sum", "overlap", "net overlap"]
    lines = []
    for row in rows:
        shares = [row[name] / row["step_ms"] for name in STEP_PARTS]
        cells = [f"{row['images_per_s']:.1f}", f"{row['speed_up']:.2f}x", f"{row['efficiency']:.0%}"]
        cells += [f"{row['step_ms']:.1f}", *(f"{share:.1%}" for share in [*shares, row["ranges_share"]])]
        cells += ["-" if row[name] is None else f"{row[name]:.0%}" for name in ("overlap", "net_overlap")]
        lines.append([row["scaling"], row["processes"], row["global_batch_size"], *cells])
    return format_table(header, lines, right_from=3)


def allreduce_table(points: Sequence[dict[str, Any]]) -> str:
    """Return the all-reduces that were timed by themselves as a table."""
    lines = []
    for point in points:
        speeds = [f"{point['gb_per_s']:.2f}", f"{point['bus_gb_per_s']:.2f}"]
        lines.append([point["processes"], format_bytes(point["bytes"]), f"{point['ms']:.3f}", *speeds])
    return format_table(["processes", "message", "ms", "algorithm GB/s", "bus GB/s"], lines, right_from=1)


def median_points(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return one row per process count and message size: medians over the runs."""
    by_key: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for run in runs:
        for point in run["allreduces"]:
            by_key.setdefault((point["processes"], point["bytes"]), []).append(point)
    names = ("ms", "gb_per_s", "bus_gb_per_s")
    return [
        {"processes": count, "bytes": size, **{name: median(point[name] for point in points) for name in names}}
        for (count, size), points in sorted(by_key.items())
    ]
