"""Counts photographs, objects and sizes of each class and split, and compares the splits."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from yolo_seg_ddp.data.polygons import SIZES, areas, join_outlines, size_classes
from yolo_seg_ddp.extras.check.findings import Finding
from yolo_seg_ddp.extras.check.reading import Entry

# of the difference between two shares of photographs; chance exceeds it once in 1000 times
MIN_DEVIATIONS = 3.3
MIN_FACTOR = 1.5  # between the shares


def count_classes(
    entries: Sequence[Entry], splits: Sequence[str], num_classes: int
) -> dict[str, dict[str, Any]]:
    """Return the counts of each split: `photographs`, `without_objects`, and `classes`, a row for
    each class.

    A row holds `photographs`, `objects` and the numbers of `small`, `medium` and `large` objects,
    by COCO's bounds in pixels of the photograph. `looked_for`: photographs in which somebody looked
    for the class.
    """
    counts = {}
    for split in splits:
        mine = [entry for entry in entries if entry.split == split]
        photographs = np.zeros(num_classes, np.int64)
        searched = photographs + len(mine)
        sizes = np.zeros((num_classes, len(SIZES)), np.int64)
        for entry in mine:
            class_ids = np.array([row.class_id for row in entry.rows], np.int64)
            photographs[np.unique(class_ids)] += 1
            searched[entry.unsearched] -= 1
            if len(class_ids) and entry.picture:
                size = (entry.picture.width, entry.picture.height)
                outlines = [row.polygon.astype(np.float64) * size for row in entry.rows]
                np.add.at(sizes, (class_ids, size_classes(areas(*join_outlines(outlines)))), 1)
        objects = np.bincount(
            [row.class_id for entry in mine for row in entry.rows], minlength=num_classes
        )
        counts[split] = {
            "photographs": len(mine),
            "without_objects": sum(not entry.rows for entry in mine),
            "objects": int(objects.sum()),
            "classes": [
                {
                    "photographs": int(photographs[number]),
                    "objects": int(objects[number]),
                    "looked_for": int(searched[number]),
                    **dict(zip(SIZES, sizes[number].tolist(), strict=True)),
                }
                for number in range(num_classes)
            ],
        }
    return counts


def check_classes(
    counts: dict[str, dict[str, Any]], names: Sequence[str], yaml_file: Path
) -> list[Finding]:
    """Return classes that are missing, or whose shares differ between train and another split."""
    findings = []
    for number, name in enumerate(names):
        objects = {split: count["classes"][number]["objects"] for split, count in counts.items()}
        others = {split: amount for split, amount in objects.items() if split != "train" and amount}
        if not any(objects.values()):
            findings.append(Finding("class_unused", "", yaml_file, f"{name}: no objects"))
        elif others and not objects.get("train", 1):
            where = ", ".join(f"{amount} in {split}" for split, amount in others.items())
            findings.append(
                Finding("class_not_in_train", "train", yaml_file, f"{name}: {where}, none in train")
            )
        elif not objects.get("val", 1):
            where = ", ".join(f"{amount} in {split}" for split, amount in objects.items() if amount)
            text = f"{name}: {where}, none in val"
            findings.append(Finding("class_not_in_val", "val", yaml_file, text))
        else:
            for split in others if "train" in counts else ():
                findings += _compare_shares(counts, number, name, split, yaml_file)
    return findings


def _compare_shares(
    counts: dict[str, dict[str, Any]], number: int, name: str, split: str, yaml_file: Path
) -> list[Finding]:
    """Compare the shares of photographs that show a class by the test of two proportions."""
    pair = [counts["train"], counts[split]]
    shown = np.array([count["classes"][number]["photographs"] for count in pair])
    totals = np.array([count["classes"][number]["looked_for"] for count in pair])
    shares = shown / totals
    pooled = shown.sum() / totals.sum()
    deviation = math.sqrt(max(pooled * (1 - pooled), 1e-12) * (1 / totals).sum())
    distance = abs(shares[0] - shares[1]) / deviation
    if distance < MIN_DEVIATIONS or shares.max() < MIN_FACTOR * shares.min():
        return []
    text = (
        f"{name}: in {shares[0]:.0%} of the photographs of train, in {shares[1]:.0%} of those of "
        f"{split}"
    )
    return [Finding("class_share", split, yaml_file, text, None, distance)]
