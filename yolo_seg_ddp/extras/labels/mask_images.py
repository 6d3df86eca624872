"""Finds masks in PNG, GIF, TIFF or BMP files: Pascal VOC's pairs (LabelMe, CVAT), a file per class
or object, binary masks.

Outside of Pascal VOC's folders a file is a mask if its name and folder fit a photograph, and most
neighbouring pixels are equal. reference.md lists the names.
"""

import glob
import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np

from yolo_seg_ddp.data.dataset_yaml import IMAGE_SUFFIXES
from yolo_seg_ddp.data.images import ImageError, read_image
from yolo_seg_ddp.extras.labels.mask_values import (
    COLOUR,
    COLOUR_LIST,
    MASK_LISTS,
    VALUE_LIST,
    VOID,
    MaskFacts,
    Meaning,
    is_colour,
    mask_objects,
    measured_objects,
    read_mask,
    read_values,
    unlisted,
)
from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, Problem
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile
from yolo_seg_ddp.prepare.parsing.rows import MASK, UNUSED_SOURCE, AnnotationRow, digest_of
from yolo_seg_ddp.prepare.parsing.yolo_text import ONLY_CLASS, find_list, is_background
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.text import counted

VOC_CLASSES, VOC_OBJECTS = "SegmentationClass", "SegmentationObject"
PHOTOGRAPH_FOLDERS = ("images", "JPEGImages", "image", "imgs", "img", "photos")
MASK_SUFFIXES = (".png", ".gif", ".tif", ".tiff", ".bmp")
MIN_ALIKE = 0.95  # share of neighbouring pixels with equal values; photographs have less
# of a mask's pixels: so few grey ones beside masks of black and white are damage
STRAY_SHARE = 0.001
# pixels of a value that only one of so many masks has, which make no class
STRAY_PX, STRAY_MASKS = 20, 4
MOST_DIMMED = 0.1  # of the pixels that are kept if a grey mask is read as one of black and white
STRAY = "stray values"
Source = tuple[str, str]  # a folder of masks, and the ending of their names
_WORDS = re.compile(r"[-_. ]+")
_NOT_A_CLASS = re.compile(
    r"(?i)masks?|manual\d*|seg(mentation)?|labels?|gt|inst(ance)?s?|annotations?|cp|jpe?g|png|"
    r"save|fuse|\d*"
)
# in the name of a file or folder: each value is an object
_NUMBERED = re.compile(r"(?i)inst(ance)?s?|cp")


