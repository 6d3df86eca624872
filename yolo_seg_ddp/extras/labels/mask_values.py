"""Turns the values of a mask's pixels into objects: numbered ones, or the connected parts of each
class.
"""

import io
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from PIL import Image
from scipy import ndimage

from yolo_seg_ddp.data.images import EXIF_ERRORS, is_deep
from yolo_seg_ddp.data.labels import LabelError
from yolo_seg_ddp.prepare.parsing.label_csv import MAX_OBJECTS
from yolo_seg_ddp.prepare.parsing.outlines import ShapeObject
from yolo_seg_ddp.prepare.parsing.rows import Parsed, digest_of
from yolo_seg_ddp.prepare.parsing.yolo_text import ONLY_CLASS, is_background, read_names
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.files import read_text

COLOUR_LIST = "labelmap.txt"
VALUE_LIST = "obj_class_to_machine_color.json"  # Supervisely's
MASK_LISTS = (COLOUR_LIST, VALUE_LIST, "class_names.txt", "classes.txt", "labels.txt")
COLOUR = 1 << 24  # added to colours of 24 bits, so that none equals an index of a palette
_COLOUR_LINE = re.compile(r"^(.+?):(\d{1,3}),(\d{1,3}),(\d{1,3})(:.*)?$")
# of indexed masks: pixels that belong to no object; alone: white, in a mask of black and white
VOID = 255
MAX_MASK_BYTES, MAX_MASK_PIXELS = 200_000_000, 100_000_000
MASK_FORMATS = ("PNG", "GIF", "TIFF", "BMP")
MAX_CLASS_VALUES = 100  # a mask with more values, and no list of classes, holds numbered objects
# first bytes of the text that stands for a large file
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
SOFT_EDGES = 0.1  # largest share of grey pixels in a mask of black and white


@dataclass(frozen=True)
class Meaning:
    """The meaning of a mask's values.

    label: the class in the name of the file or folder, or empty. names: the classes by value.
    classes: Pascal VOC's mask of the class of each pixel. class_digest: of that file's bytes.
    is_whole: the file is one object. is_numbered: each value is an object. is_binary: as the other
    masks of its folder it is black and white, whatever it holds. strays: values that belong to no
    object.
    """

    label: str = ""
    names: tuple[tuple[int, str], ...] = ()
    classes: Path | None = None
    class_digest: bytes = b""
    is_whole: bool = False
    is_numbered: bool = False
    is_binary: bool = False
    strays: tuple[int, ...] = ()

    @property
    def listed(self) -> list[str]:
        """The classes of the list without the background."""
        return [name for _, name in self.names if not is_background(name)]


@dataclass(frozen=True)
class MaskFacts:
    """The pixels of each value of a mask but 0, nothing of a mask of 16 bits or very many values;
    and whether it is black and white.
    """

    pixels: dict[int, int]
    num_pixels: int
    is_binary: bool


def read_values(file: Path) -> dict[int, str]:
    """Return the class names by their values in masks.

    A value is a colour (COLOUR plus 24 bits) in CVAT's labelmap.txt (`wire:250,50,83::`), else a
    number: in LabelMe's class_names.txt, and in its labels.txt, which begins with `__ignore__` for
    -1. Supervisely writes `{"wire": 1}` or `{"wire": [1, 1, 1]}`. Raises UserError.
    """
    if file.name == VALUE_LIST:
        try:
            items = json.loads(read_text(file)).items()
            values = {
                name: [value] * 3 if isinstance(value, int) else [*map(int, value)]
                for name, value in items
            }
            return {
                r if r == g == b else COLOUR | r << 16 | g << 8 | b: printable(name)
                for name, (r, g, b) in values.items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f'{file}: not Supervisely\'s list of values, such as {{"wire": 1}}; export it again'
            ) from error
    if file.name != COLOUR_LIST:
        names = read_names(file)
        return dict(enumerate(names[1:] if names[0] == "__ignore__" else names))
    found = {}
    for line in read_text(file).splitlines():
        if match := _COLOUR_LINE.match(line.strip()):
            red, green, blue = (int(match[position]) for position in (2, 3, 4))
            found[COLOUR | red << 16 | green << 8 | blue] = printable(match[1].strip())
    if not found:
        raise UserError(f"{file}: names no class; write lines such as wire:250,50,83::")
    return found


