"""What the labels of a split say about its objects: which are thin, curved, small or turned."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import cv2
import numpy as np

from utils.common.errors import UsageError
from utils.common.spellings import nearest
from utils.common.text import coloured
from utils.data.images import upright_size
from utils.data.label_statistics import class_bends, common_direction, label_lengths, spread_out
from utils.data.labels import Photo
from utils.data.polygons import elongated_classes, elongation

MEASURED_PHOTOS = 1000  # whose labels' lengths are measured
THIN_PX, SMALL_PX = 4.0, 12.0  # width, and longer side, of labels in the network's input that are hard to learn
LARGER = 0.8  # scale of a photograph in the input below which a window shows more of it
WINDOWS_ADVICE = "train on windows of the photographs: --windows 8 (docs/windows.md)"


@dataclass(frozen=True)
class LabelShapes:
    """What decides how a data set is augmented.

    thin: classes of long and thin objects. bends: of each of these, how curved its labels are; 1 is the most that wires are.
    agreement: of the directions of long objects, from 0 to 1; None if there are too few. are_all_thin: no class is another.
    """

    thin: tuple[int, ...]
    bends: dict[int, float]
    agreement: float | None
    are_all_thin: bool

    @property
    def straight(self) -> tuple[int, ...]:
        """The thin classes whose labels are no more curved than wires."""
        return tuple(class_id for class_id in self.thin if self.bends[class_id] <= 1)

    @property
    def curved(self) -> tuple[int, ...]:
        """The other thin classes."""
        return tuple(class_id for class_id in self.thin if self.bends[class_id] > 1)


def shapes_of(photos: list[Photo]) -> LabelShapes:
    """Measure the labels of some photographs, spread over the split, alike on all ranks."""
    size_of = sizes_on_disk(photos)
    thin = choose_thin_classes(("auto",), photos, size_of, ())
    in_pixels = (
        (photos[n].class_ids, [outline * size_of(n) for outline in photos[n].polygons]) for n in with_objects(photos)
    )
    bends = class_bends(in_pixels, thin) if thin else {}
    curved = [class_id for class_id in thin if bends[class_id] > 1]
    are_all_thin = all(np.isin(photo.class_ids, thin).all() for photo in photos)
    return LabelShapes(thin, bends, common_direction(photos, size_of, curved), are_all_thin)


def sizes_on_disk(photos: list[Photo]) -> Callable[[int], tuple[int, int]]:
    """Return a function from an index to the width and height of that photograph's file, upright."""
    return cache(lambda index: upright_size(photos[index].file.read_bytes()))


def choose_thin_classes(
    asked: tuple[str, ...], photos: list[Photo], size_of: Callable[[int], tuple[int, int]], names: tuple[str, ...]
) -> tuple[int, ...]:
    """Return the classes to judge by their centrelines, alike on all ranks: those of the given names, `auto` or `none`.

    `auto` takes the classes whose objects have a median elongation of MIN_ELONGATION or more in some
    photographs, spread over the split. Raises UsageError for a name that is no class.
    """
    if asked == ("auto",):
        chosen = with_objects(photos)
        values = [elongation(outline * size_of(index)) for index in chosen for outline in photos[index].polygons]
        return elongated_classes((class_id for index in chosen for class_id in photos[index].class_ids), values)
    return named_classes(asked, names)


def named_classes(asked: tuple[str, ...], names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the classes that `--thin-classes` names; none for `none`. Raises UsageError for a name that is no class."""
    if asked == ("none",):
        return ()
    for name in asked:
        if name not in names:
            raise UsageError(f"--thin-classes {name}: not one of {', '.join(names)}{nearest(name, names)}")
    return tuple(sorted({names.index(name) for name in asked}))


def small_labels_hint(photos: list[Photo], names: tuple[str, ...], size_px: int) -> str:
    """Return a line about the class whose labels are the smallest at a network input of size_px; empty if they are large enough.

    It is about photographs that are larger than the input, of which windows show more. Some photographs are looked at, spread over the split.
    """
    size_of = sizes_on_disk(photos)
    large = [index for index in with_objects(photos) if size_px / max(size_of(index)) < LARGER]
    medians = median_sizes([photos[index] for index in large], [size_of(index) for index in large], size_px)
    small = [
        (width / THIN_PX, f"half of the labels of {names[class_id]} are at most {width:.1f} px wide")
        for class_id, (width, _) in medians.items()
        if width < THIN_PX
    ] + [
        (long / SMALL_PX, f"half of the labels of {names[class_id]} are at most {long:.0f} px long")
        for class_id, (_, long) in medians.items()
        if long < SMALL_PX
    ]
    hint = coloured("Hint:", "yellow")
    return f"{hint} {min(small)[1]} at an input of {size_px} px; {WINDOWS_ADVICE}" if small else ""


def median_sizes(photos: list[Photo], sizes: list[tuple[int, int]], size_px: int) -> dict[int, tuple[float, float]]:
    """Return the median width and length of each class's labels in pixels of a network input of size_px.

    sizes: widths and heights of the photographs. A label's width is twice its area over its perimeter.
    """
    found: dict[int, list[tuple[float, float]]] = {}
    for photo, size in zip(photos, sizes, strict=True):
        scale = min(1.0, size_px / max(size))
        for class_id, polygon in zip(photo.class_ids.tolist(), photo.polygons, strict=True):
            outline = (polygon * size * scale).astype(np.float32)
            width = 2 * cv2.contourArea(outline) / max(cv2.arcLength(outline, True), 1e-6)
            found.setdefault(class_id, []).append((width, float(np.ptp(outline, axis=0).max())))
    return {class_id: tuple(np.median(np.array(values), axis=0).tolist()) for class_id, values in found.items()}


def class_sizes(
    photos: list[Photo], names: tuple[str, ...], records: list[dict[str, Any]], size_px: int
) -> dict[str, str]:
    """Return the median length and width of each class's labels as text, by `median_sizes`.

    records: the photographs of manifest.json, which has their sizes.
    """
    size_of = {record["file"]: (record["output_width"], record["output_height"]) for record in records}
    medians = median_sizes(photos, [size_of[photo.file.name] for photo in photos], size_px)
    return {names[class_id]: f"{long:.0f} x {width:.1f}" for class_id, (width, long) in medians.items()}


def with_objects(photos: list[Photo]) -> list[int]:
    """Return the positions of some photographs with objects, spread over the split."""
    return spread_out([index for index, photo in enumerate(photos) if len(photo.polygons)])


def label_lengths_of(photos: list[Photo], sizes: np.ndarray) -> list[float]:
    """Return how long labels are in at most MEASURED_PHOTOS photographs; sizes int (N, 2): their heights and widths."""
    sized = list(zip(photos, sizes[:, ::-1], strict=True))
    labels = sized[:: max(1, len(sized) // MEASURED_PHOTOS)][:MEASURED_PHOTOS]
    lengths = [(np.ptp(outline, axis=0) * size).max() for photo, size in labels for outline in photo.polygons]
    class_ids = [class_id for photo, _ in labels for class_id in photo.class_ids]
    return label_lengths(np.array(class_ids, int), np.array(lengths, float))
