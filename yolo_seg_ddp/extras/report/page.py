"""Builds report.html: a single file that loads nothing else and runs only its own script (content
security policy).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from yolo_seg_ddp.evaluation.metrics.summary import KINDS_OF_ERROR
from yolo_seg_ddp.evaluation.tables import guarantee_lines
from yolo_seg_ddp.evaluation.tile_search import Candidate
from yolo_seg_ddp.extras.report import photographs, tables
from yolo_seg_ddp.extras.report.charts import (
    Line,
    class_style,
    confusion_chart,
    curve_chart,
    reliability_chart,
)
from yolo_seg_ddp.extras.report.gallery import ERROR_OF, Card, draw_cards
from yolo_seg_ddp.extras.report.tables import KINDS, MODEL_LETTERS
from yolo_seg_ddp.pages.figures import MAX_CLASSES_SHOWN
from yolo_seg_ddp.pages.markup import Markup, color_key, element, joined, report_page, zoomable
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.text import counted

CURVES = (
    ("precision_at_recall", "Precision over recall at IoU 0.5", "recall", "precision"),
    ("f1", "F1 over confidence", "confidence", "F1"),
    ("precision", "Precision over confidence", "confidence", "precision"),
    ("recall", "Recall over confidence", "confidence", "recall"),
)
SECTIONS = {
    "classes": "Classes",
    "curves": "Curves",
    "thresholds": "Best thresholds",
    "guarantee": "Guarantee",
    "confusion": "Confusion matrix",
    "sizes": "Sizes of objects",
    "calibration": "Calibration, other numbers",
    "worst": "Worst images",
}

ON_THRESHOLDS = (
    "The confidence threshold that gives a class its highest F1 at IoU 0.5, and the scores at that "
    "threshold. Threshold and scores come from the same images, so the scores are slightly "
    "optimistic. For classes with few objects they are uncertain."
)
NO_ERRORS = (
    "No image has an error: no object is missed or confused and no detection is false above "
    "confidence 0.25."
)
FOOTER = (
    "Every score and count on this page is also in metrics.json next to this file (model B: "
    "compared_metrics.json). Greedy matching and 101-point AP as in Ultralytics 8.4. Classes "
    "without objects in the split have no scores."
)
ON_SIZES = "Size classes by the object's area in pixels of the photograph on disk (COCO's bounds)."


@dataclass(frozen=True)
class Subject:
    """One evaluated model: the content of its metrics.json, and the result of
    `metrics.precision_recall_curves`.
    """

    metrics: dict[str, Any]
    curves: dict[str, Any]


def write_pages(
    folder: Path,
    candidates: Sequence[Candidate],
    metrics: Sequence[dict[str, Any]],
    curves: Sequence[dict[str, Any]],
    listed: dict[int, photographs.Listed],
) -> None:
    """Write both pages; listed: those of `Thumbnails`.

    The model runs a second time on the few images that they show large; none were kept.
    """
    cards = draw_cards(metrics[0]["worst_images"], candidates)
    subjects = [Subject(*both) for both in zip(metrics, curves, strict=True)]
    write_text_atomic(folder / "report.html", build_page(subjects, cards))
    views = {card.errors["image_id"]: card.view for card in cards if card.view is not None}
    listed = listed or {
        card.errors["image_id"]: card.listed for card in cards if card.listed is not None
    }
    photographs.write_photographs(folder, listed, views, candidates[0].names, candidates[0].path)


def build_page(subjects: Sequence[Subject], cards: Sequence[Card]) -> str:
    """Return the page for one model, or for two: model A and model B, with which it is compared.

    cards: the worst images, in the order of metrics.json's `worst_images`.
    """
    models = [subject.metrics for subject in subjects]
    choice = []
    # Without any outline no mask is judged.
    shown = "box" if models[0].get("num_outlined") == 0 else "mask"
    for kind, plural in KINDS.items():
        button = element(
            "input", type="radio", name="kind", id=f"show-{kind}", checked=kind == shown
        )
        choice.append(element("label", button, plural.capitalize()))
    content = {
        "classes": _both("", lambda kind: tables.class_table(models, kind)),
        "curves": _curves(subjects),
        "thresholds": [
            element("p", ON_THRESHOLDS, class_="note"),
            *_both("", lambda kind: tables.threshold_table(models, kind)),
        ],
        **({"guarantee": _guarantee(models[0]["guarantee"])} if "guarantee" in models[0] else {}),
        "confusion": _confusion(models),
        "sizes": [
            element("p", ON_SIZES, class_="note"),
            *_both("", lambda kind: tables.size_table(models, kind)),
        ],
        "calibration": [
            *_calibration(models),
            *_both("", lambda kind: tables.numbers_table(models, kind)),
        ],
        "worst": _gallery(cards, len(models)),
    }
    sections = (
        element("section", element("h2", SECTIONS[name]), *parts, id=name)
        for name, parts in content.items()
    )
    return report_page(
        f"Evaluation of {models[0]['model']}",
        [element("h1", "Evaluation"), *_about(models)],
        [element("fieldset", *choice, aria_label="Masks or boxes")],
        {name: SECTIONS[name] for name in content},
        [
            *_both("", lambda kind: tables.verdict(models, kind)),
            tables.headline_cards(models),
            *sections,
        ],
        FOOTER,
    )


def _about(models: Sequence[dict[str, Any]]) -> list[Markup]:
    lines = []
    for letter, metrics in zip(MODEL_LETTERS, models, strict=False):
        name = f"Model {letter} " if len(models) > 1 else "Model "
        size = f", input {metrics['img_size']} px"
        lines.append(element("p", name, element("b", metrics["model"]), size, class_="about"))
    metrics = models[0]
    where = (
        "in the photographs' pixels"
        if metrics["mask_resolution"] == "native"
        else "at a quarter of the input"
    )
    words = (" · split ", element("b", metrics["split"]), f" · masks compared {where}")
    return [*lines, element("p", "Data ", element("b", metrics["data"]), *words, class_="about")]


def _both(class_: str, make: Any) -> list[Markup]:
    """Return an element for masks and one for boxes; the page shows the selected one."""
    return [element("div", make(kind), class_=f"kind-{kind} {class_}".strip()) for kind in KINDS]


def _curves(subjects: Sequence[Subject]) -> list[Markup]:
    names = [row["name"] for row in subjects[0].metrics["per_class"]]
    class_ids = subjects[0].curves["mask"]["class_ids"].tolist()
    buttons = []
    for class_id in class_ids:
        line = element(
            "line", x1=0, y1=4, x2=22, y2=4, style=class_style(class_id, len(names)) or None
        )
        swatch = element("svg", line, viewBox="0 0 22 8", aria_hidden="true")
        buttons.append(
            element(
                "button",
                swatch,
                names[class_id],
                type="button",
                data_class=class_id,
                aria_pressed="false",
            )
        )
    hint = "The thick line is the mean over the classes. Click a class to highlight its curves."
    if len(subjects) > 1:
        hint += (
            " Dashed lines are model B; its curves for a class appear when the class is selected."
        )
    many = " many" if len(names) > MAX_CLASSES_SHOWN else ""
    return [
        element("p", hint, class_="note"),
        element("div", *buttons, class_="legend", role="group", aria_label="Classes"),
        *_both(
            "charts" + many,
            lambda kind: joined(*(_curve(subjects, names, kind, *curve) for curve in CURVES)),
        ),
    ]


def _curve(
    subjects: Sequence[Subject],
    names: Sequence[str],
    kind: str,
    field: str,
    title: str,
    x_name: str,
    y_name: str,
) -> Markup:
    lines = []
    for model, subject in enumerate(subjects):
        curves = subject.curves[kind]
        letter = f" {MODEL_LETTERS[model]}" if len(subjects) > 1 else ""
        for class_id, values in zip(curves["class_ids"].tolist(), curves[field], strict=True):
            lines.append(Line(names[class_id] + letter, values, class_id, model))
        if len(curves["class_ids"]):
            lines.append(Line(f"mean{letter}", curves[field].mean(axis=0), None, model))
    mark = subjects[0].metrics[f"{kind}_best_confidence"] if x_name == "confidence" else None
    return curve_chart(f"{title}, {KINDS[kind]}", x_name, y_name, lines, len(names), mark)


def _guarantee(guarantee: dict[str, Any]) -> list[Markup]:
    """Return what is guaranteed in words, and the guaranteed recall over confidence."""
    meaning = [f"“{words}” is {what}. " for words, what in guarantee["promises"].items()]
    at = np.linspace(0, 1, 1000)
    rows = guarantee["classes"]
    curves = [
        Line(row["class"], np.interp(at, guarantee["levels"], row["certain"]["recall"]), class_id)
        for class_id, row in enumerate(rows)
        if "recall" in row["certain"]
    ]
    title = f"Recall that is certain at {100 * guarantee['certainty']:g} %"
    chart = curve_chart(title, "confidence", "guaranteed recall", curves, len(rows))
    lines = [element("p", line) for line in guarantee_lines(guarantee)]
    drawn = [element("div", chart, class_="charts")] if curves else []
    return [*lines, element("p", *meaning, class_="note"), *drawn]


def _confusion(models: Sequence[dict[str, Any]]) -> list[Markup]:
    names = [row["name"] for row in models[0]["per_class"]]
    words = (
        "Boxes with confidence above 0.25, matched at IoU above 0.45. Columns are true classes, "
        "rows are predicted classes; percentages are of the column. The last row counts missed "
        "objects, the last column false positives."
    )
    parts = [
        element("p", words, class_="note"),
        element("ol", *(element("li", name) for name in names), class_="labels", hidden=True),
    ]
    for letter, metrics in zip(MODEL_LETTERS, models, strict=False):
        if len(models) > 1:
            parts.append(element("h3", f"Model {letter}"))
        chart = confusion_chart(metrics["confusion_matrix"], names)
        parts.append(
            element(
                "div",
                chart,
                class_="scroll",
                tabindex="0",
                role="region",
                aria_label="Confusion matrix",
            )
        )
        if metrics is models[0]:
            parts += [
                element("h3", "The most frequent confusions"),
                tables.confusions_table(metrics),
            ]
    return parts


def _calibration(models: Sequence[dict[str, Any]]) -> list[Markup]:
    words = (
        "Precision (IoU 0.5) of the detections in each confidence range. On the dashed line "
        "confidence equals precision; bars below it show overconfidence. The grey bars at the "
        "bottom show the number of detections. Detections below confidence 0.05 are not counted."
    )

    def charts(kind: str) -> Markup:
        parts = []
        for letter, metrics in zip(MODEL_LETTERS, models, strict=False):
            calibration = metrics["calibration"][kind]
            title = f"Reliability, {KINDS[kind]}" + (f", model {letter}" if len(models) > 1 else "")
            if calibration["error"] is None:
                parts.append(element("p", f"{title}: no detections"))
                continue
            excess = f"{calibration['excess']:+.3f}".replace("-", "−")
            title += (
                f": expected calibration error {calibration['error']:.3f}, mean confidence minus "
                f"precision {excess}"
            )
            parts.append(
                reliability_chart(
                    f"{title}, {counted(calibration['num_detections'], 'detection')}", calibration
                )
            )
        return joined(*parts)

    return [element("p", words, class_="note"), *_both("charts", charts)]


def _gallery(cards: Sequence[Card], num_models: int) -> list[Markup]:
    if not cards:
        return [element("p", NO_ERRORS)]
    words = (
        f"The {len(cards)} images with the most errors, as counted in the confusion matrix. Only "
        "errors have a name on them. "
    )
    orders = {"all": "most errors", **{kind: f"most {kind}" for kind in KINDS_OF_ERROR}}
    buttons = [
        element(
            "button", label, type="button", data_by=name, aria_pressed=str(name == "all").lower()
        )
        for name, label in orders.items()
    ]
    meanings = {
        "": "correct",
        "missed": "missed label",
        "false": "false detection",
        "confused": "another class",
    }
    link = element("a", photographs.PAGE, href=photographs.PAGE)
    others = [link, " lists all photographs, to filter and sort. "] if cards[0].listed else []
    keys = [color_key(color, meanings[error], error) for color, error in ERROR_OF.items()]
    articles = [_article(position, card, num_models) for position, card in enumerate(cards)]
    return [
        element("p", words, *others, *keys, class_="note"),
        element(
            "div",
            "Order:",
            *buttons,
            class_="order",
            role="group",
            aria_label="Order of the images",
        ),
        element("div", *articles, class_="gallery"),
    ]


def _article(position: int, card: Card, num_models: int) -> Markup:
    errors = card.errors
    counts = {kind: errors[kind] for kind in KINDS_OF_ERROR}
    shown = {
        name: element(
            "span",
            str(errors[name]),
            data_key=f"worst_images.{position}.{name}",
            data_value=errors[name],
        )
        for name in (*KINDS_OF_ERROR, "num_targets")
    }
    error_counts = [joined(shown[kind], f" {kind}, ") for kind in KINDS_OF_ERROR]
    in_words = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    pictures = [
        zoomable(
            card.truth,
            "Labels",
            f"{errors['file']} with its {counted(errors['num_targets'], 'labelled object')}",
        )
    ]
    for model, picture in enumerate(card.predictions):
        name = f"Prediction of model {MODEL_LETTERS[model]}" if num_models > 1 else "Prediction"
        words = f"{errors['file']} with predictions" + ("" if model else f": {in_words}")
        pictures.append(zoomable(picture, name, words))
    letter = "model A: " if num_models > 1 else ""
    link = f"{photographs.PAGE}#{errors['image_id']}"
    full_size = [] if card.view is None else [" · ", element("a", "full size", href=link)]
    return element(
        "article",
        element("h3", errors["file"]),
        element(
            "p",
            letter,
            *error_counts,
            "of ",
            shown["num_targets"],
            " objects",
            *full_size,
            class_="note",
        ),
        *([element("p", " · ".join(card.lines))] if card.lines else []),
        element("div", *pictures, class_="pair"),
        data_all=sum(counts.values()),
        **{f"data_{kind}": count for kind, count in counts.items()},
    )
