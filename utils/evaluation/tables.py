"""The text tables that `evaluate_model.py` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from utils.common.text import format_table
from utils.data.polygons import SIZES

_APS = {"box_map50": "box mAP50", "box_map50_95": "mAP50-95", "mask_map50": "mask mAP50", "mask_map50_95": "mAP50-95"}
_COLUMNS = {
    "box_precision": "box P",
    "box_recall": "R",
    "box_map50": "mAP50",
    "box_map50_95": "mAP50-95",
    "mask_precision": "mask P",
    "mask_recall": "R",
    "mask_map50": "mAP50",
    "mask_map50_95": "mAP50-95",
}

_THIN = {
    "native_mask_map50": "native mask mAP50",
    "native_mask_map50_95": "mAP50-95",
    "centreline_recall": "centreline R",
    "centreline_precision": "centreline P",
    "pieces_per_object": "pieces per object",
}
_LENGTHS = {"length_px": "length, px", "missed_px": "missed", "invented_px": "invented"}


def all_tables(models: Sequence[dict[str, Any]]) -> str:
    """Return AP by class and by size, faster-coco-eval's AP, the compared model's AP, and the validation loss."""
    metrics = models[0]
    parts = [class_table(metrics), size_table(metrics), thin_table(metrics)]
    parts += [coco_comparison_table(metrics)] if "coco_eval" in metrics else []
    parts += [comparison_table(models)] if len(models) > 1 else []
    parts += [f"Validation loss: {metrics['val_loss']:.4f}"] if metrics["val_loss"] is not None else []
    if "guarantee" in metrics:
        parts.append("\n".join(guarantee_lines(metrics["guarantee"])))
    return "\n\n".join(filter(None, parts))


def guarantee_lines(guarantee: dict[str, Any]) -> list[str]:
    """Return what is guaranteed, for each class with its confidence, and on what it rests."""
    promised = " and ".join(guarantee["promises"])
    first = (
        f"Guaranteed with {100 * guarantee['certainty']:g} % certainty, for each class: {promised} (docs/guarantee.md)"
    )
    return [first, *(row["words"] for row in guarantee["classes"]), guarantee["proof"]]


def class_table(metrics: dict[str, Any]) -> str:
    """Return one row for all classes and one per class; a class without objects in the split has no scores."""
    rows = [
        [
            row.get("name", "all"),
            row["num_images"],
            row["num_targets"],
            *(_shown(row[name] if row["num_targets"] else None) for name in _COLUMNS),
        ]
        for row in [metrics, *metrics["per_class"]]
    ]
    return format_table(["class", "images", "objects", *_COLUMNS.values()], rows)


def size_table(metrics: dict[str, Any]) -> str:
    """Return one row per size of the targets, by their area in pixels of the photographs."""
    limits = ("under 32x32 px", "up to 96x96 px", "above")
    rows = [
        [f"{size} ({limit})", values["num_targets"], *(_shown(values[name]) for name in _APS)]
        for (size, values), limit in zip(metrics["by_size"].items(), limits, strict=True)
    ]
    return format_table(["size", "objects", *_APS.values()], rows)


def thin_table(metrics: dict[str, Any]) -> str:
    """Return one row per thin class, with native masks' AP and centrelines; "" if none was judged."""
    rows = [
        [row["name"], *(_shown(row[name]) for name in _THIN), *(f"{row[name]:,}" for name in _LENGTHS)]
        for row in metrics["per_class"]
        if row.get("length_px") is not None
    ]
    return format_table(["thin class", *_THIN.values(), *_LENGTHS.values()], rows) if rows else ""


def coco_comparison_table(metrics: dict[str, Any]) -> str:
    """Return this project's AP beside faster-coco-eval's, for all objects and by size."""
    coco = metrics["coco_eval"]
    rows = [
        [f"{kind} {label}", _shown(metrics[f"{kind}_{name}"]), _shown(coco[f"{kind}_{name}"])]
        for kind in ("box", "mask")
        for name, label in (("map50", "mAP50"), ("map50_95", "mAP50-95"))
    ] + [
        [
            f"{kind} mAP50-95, {size}",
            *(_shown(source["by_size"][size][f"{kind}_map50_95"]) for source in (metrics, coco)),
        ]
        for kind in ("box", "mask")
        for size in SIZES
    ]
    return format_table([f"masks at {metrics['mask_resolution']} resolution", "ours", "faster-coco-eval"], rows)


def comparison_table(models: Sequence[dict[str, Any]]) -> str:
    """Return AP of two models, over all classes and by class, and the difference B - A."""
    rows = []
    for number, name in enumerate(["all", *(row["name"] for row in models[0]["per_class"])]):
        found = [model if number == 0 else model["per_class"][number - 1] for model in models]
        row: list[str | None] = [name]
        for kind in ("box", "mask"):
            pair = [one[f"{kind}_map50_95"] for one in found] if found[0]["num_targets"] else []
            row += [*map(_shown, pair), f"{pair[1] - pair[0]:+.3f}"] if pair else [None] * 3
        rows.append(row)
    columns = [
        f"{kind} mAP50-95, {who}" if who == "A" else who for kind in ("box", "mask") for who in ("A", "B", "B - A")
    ]
    about = "".join(f"{letter}: {model['model']}\n" for letter, model in zip("AB", models, strict=True))
    return about + format_table(["class", *columns], rows)


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:.3f}"
