"""The report's tables and main metrics, of one model or of two side by side.

An element that shows a metric has its key in `data-key` and its unrounded value in `data-value`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from utils.data.polygons import SIZES
from utils.pages.report.markup import Markup, element

KINDS = {"mask": "masks", "box": "boxes"}
NOTHING = "–"
MODEL_LETTERS = ("A", "B")
SCORES = {"map50_95": "AP50-95", "map50": "AP50", "f1": "F1", "precision": "Precision", "recall": "Recall"}
THIN = {  # heading, digits, and 1 if higher is better, -1 if lower is better
    "centreline_recall": ("Centreline recall", 3, 1),
    "centreline_precision": ("Centreline precision", 3, 1),
    "pieces_per_object": ("Pieces per object", 2, -1),
    "length_px": ("Length, px", 0, 0),
    "missed_px": ("Missed, px", 0, -1),
    "invented_px": ("Invented, px", 0, -1),
}
SIZE_LIMITS = {"small": "under 32×32 px", "medium": "up to 96×96 px", "large": "above"}
POINT_COLUMNS = {
    "threshold": ("Threshold", 3),
    "f1": ("F1", 3),
    "precision": ("Precision", 3),
    "recall": ("Recall", 3),
    "num_hits": ("Found", 0),
    "num_missed": ("Missed", 0),
    "num_false": ("False positives", 0),
}
MAX_CONFUSIONS = 20
Metrics = dict[str, Any]


def value_at(metrics: Metrics, key: str) -> Any:
    """Return the value at a dotted key, such as `per_class.3.mask_map50`; None for a precision of nothing, or no parent."""
    if key.endswith(("box_precision", "mask_precision")) and not value_at(metrics, key.replace("precision", "recall")):
        return None
    value: Any = metrics
    for step in key.split("."):
        value = None if value is None else value[int(step)] if isinstance(value, list) else value[step]
    return value


def headline_cards(models: Sequence[Metrics]) -> Markup:
    """Return the cards with the main metrics at the top of the page."""
    best = "at the confidence of the best mean F1"
    cards = [_card(models, f"Mean AP50-95, {KINDS[kind]}", f"{kind}_map50_95") for kind in KINDS]
    cards += [_card(models, f"Mean AP50, {KINDS[kind]}", f"{kind}_map50") for kind in KINDS]
    for kind in KINDS:
        for name, label in (("precision", "Precision"), ("recall", "Recall"), ("f1", "F1")):
            cards.append(_card(models, f"{label}, {KINDS[kind]}", f"{kind}_{name}", kind=kind, note=best))
        cards.append(_card(models, "Confidence of best mean F1", f"{kind}_best_confidence", kind=kind, sign=0))
        cards.append(_card(models, "Calibration error", f"calibration.{kind}.error", kind=kind, sign=-1))
    cards.append(_card(models, "Validation loss", "val_loss", sign=-1))
    cards += [
        _card(models[:1], label, key, digits=0) for key, label in (("num_images", "Images"), ("num_targets", "Objects"))
    ]
    return element("dl", *cards, class_="cards")


def class_table(models: Sequence[Metrics], kind: str) -> Markup:
    """Return the scores over all classes and of each class; a class without objects has none."""
    counts = {"num_images": "Images", "num_targets": "Objects"}
    head = [heading("Class", True)]
    head += [cell for label in SCORES.values() for cell in _score_headings(label, len(models))]
    is_thin = any(row.get(name) is not None for row in models[0]["per_class"] for name in THIN)
    thin = THIN if kind == "mask" and is_thin else {}
    head += [cell for label, *_ in thin.values() for cell in _score_headings(label, len(models))]
    head += [heading(label) for label in counts.values()]
    rows = []
    for number, row in enumerate(models[0]["per_class"]):
        cells = [name_cell(row["name"])]
        for name in SCORES:
            cells += _score_cells(models, f"per_class.{number}.{kind}_{name}", bool(row["num_targets"]))
        for name in thin:
            cells += _thin_cells(models, f"per_class.{number}.{name}", *THIN[name][1:])
        cells += [number_cell(models[0], f"per_class.{number}.{key}", 0) for key in counts]
        rows.append(element("tr", *cells))
    total = [name_cell("all"), *(cell for name in SCORES for cell in _score_cells(models, f"{kind}_{name}", True))]
    total += [element("td", NOTHING, class_="none")] * (len(thin) * (1 if len(models) == 1 else 3))
    total += [number_cell(models[0], key, 0) for key in counts]
    return table(f"Scores of each class, {KINDS[kind]}", head, rows, element("tr", *total, class_="all"))


def size_table(models: Sequence[Metrics], kind: str) -> Markup:
    """Return AP by object size."""
    head = [heading("Size", True), heading("Objects")]
    scores = {name: SCORES[name] for name in ("map50_95", "map50")}
    head += [cell for label in scores.values() for cell in _score_headings(label, len(models))]
    rows = []
    for size in SIZES:
        cells = [name_cell(f"{size} ({SIZE_LIMITS[size]})"), number_cell(models[0], f"by_size.{size}.num_targets", 0)]
        cells += [cell for name in scores for cell in _score_cells(models, f"by_size.{size}.{kind}_{name}", True)]
        rows.append(element("tr", *cells))
    return table(f"AP by object size, {KINDS[kind]}", head, rows)


def threshold_table(models: Sequence[Metrics], kind: str) -> Markup:
    """Return each class's best threshold and the scores there, of one model or of two side by side."""
    head = [heading("Class", True)]
    letters = [f" {letter}" for letter in MODEL_LETTERS] if len(models) > 1 else [""]
    head += [heading(label + letter) for label, _ in POINT_COLUMNS.values() for letter in letters]
    rows = []
    for number, row in enumerate(models[0]["per_class"]):
        cells = [name_cell(row["name"])]
        for name, (_, digits) in POINT_COLUMNS.items():
            key = f"operating_points.{kind}.{number}.{name}"
            cells += [number_cell(metrics, key, digits, model=model) for model, metrics in enumerate(models)]
        rows.append(element("tr", *cells))
    return table(f"Best threshold of each class, {KINDS[kind]}", head, rows)