class MaskFile(LabelFile):
    """The objects of one mask. A file that is not a mask has no rows. The list of the classes lies
    in `folder` or below; without a list the classes are those in use, sorted.
    """

    format = "masks"
    title = "mask PNGs"
    patterns = (f"**/{VOC_CLASSES}/*.png", "**/*.[pPgGtTbB][nNiImM][gGfFpP]*")
    how_to_export = "put a.png into masks/ for a.jpg in images/"
    names_are_relative = several_files_a_photograph = takes_folder = are_pictures = True
    has_lines = False
    meaning: Meaning
    facts: MaskFacts
    used: set[str]  # the classes of its objects

    def __init__(self, path: Path, problems: list[Problem], folder: Path) -> None:
        super().__init__(path, problems)
        try:
            found = find_mask(path)
            if found is None:
                return
            source, photographs, meaning = found
            # Pascal VOC has a mask of the classes, too.
            digest = digest_of(meaning.classes.read_bytes()) if meaning.classes else b""
            self.class_list = None if meaning.label else find_list(path, MASK_LISTS, folder)
            names = tuple(read_values(self.class_list).items()) if self.class_list else ()
            self._read(source, photographs, replace(meaning, class_digest=digest, names=names))
        except (ValueError, UserError, OSError) as error:
            self.complain(f"{error}; skipped")
            self.is_damaged = True

    @classmethod
    def is_of_format(cls, file: Path) -> bool:
        """Return whether a file is a mask and no photograph.

        Both masks of a pair are, though only one has rows.
        """
        if file.suffix.lower() not in MASK_SUFFIXES:
            return False
        try:
            return file.parent.name in (VOC_CLASSES, VOC_OBJECTS) or find_mask(file) is not None
        except ValueError:
            return True
        except OSError:
            return False

    def _read(self, source: Path, photographs: tuple[str, ...], meaning: Meaning) -> None:
        """Read the mask with a meaning of its values. Raises ValueError, LabelError and OSError."""
        data = source.read_bytes()
        # the complaints come again in the build
        objects, complaints, self.facts = measured_objects(meaning, data)
        void = [item for item in objects if item.is_region]
        objects = [item for item in objects if not item.is_region]
        self.meaning, self.used = meaning, {item.value for item in objects}
        self.names = meaning.listed if self.used & {*meaning.listed} else sorted(self.used)
        context = repr(replace(meaning, classes=None)) + " void" * len(void)
        masks = Counter([(item.value, MASK) for item in objects] + [("", MASK)] * len(complaints))
        read_objects, digest = partial(mask_objects, meaning), digest_of(data)
        self.rows = [
            AnnotationRow(photographs, source, (), context, read_objects, masks, file_digest=digest)
        ]

    def origin_of(self, name: str) -> str:
        values = [value for value, one in self.meaning.names if one == name]
        if self.class_list is None or not values:
            return "name of file or folder" if self.meaning.label else "value of the pixels"
        return (
            f"{self.class_list.name}: {values[-1]}" if values[-1] < COLOUR else self.class_list.name
        )

    def read_again(self, **changes: Any) -> None:
        """Read the mask with another meaning. Objects of `strays` are lost."""
        before = self.rows[0].counts
        try:
            self._read(self.rows[0].file, self.rows[0].names, replace(self.meaning, **changes))
            if self.meaning.strays:
                self.lose(before - self.rows[0].counts, STRAY)
        except (ValueError, OSError) as error:
            self.complain(f"{error}; skipped")
            self.lose(before, UNREADABLE_ROW)
            self.is_damaged, self.rows = True, []

    @classmethod
    def agree(cls, read: Sequence[Self]) -> None:
        """Decide from all masks what one alone does not tell: the value of a list's first name, and
        stray values.
        """
        by_list, by_folder = (
            defaultdict[Path | None, list[Self]](list),
            defaultdict[tuple[Path, str], list[Self]](list),
        )
        for mask in (mask for mask in read if mask.rows):
            by_list[mask.class_list].append(mask)
            meaning = mask.meaning
            if mask.facts.pixels and not (
                meaning.classes or meaning.is_whole or meaning.is_numbered
            ):
                by_folder[mask.path.parent, meaning.label].append(mask)
        for file, masks in by_list.items():
            if file and file.name not in (COLOUR_LIST, VALUE_LIST):
                _agree_on_names(file, masks)
        for masks in by_folder.values():
            _agree_on_strays(masks)

    @classmethod
    def one_source(
        cls, read: Sequence[Self], rows: dict[str, tuple[Any, ...]], problems: list[Problem]
    ) -> None:
        """Leave out all but one of the masks that each show all objects of a photograph.

        One with several classes is better than a foreground, then numbers are better than colours,
        then more classes than few. Raises UserError if nothing tells them apart.
        """
        of = {mask.rows[0].file: mask for mask in read if mask.rows}
        of = {
            file: mask
            for file, mask in of.items()
            if not (mask.meaning.label or mask.meaning.is_whole)
        }
        found = {
            key: {_source_of(row, key): row.file for row in own if row.file in of}
            for key, own in rows.items()
        }
        classes, unused = defaultdict[Source, set[str]](set), dict[Source, Source]()
        for source, file in (pair for sources in found.values() for pair in sources.items()):
            classes[source] |= of[file].used
        rank = {
            source: (len(used) < 2, any(map(is_colour, used)), -len(used))
            for source, used in classes.items()
        }
        for key, sources in found.items():
            best, *others = sorted(sources, key=rank.__getitem__) or [("", "")]
            if others and rank[best] == rank[others[0]]:
                one, other = (
                    sources[source].relative_to(sources[source].parents[1])
                    for source in (best, others[0])
                )
                raise UserError(
                    f"{printable(str(one))} and {printable(str(other))} are masks of one "
                    f"photograph, {printable(key)}: move away "
                    "those that show no objects, such as the field of view, or the same ones "
                    "again; put masks of one class "
                    "into masks/CLASS/"
                )
            unused |= dict.fromkeys(others, best)
        for source, used_source in sorted(unused.items()):
            folder, used_folder = printable(source[0]), printable(used_source[0])
            text = (
                f"masks of {folder}/ are not used: those of {used_folder}/ tell more about the "
                "classes"
            )
            problems.append(Problem(f"{folder}/", text, UNUSED_SOURCE))
        for key, own in [*rows.items()]:
            rows[key] = tuple(
                row for row in own if row.file not in of or _source_of(row, key) not in unused
            )
            for row in (row for row in own if row not in rows[key]):
                of[row.file].lose(row.counts, UNUSED_SOURCE)
            if not rows[key]:
                del rows[key]
        kept = {row.file for own in rows.values() for row in own}
        for file in of.keys() - kept:
            of[file].names = ()


