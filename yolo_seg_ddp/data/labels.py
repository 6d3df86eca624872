"""YOLO segmentation label files: one object a line, `class x1 y1 x2 y2 ...`, coordinates in 0..1 of
the image.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from yolo_seg_ddp.data.dataset_yaml import DatasetSpec, label_file_for
from yolo_seg_ddp.data.polygons import areas, join_outlines
from yolo_seg_ddp.utils.errors import DataErrors, UserError, printable
from yolo_seg_ddp.utils.files import read_text

MAX_LABEL_FILE_BYTES = 20_000_000
ANY_CLASS = -1  # of a region to ignore
IGNORE_FOLDER = "ignore"  # beside `images` and `labels`
CODE = -2  # less a region's class is its code, which is negative, among the classes of objects
ROUGH = 1_000_000  # plus the class is the code of an object with a rough outline
BOXED = 2 * ROUGH  # plus the class is the code of an object with a box instead of an outline
BOX_FIELDS = 5  # of a box row: the class, the centre, the width and the height
UNSEARCHED = 1_000_000  # less is the code of a region that is a whole photograph
WHOLE = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])  # the outline of such a region
MIN_WHOLE = 0.999  # of the photograph's area
# fraction of the image; rounding errors up to this are clipped, more is an error
OUTSIDE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Photo:
    """A photograph's file and labels; polygons are float (V, 2), normalised x, y.

    ignored: outlines of regions to ignore, in which nobody says what is there; ignored_ids int64
    are the classes that each is ignored for, ANY_CLASS for all. rough: the numbers, int64, of
    objects with a rough outline, from which only the class is learned. unsearched: the numbers,
    int64, of regions of one class that are the whole photograph: nobody looked for the class in it.
    boxed: the numbers of objects that have a box and no outline; their polygon is the box.
    """

    file: Path
    class_ids: np.ndarray
    polygons: list[np.ndarray]
    ignored_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    ignored: list[np.ndarray] = field(default_factory=list)
    rough: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    unsearched: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    boxed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def with_regions(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return classes (see CODE, ROUGH, BOXED and UNSEARCHED) and outlines of the objects, then
        those of the regions to ignore.
        """
        class_ids = np.concatenate([self.class_ids, CODE - self.ignored_ids])
        class_ids[self.rough] += ROUGH
        class_ids[self.boxed] += BOXED
        class_ids[len(self.class_ids) + self.unsearched] -= UNSEARCHED
        return class_ids, [*self.polygons, *self.ignored]


