"""What the labels of a split say about its objects: which are thin, curved, small or turned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.data.drawn_wires import MAX_SAG
from yolo_seg_ddp.data.images import ImageError, read_image, upright_size
from yolo_seg_ddp.data.labels import Photo
from yolo_seg_ddp.data.polygons import elongated_classes, elongation
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.option_names import nearest
from yolo_seg_ddp.utils.text import coloured

# The first bytes hold the size and the orientation of nearly all photographs.
HEADER_BYTES = 2**20
# The lengths of labels are measured in so many photographs.
MEASURED_PHOTOS = 1000
# Width, and longer side, of labels in the network's input that are hard to learn.
THIN_PX, SMALL_PX = 4.0, 12.0
# Labels that are so many times as long as wide need windows, not a larger input.
LINE = 10.0
# The largest input that is advised.
MAX_INPUT_PX = 1280
# Share of the box around an outline of four corners that is an upright rectangle itself.
RECTANGULAR = 0.995
# The share of a class's outlines from which on it is said to consist of rectangles.
MOST_RECTANGLES = 0.9
# Scale of a photograph in the input below which a window shows more of it.
LARGER = 0.8
# A class needs so many labels, for their lengths to say anything.
MIN_LABELS = 10
# Limits of the spread of the logarithms of lengths. Where labels differ more, short objects are not
# worse.
LEAST_SPREAD, MOST_SPREAD = 0.5, 1.0
# What labels deviate from a parabola, in their length, for STRAIGHT_SHARE of a class: real wires
# 0.003, drawn ones 0.005 to 0.009; roots of plants 0.017, cracks in roads 0.05, vessels of the
# retina 0.25. How far they sag is limited to what drawn wires sag (MAX_SAG): real wires 0.004,
# drawn ones 0.03 to 0.08; roots 0.13, cracks 0.23, vessels 0.9.
MAX_BEND, STRAIGHT_SHARE = 0.012, 0.75
# So many points stand for an outline in `bend_of`.
BEND_POINTS = 256
# An object has a direction if its smallest rectangle is this many times as long as wide.
LONG = 3.0
# A class needs so many such objects, for their directions to say anything.
MIN_LONG_OBJECTS = 20
# The labels of so many photographs are measured, spread over the split.
SAMPLED_PHOTOS = 64
# From a photograph's position to its width and height.
SizeOf = Callable[[int], tuple[int, int]]
WINDOWS_ADVICE = "train on windows of the photographs: --windows 8 (docs/windows.md)"


@dataclass(frozen=True)
class LabelledPhoto:
    """A photograph's labels: class ids int64 (N,), outlines (V, 2) xy in its pixels, its width and
    height; `read` it, RGB. boxed: the numbers of objects that have a box and no outline.
    """

    class_ids: np.ndarray
    outlines: list[np.ndarray]
    size: tuple[int, int]
    read: Callable[[], np.ndarray]
    boxed: Sequence[int] = ()

    @classmethod
    def of(cls, photo: Photo, size: tuple[int, int]) -> LabelledPhoto:
        """Return the labels of a photograph of this width and height."""
        outlines = [outline * size for outline in photo.polygons]
        read = partial(read_image, photo.file)
        return cls(photo.class_ids, outlines, size, read, photo.boxed.tolist())

    def outlined(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the class and outline of each object that has one."""
        for number, labelled in enumerate(zip(self.class_ids.tolist(), self.outlines, strict=True)):
            if number not in self.boxed:
                yield labelled


@dataclass(frozen=True)
class LabelStatistics:
    """What the training labels say: how photographs are augmented, and what a model's file says of
    the labels.

    thin: classes of long and thin objects. bends: of each of these, how curved its labels are; 1 is
    the most that wires are. agreement: of the directions of long objects, from 0 to 1; None if
    there are too few. are_all_thin: no class is another. sample: the labels of which all this was
    measured.
    """

    thin: tuple[int, ...]
    bends: dict[int, float]
    agreement: float | None
    are_all_thin: bool
    sample: Sequence[LabelledPhoto] = ()

    @property
    def straight(self) -> tuple[int, ...]:
        """The thin classes whose labels are no more curved than wires."""
        return tuple(class_id for class_id in self.thin if self.bends[class_id] <= 1)

    @property
    def curved(self) -> tuple[int, ...]:
        """The other thin classes."""
        return tuple(class_id for class_id in self.thin if self.bends[class_id] > 1)


