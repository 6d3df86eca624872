"""The page on which a person looks at what was added."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from yolo_seg_ddp.data.images import encode_jpeg, load_photo
from yolo_seg_ddp.data.labels import ANY_CLASS, read_yolo_label
from yolo_seg_ddp.extras.unlabelled.data_set import NewData
from yolo_seg_ddp.pages import draw_instances
from yolo_seg_ddp.pages.markup import Markup, color_key, element, report_page, zoomable
from yolo_seg_ddp.pages.pictures import CONFUSED, FALSE, MISSED, RIGHT
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.text import counted

PAGE = "unlabelled.html"
NUM_SHOWN, SHOWN_PX = 12, 900
LABEL, UNSURE, DISAGREES, NO_BOUND = (
    "labels",
    "not sure enough",
    "second view disagrees",
    "class not sure enough",
)
COLORS = {LABEL: RIGHT, UNSURE: CONFUSED, DISAGREES: FALSE, NO_BOUND: MISSED}
STYLE = "grid-template-columns:repeat(auto-fill,minmax(min(100%,460px),1fr))"
ADVICE = (
    "The most doubtful come first. Delete a bad one with the command below it before you train: it "
    "stays out."
)


def write_page(data: NewData, names: Sequence[str], sure: Sequence[str]) -> tuple[list[str], int]:
    """Write the page. Return lines that say what was done with each class and with the photographs,
    and how many were added.

    Lengths of thin objects and areas of others have no common unit, so a photograph's doubt is its
    shares of all that is ignored.
    """
    counts: Counter[tuple[int, str]] = Counter()
    photographs: Counter[str] = Counter()
    rows: list[tuple[str, float, float]] = []
    for name in data.new:
        note = data.note(name)
        photographs[note["left_out"]] += 1
        if not note["left_out"]:
            counts.update((each["class"], each["why"]) for each in note["found"])
            sums = (
                sum(each[what] for each in note["found"] if each["why"] != LABEL)
                for what in ("length_px", "area")
            )
            rows.append((name, *sums))
    all_px, all_area = sum(row[1] for row in rows) or 1, sum(row[2] for row in rows) or 1
    rows.sort(key=lambda row: (-row[1] / all_px - row[2] / all_area, row[0]))
    left_out = (f"{number} left out: {why}" for why, number in photographs.items() if why)
    lines = [", ".join([f"{counted(photographs[''], 'photograph')} added", *left_out])]
    for number, name in enumerate(names):
        ignored = ", ".join(
            f"{counts[number, why]:,} ({why})"
            for why in COLORS
            if why != LABEL and counts[number, why]
        )
        labels = counted(counts[number, LABEL], "label")
        lines.append(f"{name}: {labels}; ignored: {ignored or 'nothing'}; {sure[number]}")
    shown = [row[0] for row in rows]
    shown = (
        shown[: NUM_SHOWN // 2]
        + shown[NUM_SHOWN // 2 :: max(1, len(shown) // (NUM_SHOWN // 2))][: NUM_SHOWN // 2]
    )
    keys = [
        color_key(color, why, "" if why == LABEL else "missed") for why, color in COLORS.items()
    ]
    title = "What a model labelled"
    head = [
        element("h1", title),
        *(element("p", line) for line in (*lines, ADVICE)),
        element("p", *keys),
    ]
    figures = [_figure(data, name, data.note(name), names) for name in shown]
    page = report_page(
        title,
        head,
        [],
        {},
        [element("div", *figures, class_="gallery", style=STYLE)],
        str(data.folder),
    )
    write_text_atomic(data.folder / PAGE, page)
    return lines, photographs[""]


def _figure(data: NewData, name: str, note: Mapping[str, Any], names: Sequence[str]) -> Markup:
    photo = load_photo(data.new[name], SHOWN_PX)
    texts = [
        read_yolo_label(data.file(name, kind), len(names), ANY_CLASS)
        for kind in ("labels", "ignore")
    ]
    found = sorted(note["found"], key=lambda each: each["why"] != LABEL)  # as in the files
    num_labels = sum(each["why"] == LABEL for each in found)
    (_, labels), (_, regions) = texts
    rows = [*labels[:num_labels], *regions[: len(found) - num_labels]]
    outlines = [polygon * photo.shape[1::-1] for polygon in rows]
    look: dict[str, Any] = {"colors": [COLORS[each["why"]] for each in found]}
    look |= {"dashed": [each["why"] != LABEL for each in found]}
    look |= {"labels": [f"{names[each['class']]} {each['score']:.2f}" for each in found]}
    class_ids = [each["class"] for each in found]
    drawn = draw_instances(photo, class_ids, None, outlines, None, names, nothing="nothing", **look)
    reasons = Counter(each["why"] for each in found).items()
    words = ", ".join(
        counted(number, "label") if why == LABEL else f"{number} ignored ({why})"
        for why, number in reasons
    )
    picture = element("div", zoomable(encode_jpeg(drawn, 80), words, words), class_="pair")
    files = [f"images/{name}{data.new[name].suffix}", f"labels/{name}.txt", f"ignore/{name}.txt"]
    command = (
        f"cd {shlex.quote(str(data.folder / data.split_of[name]))} && {shlex.join(['rm', *files])}"
    )
    return element("article", element("h3", data.new[name].name), picture, element("code", command))
