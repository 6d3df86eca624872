"""Finds masks in PNG, GIF, TIFF or BMP files: Pascal VOC's pairs (LabelMe, CVAT), a file per class or object, binary masks.

Outside of Pascal VOC's folders a file is a mask if its name and folder fit a photograph, and most neighbouring pixels are
equal. docs/labels.md lists the names.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from utils.common.errors import UserError, printable
from utils.data.dataset_yaml import IMAGE_SUFFIXES
from utils.data.images import ImageError, read_image
from utils.sources.parsing.class_lists import COLOUR, MASK_LISTS, find_list, read_values
from utils.sources.parsing.label_csv import Problem
from utils.sources.parsing.mask_values import ONLY_CLASS, Meaning, mask_objects, read_mask
from utils.sources.parsing.rows import MASK, SPAN, AnnotationRow, LabelFile, digest_of

VOC_CLASSES, VOC_OBJECTS = "SegmentationClass", "SegmentationObject"
PHOTOGRAPH_FOLDERS = ("images", "JPEGImages", "image", "imgs", "img", "photos")
MASK_SUFFIXES = (".png", ".gif", ".tif", ".tiff", ".bmp")
MIN_ALIKE = 0.95  # share of neighbouring pixels with equal values; photographs have less
_WORDS = re.compile(r"[-_. ]+")
_NOT_A_CLASS = re.compile(r"(?i)masks?|manual\d*|seg(mentation)?|labels?|gt|inst(ance)?s?|annotations?|cp|\d*")
_NUMBERED = re.compile(r"(?i)inst(ance)?s?|cp")  # in the name of a file or folder: each value is an object


class MaskFile(LabelFile):
    """The objects of one mask. A file that is not a mask has no rows. The list of the classes lies in `folder` or below;
    without a list the classes are those in use, sorted."""

    title = "mask PNGs"
    patterns = (f"**/{VOC_CLASSES}/*.png", "**/*.[pPgGtTbB][nNiImM][gGfFpP]*")
    how_to_export = "put a.png into masks/ for a.jpg in images/"
    by_file = has_rows_per_file = takes_folder = True

    def __init__(self, path: Path, problems: list[Problem], folder: Path) -> None:
        super().__init__(path, problems)
        try:
            found = find_mask(path)
            if found is None:
                return
            source, photographs, meaning = found
            meaning = _with_list(meaning, path, folder)
            data = source.read_bytes()
            objects, complaints = mask_objects(meaning, data)  # they come again when the photograph is built
        except (ValueError, UserError, OSError) as error:
            self.complain(f"{error}; skipped")
            self.is_damaged = True
            return
        used = {item.value for item in objects}
        self.names = meaning.listed if used & {*meaning.listed} else sorted(used)
        span, context = SPAN.pack(0, len(data), digest_of(data)), repr(replace(meaning, classes=None))
        masks = Counter([(item.value, MASK) for item in objects] + [("", MASK)] * len(complaints))
        self.rows = [AnnotationRow(photographs, source, span, context, partial(mask_objects, meaning), masks)]
        class_list = find_list(path, MASK_LISTS, folder) if meaning.names else None
        self._list, self._values = class_list, {one: value for value, one in meaning.names}
        self.named_by = "name of file or folder" if meaning.label else "value of the pixels"

    def origin_of(self, name: str) -> str:
        if self._list is None or name not in self._values:
            return self.named_by
        value = self._values[name]
        return f"{self._list.name}: {value}" if value < COLOUR else self._list.name


def is_mask(path: Path) -> bool:
    """Return whether a file is a mask and no photograph. Both masks of a pair are, though only one has rows."""
    if path.suffix.lower() not in MASK_SUFFIXES:
        return False
    try:
        return path.parent.name in (VOC_CLASSES, VOC_OBJECTS) or find_mask(path) is not None
    except ValueError:
        return True
    except OSError:
        return False


def find_mask(path: Path) -> tuple[Path, tuple[str, ...], Meaning] | None:
    """Return the file to read, the possible paths of its photograph relative to the folder, and the meaning of its values.

    None if it is not a mask. Raises ValueError for a file that has the name of a mask but cannot be read.
    """
    folder, above = path.parent.name, path.parent.parent
    if folder in (VOC_CLASSES, VOC_OBJECTS):
        names = tuple(f"../{place}/{path.stem}{suffix}" for place in PHOTOGRAPH_FOLDERS for suffix in IMAGE_SUFFIXES)
        classes, objects = above / VOC_CLASSES / path.name, above / VOC_OBJECTS / path.name
        if not classes.is_file():
            return path, names, Meaning(ONLY_CLASS, is_numbered=True)
        if folder == VOC_OBJECTS:
            return None  # read with its class mask
        is_pair = objects.is_file() and not objects.is_symlink()
        return (objects, names, Meaning(classes=path)) if is_pair else (path, names, Meaning())
    found = _photograph_of(path)
    if found is None:
        return None
    photograph, rest, class_folder = found
    words = _WORDS.split(rest)
    try:
        if not _is_alike(path):
            return None
    except ValueError:
        parts = [*words, *_WORDS.split(folder), *_WORDS.split(above.name)]
        is_called_mask = any(_NOT_A_CLASS.fullmatch(word) for word in parts if word and not word.isdigit())
        if not is_called_mask and _is_picture(path):
            return None
        raise
    label = "_".join(word for word in words if not _NOT_A_CLASS.fullmatch(word))
    label = label or ("" if _NOT_A_CLASS.fullmatch(class_folder) else class_folder)
    is_numbered = any(map(_NUMBERED.fullmatch, [*words, *_WORDS.split(folder)]))
    is_whole = any(word.isdigit() for word in words)
    meaning = Meaning(printable(label), is_whole=is_whole, is_numbered=is_numbered)
    return path, (os.path.relpath(photograph, path.parent),), meaning


def _photograph_of(path: Path) -> tuple[Path, str, str] | None:
    """Return a mask's photograph, what follows the photograph's name in the mask's name, and the folder that may name the class."""
    ends = [match.start() for match in _WORDS.finditer(path.stem)]
    stems = [path.stem, *(path.stem[:end] for end in ends[:-5:-1] if end)]
    for folder, class_folder in _folders_for(path.parent):
        for stem in stems if folder.is_dir() else ():
            for suffix in IMAGE_SUFFIXES:
                for file in (folder / f"{stem}{suffix}", folder / f"{stem}{suffix.upper()}"):
                    is_other = file.is_file() and file != path
                    if is_other and (suffix not in MASK_SUFFIXES or not _is_readable_mask(file)):
                        return file, path.stem[len(stem) :], class_folder
    if found := _with_other_ending(path):
        return found, "", ""
    images = path.parent.parent / "images"  # of one photograph, whose objects have a file each: Data Science Bowl 2018
    inside = list(images.iterdir())[:2] if path.parent.name == "masks" and images.is_dir() else []
    return (inside[0], "_1", "") if len(inside) == 1 and inside[0].is_file() else None


