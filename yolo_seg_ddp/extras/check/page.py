"""Builds the page of the findings: a single file that loads nothing else, in the style of the
evaluation's report.

Its pictures are parts of photographs with their outlines, as JPEG.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from yolo_seg_ddp.data.images import (
    ImageError,
    encode_jpeg,
    fit_long_side,
    load_photo,
    read_image,
    resize_area,
    scaled_size,
)
from yolo_seg_ddp.data.polygons import SIZES
from yolo_seg_ddp.extras.check.findings import (
    KINDS,
    MODEL_KINDS,
    Finding,
    View,
    count_kinds,
    num_errors,
)
from yolo_seg_ddp.extras.check.reading import Entry
from yolo_seg_ddp.pages import draw_instances
from yolo_seg_ddp.pages.markup import (
    Markup,
    color_key,
    element,
    heading,
    name_cell,
    number_cards,
    report_page,
    table,
    zoomable,
)
from yolo_seg_ddp.pages.pictures import CONFUSED, MISSED, RIGHT
from yolo_seg_ddp.utils.text import class_color, counted
from yolo_seg_ddp.utils.threads import ordered_map

MAX_CARDS = 8  # pictures of a kind
MAX_ROWS = 200  # rows of a kind
MAX_LINKS = 8  # to kinds, at the top of the window; the summary has all
MAX_BYTES = 6_000_000  # of all pictures of findings together; base64 makes them a third larger
MAX_SMALL = 280  # small pictures of all labels
MAX_SMALL_BYTES = 4_000_000  # of them together
# hints that are normal in a good set: only their heading is shown until it is opened
FOLDED = ("touches_edge", "box_row")
KEYS = "Vermillion: the label in question. Yellow: the model's prediction. Blue: other labels."
SHOWN_PX = 400
JPEG_QUALITY = 80
AROUND = 1.5  # the part shown, relative to the subjects
MIN_SHARE = 0.12  # of the photograph's long side that is shown at least


def build_page(
    data: str,
    counts: dict[str, dict[str, Any]],
    names: Sequence[str],
    entries: Sequence[Entry],
    findings: Sequence[Finding],
    about: Sequence[str],
    has_model: bool,
) -> str:
    """Return the page about sorted findings; counts: see `count_classes`; entries: all photographs;
    about: lines for the top of the page; has_model: whether labels were compared with a model.
    """
    number_of = count_kinds(findings)
    kinds = [kind for kind, number in number_of.items() if number]
    pictures = _Pictures()
    sections = [
        _section(kind, [finding for finding in findings if finding.kind == kind], pictures)
        for kind in kinds
    ]
    links = {"summary": "Summary", "classes": "Classes", "labels": "All labels"}
    links |= {kind: KINDS[kind].title for kind in kinds[:MAX_LINKS]}
    totals = {f"Photographs, {split}": count["photographs"] for split, count in counts.items()}
    totals |= {f"Objects, {split}": count["objects"] for split, count in counts.items()}
    errors = num_errors(findings)
    return report_page(
        f"Check of {data}",
        [
            element("h1", "Data check"),
            element("p", "Data ", element("b", data), class_="about"),
            *(element("p", line, class_="about") for line in about),
        ],
        [],
        links,
        [
            number_cards({**totals, "Errors": errors, "Hints": len(findings) - errors}),
            element(
                "section", element("h2", "Summary"), *_summary(number_of, has_model), id="summary"
            ),
            element("section", element("h2", "Classes"), *_classes(counts, names), id="classes"),
            element("section", element("h2", "All labels"), *_gallery(entries, names), id="labels"),
            *sections,
        ],
        "All findings are in check.json next to this file. yolo_seg_ddp/extras/check/reference.md "
        "explains each kind.",
    )


class _Pictures:
    """Draws pictures until they take MAX_BYTES."""

    def __init__(self) -> None:
        self.bytes_left = MAX_BYTES

    def draw(self, findings: Sequence[Finding]) -> list[list[tuple[bytes, str]]]:
        """Return the pictures of each finding, with their captions; none once
        the limit is reached.
        """
        views = (
            [view for finding in findings for view in finding.views] if self.bytes_left > 0 else []
        )
        drawn = ordered_map(draw_view, views, 2)
        pictures: list[list[tuple[bytes, str]]] = []
        for finding in findings:
            jpegs = [(next(drawn), view.caption) for view in finding.views] if views else []
            pictures.append([(jpeg, caption) for jpeg, caption in jpegs if jpeg is not None])
            self.bytes_left -= sum(len(jpeg) for jpeg, _ in pictures[-1])
        return pictures


def _summary(number_of: dict[str, int], has_model: bool) -> list[Markup]:
    rows = [
        element(
            "tr",
            name_cell(element("a", KINDS[kind].title, href=f"#{kind}")),
            element("td", _level(kind), class_="name worse" if KINDS[kind].is_error else "name"),
            _number(number, key=f"counts.{kind}"),
            element("td", KINDS[kind].meaning, class_="name"),
        )
        for kind, number in number_of.items()
        if number
    ]
    head = [
        heading("Kind", True),
        heading("Level", True),
        heading("Findings"),
        heading("What it means", True),
    ]
    checked = [kind for kind in number_of if has_model or kind not in MODEL_KINDS]
    clean = ", ".join(
        KINDS[kind].title[0].lower() + KINDS[kind].title[1:]
        for kind in checked
        if not number_of[kind]
    )
    unchecked = "" if has_model else " Not compared with a model: that takes --model."
    nothing = element("p", f"Nothing found of: {clean}.{unchecked}", class_="note")
    return [table("Kinds of findings", head, rows), nothing] if rows else [nothing]


def _level(kind: str) -> str:
    return "error" if KINDS[kind].is_error else "hint"


def _classes(counts: dict[str, dict[str, Any]], names: Sequence[str]) -> list[Markup]:
    numbers = ("photographs", "objects")
    head = [heading("Class", True)]
    head += [heading(f"{label}, {split}") for split in counts for label in (*numbers, *SIZES)]
    rows = []
    for number, name in enumerate(names):
        cells = [name_cell(name)]
        for split, count in counts.items():
            row = count["classes"][number]
            cells += [
                _number(row[key], key=f"splits.{split}.classes.{number}.{key}") for key in numbers
            ]
            measured = sum(row[size] for size in SIZES)
            cells += [_share(row[size] / measured if measured else None) for size in SIZES]
        rows.append(element("tr", *cells))
    words = (
        "Size classes by the object's area in pixels of the photograph on disk: small under 32 x "
        "32, medium up to 96 x 96 (COCO's bounds)."
    )
    empty = ", ".join(f"{count['without_objects']:,} in {split}" for split, count in counts.items())
    return [
        element("p", words, f" Photographs without objects: {empty}.", class_="note"),
        table("Classes", head, rows),
    ]


def _section(kind: str, findings: Sequence[Finding], pictures: _Pictures) -> Markup:
    about = KINDS[kind]
    shown = [one for one in findings if one.views][:MAX_CARDS]
    drawn = pictures.draw(shown)
    cards = [_card(finding, jpegs) for finding, jpegs in zip(shown, drawn, strict=True) if jpegs]
    wide = any(len(jpegs) > 1 for jpegs in drawn)
    style = (
        f"grid-template-columns:repeat(auto-fill,minmax(min(100%,{560 if wide else 270}px),1fr))"
    )
    rows = [
        element(
            "tr",
            element(
                "th",
                element("span", str(finding.place), style="max-width:none"),
                scope="row",
                class_="name",
            ),
            element("td", finding.split, class_="name"),
            element("td", element("span", finding.text, style="max-width:none"), class_="name"),
        )
        for finding in findings[:MAX_ROWS]
    ]
    are_more = len(findings) > MAX_ROWS
    left = (
        f" The first {MAX_ROWS} of {len(findings):,} are listed; check.json has all."
        if are_more
        else ""
    )
    few = f" The pictures show {len(cards)} of them." if 0 < len(cards) < len(findings) else ""
    has_keys = any(
        mark.is_prediction for finding in shown for view in finding.views for mark in view.marks
    )
    head = [heading("Place", True), heading("Split", True), heading("What", True)]
    number = f" · {counted(len(findings), _level(kind))}"
    title = [about.title, element("small", number, class_="worse" if about.is_error else "same")]
    content = [
        element("p", f"{about.meaning} {about.remedy}{few}{left}"),
        *([element("p", KEYS, class_="note")] if cards and has_keys else []),
        *(
            [element("div", *cards, class_="gallery", style=f"{style};margin:.6rem 0")]
            if cards
            else []
        ),
        table(about.title, head, rows),
    ]
    if kind in FOLDED:
        return element(
            "section",
            element("details", element("summary", element("h2", *title)), *content),
            id=kind,
        )
    return element("section", element("h2", *title), *content, id=kind)


def _gallery(entries: Sequence[Entry], names: Sequence[str]) -> list[Markup]:
    """Return small pictures of all photographs with their labels; of a large set only of every
    second, third, ... photograph.
    """
    chosen = [entry for entry in entries if entry.picture][:: max(1, -(-len(entries) // MAX_SMALL))]
    size_px = 400 if len(chosen) <= 100 else 256
    jpegs = ordered_map(lambda entry: draw_labels(entry, names, size_px), chosen, 2)
    figures: list[Markup] = []
    bytes_left = MAX_SMALL_BYTES
    for one, jpeg in zip(chosen, jpegs, strict=True):
        bytes_left -= len(jpeg or b"")
        if jpeg and bytes_left >= 0:
            words = f"{one.split}, {one.file.name}: {counted(len(one.rows), 'object')}"
            figures.append(zoomable(jpeg, words, words))
    few = f"{len(figures)} of {len(entries):,} photographs. " if len(figures) < len(entries) else ""
    used = sorted({row.class_id for one in chosen for row in one.rows})
    keys = [color_key(class_color(number), names[number]) for number in used]
    return [element("p", few, *keys, class_="note"), element("div", *figures, class_="thumbnails")]


def _card(finding: Finding, jpegs: Sequence[tuple[bytes, str]]) -> Markup:
    columns = f"grid-template-columns:repeat({len(jpegs)},1fr)"
    return element(
        "article",
        element("p", finding.text, class_="note"),
        element(
            "div",
            *(zoomable(jpeg, caption, caption) for jpeg, caption in jpegs),
            class_="pair",
            style=columns,
        ),
    )


def _number(value: int, key: str) -> Markup:
    return element(
        "td", f"{value:,}", data_key=key, data_value=value, class_=None if value else "none"
    )


def _share(value: float | None) -> Markup:
    if value is None:
        return element("td", "–", class_="none")
    style = f"--share:{100 * value:.1f}%"
    return element(
        "td", f"{100 * value:.0f} %", data_value=f"{value:.4f}", class_="bar", style=style
    )


def draw_labels(entry: Entry, names: Sequence[str], size_px: int) -> bytes | None:
    """Return a picture of a photograph, `size_px` at most, with its outlines in their classes'
    colours; None if it cannot be read.
    """
    try:
        photo = load_photo(entry.file, size_px)
    except ImageError:
        return None
    class_ids = [row.class_id for row in entry.rows]
    size = photo.shape[1::-1]
    outlines = [row.polygon * size for row in entry.rows]
    nameless = [""] * len(outlines)
    return encode_jpeg(
        draw_instances(photo, class_ids, None, outlines, None, names, labels=nameless), JPEG_QUALITY
    )


def draw_view(view: View) -> bytes | None:
    """Return a view as JPEG, at most SHOWN_PX wide and high; None if
    its photograph cannot be read.
    """
    subjects = [mark.outline for mark in view.marks if mark.is_subject and len(mark.outline)]
    low, high = np.zeros(2), np.ones(2)
    if subjects:
        points = np.concatenate(subjects).astype(np.float64)
        low, high = points.min(axis=0), points.max(axis=0)
    share = min(1.0, max(AROUND * float((high - low).max()), MIN_SHARE))
    long_side_px = round(SHOWN_PX / share)
    try:
        photo = fit_long_side(read_image(view.photo, long_side_px), long_side_px)
    except ImageError:
        return None
    size = np.array(photo.shape[1::-1])
    low, high = low * size, high * size
    side = max(AROUND * float((high - low).max()), MIN_SHARE * float(size.max()), 2.0)
    sides = np.minimum(side, size)
    corner = np.clip((low + high) / 2 - sides / 2, 0, size - sides)
    left, top = np.floor(corner).astype(int).tolist()
    right, bottom = np.ceil(corner + sides).astype(int).clip(None, size).tolist()
    # a small part is enlarged, so that its outlines are thin
    scale = SHOWN_PX / max(bottom - top, right - left)
    part = resize_area(
        photo[top:bottom, left:right], *scaled_size(right - left, bottom - top, scale)
    )
    drawn = [mark for mark in view.marks if mark.is_drawn and len(mark.outline)]
    if drawn:
        colors = [
            RIGHT if not mark.is_subject else CONFUSED if mark.is_prediction else MISSED
            for mark in drawn
        ]
        outlines = [(mark.outline * size - (left, top)) * scale for mark in drawn]
        texts = [mark.text for mark in drawn]
        part = draw_instances(
            part, [0] * len(drawn), None, outlines, None, [""], colors=colors, labels=texts
        )
    return encode_jpeg(part, JPEG_QUALITY)