def confusions_table(metrics: Metrics) -> Markup:
    """Return the largest off-diagonal entries of the confusion matrix."""
    matrix, names = metrics["confusion_matrix"], [row["name"] for row in metrics["per_class"]]
    predicted, true = [*names, "missed"], [*names, "background"]
    totals = [sum(row[column] for row in matrix) for column in range(len(matrix))]
    entries = [
        (count, row, column)
        for row, line in enumerate(matrix)
        for column, count in enumerate(line)
        if row != column and count
    ]
    entries.sort(key=lambda entry: (-entry[0], entry[1], entry[2]))
    head = [heading(label, True) for label in ("True class", "Predicted as")]
    head += [heading(label) for label in ("Number", "Share of the true class")]
    rows = [
        element(
            "tr",
            name_cell(true[column]),
            element("td", element("span", predicted[row]), class_="name"),
            number_cell(metrics, f"confusion_matrix.{row}.{column}", 0),
            element("td", f"{100 * count / totals[column]:.1f} %", data_value=count / totals[column])
            if column < len(names)
            else element("td", NOTHING, class_="none"),
        )
        for count, row, column in entries[:MAX_CONFUSIONS]
    ]
    return table("The most frequent confusions", head, rows)


def table(caption: str, head: Iterable[str], rows: Iterable[str], total: Markup | None = None) -> Markup:
    """Return a sortable table, in an element that scrolls if the window is narrow."""
    parts = [element("thead", element("tr", *head)), element("tbody", *rows)]
    parts += [element("tfoot", total)] if total else []
    inside = element("table", *parts, class_="sortable", aria_label=caption)
    return element("div", inside, class_="scroll tall", tabindex="0", role="region", aria_label=caption)


def heading(label: str, is_name: bool = False) -> Markup:
    """Return the heading of a column, which sorts the table when it is clicked."""
    return element("th", element("button", label, type="button"), scope="col", class_="name" if is_name else None)


def name_cell(name: str) -> Markup:
    """Return the first cell of a row."""
    return element("th", element("span", name), scope="row", class_="name")


def number_cell(metrics: Metrics, key: str, digits: int, *, model: int = 0, is_bar: bool = False) -> Markup:
    """Return the table cell of one metric, with a dash for None."""
    value = value_at(metrics, key)
    if value is None:
        return element("td", NOTHING, class_="none", **_data(key, value, model))
    style = f"--share:{100 * value:.1f}%" if is_bar else None
    shown = f"{value:.{digits}f}"
    return element("td", shown, class_="bar" if is_bar else None, style=style, **_data(key, value, model))


def _data(key: str, value: Any, model: int) -> dict[str, Any]:
    exact = None if value is None else json.dumps(value)
    return {"data_key": key, "data_value": exact, "data_model": model or None}


def _score_headings(label: str, num_models: int) -> list[Markup]:
    return [heading(label)] if num_models == 1 else [heading(text) for text in (f"{label} A", f"{label} B", "B − A")]


def _score_cells(models: Sequence[Metrics], key: str, has_targets: bool) -> list[Markup]:
    if not has_targets:
        return [element("td", NOTHING, class_="none")] * (1 if len(models) == 1 else 3)
    return _thin_cells(models, key, 3, 1)


def _thin_cells(models: Sequence[Metrics], key: str, digits: int, sign: int) -> list[Markup]:
    cells = [number_cell(metrics, key, digits, model=model, is_bar=digits == 3) for model, metrics in enumerate(models)]
    return cells if len(models) == 1 else [*cells, _difference("td", models, key, sign, digits)]


def _difference(tag: str, models: Sequence[Metrics], key: str, sign: int = 1, digits: int = 3) -> Markup:
    """Return an element with B minus A. sign: 1 if higher is better, -1 if lower is better, 0 if neither."""
    first, second = (value_at(metrics, key) for metrics in models)
    if first is None or second is None:
        return element(tag, NOTHING, class_="none")
    difference = second - first
    if round(difference, digits) == 0:
        return element(tag, f"±{0:.{digits}f}", class_="same", data_value=json.dumps(difference))
    direction = "" if sign == 0 else "better" if sign * difference > 0 else "worse"
    arrow = "▲" if difference > 0 else "▼"
    text = f"{arrow} {difference:+.{digits}f}".replace("-", "−")
    return element(tag, text, class_=direction or None, data_value=json.dumps(difference))


def _card(
    models: Sequence[Metrics], label: str, key: str, *, digits: int = 3, kind: str = "", sign: int = 1, note: str = ""
) -> Markup:
    shown = []
    for model, metrics in enumerate(models):
        value = value_at(metrics, key)
        text = NOTHING if value is None else f"{value:.{digits}f}"
        letter = [element("small", f"{MODEL_LETTERS[model]} ")] if len(models) > 1 else []
        shown.append(element("dd", *letter, element("span", text, **_data(key, value, model)), class_="value"))
    if len(models) > 1:
        shown.append(_difference("dd", models, key, sign, digits))
    return element("div", element("dt", label), *shown, class_=f"kind-{kind}" if kind else None, title=note or None)
