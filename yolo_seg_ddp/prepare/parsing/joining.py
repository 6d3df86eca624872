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
from yolo_seg_ddp.prepare.near_duplicates import is_same_frame
from yolo_seg_ddp.prepare.parsing.sources import Photograph
from yolo_seg_ddp.prepare.parsing.state import Entry, output_files, write_labels

DRAWN_PX = 512  # side of the square in which outlines are compared
EDGE_PX = 3  # width of their edges there, so that two annotators' outlines of a wire overlap
SAME_OBJECT = 0.5  # IoU of two outlines of one object


def join_copies(
    folder: Path,
    entries: Sequence[Entry],
    copies: Iterable[Sequence[str]],
    photographs: Mapping[str, Photograph],
    read_thumb: Callable[[Entry], np.ndarray],
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
            is_apart = photographs[other.key].input_name != photographs[first.key].input_name
            if is_apart and (
                first.image_digest == other.image_digest
                or is_same_frame(read_thumb(first), read_thumb(other))
            ):
                by_key[first.key] = _joined(folder, by_key[first.key], other, class_names)
                del by_key[other.key]
    return list(by_key.values())


def _joined(folder: Path, first: Entry, other: Entry, class_names: Sequence[str]) -> Entry:
    """Write the labels of two entries as those of the first, and return it with what both hold.

    An object that both have is that of the first. Nobody looked for a class that both did not look
    for.
    """
    (rows, regions), (more_rows, more_regions) = (_lines(folder, each) for each in (first, other))
    known = [parse_yolo_row(line.split(), len(class_names)) for line in rows]
    repeated = Counter[str]()
    for line in more_rows:
        class_id, outline = parse_yolo_row(line.split(), len(class_names))
        if any(number == class_id and _iou(outline, each) >= SAME_OBJECT for number, each in known):
            repeated[class_names[class_id]] += 1
        else:
            rows.append(line)

    one_sided = map(class_names.index, {*first.unsearched} ^ {*other.unsearched})
    gone = {*more_rows, *whole_photograph(one_sided).splitlines()} - {*rows}
    ignored_text = _text(line for line in dict.fromkeys(regions + more_regions) if line not in gone)
    counts = {
        name: Counter(getattr(first, name)) + Counter(getattr(other, name))
        for name in ("objects", "unknown_values", "lost", "merged", "ignored")
    }
    counts["objects"] -= repeated
    counts["merged"] += repeated
    return dataclasses.replace(
        first,
        # its labels are built again in another run
        label_fingerprint="",
        label_digest=write_labels(folder, first.split, first.stem, _text(rows), ignored_text),
        found=[*first.found, *other.found],
        unsearched=[name for name in first.unsearched if name in other.unsearched],
        **{name: dict(number) for name, number in counts.items()},
    )


def _lines(folder: Path, entry: Entry) -> tuple[list[str], ...]:
    """Return the lines of a photograph's labels, and of its regions to ignore."""
    files = output_files(folder, entry.split, entry.stem)[1:]
    # An earlier run may have left a file of regions.
    exist = (True, entry.has_regions)
    return tuple(
        [" ".join(fields) for _, fields in label_rows(file if exists else None)]
        for file, exists in zip(files, exist, strict=True)
    )


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


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
