"""Durations, sizes and aligned tables as text; colours on a terminal, and of each class."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

# Control characters, halves of surrogate pairs (from a file name that is not UTF-8), and what XML
# 1.0, 2.2 leaves out.
_NOT_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
COLORS = {"red": 31, "green": 32, "yellow": 33}
# What `pip install .` gives, and what works without it in the project's folder; their commands are
# the scripts.
COMMAND = "yolo-seg-ddp"
MODULE = "python -m yolo_seg_ddp"
_NAMES = (
    "download_data parse_labels check_data prepare_data train_yolo_ddp evaluate_model inference "
    "export test_ddp profile_gpu benchmark_ddp"
)
SCRIPTS = {
    "predict" if name == "inference" else name.partition("_")[0]: name for name in _NAMES.split()
}


def plain_text(text: str) -> str:
    """Replace each character that UTF-8, XML or a table's cell cannot hold by U+FFFD, including
    tabs and line breaks.
    """
    return _NOT_TEXT.sub("\ufffd", text)


def is_terminal(*streams: TextIO) -> bool:
    """Return whether streams show colours and a bar: on a terminal, unless NO_COLOR is set
    (no-color.org).
    """
    return all(stream.isatty() for stream in streams) and not os.environ.get("NO_COLOR")


def coloured(text: str, color: str, stream: TextIO | None = None) -> str:
    """Return text for a stream, by default stdout: on a terminal bold and in a color of COLORS,
    else as it is.
    """
    return f"\x1b[1;{COLORS[color]}m{text}\x1b[0m" if is_terminal(stream or sys.stdout) else text


def next_command(*words: object) -> str:
    """Return the line that tells which command to type next."""
    return as_called(coloured("Next:", "green") + " " + shlex.join(str(word) for word in words))


def as_called(text: str) -> str:
    """Return text with the commands of COMMAND or MODULE for those of the scripts, if it was
    called.
    """
    called = sys.argv[0].rpartition(" ")[0]
    if called not in (COMMAND, MODULE):
        return text
    for name, script in SCRIPTS.items():
        text = text.replace(f"python {script}.py", f"{called} {name}")
    return text.replace(f"{MODULE} ", f"{called} ")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]], end: str = "\r\n") -> str:
    """Return a table as CSV.

    Its first line has the names of the columns; each line ends with `end`.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator=end).writerows([columns, *rows])
    return text.getvalue()


def format_duration(duration_s: float) -> str:
    """Return a duration in its two largest units: `42s`, `3m 05s`, `1h 02m`, `2d 03h`; `?` if below
    0 or not finite.
    """
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
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    right_from: int | None = None,
    cut: int | None = None,
) -> str:
    """Align columns, two spaces apart: numbers to the right (floats with four decimals), text to
    the left.

    Columns from number `right_from` on are aligned to the right whatever they hold.
    Column number `cut` loses the middle of what makes the table too wide for a terminal.
    """
    rows = [list(row) for row in rows]
    lines = [list(header), *([_cell(value) for value in row] for row in rows)]
    align = []
    for column in range(len(header)):
        values = [row[column] for row in rows if row[column] is not None]
        are_numbers = values and all(map(_is_number, values))
        align.append(
            ">" if are_numbers or (right_from is not None and column >= right_from) else "<"
        )
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    excess = sum(widths) + 2 * len(widths) - 2 - shutil.get_terminal_size().columns
    if cut is not None and excess > 0 and sys.stdout.isatty():
        width = widths[cut] = min(widths[cut], max(widths[cut] - excess, 9))
        for line in (line for line in lines if len(line[cut]) > width):
            line[cut] = f"{line[cut][: width // 2]}…{line[cut][width // 2 - width + 1 :]}"
    lines.insert(1, ["-" * width for width in widths])
    form = "  ".join(f"{{:{place}{width}}}" for place, width in zip(align, widths, strict=True))
    return "\n".join(form.format(*line).rstrip() for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return (
        f"{float(value):.4f}"
        if _is_number(value) and not hasattr(value, "__index__")
        else str(value)
    )


def _is_number(value: Any) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


def without_mask_line(number: int) -> str:
    """Return a line about detections whose mask is empty; an empty string if there are none."""
    return (
        f"{counted(number, 'detection')} without a mask: only the box is reported" if number else ""
    )


def counted(number: int, what: str) -> str:
    """Return a number with its noun, such as "1 error", "0 errors" or "2 classes"."""
    return f"{number:,} {what}{('es' if what.endswith(('s', 'tch')) else 's') * (number != 1)}"


# Six of Okabe and Ito's colours, which colour-blind people can distinguish
# (jfly.uni-koeln.de/color, 2008). Their yellow and black are crimson and violet here: all eight are
# visible on white, on black and on photographs, and in the simulations of Machado et al. (2009) any
# two are at least 16 apart (CIE76). Further classes get darker, then duller shades.
PALETTE = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (225, 0, 75),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
    (128, 64, 255),
)


def class_color(class_id: int) -> tuple[int, int, int]:
    """Return a class's RGB colour. From the 25th class on, colours repeat."""
    red, green, blue = PALETTE[class_id % len(PALETTE)]
    shade = class_id // len(PALETTE) % 3
    if shade == 1:
        return red * 6 // 10, green * 6 // 10, blue * 6 // 10
    if shade == 2:
        return (red + 128) // 2, (green + 128) // 2, (blue + 128) // 2
    return red, green, blue


def contrast_color(color: Sequence[int]) -> tuple[int, int, int]:
    """Return black or white, which stands out from an RGB colour: for text on it and for edges
    beside it (ITU-R BT.601).
    """
    return (
        (0, 0, 0)
        if 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 110
        else (255, 255, 255)
    )


def without_secrets(text: str) -> str:
    """Return `text` without the user, password and query of its URLs."""
    return re.sub(r"(://[^\s?]*)\?\S+", r"\1?…", re.sub(r"://[^/\s]*@", "://…@", text))