def measure_labels(photos: list[Photo]) -> LabelStatistics:
    """Measure the labels of some photographs, spread over the split, alike on all ranks."""
    sample = sample_labels(photos)
    thin = thin_classes(sample)
    bends = class_bends(sample, thin) if thin else {}
    curved = [class_id for class_id in thin if bends[class_id] > 1]
    are_all_thin = all(np.isin(photo.class_ids, thin).all() for photo in photos)
    return LabelStatistics(thin, bends, common_direction(sample, curved), are_all_thin, sample)


def sample_labels(photos: list[Photo], size_of: SizeOf | None = None) -> list[LabelledPhoto]:
    """Return the labels of at most SAMPLED_PHOTOS photographs with objects, evenly spread over the
    split.

    `size_of`: as `sizes_on_disk` returns it, which is used if it is unset.
    """
    size_of = size_of or sizes_on_disk(photos)
    positions = [index for index, photo in enumerate(photos) if len(photo.polygons)]
    chosen = positions[:: max(1, len(positions) // SAMPLED_PHOTOS)][:SAMPLED_PHOTOS]
    return [LabelledPhoto.of(photos[index], size_of(index)) for index in chosen]


def thin_classes(labels: Iterable[LabelledPhoto]) -> tuple[int, ...]:
    """Return the classes whose outlines have a median elongation of MIN_ELONGATION or more."""
    return elongated_classes(
        (class_id, elongation(outline))
        for photo in labels
        for class_id, outline in photo.outlined()
    )


def sizes_on_disk(photos: list[Photo]) -> SizeOf:
    """Return a function from an index to the width and height of
    that photograph's file, upright.
    """

    def size_of(index: int) -> tuple[int, int]:
        with photos[index].file.open("rb") as stream:
            head = stream.read(HEADER_BYTES)
            try:
                return upright_size(head)
            # A TIFF may have its sizes at its end.
            except ImageError:
                return upright_size(head + stream.read())

    return cache(size_of)


def choose_thin_classes(
    wanted: tuple[str, ...], photos: list[Photo], size_of: SizeOf, names: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the classes to judge by their centrelines, alike on all ranks: those of the given
    names, `auto` or `none`.

    `auto` takes the `thin_classes` of some photographs, spread over the split. Raises UsageError
    for a name that is no class.
    """
    return (
        thin_classes(sample_labels(photos, size_of))
        if wanted == ("auto",)
        else named_classes(wanted, names)
    )


def named_classes(wanted: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the classes that `--thin-classes` names; none for `none`.

    Raises UsageError for a name that is no class.
    """
    if wanted == ("none",):
        return ()
    for name in wanted:
        if name not in names:
            raise UsageError(
                f"--thin-classes {name}: not one of {', '.join(names)}{nearest(name, names)}"
            )
    return tuple(sorted({names.index(name) for name in wanted}))


def small_labels_hint(
    labels: Sequence[LabelledPhoto], names: tuple[str, ...], size_px: int
) -> tuple[str, list[str]]:
    """Return a line about the class whose labels are the smallest at a network input of size_px,
    and what to train with.

    Both are empty if the labels are large enough. It is about photographs that are larger than the
    input, of which a larger input, or windows, show more.
    """
    large = [photo for photo in labels if size_px / max(photo.size) < LARGER]
    medians = median_sizes(large, size_px)
    small = [
        (
            width / THIN_PX,
            f"half of the labels of {names[class_id]} are at most {width:.1f} px wide",
        )
        for class_id, (width, _) in medians.items()
        if width < THIN_PX
    ] + [
        (long / SMALL_PX, f"half of the labels of {names[class_id]} are at most {long:.0f} px long")
        for class_id, (_, long) in medians.items()
        if long < SMALL_PX
    ]
    if not small:
        return "", []
    needed_px = math.ceil(size_px / min(small)[0] / 32) * 32
    long_side_px = np.median([max(photo.size) for photo in large])
    has_lines = any(width < THIN_PX and long >= LINE * width for width, long in medians.values())
    fits = needed_px <= min(MAX_INPUT_PX, long_side_px) and not has_lines
    hint, words = (
        coloured("Hint:", "yellow"),
        ["--img-size", str(needed_px)] if fits else ["--windows", "8"],
    )
    advice = f"train with {' '.join(words)}" if fits else WINDOWS_ADVICE
    return f"{hint} {min(small)[1]} at an input of {size_px} px; {advice}", words


def median_sizes(labels: Iterable[LabelledPhoto], size_px: int) -> dict[int, tuple[float, float]]:
    """Return the median width and length of each class's labels in pixels of a network input of
    size_px.

    A compact label is as wide as the smallest rectangle around it, another one, which may bend, as
    the rectangle of its area and perimeter.
    """
    sizes: dict[int, list[tuple[float, float]]] = {}
    for photo in labels:
        scale = min(1.0, size_px / max(photo.size))
        for class_id, in_pixels in zip(photo.class_ids.tolist(), photo.outlines, strict=True):
            outline = (in_pixels * scale).astype(np.float32)
            area, half = cv2.contourArea(outline), cv2.arcLength(outline, True) / 2
            ends, width = long_axis(outline)
            length = float(np.hypot(*(ends[1] - ends[0])))
            if length > LONG * width or area < length * width / 2:
                width = (half - math.sqrt(max(half**2 - 4 * area, 0))) / 2
            sizes.setdefault(class_id, []).append((width, float(np.ptp(outline, axis=0).max())))
    return {
        class_id: tuple(np.median(np.array(values), axis=0).tolist())
        for class_id, values in sizes.items()
    }


def class_sizes(
    photos: list[Photo], names: tuple[str, ...], records: list[dict[str, Any]], size_px: int
) -> tuple[dict[str, str], list[str]]:
    """Return the median length and width of each class's labels as text, by `median_sizes`, and
    the names of the `rectangular_classes`.

    records: the photographs of manifest.json, which has their sizes.
    """
    size_of = {
        record["file"]: (record["output_width"], record["output_height"]) for record in records
    }
    labels = [LabelledPhoto.of(photo, size_of[photo.file.name]) for photo in photos]
    medians = median_sizes(labels, size_px)
    texts = {
        names[class_id]: f"{long:.0f} x {width:.1f}" for class_id, (width, long) in medians.items()
    }
    return texts, [names[class_id] for class_id in rectangular_classes(labels)]


def rectangular_classes(labels: Iterable[LabelledPhoto]) -> tuple[int, ...]:
    """Return the classes of which nearly all outlines are upright rectangles, ascending."""
    rectangles, outlines = Counter[int](), Counter[int]()
    for photo in labels:
        for class_id, outline in photo.outlined():
            outlines[class_id] += 1
            rectangles[class_id] += len(outline) == 4 and cv2.contourArea(
                outline.astype(np.float32)
            ) >= RECTANGULAR * math.prod(np.ptp(outline, axis=0).tolist())
    return tuple(
        class_id
        for class_id, number in sorted(rectangles.items())
        if number >= max(MOST_RECTANGLES * outlines[class_id], MIN_LABELS)
    )


def label_lengths_of(photos: list[Photo], sizes: np.ndarray) -> list[float]:
    """Return how long labels are in at most MEASURED_PHOTOS photographs; sizes int (N, 2): their
    heights and widths.
    """
    sized = list(zip(photos, sizes[:, ::-1], strict=True))
    labels = sized[:: max(1, len(sized) // MEASURED_PHOTOS)][:MEASURED_PHOTOS]
    lengths = [
        (np.ptp(outline, axis=0) * size).max()
        for photo, size in labels
        for outline in photo.polygons
    ]
    class_ids = [class_id for photo, _ in labels for class_id in photo.class_ids]
    return label_lengths(np.array(class_ids, int), np.array(lengths, float))


def label_lengths(class_ids: np.ndarray, lengths_px: np.ndarray) -> list[float]:
    """Return how long labels are: class id, median in pixels and spread of each class with
    MIN_LABELS, one after the other.

    class_ids: int (N,); lengths_px: float (N,), the longer sides of their boxes. The spread is the
    standard deviation of the natural logarithm, LEAST_SPREAD at least. Classes with a spread above
    MOST_SPREAD are left out.
    """
    statistics: list[float] = []
    for class_id in np.unique(class_ids).tolist():
        lengths = np.log(np.maximum(lengths_px[class_ids == class_id], 1))
        spread = (
            max(LEAST_SPREAD, float(lengths.std(ddof=1))) if len(lengths) >= MIN_LABELS else np.inf
        )
        if spread <= MOST_SPREAD:
            statistics += [class_id, round(float(np.exp(np.median(lengths))), 1), round(spread, 3)]
    return statistics


def class_bends(labels: Iterable[LabelledPhoto], thin: tuple[int, ...]) -> dict[int, float]:
    """Return for each thin class how curved its labels are: STRAIGHT_SHARE of them are at most that
    curved, and wires at most 1.
    """
    bends: dict[int, list[float]] = {}
    for photo in labels:
        for class_id, outline in photo.outlined():
            if class_id in thin:
                bends.setdefault(class_id, []).append(bend_of(outline))
    return {
        class_id: float(np.quantile(values, STRAIGHT_SHARE)) for class_id, values in bends.items()
    }


def bend_of(outline: np.ndarray) -> float:
    """Return how curved an outline (V, 2) is, relative to what wires are at most.

    Two values count: the deviation from a parabola (root mean square) and the sag, both as shares
    of the length. Each is divided by its limit, and the larger quotient is returned.
    """
    closed = np.vstack([outline, outline[:1]]).astype(float)
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(closed, axis=0).T))])
    places = np.linspace(0, along[-1], BEND_POINTS, endpoint=False)
    points = np.stack([np.interp(places, along, closed[:, axis]) for axis in (0, 1)], axis=1)
    ends, width = long_axis(outline)
    length = float(np.hypot(*(ends[1] - ends[0])))
    if length <= 0:
        return 0.0
    direction = (ends[1] - ends[0]) / length
    x, y = (
        (points - ends.mean(axis=0))
        @ np.array([direction, [-direction[1], direction[0]]]).T
        / length
    ).T
    beside = float(np.mean((y - np.polyval(np.polyfit(x, y, 2), x)) ** 2))
    half_width = abs(float(cv2.contourArea(outline.astype(np.float32)))) / along[-1] / length
    sag = width / length - 2 * half_width
    return max(float(np.sqrt(max(beside - half_width**2, 0.0))) / MAX_BEND, sag / MAX_SAG)


def long_axis(outline: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the ends of the line through the middle of the smallest rectangle around an outline
    (V, 2), and its width.

    float64 (2, 2) xy.
    """
    centre, sides, angle_deg = cv2.minAreaRect(outline.astype(np.float32))
    angle = np.radians(angle_deg if sides[0] >= sides[1] else angle_deg + 90)
    half = max(sides) / 2 * np.array([np.cos(angle), np.sin(angle)])
    return np.stack([centre - half, centre + half]), min(sides)


def common_direction(labels: Iterable[LabelledPhoto], curved: Sequence[int]) -> float | None:
    """Return how well the long objects of a class agree in their direction: from 0, no common
    direction, to 1.

    That is the length of the mean of exp(2i direction) over the objects, for the class where it is
    largest: photographs in which only poles agree have an up, too. Objects of `curved` classes have
    no direction, and a box says none. None if no class has MIN_LONG_OBJECTS long objects.
    """
    of_class: dict[int, list[complex]] = {}
    for photo in labels:
        for class_id, outline in photo.outlined():
            _, (width, height), angle = cv2.minAreaRect(outline.astype(np.float32))
            is_long = max(width, height) >= LONG * min(width, height)
            if is_long and class_id not in curved:
                direction = np.radians(angle if width >= height else angle + 90)
                of_class.setdefault(class_id, []).append(np.exp(2j * direction))
    agreements = [
        float(abs(np.mean(values)))
        for values in of_class.values()
        if len(values) >= MIN_LONG_OBJECTS
    ]
    return max(agreements, default=None)
