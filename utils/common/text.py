"""Durations, sizes and aligned tables as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def format_duration(duration_s: float) -> str:
    """Return the two largest units: `42s`, `3m 05s`, `1h 02m`, `2d 03h`; `?` for what is not a duration."""
    if not math.isfinite(duration_s) or duration_s < 0:
        return "?"
    seconds = round(duration_s)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    minutes = round(duration_s / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    hours = round(duration_s / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def format_bytes(num_bytes: float) -> str:
    """Return a size in binary units with one decimal: `512 B`, `5.1 GiB`."""
    if abs(num_bytes) < 1024:
        return f"{num_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB")
    size = num_bytes / 1024
    for unit in units[:-1]:
        if abs(size) < 1023.95:  # what would be written as 1024.0 belongs to the next unit
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {units[-1]}"


def format_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Align columns, two spaces apart: numbers to the right (floats with four decimals), text to the left."""
    rows = [list(row) for row in rows]
    cells = [[_cell(value) for value in row] for row in rows]
    align: list[Callable[[str, int], str]] = []
    for column in range(len(header)):
        values = [row[column] for row in rows if row[column] is not None]
        align.append(str.rjust if values and all(_is_number(value) for value in values) else str.ljust)
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    lines = [
        "  ".join(place(text, width) for place, text, width in zip(align, line, widths, strict=True)).rstrip()
        for line in [list(header), ["-" * width for width in widths], *cells]
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{float(value):.4f}" if _is_number(value) and not hasattr(value, "__index__") else str(value)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


def aligned(header: Sequence[str], rows: Sequence[Sequence[Any]], num_plain: int) -> str:
    """Return a table whose columns, from the one numbered `num_plain` on, are texts set to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(str(cell)) for cell in column) for column in columns]
    padded = [
        [
            str(cell).rjust(width) if number >= num_plain else cell
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (header, *rows)
    ]
    return format_table(padded[0], padded[1:])
