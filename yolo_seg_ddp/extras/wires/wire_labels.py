"""What the labels of a training say of its wires: at which objects they end, how wide they are, and
whether they are parallel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from yolo_seg_ddp.data.label_shapes import LabelledPhoto, long_axis
from yolo_seg_ddp.extras.wires.along import outside, values_at, values_on
from yolo_seg_ddp.extras.wires.confidence import parallel_shares
from yolo_seg_ddp.extras.wires.from_mask import find_lines
from yolo_seg_ddp.extras.wires.in_photo import profiles
from yolo_seg_ddp.extras.wires.numbers import NUMBERS
from yolo_seg_ddp.extras.wires.routes import find_routes
from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.regions import canvas_of, fill_outline
from yolo_seg_ddp.yolo.model import numbers_by_class


@dataclass(frozen=True)
class WireLabels:
    """Which classes are thin, and how they are labelled in the training's photographs.

    end_at: the classes at whose objects labels end. width: (gain, margin in pixels), labels are
    gain times as wide as the wires that a photograph shows, plus the margin; empty if that is not
    known: lines then stay where and as wide as masks are. parallel: for classes whose wires run
    side by side, the `parallel_shares` that most labels reach. curved: classes of curved labels,
    which keep their masks.
    """

    classes: tuple[int, ...] = ()
    end_at: tuple[int, ...] = ()
    width: tuple[float, ...] = ()
    parallel: Mapping[int, float] = field(default_factory=dict)
    curved: tuple[int, ...] = ()

    @property
    def lines(self) -> tuple[int, ...]:
        """The classes whose masks are replaced by lines: those that are not curved."""
        return tuple(class_id for class_id in self.classes if class_id not in self.curved)

    @classmethod
    def of_model(cls, classes: tuple[int, ...], metadata: Mapping[str, Any]) -> WireLabels:
        """Return what a model file says of some classes: `metadata` are those of
        `measure_wire_labels`, or empty.
        """
        names = ("wires_end_at", "wire_width", "wires_parallel", "wires_bent")
        end_at, width, parallel, curved = (tuple(metadata.get(name, ())) for name in names)
        return cls(
            classes, end_at, width, dict(zip(parallel[::2], parallel[1::2], strict=True)), curved
        )


def measure_wire_labels(
    photos: Sequence[LabelledPhoto], straight: tuple[int, ...], curved: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return the values of `WireLabels` for thin classes, by their names in a model file.

    Curved labels have no direction, so they are neither parallel nor do they continue each other.
    """
    return {
        "wires_end_at": [*classes_at_ends(photos, straight)],
        "wire_width": [*label_width(photos, straight + curved)],
        "wires_parallel": [
            number for class_id in straight for number in parallel_labels(photos, class_id)
        ],
        "wires_bent": [*curved],
    }


def parallel_labels(
    photos: Sequence[LabelledPhoto], class_id: int
) -> tuple[int, float] | tuple[()]:
    """Return a thin class and the `parallel_shares` that most of its labels reach, `max_parallel`
    at most.

    Return nothing if wires run in all directions, or if few labels have another one in their
    photograph.
    """
    shares: list[float] = []
    for photo in photos:
        lines = [_axis(outline) for other, outline in photo.outlined() if other == class_id]
        if len(lines) > 1:
            shares += parallel_shares(lines, np.ones(len(lines))).tolist()
    usual = (
        round(float(np.quantile(shares, 1 - NUMBERS.usual)), 3)
        if len(shares) >= NUMBERS.min_labels
        else 0.0
    )
    return (class_id, min(usual, NUMBERS.max_parallel)) if usual >= NUMBERS.min_parallel else ()


def classes_at_ends(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> tuple[int, ...]:
    """Return the classes at whose objects the labels of thin classes end although the wires go on.

    Over the objects of such a class, at least `min_cuts` labelled wires continue each other, and
    fewer pass through.
    """
    ended: Counter[int] = Counter()
    passed: Counter[int] = Counter()
    for photo in photos:
        is_thin = np.isin(photo.class_ids, thin)
        others = np.unique(photo.class_ids[~is_thin]).tolist()
        lines = [_axis(photo.outlines[number]) for number in np.flatnonzero(is_thin)]
        gaps = [
            gap for route in find_routes(lines, photo.class_ids[is_thin]) for gap in route.line.gaps
        ]
        for class_id in others if lines else []:
            same = np.flatnonzero(photo.class_ids == class_id)
            canvas = canvas_of(
                (fill_outline(photo.outlines[number], photo.size) for number in same), photo.size
            )
            passed[class_id] += sum(
                len(outside(line, values_on(line, canvas))) > 1 for line in lines
            )
            ended[class_id] += sum(
                values_at(np.linspace(gap[0], gap[1], 64), canvas).mean() > 0.5 for gap in gaps
            )
    return tuple(
        class_id
        for class_id in sorted(ended)
        if ended[class_id] >= max(NUMBERS.min_cuts, passed[class_id] + 1)
    )


def _axis(outline: np.ndarray) -> Line:
    """Return the line through the middle of the smallest rectangle around an outline (V, 2)."""
    ends, width = long_axis(outline)
    return Line(ends, np.full(2, width), np.zeros((0, 2, 2)))


def label_width(photos: Sequence[LabelledPhoto], thin: tuple[int, ...]) -> tuple[float, ...]:
    """Return (gain, margin in pixels): labels of thin classes are gain times as wide as what is
    visible, plus the margin.

    Outlines that are drawn around wires have a gain near 1. Wires that are labelled as lines all
    have one width, so the gain is 0. The gain is the median over all pairs of wires (Theil and
    Sen). Return nothing if fewer than `min_labels` can be seen.
    """
    # Its import takes 0.5 s.
    from scipy.stats import theilslopes

    wires = [
        (number, position)
        for number, photo in enumerate(photos)
        for position in np.flatnonzero(np.isin(photo.class_ids, thin)).tolist()
    ]
    most = NUMBERS.most_wires
    chosen = wires[:: max(1, len(wires) // most)][:most]
    visible, labelled = [], []
    for number in sorted({number for number, _ in chosen}):
        photo = photos[number]
        picture = photos[number].read()
        for outline in (photo.outlines[position] for other, position in chosen if other == number):
            for line in find_lines(fill_outline(outline, photo.size))[:1]:
                _, _, widths = profiles(line, picture)
                if len(widths):
                    visible.append(float(np.median(widths)))
                    labelled.append(line.width_px)
    if len(visible) < NUMBERS.min_labels or np.ptp(visible) == 0:
        return ()
    gain = max(float(theilslopes(labelled, visible).slope), 0.0)
    return round(gain, 3), round(float(np.median(np.array(labelled) - gain * np.array(visible))), 2)


def line_rules(metadata: dict[str, Any], names: tuple[str, ...]) -> str:
    """Return a line that says which rules predictions of thin classes follow, from a model file's
    metadata.
    """
    shares = numbers_by_class(metadata["wires_parallel"], 1)
    alike = ", ".join(
        f"{names[class_id]} (share of length {share:g})" for class_id, (share,) in shares.items()
    )
    ends = ", ".join(names[class_id] for class_id in metadata["wires_end_at"])
    bent = ", ".join(names[class_id] for class_id in metadata["wires_bent"])
    rules = (
        [f"labels run alike in {alike}, so lines that run otherwise are less sure"] if alike else []
    )
    rules.append(
        f"labels end at {ends}, and so do lines"
        if ends
        else "lines that continue each other are one"
    )
    rules += [f"those of {bent} do not, because its labels are curved"] if bent else []
    return "Found lines: " + "; ".join(rules)