def read_mask(data: bytes, by_colour: bool) -> tuple[np.ndarray, bool]:
    """Return a mask's values (H, W), 0 for the background, and whether they have 16 bits.

    Grey levels, also those of an RGB picture, and indices of a palette keep their values. A colour
    becomes COLOUR plus 24 bits; with `by_colour` each value does. Raises ValueError.
    """
    if len(data) > MAX_MASK_BYTES:
        raise ValueError(f"{len(data):,} bytes, more than any mask")
    try:
        picture: Image.Image = Image.open(io.BytesIO(data), formats=MASK_FORMATS)
        width, height = picture.size
        if width * height > MAX_MASK_PIXELS:
            raise ValueError(
                f"{width}x{height} is more than {MAX_MASK_PIXELS // 1_000_000} megapixels"
            )
        # a GIF's palette says what its indices mean
        mode = "RGB" if picture.format == "GIF" else picture.mode
        if mode.startswith("RGB") and is_deep(picture, data):
            raise ValueError("colours of 16 bits, which no mask has: save it as PNG with 8")
        if mode == "1" or (mode == "LA" and not by_colour):
            picture = picture.convert("L")
        values = np.asarray(
            picture.convert("RGB")
            if by_colour or mode not in ("1", "L", "LA", "P", "I", "I;16")
            else picture
        )
    except (*EXIF_ERRORS, zlib.error) as error:
        raise ValueError(
            _damage(data) if not isinstance(error, ValueError) else str(error)
        ) from error
    if values.ndim == 3:
        red, green, blue = np.moveaxis(values.astype(np.int32), 2, 0)
        is_grey = not by_colour and np.array_equal(red, green) and np.array_equal(red, blue)
        values = (
            red
            if is_grey
            else np.where(red | green | blue, COLOUR | red << 16 | green << 8 | blue, 0)
        )
    return values, mode.startswith("I")


def _damage(data: bytes) -> str:
    """Return why a mask cannot be read."""
    if data.startswith(LFS_POINTER):
        return "a Git LFS pointer, not the mask: run git lfs pull"
    is_known = data.startswith((b"\x89PNG", b"GIF8", b"II*\0", b"MM\0*", b"BM"))
    return (
        "damaged: truncated or corrupt"
        if is_known
        else "damaged, or not a PNG in spite of its name: save it as PNG"
    )


def mask_objects(meaning: Meaning, data: bytes) -> Parsed:
    """Return the objects of a mask, and messages about those left out.

    Raises ValueError and LabelError.
    """
    objects, complaints, _ = measured_objects(meaning, data)
    return objects, complaints


