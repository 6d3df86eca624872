"""The report's tables and main metrics, of one model or of two side by side.

An element that shows a metric has its key in `data-key` and its unrounded value in `data-value`.
"""

import json
from collections.abc import Sequence
from typing import Any

from yolo_seg_ddp.data.polygons import SIZES
from yolo_seg_ddp.evaluation.tables import num_judged
from yolo_seg_ddp.pages.markup import Markup, element, heading, name_cell, table
from yolo_seg_ddp.utils.text import counted

KINDS = {"mask": "masks", "box": "boxes"}
NOTHING = "–"
MODEL_LETTERS = ("A", "B")
SCORES = {
    "map50_95": "AP50-95",
    "map50": "AP50",
    "f1": "F1",
    "precision": "Precision",
    "recall": "Recall",
}
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
# from which score on
LEVELS = {"Found well": 0.5, "Found in part": 0.1, "Hardly found": 0.0005, "Not found": 0.0}
MOST = 6  # classes of a level that the verdict names
RULE = (
    "Well: AP50 from 0.5 on; of a thin class half the length is found, and half of what is found "
    "is right. In part: from 0.1 on."
)
Metrics = dict[str, Any]


def value_at(metrics: Metrics, key: str) -> Any:
    """Return the value at a dotted key, such as `per_class.3.mask_map50`; None if a parent is None.

    A precision is None, too, where nothing was found: there it says nothing. So are the scores of
    masks of all classes if no object has an outline.
    """
    if key.startswith("mask_") and metrics.get("num_outlined") == 0:
        return None
    if (
        key.endswith("precision")
        and value_at(metrics, key.removesuffix("precision") + "recall") == 0
    ):
        return None
    value: Any = metrics
    for step in key.split("."):
        value = (
            None if value is None else value[int(step)] if isinstance(value, list) else value[step]
        )
    return value


def verdict(models: Sequence[Metrics], kind: str) -> Markup:
    """Return in words what was judged, and which classes the first model finds well and which not.

    A thin class is judged by its centrelines, any other one by its AP50.
    """
    first = models[0]
    classes_at = {level: list[str]() for level in LEVELS}
    rows = sorted(
        (row for row in first["per_class"] if num_judged(row, kind)),
        key=lambda row: -row[f"{kind}_map50"],
    )
    for row in rows:
        score = row[f"{kind}_map50"]
        words = counted(num_judged(row, kind), "object")
        if kind == "mask" and row.get("centreline_recall") is not None:
            score = row["centreline_precision"] or 0
            recall = row["centreline_recall"]
            score = min(score, recall)
            words = f"{100 * recall:.0f} % of the length"
        classes_at[next(level for level, least in LEVELS.items() if score >= least)].append(
            f"{row['name']} ({words})"
        )
    sentences = [
        f" {level}: {', '.join(of[:MOST])}{', …' * (len(of) > MOST)}."
        for level, of in classes_at.items()
        if of
    ]
    classes = f"{KINDS[kind].capitalize()} of {counted(len(rows), 'class')}"
    score = element(
        "b", f"{first[f'{kind}_map50']:.3f}", **_data(f"{kind}_map50", first[f"{kind}_map50"], 0)
    )
    where = (
        f"{counted(first['num_images'], 'photograph')} with "
        f"{counted(num_judged(first, kind), 'object')}"
    )
    words = f"{'Model A: ' * (len(models) > 1)}{classes} in {where}: mAP50 "
    return element("p", words, score, ".", *sentences, class_="verdict", title=RULE)


def headline_cards(models: Sequence[Metrics]) -> Markup:
    """Return the cards with the main metrics at the top of the page: four for masks, four for
    boxes.
    """
    labels = {
        "map50": "Mean AP50",
        "map50_95": "Mean AP50-95",
        "precision": "Mean precision",
        "recall": "Mean recall",
    }
    pairs = [
        (f"{kind}_{name}", f"{label}, {KINDS[kind]}")
        for kind in KINDS
        for name, label in labels.items()
    ]
    return element("dl", *(_card(models, label, key) for key, label in pairs), class_="cards")


def numbers_table(models: Sequence[Metrics], kind: str) -> Markup:
    """Return the numbers of a whole model that no other table has."""
    numbers = (
        (f"{kind}_best_confidence", "Confidence of the best mean F1", 0),
        ("val_loss", "Validation loss", -1),
    )
    error = f"calibration.{kind}.error", "Calibration error", -1
    rows = [
        element("tr", name_cell(name), *_thin_cells(models, key, 4, sign))
        for key, name, sign in (*numbers, error)
    ]
    head = [heading("Number", True), *_score_headings("Value", len(models))]
    return table(f"Other numbers, {KINDS[kind]}", head, rows)