def _with_other_ending(path: Path) -> Path | None:
    """Return the photograph `21_training.tif` of the mask `21_manual1.gif`. No other file in the two folders begins like them."""
    beginning, separator, ending = path.stem.rpartition("_")
    if not separator or not _NOT_A_CLASS.fullmatch(ending):
        return None
    masks = [file for file in path.parent.glob(f"{glob.escape(beginning)}_*") if file.suffix.lower() in MASK_SUFFIXES]
    for folder, _ in _folders_for(path.parent):
        if folder != path.parent and folder.is_dir():
            near = [
                file for file in folder.glob(f"{glob.escape(beginning)}_*") if file.suffix.lower() in IMAGE_SUFFIXES
            ]
            near = [file for file in near if file.stem.rpartition("_")[0] == beginning]
            if len(near) == len(masks) == 1:
                return near[0]
    return None


def _folders_for(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each folder that may hold the photographs of a folder of masks, and the folder that names the masks' class."""
    above, top = folder.parent, folder.parent.parent
    yield folder, ""
    for name in PHOTOGRAPH_FOLDERS:
        yield above / name, ""  # masks/a.png, images/a.jpg
        yield top / name / folder.name, ""  # masks/train/a.png, images/train/a.jpg
        yield top / name, folder.name  # masks/wire/a.png, images/a.jpg
        yield top.parent / name / above.name, folder.name  # masks/train/wire/a.png, images/train/a.jpg
    yield above, folder.name  # wire/a.png or masks/a.png, a.jpg
    yield top, folder.name  # masks/wire/a.png, a.jpg


def _is_alike(path: Path) -> bool:
    """Return whether a file has at most two values, or mostly equal neighbouring pixels. Raises ValueError and OSError."""
    values, _ = read_mask(path.read_bytes(), False)
    is_alike = values.shape[1] > 1 and float((values[:, 1:] == values[:, :-1]).mean()) >= MIN_ALIKE
    return is_alike or len(np.unique(values)) <= 2


def _is_readable_mask(path: Path) -> bool:
    try:
        return _is_alike(path)
    except (ValueError, OSError):
        return False


def _is_picture(path: Path) -> bool:
    """Return whether a file can be read as a photograph, such as a JPEG called .png or a large PNG."""
    try:
        read_image(path)
    except ImageError:
        return False
    return True


def _with_list(meaning: Meaning, path: Path, folder: Path) -> Meaning:
    """Add the classes of the list near a mask, and the digest of Pascal VOC's mask of the classes."""
    digest = digest_of(meaning.classes.read_bytes()) if meaning.classes else b""
    file = None if meaning.label else find_list(path, MASK_LISTS, folder)
    names = tuple(read_values(file).items()) if file else ()
    return replace(meaning, class_digest=digest, names=names)
