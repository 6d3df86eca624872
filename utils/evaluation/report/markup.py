"""HTML written so that no text can become markup: what is not `Markup` is escaped, always."""

from __future__ import annotations

import html

from utils.common.errors import printable

MOST_CHARACTERS = 1000  # of one piece of text: a hostile name stays a nuisance
_EMPTY = {"br", "circle", "img", "input", "line", "link", "meta", "polyline", "rect"}


class Markup(str):
    """HTML that goes into the page as it stands."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return text as HTML that shows it; what cannot be printed (control characters, half surrogates) is spelt out."""
    return text if isinstance(text, Markup) else Markup(html.escape(printable(text, MOST_CHARACTERS)))


def element(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Markup:
    """Return an element. Attributes: `class_` is class, `data_key` data-key; True has no value, None and False are left out."""
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + ("" if value is True else f'="{escaped(value if isinstance(value, str) else str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inside = joined(*children)
    return Markup(f"<{name}{shown}/>" if name in _EMPTY and not inside else f"<{name}{shown}>{inside}</{name}>")


def joined(*parts: str) -> Markup:
    """Return several pieces, one after the other."""
    return Markup("".join(escaped(part) for part in parts))
