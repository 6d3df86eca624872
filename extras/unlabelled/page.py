"""The page on which a person looks at what was added, and the list of photographs whose labels would teach most."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from extras.unlabelled.folder import NewData
from utils.common.files import write_text_atomic
from utils.common.text import class_color, counted, csv_text
from utils.data.cache import load_photo
from utils.data.images import encode_jpeg
from utils.data.labels import read_yolo_label
from utils.pages import draw_instances
from utils.pages.markup import (
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

PAGE, LIST = "unlabelled.html", "label_next.csv"
NUM_SHOWN, SHOWN_PX = 12, 900
KEYS = "Filled: a label. Dashed: a region to ignore, with the reason and the confidence."


def doubt_of(note: Mapping[str, Any]) -> tuple[float, float]:
    """Return the length in pixels of a photograph's unsure thin objects, and the share of it that other unsure objects cover."""
    unsure = [each for each in note["found"] if each["why"]]
    return sum(each["length_px"] for each in unsure), sum(each["area"] for each in unsure)


def write_pages(data: NewData, names: Sequence[str], sure: Sequence[tuple[float | None, str]]) -> None:
    """Write the list and the page."""
    counts: Counter[tuple[int, str]] = Counter()
    left_out: Counter[str] = Counter()
    rows = []
    for name, note in data.all_notes():
        left_out[note["left_out"]] += 1
        if not note["left_out"]:
            counts.update((each["class"], each["why"]) for each in note["found"])
        rows.append((name, note["file"], note["left_out"] or "added", *doubt_of(note), len(note["found"])))
    # Lengths and areas have no common unit: each counts by its share of all.
    totals = [max(sum(row[column] for row in rows), 1e-9) for column in (3, 4)]
    rows.sort(key=lambda row: (-row[3] / totals[0] - row[4] / totals[1], row[0]))
    unsure = [
        (number, *row[1:3], round(row[3]), f"{row[4]:.4f}") for number, row in enumerate(rows, 1) if row[3] + row[4]
    ]
    columns = ["rank", "photograph", "what_was_done", "unsure_length_px", "unsure_area_share"]
    write_text_atomic(data.folder / LIST, csv_text(columns, unsure, "\n"))
    added = [row[0] for row in rows if row[2] == "added" and row[5]]
    half = NUM_SHOWN // 2
    others = added[half:][:: max(1, -(-len(added[half:]) // half))]
    figures = [_figure(data, name, names) for name in (*added[:half], *others)]
    reasons = sorted({why for _, why in counts if why})
    head = [
        heading("Class", True),
        heading("Labels"),
        *map(heading, reasons),
        heading("Validation photographs say", True),
    ]
    body = [
        element(
            "tr",
            name_cell(name),
            *(element("td", f"{counts[number, why]:,}") for why in ("", *reasons)),
            element("td", sure[number][1], class_="name"),
        )
        for number, name in enumerate(names)
    ]
    num_labels = sum(number for (_, why), number in counts.items() if not why)
    cards = {
        "Photographs added": left_out.pop("", 0),
        "Labels": num_labels,
        "Regions to ignore": counts.total() - num_labels,
    }
    cards |= {f"Left out: {why}": number for why, number in left_out.items()}
    keys = [
        color_key(class_color(number), name)
        for number, name in enumerate(names)
        if sum(counts[number, why] for why in ("", *reasons))
    ]
    advice = "Take a bad photograph out with the command below its picture, before you train. A further run does not bring it back."
    page = report_page(
        "Photographs without labels",
        [element("h1", "Photographs without labels"), element("p", element("b", str(data.folder)), class_="about")],
        [],
        {"classes": "Classes", "photographs": "Photographs"},
        [
            number_cards(cards),
            element("section", element("h2", "Classes"), table("Classes", head, body), id="classes"),
            element(
                "section",
                element("h2", "Photographs"),
                element("p", advice),
                element("p", KEYS, " ", *keys, class_="note"),
                element("div", *figures, class_="gallery"),
                id="photographs",
            ),
        ],
        f"The {half} most doubtful photographs come first, then others, evenly chosen. {LIST} names what to label next.",
    )
    write_text_atomic(data.folder / PAGE, page)


def _figure(data: NewData, name: str, names: Sequence[str]) -> Markup:
    note = data.read(name)
    file = data.image("train", name, data.new[name])
    photo = load_photo(file, SHOWN_PX)
    class_ids: list[int] = []
    outlines: list[np.ndarray] = []
    for kind in ("labels", "ignore"):
        ids, polygons = read_yolo_label(data.text("train", kind, name), len(names))
        class_ids += ids.tolist()
        outlines += [polygon * photo.shape[1::-1] for polygon in polygons]
    found = sorted(note["found"], key=lambda each: bool(each["why"]))  # as in the files: first the labels
    texts = [f"{each['why']} {each['score']:.2f}" if each["why"] else "" for each in found]
    drawn = draw_instances(
        photo, class_ids, None, outlines, None, names, labels=texts, dashed=[bool(text) for text in texts]
    )
    why = Counter(each["why"] for each in found)
    num_labels = why.pop("", 0)
    words = [counted(num_labels, "label"), *(f"{number} ignored: {reason}" for reason, number in why.items())]
    command = f"rm {shlex.quote(str(data.folder / 'train'))}/*/{shlex.quote(name)}.*"
    return element(
        "article",
        element("h3", str(note["file"])),
        zoomable(encode_jpeg(drawn, 80), ", ".join(words), f"{name} with labels and regions to ignore"),
        element("p", element("code", command), class_="note"),
    )
