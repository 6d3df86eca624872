"""Durations, sizes and aligned tables as text."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# Control characters, halves of surrogate pairs (from a file name that is not UTF-8), and what XML 1.0, 2.2 leaves out.
_NOT_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def plain_text(text: str) -> str:
    """Replace each character that UTF-8, XML or a table's cell cannot hold by U+FFFD, including tabs and line breaks."""
    return _NOT_TEXT.sub("\ufffd", text)


def next_command(*words: object) -> str:
    """Return the line that tells which command to type next."""
    return "Next: " + shlex.join(str(word) for word in words)


def format_duration(duration_s: float) -> str:
    """Return a duration in its two largest units: `42s`, `3m 05s`, `1h 02m`, `2d 03h`; `?` if below 0 or not finite."""
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
    size = num_bytes / 1024
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.95:  # 1023.95 and more would print as 1024.0
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} PiB"


def format_table(
    header: Sequence[str], rows: Iterable[Sequence[Any]], *, right_from: int | None = None, has_rule: bool = True
) -> str:
    """Align columns, two spaces apart: numbers to the right (floats with four decimals), text to the left.

    Columns from number `right_from` on are aligned to the right whatever they hold. `has_rule`: underline the header.
    """
    rows = [list(row) for row in rows]
    cells = [[_cell(value) for value in row] for row in rows]
    align: list[Callable[[str, int], str]] = []
    for column in range(len(header)):
        values = [row[column] for row in rows if row[column] is not None]
        is_right = right_from is not None and column >= right_from
        align.append(str.rjust if is_right or (values and all(map(_is_number, values))) else str.ljust)
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    rule = [["-" * width for width in widths]] if has_rule else []
    lines = [
        "  ".join(place(text, width) for place, text, width in zip(align, line, widths, strict=True)).rstrip()
        for line in [list(header), *rule, *cells]
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{float(value):.4f}" if _is_number(value) and not hasattr(value, "__index__") else str(value)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


def without_mask_line(number: int) -> str:
    """Return a line about detections whose mask is empty; an empty string if there are none."""
    return f"{counted(number, 'detection')} without a mask: only the box is reported" if number else ""


def counted(number: int, what: str) -> str:
    """Return a number with its noun, such as "1 error" or "0 errors"."""
    return f"{number:,} {what}{'s' * (number != 1)}"
