"""docs/results/records.jsonl holds each figure that a page quotes beside a link to the results, and
nothing else.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.pictures import CHART, draw
from tests.support.plugin import PROJECT

RECORDS = "docs/results/records.jsonl"
FILES = [
    PROJECT / "README.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
    *sorted(PROJECT.glob("yolo_seg_ddp/extras/*/*.md")),
]
RECIPES = sorted(PROJECT.glob("recipes/*/README.md"))
PAGES = [file.relative_to(PROJECT).as_posix() for file in [*FILES, *RECIPES]]
LINK = re.compile(r"records\.jsonl(?:#([\w-]+))?|results/README\.md")
# each has an alt text
IMAGE = re.compile(r'(?:!\[[^\]]+\]\(|<img src=")([^)"]+\.(?:svg|png|jpg))(?:\)|" alt="[^"])')
# Code, the target of a link, a date, a version, and a word that holds digits are no numbers.
NUMBER = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d-\d\d|\d+\.\d+\.\d+|[^\W\d]\w*|(\d[\d,]*(?:\.\d+)?(?:e-\d+)?)"
)


def numbers(text: str) -> list[str]:
    """Return the numbers of a line as they are written, without commas."""
    return [found.replace(",", "") for found in NUMBER.findall(text) if found]


def lines_with_figures(page: str) -> Iterator[str]:
    """Yield the lines of a page that link to the results, and the rows of the tables below them in
    the same section.
    """
    is_linked, lines = False, (PROJECT / page).read_text(encoding="utf-8").splitlines()
    for line, below in itertools.pairwise([*lines, ""]):
        has_link = LINK.search(line) is not None
        is_linked = has_link or (is_linked and not line.startswith("#"))
        # no heads of tables
        if has_link or (is_linked and line.strip().startswith("|") and "|---" not in below):
            yield line


def values_of(record: dict[str, Any]) -> set[float]:
    return {
        value
        for given in record["values"].values()
        for value in (given if isinstance(given, list) else [given])
    }


def test_each_quoted_figure_has_a_record_and_each_record_is_quoted() -> None:
    read = [
        json.loads(line) for line in (PROJECT / RECORDS).read_text(encoding="utf-8").splitlines()
    ]
    measurements = {facts["id"]: facts for facts in read if "id" in facts}
    assert all(
        facts[name]
        for facts in measurements.values()
        for name in ("command", "revision", "date", "machine")
    )
    unseen = [record for record in read if "id" not in record]
    assert {one for record in unseen for one in record["of"]} == measurements.keys()
    assert {file.relative_to(PROJECT).as_posix() for file in RECIPES} <= {
        record["in"] for record in unseen
    }
    for page in PAGES:
        own = [record for record in unseen if record["in"] == page]
        for line in lines_with_figures(page):
            written = numbers(line)
            shown = [record for record in own if values_of(record) <= set(map(float, written))]
            known = {
                value
                for record in shown
                for value in values_of(record) | set(map(float, numbers(record["what"])))
            }
            missing = [number for number in written if "." in number and float(number) not in known]
            new = [
                number
                for number in missing
                if all(float(number) not in values_of(record) for record in own)
            ]
            assert not missing, (
                f"{page}: {', '.join(new or missing)} in this line: no record in {RECORDS}: {line}"
            )
            unseen = [record for record in unseen if record not in shown]
        links = {
            link[1]
            for link in LINK.finditer((PROJECT / page).read_text(encoding="utf-8"))
            if link[1]
        }
        assert links <= measurements.keys(), (
            f"{page} links to measurements that {RECORDS} does not name"
        )
    assert not unseen, (
        f"no line of {unseen[0]['in']} that belongs to the results shows this record: {unseen[0]}"
    )


def test_the_chart_is_drawn_from_the_records_and_all_pictures_are_small() -> None:
    expected = draw((PROJECT / RECORDS).read_text(encoding="utf-8"))
    assert CHART.read_text(encoding="utf-8") == expected, "run: python benchmarks/pictures.py"
    pictures = {
        path.name: path.stat().st_size for path in CHART.parent.iterdir() if path.suffix != ".md"
    }
    assert sum(pictures.values()) <= 3e6, pictures
    shown = {
        Path(name).name
        for file in FILES
        for name in IMAGE.findall(file.read_text(encoding="utf-8"))
    }
    assert shown == pictures.keys()
