"""Builds assets.html: a map of the assets that loads nothing from the network, the changes, and
each asset's best view.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from yolo_seg_ddp.extras.maps.asset_files import AssetTables
from yolo_seg_ddp.extras.maps.changes import GONE
from yolo_seg_ddp.extras.maps.wgs84 import geocentric, offsets_m
from yolo_seg_ddp.pages.markup import (
    Markup,
    color_key,
    element,
    heading,
    joined,
    name_cell,
    number_cards,
    report_page,
    table,
)
from yolo_seg_ddp.utils.text import class_color, counted

# width of the map, and least height or width of what is drawn, as a share of that
MAP_PX, LEAST_SHARE = 640, 0.45
MARGIN_PX, DOT_PX, MOST_NAMES = 34, 5, 40
MOST_ROWS, MOST_PICTURES, MOST_LINKS = 2000, 400, 13
MAP_WORDS = (
    "● asset · ○ asset in too few photographs to be sure · • camera · ellipse: holds the position "
    "in 95 % of cases"
)
CHANGE_WORDS = " · ◎ new, moved or of another class · ✕ gone"
CAMERA_STYLE = "stroke:var(--soft);stroke-width:4;stroke-linecap:round;opacity:.7"
CHANGE_TEXT = {"new": "new", GONE: "gone", "moved": "moved", "class": "other class"}
Row = dict[str, Any]


def build_page(
    tables: AssetTables, names: Sequence[str], made_with: Sequence[str], num_photos: int
) -> str:
    """Return the page.

    Its pictures are the files beside it. made_with: the model file, then lines about it.
    """
    rows, changes = tables.assets, tables.changes
    number_of = Counter(row["class"] for row in rows)
    values = {**number_of, "seen often enough to be sure": sum(row["sure"] for row in rows)}
    values |= Counter(CHANGE_TEXT[row["change"]] for row in changes or [])
    colors = {name: number for number, name in enumerate(names)}
    keys = [color_key(class_color(colors[name]), name) for name in number_of]
    notes = [
        element("p", *words, class_="note")
        for words in (keys, [MAP_WORDS + CHANGE_WORDS * bool(changes)])
    ]
    days = sorted({view.time[:10] for flight in tables.flights for view in flight} - {""})
    taken = f" · taken {' to '.join(dict.fromkeys([days[0], days[-1]]))}" if days else ""
    about = "".join(f" · {line}" for line in made_with[1:])
    summary = (element("b", made_with[0]), f" · {counted(num_photos, 'photograph')}", taken, about)
    parts = {
        "map": ("Map", [*notes, _map(tables, colors)]),
        **({} if changes is None else {"changes": ("Changes", _changes(changes))}),
        "assets": ("Assets", _table(rows)),
        "views": ("Best views", _views(rows)),
    }
    sections = (
        element("section", element("h2", label), *inside, id=name)
        for name, (label, inside) in parts.items()
    )
    return report_page(
        "Assets",
        [element("h1", "Assets"), element("p", "Model ", *summary, class_="about")],
        [],
        {name: label for name, (label, _) in parts.items()},
        [number_cards(values), *sections],
        "All values are in assets.csv and assets.geojson next to this file. "
        "yolo_seg_ddp/extras/maps/reference.md explains them.",
        "img-src 'self' file: data:",
    )


def _map(tables: AssetTables, colors: dict[str, int]) -> Markup:
    """Draw assets, ellipses and the camera's path, north up, with a scale bar."""
    marks = tables.assets + [row for row in tables.changes or [] if row["change"] == GONE]
    if not marks:
        return element("p", "No asset has a position.")
    origin = marks[0]["latitude"], marks[0]["longitude"]
    points = _metres(origin, [(row["latitude"], row["longitude"]) for row in marks])
    paths = [
        _metres(origin, [(view.latitude, view.longitude) for view in flight])
        for flight in tables.flights
    ]
    everything = np.concatenate([points, *paths])
    low, high = everything.min(axis=0), everything.max(axis=0)
    longest = max(float((high - low).max()), 20.0)
    middle = (low + high) / 2
    half = np.maximum((high - low) / 2, LEAST_SHARE * longest / 2)
    scale = (MAP_PX - 2 * MARGIN_PX) / (2 * half[0])
    height_px = min(2 * half[1] * scale, 1.5 * MAP_PX) + 2 * MARGIN_PX
    scale = min(scale, (height_px - 2 * MARGIN_PX) / (2 * half[1]))

    def at(where: np.ndarray) -> np.ndarray:
        return (where - middle) * (scale, -scale) + (MAP_PX / 2, height_px / 2)

    cameras = "".join(f"M{x:.1f},{y:.1f}h0" for path in paths for x, y in at(path))
    drawn = [element("path", d=Markup(cameras), style=CAMERA_STYLE)]  # as Markup it may be long
    # sure ones on top
    order = sorted(range(len(marks)), key=lambda number: bool(marks[number].get("sure")))
    drawn += [
        _mark(marks[number], at(points[number]), scale, colors, len(marks) <= MOST_NAMES)
        for number in order
    ]
    drawn += _scale_bar(scale, height_px)
    box = f"0 0 {MAP_PX} {height_px:.0f}"
    style = (
        "width:100%;height:auto;max-height:85vh;border:1px solid "
        "var(--line);border-radius:.5rem;font-size:16px"
    )
    return element(
        "svg", *drawn, viewBox=box, role="img", aria_label="Map of the assets", style=style
    )


