"""Reads the figures of a report page back, for every test that looks at one."""

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import pytest

from utils.pages.report.tables import value_at


class Elements(HTMLParser):
    """Lists what a page consists of: (element, attributes), and the text right behind each `data-key`."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._open: dict[str, str | None] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = dict(attrs) if any(name == "data-key" for name, _ in attrs) else None

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open is not None:
            self.figures.append((self._open, data))
            self._open = None


def check_figures(page: str, metrics: Sequence[dict[str, Any]]) -> int:
    """Compare every figure of a page with metrics.json, to the last bit; return how many there are."""
    figures = Elements(page).figures
    for attributes, text in figures:
        value = value_at(metrics[int(attributes.get("data-model") or 0)], str(attributes["data-key"]))
        if value is None:
            assert text == "–", attributes
        else:
            assert json.loads(str(attributes["data-value"])) == value, attributes
            assert float(text.replace(",", "")) == pytest.approx(value, abs=0.00050001), attributes
    return len(figures)