def find_mask(path: Path) -> tuple[Path, tuple[str, ...], Meaning] | None:
    """Return the file to read, the possible paths of its photograph relative to the folder, and the
    meaning of its values.

    None if it is not a mask. Raises ValueError for a file that has the name of a mask but cannot be
    read.
    """
    folder, above = path.parent.name, path.parent.parent
    if folder in (VOC_CLASSES, VOC_OBJECTS):
        names = tuple(
            f"../{place}/{path.stem}{suffix}"
            for place in PHOTOGRAPH_FOLDERS
            for suffix in IMAGE_SUFFIXES
        )
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
        is_called_mask = any(
            _NOT_A_CLASS.fullmatch(word) for word in parts if word and not word.isdigit()
        )
        if not is_called_mask:
            with suppress(ImageError):
                read_image(path)  # it is a photograph, such as a JPEG called .png or a large PNG
                return None
        raise
    label = "_".join(word for word in words if not _NOT_A_CLASS.fullmatch(word))
    label = label or ("" if _NOT_A_CLASS.fullmatch(class_folder) else class_folder)
    is_numbered = any(map(_NUMBERED.fullmatch, [*words, *_WORDS.split(folder)]))
    is_whole = any(word.isdigit() for word in words)
    meaning = Meaning(printable(label), is_whole=is_whole, is_numbered=is_numbered)
    return path, (os.path.relpath(photograph, path.parent),), meaning


def _photograph_of(path: Path) -> tuple[Path, str, str] | None:
    """Return a mask's photograph, what follows the photograph's name in the mask's name, and the
    folder that may name the class.
    """
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
    # of one photograph, whose objects have a file each: Data Science Bowl 2018
    images = path.parent.parent / "images"
    inside = list(images.iterdir())[:2] if path.parent.name == "masks" and images.is_dir() else []
    return (inside[0], "_1", "") if len(inside) == 1 and inside[0].is_file() else None


def _with_other_ending(path: Path) -> Path | None:
    """Return the photograph `21_training.tif` of the mask `21_manual1.gif`.

    No other file in the two folders begins like them.
    """
    beginning, separator, ending = path.stem.rpartition("_")
    if not separator or not _NOT_A_CLASS.fullmatch(ending):
        return None
    masks = [
        file
        for file in path.parent.glob(f"{glob.escape(beginning)}_*")
        if file.suffix.lower() in MASK_SUFFIXES
    ]
    for folder, _ in _folders_for(path.parent):
        if folder != path.parent and folder.is_dir():
            near = [
                file
                for file in folder.glob(f"{glob.escape(beginning)}_*")
                if file.suffix.lower() in IMAGE_SUFFIXES
            ]
            near = [file for file in near if file.stem.rpartition("_")[0] == beginning]
            if len(near) == len(masks) == 1:
                return near[0]
    return None


