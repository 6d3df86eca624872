"""Draw the README's comparison with Ultralytics from the recorded figures: `python
benchmarks/pictures.py`.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
# started by its path: Python would search this folder instead of the project's
if __package__ in (None, ""):
    sys.path[0] = str(DOCS.parent)

from yolo_seg_ddp.pages.markup import Markup, element

RECORDS, CHART = DOCS / "results" / "records.jsonl", DOCS / "images" / "ultralytics.svg"
LESS_IS_BETTER = re.compile("time|gradient")  # at the start of a record's `what`
TOP_PX, ROW_PX, BARS_PX, LONGEST_PX = 50, 50, 350, 390
# The picture has a background of its own, because the reader's system and GitHub can differ in
# light and dark.
STYLE = """
text { font: 13px -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif }
text { fill: #1f2328 }
.page { fill: #fff; stroke: #d1d9e0 }
.ours { fill: #0969da } .theirs { fill: #9aa4ae } .better { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .page { fill: #0d1117; stroke: #3d444d }
  .ours { fill: #4493f8 } .theirs { fill: #656c76 }
}
"""


def draw(records: str) -> str:
    """Return the chart as SVG: the README's records in their order; in each row the longer bar has
    the same length.
    """
    rows = [row for row in map(json.loads, records.splitlines()) if row.get("in") == "README.md"]
    height_px = TOP_PX + ROW_PX * len(rows)
    parts = [element("rect", class_="page", x=0.5, y=0.5, width=829, height=height_px - 1, rx=6)]
    for x, style, side in zip((350, 480), ("ours", "theirs"), rows[0]["values"], strict=True):
        parts += [
            element("rect", class_=style, x=x, y=18, width=12, height=12),
            element("text", side, x=x + 18, y=29),
        ]
    for y, row in zip(range(TOP_PX, height_px, ROW_PX), rows, strict=True):
        values = list(row["values"].values())
        is_less = LESS_IS_BETTER.match(row["what"])
        lines = textwrap.wrap(row["what"] + " (less is better)" * bool(is_less), 48)
        parts += [
            element("text", line, x=18, y=y + 14 + 18 * number) for number, line in enumerate(lines)
        ]
        best = (min if is_less else max)(values)
        digits = max(len(str(value).partition(".")[2]) for value in values)
        for top, style, value in zip((y + 2, y + 19), ("ours", "theirs"), values, strict=True):
            length = max(round(LONGEST_PX * value / max(values), 1), 1.5)
            written = f"{value:.{digits}f}" if value > 1e-3 else f"{value:.0e}".replace("e-0", "e-")
            weight = "better" if value == best else None
            end = f"{BARS_PX + length + 8:.1f}"
            parts += [element("rect", class_=style, x=BARS_PX, y=top, width=length, height=14)]
            parts += [element("text", written, class_=weight, x=end, y=top + 11)]
    body = Markup("\n".join([element("style", Markup(STYLE)), *parts]))
    return (
        element(
            "svg",
            body,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 830 {height_px}",
            width=830,
        )
        + "\n"
    )


if __name__ == "__main__":
    CHART.write_text(draw(RECORDS.read_text(encoding="utf-8")), encoding="utf-8")
