"""The output of `profile_gpu.py`: tables, the recommended batch size, and values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from utils.common.text import format_bytes, format_table
from utils.measure.operators import Operator
from utils.measure.profiling import BEST_WITHIN, HEADROOM, BatchProfile, TooLarge, best_profile, leaves_headroom
from utils.measure.step_timer import PHASES


def verdict_lines(
    profiles: Sequence[BatchProfile], too_large: TooLarge | None, capacity_bytes: int | None = None
) -> list[str]:
    """Return two lines: the best batch size, and the largest that fits."""
    best = best_profile(profiles, capacity_bytes)
    largest = max(profile.batch_size for profile in profiles)
    fits = f"batch {too_large.batch_size} {too_large.reason}" if too_large else "none of those tried ran out of memory"
    room = f"with at least {HEADROOM:.0%} of the memory free"
    if not leaves_headroom(best, capacity_bytes):
        room = f"none leaves {HEADROOM:.0%} of the memory free: try a smaller one"
    return [
        f"Best: --batch-size {best.batch_size} ({best.images_per_s:.1f} images/s; "
        f"the smallest batch within {BEST_WITHIN:.0%} of the fastest, {room})",
        f"Largest that fits: {largest} ({fits})",
    ]


def profile_table(profiles: Sequence[BatchProfile]) -> str:
    """Return speed, times (ms per step), memory and readings as a table, one row per batch size."""
    memory = ("tensors", "reserved") if profiles[0].reserved_bytes is not None else ("peak RSS",)
    readings = {
        "cpu_util": ("CPU busy", "{:.0%}"),
        "gpu_util": ("GPU busy", "{:.0%}"),
        "gpu_power_w": ("power W", "{:.0f}"),
        "gpu_temperature_c": ("temp. C", "{:.0f}"),
    }
    shown = {name: look for name, look in readings.items() if any(name in profile.readings for profile in profiles)}
    titles = ("images/s", "ms/step", "std", *PHASES, *memory, *(title for title, _ in shown.values()))
    rows = []
    for profile in profiles:
        sizes = [profile.allocated_bytes, profile.reserved_bytes][: len(memory)]
        values = [profile.images_per_s, profile.step_ms, profile.step_ms_std, *profile.phase_ms.values()]
        cells = [*(f"{value:.1f}" for value in values), *(format_bytes(size or 0) for size in sizes)]
        cells += [
            form.format(profile.readings[name]) if name in profile.readings else "-"
            for name, (_, form) in shown.items()
        ]
        rows.append([profile.batch_size, *cells])
    return format_table(["batch", *(title.rjust(9) for title in titles)], rows, right_from=1)


def to_record(
    profiles: Sequence[BatchProfile], too_large: TooLarge | None, capacity_bytes: int | None = None
) -> dict[str, Any]:
    """Return the profiles and the recommended batch size as plain values for JSON."""
    derived = ("step_ms", "images_per_s")  # properties, which asdict leaves out
    return {
        "best_batch_size": best_profile(profiles, capacity_bytes).batch_size,
        "largest_batch_size": max(profile.batch_size for profile in profiles),
        "out_of_memory_at": too_large.batch_size if too_large else None,
        "ended_because": too_large.reason if too_large else None,
        "capacity_bytes": capacity_bytes,
        "profiles": [{**asdict(one), **{name: getattr(one, name) for name in derived}} for one in profiles],
    }


def operator_table(operators: Sequence[Operator]) -> str:
    """Return the most expensive operators as a table."""
    rows = [[found.name, f"{found.calls:.0f}", f"{found.ms:.1f}", f"{found.share:.1%}"] for found in operators]
    return format_table(["operator", "calls/step", "own ms/step", "share".rjust(7)], rows, right_from=1)