def _metres(origin: tuple[float, float], places: Sequence[tuple[float, float]]) -> np.ndarray:
    """Return positions as metres east and north of the origin (n, 2)."""
    latitude, longitude = np.array(places, float).reshape(-1, 2).T
    return offsets_m(*origin, geocentric(latitude, longitude))[:, ::-1]


def _mark(
    row: Row, point: np.ndarray, scale: float, colors: dict[str, int], has_name: bool
) -> Markup:
    x, y = (f"{value:.1f}" for value in point)
    name = (
        [element("text", row["asset"], x=f"{point[0] + 12:.1f}", y=f"{point[1] + 5:.1f}")]
        if has_name
        else []
    )
    if row.get("ellipse_major_m") is None:  # gone
        (left, top), side = point - DOT_PX, 2 * DOT_PX
        cross = f"M{left:.1f},{top:.1f}l{side},{side}m0,-{side}l-{side},{side}"
        title = element("title", f"{row['asset']}: gone")
        return joined(
            element("path", title, d=cross, style="stroke:var(--bad);stroke-width:3"), *name
        )
    color = f"rgb{class_color(colors[row['class']])}"
    ellipse = element(
        "ellipse",
        cx=x,
        cy=y,
        rx=f"{max(row['ellipse_major_m'] * scale, 1):.1f}",
        ry=f"{max(row['ellipse_minor_m'] * scale, 1):.1f}",
        transform=f"rotate({row['ellipse_bearing_deg'] - 90:.1f} {x} {y})",
        style=f"fill:{color};fill-opacity:.15;stroke:{color};stroke-opacity:.5",
    )
    fill = color if row["sure"] else "var(--page)"
    dot = element(
        "circle", cx=x, cy=y, r=DOT_PX, style=f"fill:{fill};stroke:{color};stroke-width:2"
    )
    ring = element(
        "circle", cx=x, cy=y, r=DOT_PX + 4, style="fill:none;stroke:var(--bad);stroke-width:2"
    )
    label = f"{row['asset']}: ± {row['sigma_m']:.2g} m, {counted(row['photographs'], 'photograph')}"
    if row["change"]:
        label += f", {CHANGE_TEXT[row['change']]}"
    shown = [ellipse, dot, *([ring] if row["change"] else []), *name]
    return element("a", element("title", label), *shown, href=f"#{_anchor(row)}")


def _scale_bar(scale: float, height_px: float) -> list[Markup]:
    """Return a bar of 1, 2 or 5 times a power of ten metres, about a quarter of the map wide, and
    an arrow to the north.
    """
    most = MAP_PX / 4 / scale
    power = 10.0 ** np.floor(np.log10(most))
    metres = max(step * power for step in (1, 2, 5) if step * power <= most)
    length = metres * scale
    y = height_px - 14
    ends = f"M12,{y - 5:.1f}v5h{length:.1f}v-5"
    return [
        element("path", d=ends, style="fill:none;stroke:var(--ink);stroke-width:1.5"),
        element("text", f"{metres:g} m", x=f"{length + 18:.1f}", y=f"{y:.1f}"),
        element("path", d=f"M{MAP_PX - 18},10l6,16l-6,-4l-6,4z", style="fill:var(--ink)"),
        element("text", "N", x=MAP_PX - 18, y=40, style="text-anchor:middle"),
    ]


