"""The same photograph in several folders of the input becomes one photograph with the labels of
all.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from yolo_seg_ddp.data.labels import label_rows, parse_yolo_row, whole_photograph
from yolo_seg_ddp.data.polygons import polygon_boxes
from yolo_seg_ddp.prepare.parsing.state import Entry, output_files, write_labels

DRAWN_PX = 512  # side of the square in which outlines are compared
EDGE_PX = 3  # width of their edges there, so that two annotators' outlines of a wire overlap
SAME_OBJECT = 0.5  # IoU of two outlines of one object


def join_copies(
    folder: Path,
    entries: Sequence[Entry],
    copies: Iterable[Sequence[str]],
    input_of: Callable[[str], str],
    is_same_frame: Callable[[Entry, Entry], bool],
    class_names: Sequence[str],
) -> list[Entry]:
    """Return the entries with one for each photograph that several folders have, and write its
    labels.

    copies: keys of photographs that show the same picture. The largest one stays. A copy that is
    turned, mirrored or cropped does not join it, nor does one of the same folder.
    """
    by_key = {entry.key: entry for entry in entries}
    for group in copies:
        ordered = sorted(
            (by_key[key] for key in group),
            key=lambda entry: -entry.facts.output_width * entry.facts.output_height,
        )
        first = ordered[0]
        for other in ordered[1:]:
            if input_of(other.key) != input_of(first.key) and is_same_frame(first, other):
                by_key[first.key] = _joined(folder, by_key[first.key], other, class_names)
                del by_key[other.key]
    return list(by_key.values())


def _joined(folder: Path, first: Entry, other: Entry, class_names: Sequence[str]) -> Entry:
    """Write the labels of two entries as those of the first, and return it with what both hold.

    An object that both have is that of the first. Nobody looked for a class that both did not look
    for.
    """
    (_, first_labels, first_ignore), (_, other_labels, other_ignore) = (
        output_files(folder, entry.split, entry.stem) for entry in (first, other)
    )
    lines = _lines(first_labels)
    known = [parse_yolo_row(line.split(), len(class_names)) for line in lines]
    added, repeated = Counter[str](), Counter[str]()
    dropped = set[str]()
    for line in _lines(other_labels):
        class_id, outline = parse_yolo_row(line.split(), len(class_names))
        same_class = [each for number, each in known if number == class_id]
        if any(_iou(outline, each) >= SAME_OBJECT for each in same_class):
            repeated[class_names[class_id]] += 1
            dropped.add(line)
        else:
            added[class_names[class_id]] += 1
            lines.append(line)

    unsearched = [name for name in first.unsearched if name in other.unsearched]
    whole = {
        line
        for entry in (first, other)
        for line in whole_photograph(map(class_names.index, entry.unsearched)).splitlines()
    }
    regions = dict.fromkeys(
        line
        for file, entry in ((first_ignore, first), (other_ignore, other))
        for line in _lines(file if entry.has_regions else None)
        if line not in whole and line not in dropped
    )
    ignored_text = _text(regions) + whole_photograph(map(class_names.index, unsearched))
    return dataclasses.replace(
        first,
        # its labels are built again in another run
        label_fingerprint="",
        label_digest=write_labels(folder, first.split, first.stem, _text(lines), ignored_text),
        objects=_sum(first.objects, added),
        unknown_values=_sum(first.unknown_values, other.unknown_values),
        lost=_sum(first.lost, other.lost),
        found=[*first.found, *other.found],
        merged=_sum(first.merged, other.merged, repeated),
        ignored=_sum(first.ignored, other.ignored),
        unsearched=unsearched,
    )


def _lines(file: Path | None) -> list[str]:
    return [" ".join(fields) for _, fields in label_rows(file)] if file else []


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _sum(*counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sum(map(Counter, counts), Counter[str]()))


def _iou(one: np.ndarray, other: np.ndarray) -> float:
    """Return the IoU of two outlines (V, 2) in 0..1, each with its edge."""
    low, high = np.split(polygon_boxes([one, other]), 2, axis=1)
    if (low.max(axis=0) > high.min(axis=0) + EDGE_PX / DRAWN_PX).any():
        return 0.0
    masks = []
    for outline in (one, other):
        mask = np.zeros((DRAWN_PX, DRAWN_PX), np.uint8)
        points = [np.rint(outline * DRAWN_PX).astype(np.int32)]
        cv2.fillPoly(mask, points, 1)
        cv2.polylines(mask, points, True, 1, EDGE_PX)
        masks.append(mask > 0)
    return float((masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum())