def measured_objects(
    meaning: Meaning, data: bytes
) -> tuple[list[ShapeObject], list[str], MaskFacts]:
    """Return what `mask_objects` does, and the facts of the mask."""
    names = dict(meaning.names)
    by_colour = any(value >= COLOUR for value in names)
    values, has_numbers = read_mask(data, by_colour and meaning.classes is None)
    levels, pixels = (numbers.tolist() for numbers in np.unique(values, return_counts=True))
    found = [value for value in levels if value and value not in meaning.strays]
    is_binary = _is_black_and_white(values, found)
    counts = (
        dict(zip(levels, pixels, strict=True)) if not has_numbers and levels[-1] <= VOID else {}
    )
    facts = MaskFacts(
        {value: number for value, number in counts.items() if value}, values.size, is_binary
    )
    label = meaning.label or ONLY_CLASS
    if meaning.classes:
        shapes, complaints = _paired(
            values, [value for value in found if value != VOID], meaning, by_colour
        )
        return shapes + _void(values), complaints, facts
    if meaning.is_whole:
        return _shapes((values > 0).astype(np.int32), [label] if found else []), [], facts
    are_named = len(found) > 1 and all(value in names for value in found if value != VOID)
    if meaning.is_binary or (is_binary and not are_named):
        if not meaning.label and len(meaning.listed) == 1:
            (label,) = meaning.listed
        drawn = values > (VOID // 2 if len(found) > 1 else 0)
        return (
            _shapes(*_connected((drawn & (len(found) > 0)).astype(np.uint8), {1: label})),
            [],
            facts,
        )
    if (
        meaning.is_numbered
        or meaning.label
        or has_numbers
        or (not names and len(found) > MAX_CLASS_VALUES)
    ):
        return _shapes(_numbers(values, found), [label] * len(found)), [], facts
    classes = {
        value: names.get(value) or unlisted(value)
        for value in found
        if value != VOID or value in names
    }
    classes = {value: name for value, name in classes.items() if not is_background(name)}
    void = _void(values) if VOID not in names else []
    return _shapes(*_connected(values, classes)) + void, [], facts


def _void(values: np.ndarray) -> list[ShapeObject]:
    """Return the pixels of which nobody says what they show as a region
    to ignore, for all classes.
    """
    is_void = values == VOID
    return [
        replace(shape, value="", is_region=True)
        for shape in _shapes(is_void.astype(np.int32), ["void"] * bool(is_void.any()))
    ]


def unlisted(value: int) -> str:
    """Return the class of a value that no list names."""
    return f"class_{value}" if value < COLOUR else f"colour_{value - COLOUR:06x}"


def is_colour(label: str) -> bool:
    """Return whether a class is a colour that no list names."""
    return label.startswith("colour_")


def _is_black_and_white(values: np.ndarray, found: Sequence[int]) -> bool:
    if not found or found[-1] != VOID:
        return False
    return len(found) == 1 or (
        len(found) > 2 and float(((values > 0) & (values < VOID)).mean()) <= SOFT_EDGES
    )


def _paired(values: np.ndarray, found: list[int], meaning: Meaning, by_colour: bool) -> Parsed:
    """Return the objects of Pascal VOC's two masks: a value of the first is an object; most of its
    pixels in the second tell the class.
    """
    assert meaning.classes is not None
    data = meaning.classes.read_bytes()
    if digest_of(data) != meaning.class_digest:
        raise LabelError("the mask of its classes has changed since this run began; start it again")
    classes, _ = read_mask(data, by_colour)
    if classes.shape != values.shape:
        raise LabelError(
            f"the mask of its classes has {classes.shape[1]}x{classes.shape[0]} pixels"
        )
    numbers, names, complaints = _numbers(values, found), dict(meaning.names), []
    labels = []
    for number, place in enumerate(ndimage.find_objects(numbers), start=1):
        inside, counts = np.unique(classes[place][numbers[place] == number], return_counts=True)
        best = max(
            zip(counts.tolist(), inside.tolist(), strict=True),
            key=lambda pair: (pair[1] not in (0, VOID), pair),
        )
        labels.append(names.get(best[1]) or unlisted(best[1]) if best[1] not in (0, VOID) else "")
        if not labels[-1]:
            complaints.append(f"object {number}: has no class in {meaning.classes.parent.name}")
    return _shapes(numbers, labels), complaints


def _numbers(values: np.ndarray, found: Sequence[int]) -> np.ndarray:
    """Return 1, 2, 3 ... for each pixel that has one of the sorted values `found`, else 0: int32
    (H, W).
    """
    if not found:
        return np.zeros(values.shape, np.int32)
    order = np.searchsorted(found, values).clip(max=len(found) - 1)
    return np.where(np.asarray(found)[order] == values, order + 1, 0).astype(np.int32)


def _connected(values: np.ndarray, classes: dict[int, str]) -> tuple[np.ndarray, list[str]]:
    """Number the connected parts of each class, and return their labels.

    Pixels that touch at a corner are connected.
    """
    numbers, labels = np.zeros(values.shape, np.int32), list[str]()
    for value, label in classes.items():
        count, parts = cv2.connectedComponents((values == value).astype(np.uint8), connectivity=8)
        np.copyto(numbers, parts + len(labels), where=parts > 0)
        labels += [label] * (count - 1)
        if len(labels) > MAX_OBJECTS:
            raise LabelError(f"more than {MAX_OBJECTS:,} objects in one mask")
    return numbers, labels


def _shapes(numbers: np.ndarray, labels: Sequence[str]) -> list[ShapeObject]:
    """Return an object for each number with a label.

    Its mask is cut out later, when it is drawn.
    """
    if len(labels) > MAX_OBJECTS:
        raise LabelError(f"more than {MAX_OBJECTS:,} objects in one mask")
    size = (numbers.shape[1], numbers.shape[0])
    places = enumerate(ndimage.find_objects(numbers), start=1)
    return [
        ShapeObject(
            label, f"object {number}", size, size, draw=partial(_cut_out, numbers, number, place)
        )
        for (number, place), label in zip(places, labels, strict=True)
        if label
    ]


def _cut_out(
    numbers: np.ndarray, number: int, place: tuple[slice, slice]
) -> tuple[np.ndarray, int, int]:
    """Return an object's mask and the left and top of its corner."""
    return numbers[place] == number, place[1].start, place[0].start
