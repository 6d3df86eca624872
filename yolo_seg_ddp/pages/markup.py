"""Builds HTML pages safely: all text that is not `Markup` is escaped."""

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from yolo_seg_ddp.utils.errors import printable

MOST_CHARACTERS = 1000  # of one text; names in a model file can be of any length
_EMPTY = {"br", "circle", "img", "input", "line", "link", "meta", "polyline", "rect"}


class Markup(str):
    """HTML that is inserted into the page unchanged."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return text as escaped HTML; unprintable characters (control characters, lone surrogates)
    become escape codes.
    """
    return (
        text if isinstance(text, Markup) else Markup(html.escape(printable(text, MOST_CHARACTERS)))
    )


def element(name: str, /, *children: str, **attributes: str | int | float | bool | None) -> Markup:
    """Return an element.

    `data_key` becomes data-key, `class_` class; None and False omit it, True gives it no value.
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}"
        + (
            ""
            if value is True
            else f'="{escaped(value if isinstance(value, str) else str(value))}"'
        )
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inside = joined(*children)
    return Markup(
        f"<{name}{shown}/>"
        if name in _EMPTY and not inside
        else f"<{name}{shown}>{inside}</{name}>"
    )


def joined(*parts: str) -> Markup:
    """Return the parts concatenated, each escaped if it is not Markup."""
    return Markup("".join(escaped(part) for part in parts))


def document(title: str, parts: Path, pictures: str, *body: str) -> str:
    """Return a page with its style and script, the files `parts` with the suffixes .css and .js.

    The content security policy allows no other script, and the pictures that the directive
    `pictures` names.
    """
    style, script = (
        parts.with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; {pictures}; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("style", Markup(style)),
    )
    html_body = element("body", *body, element("script", Markup(script)))
    return f"<!DOCTYPE html>\n{element('html', head, html_body, lang='en')}\n"


def report_page(
    title: str,
    header: Sequence[str],
    controls: Sequence[str],
    sections: Mapping[str, str],
    main: Sequence[str],
    footer: str,
    pictures: str = "img-src data:",
) -> str:
    """Return a page in the style of the report. controls: beside the links to `sections`, {id:
    label}. pictures: see `document`.
    """
    links = (element("a", label, href=f"#{name}") for name, label in sections.items())
    return document(
        title,
        Path(__file__).with_name("report"),
        pictures,
        element("header", *header),
        element("div", *controls, element("nav", *links, aria_label="Sections"), class_="switch"),
        element("main", *main),
        element(
            "dialog",
            element("form", element("button", "Close"), method="dialog"),
            aria_label="Enlarged picture",
        ),
        element("footer", footer),
    )


def table(
    caption: str, head: Iterable[str], rows: Iterable[str], total: Markup | None = None
) -> Markup:
    """Return a sortable table, in an element that scrolls if the window is narrow."""
    parts = [element("thead", element("tr", *head)), element("tbody", *rows)]
    parts += [element("tfoot", total)] if total else []
    inside = element("table", *parts, class_="sortable", aria_label=caption)
    return element(
        "div", inside, class_="scroll tall", tabindex="0", role="region", aria_label=caption
    )


def heading(label: str, is_name: bool = False) -> Markup:
    """Return the heading of a column, which sorts the table when it is clicked."""
    return element(
        "th",
        element("button", label, type="button"),
        scope="col",
        class_="name" if is_name else None,
    )


def name_cell(name: str) -> Markup:
    """Return the first cell of a row."""
    return element("th", element("span", name), scope="row", class_="name")


def number_cards(values: Mapping[str, int]) -> Markup:
    """Return the cards with whole numbers at the top of a page."""
    pairs = (
        (element("dt", label), element("dd", f"{value:,}", class_="value"))
        for label, value in values.items()
    )
    return element("dl", *(element("div", *pair) for pair in pairs), class_="cards")


def zoomable(jpeg: bytes, caption: str, alt: str) -> Markup:
    """Return a picture with its caption; a click enlarges it."""
    source = Markup("data:image/jpeg;base64," + base64.b64encode(jpeg).decode())
    image = element("img", src=source, alt=alt)
    return element(
        "figure",
        element("figcaption", caption),
        element("button", image, type="button", class_="zoom"),
    )


def color_key(color: tuple[int, int, int], label: str, class_: str = "") -> Markup:
    """Return a square of a colour with its meaning."""
    return joined(
        element("span", class_=f"key {class_}".strip(), style=f"--color:rgb{color}"), f"{label} "
    )
