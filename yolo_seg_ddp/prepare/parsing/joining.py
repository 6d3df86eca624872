"""The same photograph in several folders of the input becomes one photograph with the labels of
all.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.data.labels import BOX_FIELDS, label_rows, parse_yolo_row, whole_photograph
from yolo_seg_ddp.prepare.near_duplicates import is_same_frame
from yolo_seg_ddp.prepare.parsing.sources import Photograph
from yolo_seg_ddp.prepare.parsing.state import Entry, output_files, write_labels

DRAWN_PX = 256  # side of the square in which outlines are compared
EDGE_PX = 2  # width of their edges there, so that two annotators' outlines of a wire overlap
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

    An object that both have is that of the first, but an outline takes the place of a box. Nobody
    looked for a class that both did not look for.
    """
    (rows, regions), (more_rows, more_regions) = (
        # An earlier run may have left a file of regions.
        [_lines(label_file), _lines(ignore_file if entry.has_regions else None)]
        for entry in (first, other)
        for _, label_file, ignore_file in [output_files(folder, entry.split, entry.stem)]
    )
    known, before = [_Drawn(line, len(class_names)) for line in rows], {*rows}
    repeated = Counter[str]()
    for line in more_rows:
        drawn = _Drawn(line, len(class_names))
        ious = [drawn.iou(each) for each in known]
        same = int(np.argmax(ious)) if ious else 0
        if max(ious, default=0) < SAME_OBJECT:
            rows.append(line)
            continue
        repeated[class_names[drawn.class_id]] += 1
        if known[same].is_box and not drawn.is_box:
            rows[same], known[same] = line, drawn

    one_sided = map(class_names.index, {*first.unsearched} ^ {*other.unsearched})
    gone = {*before, *more_rows, *whole_photograph(one_sided).splitlines()} - {*rows}
    ignored_text = _text(line for line in dict.fromkeys(regions + more_regions) if line not in gone)
    counts = {
        name: Counter(getattr(first, name)) + Counter(getattr(other, name))
        for name in ("objects", "unknown_values", "lost", "merged", "ignored")
    }
    counts["objects"] -= repeated
    counts["merged"] += repeated
    sums: dict[str, Any] = {name: dict(number) for name, number in counts.items()}
    return dataclasses.replace(
        first,
        # its labels are built again in another run
        label_fingerprint="",
        label_digest=write_labels(folder, first.split, first.stem, _text(rows), ignored_text),
        found=[*first.found, *other.found],
        unsearched=[name for name in first.unsearched if name in other.unsearched],
        **sums,
    )


def _lines(file: Path | None) -> list[str]:
    return [" ".join(fields) for _, fields in label_rows(file)]


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


class _Drawn:
    """A label's line as masks: of its outline with the edge, and of its box."""

    def __init__(self, line: str, num_classes: int) -> None:
        fields = line.split()
        self.class_id, outline = parse_yolo_row(fields, num_classes)
        self.is_box = len(fields) == BOX_FIELDS
        points = np.rint(outline * DRAWN_PX).astype(np.int32)
        mask = np.zeros((DRAWN_PX, DRAWN_PX), np.uint8)
        cv2.fillPoly(mask, [points], 1)
        cv2.polylines(mask, [points], True, 1, EDGE_PX)
        box = cv2.rectangle(np.zeros_like(mask), points.min(0), points.max(0), 1, cv2.FILLED)
        self.mask, self.box = mask > 0, box > 0

    def iou(self, other: "_Drawn") -> float:
        """Return the IoU of the boxes if one is a box, else of the outlines; 0 for two classes."""
        if self.class_id != other.class_id:
            return 0.0
        kind = "box" if self.is_box or other.is_box else "mask"
        one, two = getattr(self, kind), getattr(other, kind)
        return float((one & two).sum() / (one | two).sum())