def _folders_for(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield each folder that may hold the photographs of a folder of masks, and the folder that
    names the masks' class.
    """
    above, top = folder.parent, folder.parent.parent
    yield folder, ""
    for name in PHOTOGRAPH_FOLDERS:
        yield above / name, ""  # masks/a.png, images/a.jpg
        yield top / name / folder.name, ""  # masks/train/a.png, images/train/a.jpg
        yield top / name, folder.name  # masks/wire/a.png, images/a.jpg
        # masks/train/wire/a.png, images/train/a.jpg
        yield top.parent / name / above.name, folder.name
    yield above, folder.name  # wire/a.png or masks/a.png, a.jpg
    yield top, folder.name  # masks/wire/a.png, a.jpg


def _is_alike(path: Path) -> bool:
    """Return whether a file has at most two values, or mostly equal neighbouring pixels.

    Raises ValueError and OSError.
    """
    values, _ = read_mask(path.read_bytes(), False)
    is_alike = values.shape[1] > 1 and float((values[:, 1:] == values[:, :-1]).mean()) >= MIN_ALIKE
    return is_alike or len(np.unique(values)) <= 2


def _is_readable_mask(path: Path) -> bool:
    try:
        return _is_alike(path)
    except (ValueError, OSError):
        return False


def _source_of(row: AnnotationRow, key: str) -> Source:
    """Return the folder of a photograph's mask, and what the mask's name
    adds to the photograph's.
    """
    return row.file.parent.name, row.file.stem.lower().removeprefix(PurePosixPath(key).stem)


def _agree_on_names(file: Path, masks: Sequence[MaskFile]) -> None:
    """Let a list's names begin at 1 if its first one is no background, which 0 is, and masks have
    the value after the last.

    Raises UserError if no mask tells where they begin.
    """
    names = [name for _, name in masks[0].meaning.names]
    used, first = set[str]().union(*(mask.used for mask in masks)), printable(names[0])
    if is_background(first) or not used & {*names[1:], unlisted(len(names))}:
        return
    if unlisted(len(names)) not in used:
        raise UserError(
            f"{file}: is 0 or 1 the value of its first name, {first}? 0 is the background of "
            "masks: write a line "
            "`background` before it if it is 1, or instead of it if it is 0"
        )
    for mask in masks:
        mask.read_again(names=tuple(enumerate(names, start=1)))
    text = (
        f"the value 1 is its first name, {first}: masks have the values up to {len(names)}, and 0 "
        "is the background"
    )
    masks[0].problems.append(Problem(file.name, text, "first value"))


def _agree_on_strays(masks: Sequence[MaskFile]) -> None:
    """Read grey masks of a folder of black and white ones like these; leave out values of a few
    pixels in one mask.

    White alone belongs to no object where other masks use the names of a list. Raises UserError for
    a grey mask that may mean anything.
    """
    meaning = masks[0].meaning
    if len(meaning.listed) > 1 and any(mask.used & {*meaning.listed} for mask in masks):
        for mask in masks:
            if {*mask.facts.pixels} == {VOID} and VOID not in dict(meaning.names):
                mask.read_again(strays=(VOID,))
    elif 2 * sum(mask.facts.is_binary for mask in masks) > len(masks):
        for mask in masks:
            _as_black_and_white(mask)
        return
    times = Counter(value for mask in masks for value in mask.facts.pixels if value != VOID)
    for mask in masks if len(masks) >= STRAY_MASKS and not meaning.label else ():
        pixels = mask.facts.pixels.items()
        few = tuple(value for value, number in pixels if times[value] == 1 and number <= STRAY_PX)
        if strays := tuple(value for value in few if value not in dict(meaning.names)):
            mask.read_again(strays=strays)
            mask.complain(
                f"{_shown(strays)} in this mask only, at most {STRAY_PX} pixels each: no classes",
                STRAY,
            )


def _as_black_and_white(mask: MaskFile) -> None:
    pixels, most_stray = mask.facts.pixels, STRAY_SHARE * mask.facts.num_pixels
    total = sum(pixels.values())
    dim = (
        sum(number for value, number in pixels.items() if value <= VOID // 2)
        if len(pixels) > 1
        else 0
    )
    # of several values each is an object
    if mask.facts.is_binary or (mask.meaning.label and dim > most_stray):
        return
    if dim > max(most_stray, MOST_DIMMED * (total - dim)):
        raise UserError(
            f"{mask.path}: holds {_shown(pixels)}, but most masks of this folder are black and "
            "white; save it like them, or "
            "name the values of all in classes.txt"
        )
    is_damage = len(pixels) > 1 and VOID not in pixels and total <= most_stray
    mask.read_again(is_binary=True, strays=tuple(pixels) if is_damage else ())
    what = (
        f"damage of {counted(total, 'pixel')}, no object"
        if is_damage
        else "read as black and white"
    )
    mask.complain(
        f"{_shown(pixels)}: {what}, because most masks of this folder are black and white", STRAY
    )


def _shown(values: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(values)[:5]))
    return f"the value{'s' * (len(values) > 1)} {shown}{', …' * (len(values) > 5)}"