def split_regions(class_ids: np.ndarray, outlines: list[np.ndarray]) -> tuple[Any, ...]:
    """Undo `Photo.with_regions`: return the fields of a Photo after its file."""
    is_region = class_ids < 0
    objects, regions = (
        list(itertools.compress(outlines, chosen.tolist())) for chosen in (~is_region, is_region)
    )
    codes, ignored_ids = class_ids[~is_region], CODE - class_ids[is_region]
    is_whole = ignored_ids >= UNSEARCHED
    return (
        codes % ROUGH,
        objects,
        ignored_ids - UNSEARCHED * is_whole,
        regions,
        np.flatnonzero(codes // ROUGH == 1),
        np.flatnonzero(is_whole),
        np.flatnonzero(codes >= BOXED),
    )


class LabelError(UserError):
    """A label cannot be read. The message is one line and names `file:line`."""


def format_yolo_label(instances: Iterable[tuple[int, np.ndarray]]) -> str:
    """Return (class id, normalised polygon (V, 2)) pairs as YOLO-seg text, one object a line.

    A box is its centre and its size, (2, 2).
    """
    lines = []
    for class_id, polygon in instances:
        values = np.clip(np.asarray(polygon, dtype=np.float64), 0.0, 1.0).ravel()
        lines.append(f"{class_id} " + " ".join(f"{value:.6f}" for value in values) + "\n")
    return "".join(lines)


def whole_photograph(class_ids: Iterable[int]) -> str:
    """Return the lines of regions to ignore for classes that nobody looked for in a photograph."""
    return format_yolo_label((class_id, WHOLE) for class_id in class_ids)


def read_yolo_label(
    path: Path | None, num_classes: int, lowest: int = 0
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Read a YOLO-seg label file: class ids int64 (N,) and N polygons float32 (V, 2), x and y in
    0..1.

    A box row `class cx cy w h` becomes a polygon of four corners. An empty file, or none, means an
    image without objects. Classes begin at `lowest`. Raises LabelError with file and line.
    """
    class_ids, polygons, _ = read_objects(path, num_classes, lowest)
    return class_ids, polygons


def read_objects(
    path: Path | None, num_classes: int, lowest: int = 0
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Do what `read_yolo_label` does; return the numbers of the box rows, int64, too."""
    class_ids: list[int] = []
    polygons: list[np.ndarray] = []
    boxed: list[int] = []
    for line_number, fields in label_rows(path):
        try:
            class_id, polygon = parse_yolo_row(fields, num_classes, lowest)
        except ValueError as error:
            raise LabelError(f"{path}:{line_number}: {error}") from error
        if len(fields) == BOX_FIELDS:
            boxed.append(len(class_ids))
        class_ids.append(class_id)
        polygons.append(polygon)
    return np.array(class_ids, dtype=np.int64), polygons, np.array(boxed, np.int64)


def label_rows(path: Path | None) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the fields of each line of a label file, if there is one, that is
    not blank.

    Raises LabelError.
    """
    if path is None:
        return
    try:
        text = read_text(path, MAX_LABEL_FILE_BYTES)
    except OSError as error:
        raise LabelError(f"{path}: {error.strerror}; run python parse_labels.py again") from error
    except UserError as error:
        raise LabelError(str(error)) from error
    for line_number, line in enumerate(text.splitlines(), start=1):
        if fields := line.split():
            yield line_number, fields


def parse_yolo_row(fields: list[str], num_classes: int, lowest: int = 0) -> tuple[int, np.ndarray]:
    """Return the class id and the polygon, float32 (V, 2) in 0..1, of a label's fields.

    Raises ValueError.
    """
    try:
        values = np.array(fields, dtype=np.float64)
    except ValueError:
        raise ValueError(f"not a number in {' '.join(fields)[:60]!r}") from None
    class_id, coordinates = values[0], values[1:]
    if not (lowest <= class_id < num_classes and class_id == int(class_id)):
        raise ValueError(f"class {fields[0]} is not one of {lowest}..{num_classes - 1}")
    if len(coordinates) % 2 or len(coordinates) < 4:
        raise ValueError(
            f"{len(coordinates)} coordinates; expected 4 for a box or an even count from 6 for a "
            "polygon"
        )
    # also true for NaN
    outside = ~((coordinates >= -OUTSIDE_TOLERANCE) & (coordinates <= 1 + OUTSIDE_TOLERANCE))
    if outside.any():
        raise ValueError(
            f"coordinate {fields[1 + int(outside.argmax())]} is outside 0..1; normalise by the "
            "picture's size"
        )
    if len(coordinates) == 4:
        center, half = coordinates[:2], coordinates[2:] / 2
        if not (half > 0).all():
            raise ValueError(
                f"box of width {fields[3]} and height {fields[4]}; both must be above 0"
            )
        polygon = center + half * np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    else:
        polygon = coordinates.reshape(-1, 2)
    return int(class_id), np.clip(polygon, 0.0, 1.0).astype(np.float32)


def read_photos(
    spec: DatasetSpec, split: str, announce: Callable[[str], None] | None = None
) -> list[Photo]:
    """Read a split's labels and regions to ignore. A missing label file means a photograph without
    objects.

    Announces what was skipped. Raises DataErrors, which lists every unusable label file as
    file:line.
    """
    photos: list[Photo] = []
    problems: list[str] = []
    files = spec.image_files(split, announce)
    holds_folder, has_regions = functools.cache(spec.holds), functools.cache(may_have_regions)
    for file in files:
        try:
            label_file = find_label_file(spec, file, holds_folder)
            class_ids, polygons, boxed = read_objects(label_file, len(spec.names))
            photo = Photo(file, class_ids, polygons, boxed=boxed)
            if has_regions(file.parent):
                photo = with_regions_of(photo, *read_regions(spec, file, holds_folder))
            photos.append(photo)
        except LabelError as error:
            problems.append(str(error))
    if problems:
        raise DataErrors(
            f"{len(problems)} of {len(files)} label files of `{split}` cannot be used: "
            f"{problems[0]}",
            problems,
        )
    if announce and not any(len(photo.class_ids) for photo in photos):
        expected = printable(str(label_file_for(files[0])), 400)
        announce(
            f"WARNING: {split}: no photograph has an object; labels of the first are looked for "
            f"in {expected}"
        )
    return photos


def may_have_regions(folder: Path) -> bool:
    """Return whether photographs of a folder may have regions to ignore."""
    return (
        "images" in folder.parts
        and label_file_for(folder / "any.jpg", IGNORE_FOLDER).parent.exists()
    )


def read_regions(
    spec: DatasetSpec, file: Path, holds_folder: Callable[[Path], bool]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a photograph's regions to ignore as `read_yolo_label` returns objects.

    Raises LabelError.
    """
    ignore_file = find_label_file(spec, file, holds_folder, IGNORE_FOLDER)
    return read_yolo_label(ignore_file, len(spec.names), ANY_CLASS)


def with_regions_of(photo: Photo, ignored_ids: np.ndarray, ignored: list[np.ndarray]) -> Photo:
    """Add regions to ignore to a photograph.

    A row that is also an object's says that the object's outline is rough. A region of one class
    that is the whole photograph says that nobody looked for the class.
    """
    objects, regions = (
        [
            (class_id, outline.tobytes())
            for class_id, outline in zip(ids.tolist(), outlines, strict=True)
        ]
        for ids, outlines in ((photo.class_ids, photo.polygons), (ignored_ids, ignored))
    )
    both = {*objects} & {*regions}
    is_region = np.array([region not in both for region in regions], bool)
    rough = np.array([number for number, one in enumerate(objects) if one in both], np.int64)
    ignored = list(itertools.compress(ignored, is_region.tolist()))
    ignored_ids = ignored_ids[is_region]
    sizes = areas(*join_outlines(ignored)) if ignored else np.zeros(0)
    unsearched = np.flatnonzero((ignored_ids != ANY_CLASS) & (sizes >= MIN_WHOLE))
    return replace(
        photo,
        ignored_ids=ignored_ids,
        ignored=ignored,
        rough=rough,
        unsearched=unsearched,
        boxed=np.setdiff1d(photo.boxed, rough),
    )


def find_label_file(
    spec: DatasetSpec, file: Path, holds_folder: Callable[[Path], bool], folder: str = "labels"
) -> Path | None:
    """Return a photograph's label file, None if there is none. Raises LabelError for one that
    leaves the data set.

    `holds_folder` is `spec.holds`, which may remember its answers.
    """
    label_file = label_file_for(file, folder)
    if not holds_folder(label_file.parent) or (
        label_file.is_symlink() and not spec.holds(label_file)
    ):
        raise LabelError(f"{label_file}: {spec.problem_with(label_file)}")
    # a broken link is an error
    return label_file if label_file.exists() or label_file.is_symlink() else None


def count_classes(photos: list[Photo], num_classes: int) -> np.ndarray:
    """Return the number of objects of each class: int64 (num_classes,)."""
    class_ids = [np.zeros(0, np.int64), *(photo.class_ids for photo in photos)]
    return np.bincount(np.concatenate(class_ids), minlength=num_classes)


def count_searched(photos: Iterable[Photo], num_classes: int) -> np.ndarray:
    """Return in how many photographs somebody looked for each class: int64 (num_classes,)."""
    searched = np.zeros(num_classes, np.int64)
    for photo in photos:
        searched += ~np.isin(np.arange(num_classes), photo.ignored_ids[photo.unsearched])
    return searched