def _anchor(row: Row) -> str:
    return "asset-" + quote(row["asset"], safe="")


def _table(rows: Sequence[Row]) -> list[Markup]:
    titles = (
        "Asset",
        "Class",
        "Latitude",
        "Longitude",
        "± m",
        "Photographs",
        "Looks",
        "Confidence",
        "Your id",
    )
    head = [heading(title, number < 2 or title == "Your id") for number, title in enumerate(titles)]
    shown = [
        element(
            "tr",
            name_cell(element("a", row["asset"], href=f"#{_anchor(row)}")),
            element("td", row["class"], class_="name"),
            *(element("td", f"{row[name]:.7f}") for name in ("latitude", "longitude")),
            element("td", f"{row['sigma_m']:.2f}"),
            element("td", f"{row['photographs']}"),
            element("td", f"{row['looks']}"),
            element("td", f"{row['confidence']:.2f}" + ("" if row["sure"] else " unsure")),
            element("td", row["asset_id"] or "", class_="name"),
        )
        for row in rows[:MOST_ROWS]
    ]
    left = (
        f" The first {MOST_ROWS} of {len(rows):,}; assets.csv has all."
        if len(rows) > MOST_ROWS
        else ""
    )
    words = (
        "± m: standard deviation in the worst direction. Looks: photographs in which the place is. "
        "Confidence: mean over the looks."
    )
    return [element("p", words, left, class_="note"), table("Assets", head, shown)]


def _changes(changes: Sequence[Row]) -> list[Markup]:
    if not changes:
        return [element("p", "None.")]
    titles = ("Asset", "Change", "Class", "Before", "Moved, m", "Looks", "Chance of an error")
    head = [heading(title, number < 4) for number, title in enumerate(titles)]
    rows = [
        element(
            "tr",
            name_cell(
                row["asset"]
                if row["change"] == GONE
                else element("a", row["asset"], href=f"#{_anchor(row)}")
            ),
            *(
                element("td", text or "", class_="name")
                for text in (CHANGE_TEXT[row["change"]], row["class"], row["class_before"])
            ),
            element("td", "" if row["moved_m"] is None else f"{row['moved_m']:.1f}"),
            element("td", "" if row["looks"] is None else f"{row['looks']}"),
            element(
                "td",
                "under 0.0001"
                if row["chance_of_error"] < 1e-4
                else f"{row['chance_of_error']:.2g}",
            ),
        )
        for row in changes[:MOST_ROWS]
    ]
    words = (
        "Chance of an error: how often errors of position, or detections missing by chance, look "
        "like this change."
    )
    return [element("p", words, class_="note"), table("Changes", head, rows)]


def _views(rows: Sequence[Row]) -> list[Markup]:
    figures = []
    for row in rows[:MOST_PICTURES]:
        source, picture = (quote(row[f"best_{name}"]) for name in ("thumbnail", "picture"))
        words = (
            f"{row['asset']}, {counted(row['photographs'], 'photograph')}, ± {row['sigma_m']:.2g} m"
        )
        image = element("img", src=source, alt=row["asset"], loading="lazy")
        others = [
            joined(" ", element("a", str(number), href=quote(view["picture"])))
            for number, view in enumerate(row["views"][1:MOST_LINKS], start=2)
        ]
        caption = element(
            "figcaption", words, *([element("br"), "also:", *others] if others else [])
        )
        figures.append(
            element("figure", caption, element("a", image, href=picture), id=_anchor(row))
        )
    few = f"The first {MOST_PICTURES} of {len(rows):,}. " if len(rows) > MOST_PICTURES else ""
    words = (
        "The largest, sharpest and most confident view of each asset; a click opens its photograph."
    )
    return [element("p", few, words, class_="note"), element("div", *figures, class_="thumbnails")]