def class_table(models: Sequence[Metrics], kind: str) -> Markup:
    """Return the scores over all classes and of each class; a class without objects has none."""
    counts = {
        "num_images": "Images",
        "num_searched": "Looked for in",
        "num_targets": "Objects",
        "num_outlined": "With outline",
    }
    counts = {key: label for key, label in counts.items() if key in models[0]}
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
            cells += _score_cells(
                models, f"per_class.{number}.{kind}_{name}", bool(num_judged(row, kind))
            )
        for name in thin:
            cells += _thin_cells(models, f"per_class.{number}.{name}", *THIN[name][1:])
        cells += [number_cell(models[0], f"per_class.{number}.{key}", 0) for key in counts]
        rows.append(element("tr", *cells))
    total = [
        name_cell("all"),
        *(cell for name in SCORES for cell in _score_cells(models, f"{kind}_{name}", True)),
    ]
    total += [element("td", NOTHING, class_="none")] * (len(thin) * (1 if len(models) == 1 else 3))
    total += [number_cell(models[0], key, 0) for key in counts]
    return table(
        f"Scores of each class, {KINDS[kind]}", head, rows, element("tr", *total, class_="all")
    )


def size_table(models: Sequence[Metrics], kind: str) -> Markup:
    """Return AP by object size."""
    head = [heading("Size", True), heading("Objects")]
    scores = {name: SCORES[name] for name in ("map50_95", "map50")}
    head += [cell for label in scores.values() for cell in _score_headings(label, len(models))]
    rows = []
    for size in SIZES:
        cells = [
            name_cell(f"{size} ({SIZE_LIMITS[size]})"),
            number_cell(models[0], f"by_size.{size}.num_targets", 0),
        ]
        cells += [
            cell
            for name in scores
            for cell in _score_cells(models, f"by_size.{size}.{kind}_{name}", True)
        ]
        rows.append(element("tr", *cells))
    return table(f"AP by object size, {KINDS[kind]}", head, rows)


def threshold_table(models: Sequence[Metrics], kind: str) -> Markup:
    """Return each class's best threshold and the scores there, of one model or
    of two side by side.
    """
    head = [heading("Class", True)]
    letters = [f" {letter}" for letter in MODEL_LETTERS] if len(models) > 1 else [""]
    head += [heading(label + letter) for label, _ in POINT_COLUMNS.values() for letter in letters]
    rows = []
    for number, row in enumerate(models[0]["per_class"]):
        cells = [name_cell(row["name"])]
        for name, (_, digits) in POINT_COLUMNS.items():
            key = f"operating_points.{kind}.{number}.{name}"
            cells += [
                number_cell(metrics, key, digits, model=model)
                for model, metrics in enumerate(models)
            ]
        rows.append(element("tr", *cells))
    return table(f"Best threshold of each class, {KINDS[kind]}", head, rows)


def confusions_table(metrics: Metrics) -> Markup:
    """Return the largest off-diagonal entries of the confusion matrix."""
    matrix = metrics["confusion_matrix"]
    names = [row["name"] for row in metrics["per_class"]]
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
            element(
                "td", f"{100 * count / totals[column]:.1f} %", data_value=count / totals[column]
            )
            if column < len(names)
            else element("td", NOTHING, class_="none"),
        )
        for count, row, column in entries[:MAX_CONFUSIONS]
    ]
    return table("The most frequent confusions", head, rows)


def number_cell(
    metrics: Metrics, key: str, digits: int, *, model: int = 0, is_bar: bool = False
) -> Markup:
    """Return the table cell of one metric, with a dash for None."""
    value = value_at(metrics, key)
    if value is None:
        return element("td", NOTHING, class_="none", **_data(key, value, model))
    style = f"--share:{100 * value:.1f}%" if is_bar else None
    shown = f"{value:,.{digits}f}"
    return element(
        "td", shown, class_="bar" if is_bar else None, style=style, **_data(key, value, model)
    )


def _data(key: str, value: Any, model: int) -> dict[str, Any]:
    exact = None if value is None else json.dumps(value)
    return {"data_key": key, "data_value": exact, "data_model": model or None}


def _score_headings(label: str, num_models: int) -> list[Markup]:
    return (
        [heading(label)]
        if num_models == 1
        else [heading(text) for text in (f"{label} A", f"{label} B", "B − A")]
    )


def _score_cells(models: Sequence[Metrics], key: str, has_targets: bool) -> list[Markup]:
    if not has_targets:
        return [element("td", NOTHING, class_="none")] * (1 if len(models) == 1 else 3)
    return _thin_cells(models, key, 3, 1)


def _thin_cells(models: Sequence[Metrics], key: str, digits: int, sign: int) -> list[Markup]:
    cells = [
        number_cell(metrics, key, digits, model=model, is_bar=digits == 3)
        for model, metrics in enumerate(models)
    ]
    return cells if len(models) == 1 else [*cells, _difference("td", models, key, sign, digits)]


def _difference(
    tag: str, models: Sequence[Metrics], key: str, sign: int = 1, digits: int = 3
) -> Markup:
    """Return an element with B minus A. sign: 1 if higher is better, -1 if lower is better, 0 if
    neither.
    """
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


def _card(models: Sequence[Metrics], label: str, key: str) -> Markup:
    shown = []
    for model, metrics in enumerate(models):
        value = value_at(metrics, key)
        text = NOTHING if value is None else f"{value:.3f}"
        letter = [element("small", f"{MODEL_LETTERS[model]} ")] if len(models) > 1 else []
        shown.append(
            element(
                "dd", *letter, element("span", text, **_data(key, value, model)), class_="value"
            )
        )
    if len(models) > 1:
        shown.append(_difference("dd", models, key))
    return element("div", element("dt", label), *shown, class_=f"kind-{key.partition('_')[0]}")
