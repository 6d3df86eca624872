"""The text tables that `evaluate_model.py` prints."""

from collections.abc import Sequence
from typing import Any

from yolo_seg_ddp.data.polygons import SIZES
from yolo_seg_ddp.utils.text import format_table

KINDS = {"mask": "masks", "box": "boxes"}
_APS = {"map50": "mAP50", "map50_95": "mAP50-95"}
SCORES = {"precision": "precision", "recall": "recall", **_APS}

_THIN = {
    "native_mask_map50": "AP50",
    "native_mask_map50_95": "AP50-95",
    "centreline_recall": "recall",
    "centreline_precision": "precision",
    "pieces_per_object": "pieces",
}
# Photographs with objects; those in which somebody looked for the class, if not in all; objects;
# those with an outline, if not all have one.
COUNTS = {
    "num_images": "images",
    "num_searched": "looked for in",
    "num_targets": "objects",
    "num_outlined": "with outline",
}
_LENGTHS = {"length_px": "length", "missed_px": "missed", "invented_px": "invented"}


def all_tables(models: Sequence[dict[str, Any]]) -> str:
    """Return AP by class and by size, faster-coco-eval's AP, the compared model's AP, and the
    validation loss.
    """
    metrics = models[0]
    parts = [class_table(metrics), size_table(metrics), thin_table(metrics)]
    parts += [coco_comparison_table(metrics)] if "coco_eval" in metrics else []
    parts += [comparison_table(models)] if len(models) > 1 else []
    parts += (
        [f"Validation loss: {metrics['val_loss']:.4f}"] if metrics["val_loss"] is not None else []
    )
    if "guarantee" in metrics:
        parts.append("\n".join(guarantee_lines(metrics["guarantee"])))
    return "\n\n".join(filter(None, parts))


def guarantee_lines(guarantee: dict[str, Any]) -> list[str]:
    """Return what is guaranteed, for each class with its confidence, and on what it rests."""
    promised = " and ".join(guarantee["promises"])
    first = (
        f"Guaranteed with {100 * guarantee['certainty']:g} % certainty, for each class: {promised} "
        "(yolo_seg_ddp/extras/guarantee/README.md)"
    )
    return [first, *(row["words"] for row in guarantee["classes"]), guarantee["proof"]]


def score_of(row: dict[str, Any], name: str) -> float | None:
    """Return a score of all classes or of one.

    None without objects, and for the precision where none was found.
    """
    is_of_nothing = (
        name in ("box_precision", "mask_precision") and not row[name.replace("precision", "recall")]
    )
    return None if is_of_nothing or not num_judged(row, name) else row[name]


def num_judged(row: dict[str, Any], name: str) -> int:
    """Return on how many objects a score of masks or boxes rests."""
    return row.get("num_outlined" if name.startswith("mask") else "", row["num_targets"])


def class_table(metrics: dict[str, Any]) -> str:
    """Return the scores of masks, then of boxes: one row for all classes and one per class."""
    tables = []
    counts = {key: title for key, title in COUNTS.items() if key in metrics}
    for kind, words in KINDS.items():
        rows = [
            [
                row.get("name", "all"),
                *(row[key] for key in counts),
                *(_shown(score_of(row, f"{kind}_{name}")) for name in SCORES),
            ]
            for row in [metrics, *metrics["per_class"]]
        ]
        tables.append(
            format_table([words, *counts.values(), *SCORES.values()], rows, right_from=1, cut=0)
        )
    return "\n\n".join(tables)


def size_table(metrics: dict[str, Any]) -> str:
    """Return one row per size of the targets, by their area in pixels of the photographs."""
    limits = ("under 32x32", "to 96x96", "above")
    rows = [
        [
            f"{size} ({limit})",
            values["num_targets"],
            *(_shown(values[f"{kind}_{name}"]) for kind in KINDS for name in _APS),
        ]
        for (size, values), limit in zip(metrics["by_size"].items(), limits, strict=True)
    ]
    titles = [f"{kind} {title}" for kind in KINDS for title in _APS.values()]
    return format_table(["size, px", "objects", *titles], rows, right_from=1)


def thin_table(metrics: dict[str, Any]) -> str:
    """Return one row per thin class, with native masks' AP and centrelines;
    "" if none was judged.
    """
    title = "Native masks' AP; centrelines: recall, precision, pieces per object, px\n"
    rows = [
        [
            row["name"],
            *(_shown(row[name]) for name in _THIN),
            *(f"{row[name]:,}" for name in _LENGTHS),
        ]
        for row in metrics["per_class"]
        if row.get("length_px") is not None
    ]
    head = ["thin class", *_THIN.values(), *_LENGTHS.values()]
    return title + format_table(head, rows, right_from=1, cut=0) if rows else ""


def coco_comparison_table(metrics: dict[str, Any]) -> str:
    """Return this project's AP beside faster-coco-eval's, for all objects and by size."""
    coco = metrics["coco_eval"]
    rows = [
        [f"{kind} {label}", _shown(metrics[f"{kind}_{name}"]), _shown(coco[f"{kind}_{name}"])]
        for kind in KINDS
        for name, label in _APS.items()
    ] + [
        [
            f"{kind} mAP50-95, {size}",
            *(_shown(source["by_size"][size][f"{kind}_map50_95"]) for source in (metrics, coco)),
        ]
        for kind in KINDS
        for size in SIZES
    ]
    return format_table(
        [f"masks at {metrics['mask_resolution']} resolution", "ours", "faster-coco-eval"], rows
    )


def comparison_table(models: Sequence[dict[str, Any]]) -> str:
    """Return AP of two models, over all classes and by class, and the difference B - A."""
    tables = [
        "\n".join(f"{letter}: {model['model']}" for letter, model in zip("AB", models, strict=True))
    ]
    for kind, words in KINDS.items():
        rows = []
        for row, other in zip(*([model, *model["per_class"]] for model in models), strict=True):
            name = f"{kind}_map50_95"
            pair = [one[name] for one in (row, other)] if num_judged(row, name) else []
            rows.append([row.get("name", "all"), *(map(_shown, pair) if pair else [None] * 2)])
            rows[-1].append(f"{pair[1] - pair[0]:+.3f}" if pair else None)
        tables.append(
            format_table([f"{words}, mAP50-95", "A", "B", "B - A"], rows, right_from=1, cut=0)
        )
    return "\n\n".join(tables)


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
