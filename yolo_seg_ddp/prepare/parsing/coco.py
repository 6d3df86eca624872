"""Reads COCO instance files, as CVAT, Label Studio and COCO write them."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import sub
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import numpy as np

from yolo_seg_ddp.data.images import MAX_IMAGE_PIXELS
from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, Problem
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile, read_json
from yolo_seg_ddp.prepare.parsing.outlines import (
    ShapeObject,
    box_corners,
    read_number,
    read_points,
    read_size,
)
from yolo_seg_ddp.prepare.parsing.photograph import UNUSABLE_OBJECT
from yolo_seg_ddp.prepare.parsing.rows import (
    BOX,
    CROWD,
    MASK,
    MAX_NAME_CHARACTERS,
    POLYGON,
    AnnotationRow,
    ObjectCounts,
    Parsed,
    says_ignore,
)
from yolo_seg_ddp.prepare.parsing.yolo_text import ONLY_CLASS, is_background
from yolo_seg_ddp.utils.errors import UserError, printable


class RunLengthError(ValueError):
    """A mask cannot be decoded. The message is the reason."""


def decode_coco(
    segmentation: dict[Any, Any], size: tuple[int, int] | None
) -> tuple[np.ndarray, int, int]:
    """Decode COCO's run lengths `{"size": [height, width], "counts": list or text}`.

    Returns (mask bool (h, w), left, top): the columns and rows that hold pixels. `size` is the
    image's (width, height). Raises RunLengthError.
    """
    from faster_coco_eval.core import mask as coco_mask  # takes 0.25 s

    declared: Any = segmentation.get("size")
    is_size = isinstance(declared, list) and len(declared) == 2
    if not is_size or not all(type(side) is int and side > 0 for side in declared):
        raise RunLengthError("`size` is not [height, width]")
    height, width = declared
    if size is not None and (width, height) != size:
        raise RunLengthError(
            f"its `size` is {width}x{height} pixels, the image has {size[0]}x{size[1]}"
        )
    if width * height > MAX_IMAGE_PIXELS:
        raise RunLengthError(
            f"{width}x{height} is more than {MAX_IMAGE_PIXELS // 1_000_000} megapixels"
        )
    counts = segmentation.get("counts")
    is_list = isinstance(counts, list) and all(type(run) is int and run >= 0 for run in counts)
    if not isinstance(counts, str) and not is_list:
        raise RunLengthError("`counts` is neither a text nor a list of whole numbers from 0 on")
    packed: Any = {
        "size": [height, width],
        "counts": _packed(counts) if isinstance(counts, str) else counts,
    }
    try:
        columns = coco_mask.decode(
            coco_mask.frPyObjects(packed, height, width) if is_list else packed
        ).T
    except (ValueError, RuntimeError) as error:
        reason = (
            f"its runs do not add up to the {width}x{height} pixels of its size, or are damaged"
        )
        raise RunLengthError(reason) from error
    mask, top, left = cut_out(columns)
    return np.ascontiguousarray(mask.T).view(bool), left, top


def _packed(text: str) -> bytes:
    """Return COCO's compressed counts as bytes, also if the text is Python's str() of bytes."""
    if text[:2] in ("b'", 'b"') and text[1] == text[-1]:
        text = text[2:-1].replace("\\\\", "\\")
    if not re.fullmatch("[0-o]*", text):
        raise RunLengthError("`counts` holds characters that run lengths do not have")
    return text.encode("ascii")


def cut_out(mask: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Return the part of a mask bool (H, W) that holds pixels, and its left and top.

    Raises RunLengthError if none does.
    """
    left, top, width, height = cv2.boundingRect(mask.view(np.uint8))
    if not width:
        raise RunLengthError("it has no pixels")
    return mask[top : top + height, left : left + width], left, top


LISTS = ("categories", "images", "annotations")
DUPLICATE_ID = "duplicate id"
MAX_CATEGORIES = 10_000
SWAPPED = "the outlines have y before x, as their boxes show: write x first"
CORNERS = (
    "`bbox` holds two corners, as the outlines or `area` show: write left, top, width and height"
)
CONTRADICTIONS = (SWAPPED, CORNERS, "the boxes are not around their outlines: look at labels.jpg")
# share and number of annotations that tell what the numbers of all mean
MOST_ALIKE, MIN_ALIKE = 0.9, 3
KEY_POINTS = (
    "annotations have key points, which are not read, and no outline: a box becomes a rectangle"
)
NOT_SEARCHED = (
    "images were not searched for all classes (`neg_category_ids` and "
    "`not_exhaustive_category_ids` of LVIS): objects without a "
    "label in them are learned as background"
)
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})(\.0+)?")
Size = tuple[int, int] | None


class CocoFile(LabelFile):
    """The images, categories and annotations of a COCO file.

    The arrays may come in any order. Raises UserError when the file is not COCO's.
    """

    format = "coco"
    title = "COCO file"
    has_lines = False
    patterns = (
        *("annotations/instances_*.json", "annotations/*.json", "*.json"),
        *("*/_annotations.coco.json", "*/annotations/instances_*.json"),
    )
    how_to_export = (
        "export as COCO 1.0 and unzip it there, so that annotations/instances_*.json lies beside "
        "images/; of several sets put each JSON there as annotations/NAME.json"
    )

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        super().__init__(path, problems)
        self.categories: dict[int | str | None, str] = {}
        # by id; None: the id stands for two images
        self._images: dict[Any, tuple[str, Size] | None] = {}
        self._annotations: dict[Any, list[dict[str, Any]]] = {}  # by their image's id
        # Of what the numbers of annotations mean; of images not searched for all classes.
        self._signs = Counter[str | None]()
        content = read_json(path)
        lists = {
            key: value
            for key in LISTS
            if isinstance(content, dict) and isinstance(value := content.get(key), list)
        }
        missing = [f"`{key}`" for key in LISTS if key not in lists]
        if missing not in ([], ["`categories`"]):
            raise UserError(
                f"{path}: not COCO's instances: no list {' and '.join(missing)}; export as COCO 1.0"
            )
        for category in lists.get("categories", ()):
            self._add_category(category if isinstance(category, dict) else {})
        for image in lists["images"]:
            self._add_image(image if isinstance(image, dict) else {})
        for number, annotation in enumerate(lists["annotations"], start=1):
            self._add_annotation(number, annotation)

        shapes = Counter(
            _category_and_kind(one) for group in self._annotations.values() for one in group
        )
        used = {category for category, _ in shapes}
        if not self.categories and used:
            ids = used - {None} or {None}
            self.categories = {
                key: f"class_{printable(str(key))}" if key is not None else ONLY_CLASS
                for key in ids
            }
            shown = ", ".join(sorted(self.categories.values())[:5])
            fix = 'name them there, as in {"id": 1, "name": "pole"}'
            self.complain(
                f"`categories` is missing or empty: the classes are called {shown}; {fix}",
                "no categories",
            )
        self._judge_signs()
        # Some converters write `iscrowd` 1 for every mask.
        self._has_crowds = any(kind != CROWD for _, kind in shapes)
        if shapes and not self._has_crowds:
            self.complain(
                "all annotations have `iscrowd` 1, so they are read as objects, not as crowds",
                "no crowds",
            )
        self.categories = dict(
            sorted(self.categories.items(), key=lambda item: (isinstance(item[0], str), item[0]))
        )
        # Converters list the background, which has no objects.
        kept = [
            name for key, name in self.categories.items() if key in used or not is_background(name)
        ]
        self.names = dict.fromkeys(kept)
        self.rows = list(self._rows())

    @classmethod
    def is_json_of_format(cls, key: str | None, value: Any) -> bool:
        return key in ("images", "annotations") and isinstance(value, list)

    def _rows(self) -> Iterator[AnnotationRow]:
        """Yield a row for each image. Adds annotations without an image to the problems."""
        context, subset = (
            json.dumps([*self.categories.items()]),
            self.path.stem.removeprefix("instances_"),
        )
        for image_id, image in self._images.items():
            annotations = self._annotations.get(image_id, [])
            if image is None:
                self.lose(self._counts(annotations), UNREADABLE_ROW)
                continue
            name, size = image
            different = annotations
            if len({str(one.get("id")) for one in annotations}) < len(annotations):
                different = [*{json.dumps(one): one for one in annotations}.values()]
            counts = self._counts(different)
            if num_copies := len(annotations) - len(different):
                text = (
                    f"{printable(name)}: {num_copies} annotations are exact copies of others; "
                    "ignored"
                )
                self.complain(text, DUPLICATE_ID)
                self.lose(self._counts(annotations) - counts, DUPLICATE_ID)
            has_crowds = self._has_crowds and any(
                _category_and_kind(one)[1] == CROWD for one in different
            )
            read_objects = partial(_objects, self.categories, size, has_crowds)
            context_of = f"{size} {context}" + " crowds" * has_crowds
            yield AnnotationRow(
                (name,), self.path, different, context_of, read_objects, counts, subset
            )
        for image_id in self._annotations.keys() - self._images.keys():
            annotations = self._annotations[image_id]
            self.lose(self._counts(annotations), UNUSABLE_OBJECT)
            text = (
                f"no image has the id {printable(str(image_id))}; its {len(annotations)} "
                "annotations are skipped"
            )
            self.complain(text, UNUSABLE_OBJECT)

    def _judge_signs(self) -> None:
        """Say what the numbers of all annotations contradict.

        Raises UserError if objects would lie elsewhere.
        """
        signs, total = self._signs, sum(self._signs[sign] for sign in ("", *CONTRADICTIONS))
        for sign in (
            sign for sign in CONTRADICTIONS if signs[sign] > max(MOST_ALIKE * total, MIN_ALIKE)
        ):
            if sign == SWAPPED or (sign == CORNERS and signs[BOX]):
                raise UserError(f"{self.path}: {sign}")
            self.complain(f"{sign}; the outlines are used", "contradiction")
        for sign in (sign for sign in (KEY_POINTS, NOT_SEARCHED) if signs[sign]):
            self.complain(f"{signs[sign]:,} {sign}", "incomplete labels")

    def _counts(self, annotations: Iterable[dict[str, Any]]) -> ObjectCounts:
        """Count objects by the names of their categories and their kinds; of no category: an empty
        name.
        """
        counts: ObjectCounts = Counter()
        for category, kind in map(_category_and_kind, annotations):
            is_mask = kind == CROWD and not self._has_crowds
            counts[self.categories.get(category, ""), MASK if is_mask else kind] += 1
        return counts

    def origin_of(self, name: str) -> str:
        numbers = [
            str(number)
            for number, one in self.categories.items()
            if one == name and number is not None
        ]
        return f"category {', '.join(numbers)}" if numbers else "no category"

    def _add_category(self, category: dict[str, Any]) -> None:
        number, name = _by_value(category.get("id")), category.get("name")
        if number is None or not isinstance(name, str) or not name.strip():
            text = (
                f"category {printable(str(category.get('id')))}: needs a whole `id` and a `name`; "
                "skipped"
            )
            self.complain(text)
        elif number in self.categories:
            text = (
                f"category {number} twice: `{self.categories[number]}` and `{printable(name)}`; "
                "the first is used"
            )
            self.complain(text, DUPLICATE_ID)
        elif len(self.categories) == MAX_CATEGORIES:
            raise UserError(f"{self.path}: more than {MAX_CATEGORIES:,} categories")
        else:
            self.categories[number] = printable(name.strip())

    def _add_image(self, image: dict[str, Any]) -> None:
        shown = f"image {printable(str(image.get('id')))}"
        try:
            name = _path_of(image)
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
                raise ValueError("has no usable `file_name`")
            image_id = _image_id(image.get("id"))
            size = read_size(image.get("width"), image.get("height"))
        except (ValueError, OverflowError) as error:
            self.complain(f"{shown}: {error}; skipped")
            return
        self._signs[NOT_SEARCHED] += not image.keys().isdisjoint(
            ("neg_category_ids", "not_exhaustive_category_ids")
        )
        known = self._images.setdefault(image_id, (name, size))
        if known is None or known[0] != name:
            self._images[image_id] = None
            text = (
                f"{shown} twice, also as {printable(name)}: their annotations cannot be told "
                "apart; both are skipped"
            )
            self.complain(text)

    def _add_annotation(self, number: int, annotation: Any) -> None:
        try:
            if not isinstance(annotation, dict):
                raise ValueError("is not a dictionary")
            self._annotations.setdefault(_image_id(annotation.get("image_id")), []).append(
                annotation
            )
        except ValueError as error:
            shown = printable(str(annotation.get("id"))) if isinstance(annotation, dict) else "?"
            self.lose(Counter({("", "other"): 1}), UNUSABLE_OBJECT)
            self.complain(
                f"annotation {shown}, item {number:,} of the list: {error}; skipped",
                UNUSABLE_OBJECT,
            )
            return
        kind = _category_and_kind(annotation)[1]
        self._signs[_sign_of(annotation, kind)] += 1
        self._signs[BOX] += kind == BOX
        self._signs[KEY_POINTS] += kind == BOX and bool(annotation.get("keypoints"))


def _category_and_kind(annotation: dict[str, Any]) -> tuple[int | str | None, str]:
    segmentation = annotation.get("segmentation")
    kind = (
        BOX
        if not _has_outline(segmentation)
        else MASK
        if isinstance(segmentation, dict)
        else POLYGON
    )
    return _by_value(annotation.get("category_id")), CROWD if _is_crowd(annotation) else kind


def _sign_of(annotation: dict[str, Any], kind: str) -> str | None:
    """Return how the box of an annotation contradicts its outline, else its area; None if they
    cannot be compared.
    """
    try:
        x, y, width, height = map(read_number, annotation["bbox"])
        if kind == BOX:
            areas = {"": width * height, CORNERS: (width - x) * (height - y)}
            return next(
                sign for sign, area in areas.items() if abs(area - annotation["area"]) <= area / 50
            )
        xs, ys = (
            [number for part in annotation["segmentation"] for number in part[axis::2]]
            for axis in (0, 1)
        )
        outline = min(xs), min(ys), max(xs), max(ys)
        boxes = {
            "": (x, y, x + width, y + height),
            SWAPPED: (y, x, y + height, x + width),
            CORNERS: (x, y, width, height),
        }
        slack_px = 2 + max(width, height) / 50
        agree = (
            sign for sign, box in boxes.items() if max(map(abs, map(sub, box, outline))) <= slack_px
        )
        return next(agree, CONTRADICTIONS[-1])
    except (ValueError, TypeError, OverflowError, LookupError, StopIteration):
        return None


def _is_crowd(annotation: dict[str, Any]) -> bool:
    """Return whether an annotation covers several objects.

    CVAT, which adds `attributes`, says so of every mask.
    """
    return annotation.get("iscrowd") in (1, "1") and not isinstance(
        annotation.get("attributes"), dict
    )


def _image_id(image_id: Any) -> int | str:
    if (number := _by_value(image_id)) is None:
        raise ValueError("its image has no id")
    return number


def _by_value(number: Any) -> int | str | None:
    """Return an id that is equal for 1, 1.0, "1" and "1.0".

    Other texts stay as they are. None for anything that is no id.
    """
    if isinstance(number, float) and number.is_integer():
        return int(number)
    if (
        isinstance(number, bool)
        or not isinstance(number, int | str)
        or len(str(number)) > MAX_NAME_CHARACTERS
    ):
        return None
    return (
        int(number.partition(".")[0])
        if isinstance(number, str) and _WHOLE.fullmatch(number)
        else number
    )


def _path_of(image: dict[str, Any]) -> Any:
    """Return `file_name`, or `path` or `coco_url` if these, for the same file name, have folders
    and `file_name` has none.
    """
    name = image.get("file_name")
    longer = [str(image.get(key) or "").replace("\\", "/") for key in ("path", "coco_url")]
    if isinstance(name, str) and not re.search(r"[\\/]", name):
        return next(
            (path for path in longer if PurePosixPath(path).name == name and ".." not in path), name
        )
    return name


def _has_outline(segmentation: Any) -> bool:
    """Return whether a segmentation is more than empty lists, which stand beside a box."""
    counts = segmentation.get("counts") if isinstance(segmentation, dict) else segmentation
    return bool(counts) and not (isinstance(counts, list) and all(part == [] for part in counts))


def _objects(
    categories: dict[int | str | None, str],
    size: Size,
    has_crowds: bool,
    annotation: dict[str, Any],
) -> Parsed:
    """Return the object of one annotation, or the reason why there is none."""
    name, category = (
        f"annotation {printable(str(annotation.get('id')))}",
        annotation.get("category_id"),
    )
    value = categories.get(_by_value(category))
    if value is None:
        return [], [f"{name}: `categories` has no `category {printable(str(category))}`"]
    try:
        is_region = has_crowds and _is_crowd(annotation)
        is_region = (
            is_region or says_ignore(annotation) or says_ignore(annotation.get("attributes"))
        )
        return [replace(_object(name, value, size, annotation), is_region=is_region)], []
    except (ValueError, OverflowError) as error:
        return [ShapeObject(value, name, error=str(error))], []


def _object(name: str, value: str, size: Size, annotation: dict[str, Any]) -> ShapeObject:
    segmentation = (
        annotation.get("segmentation") if _has_outline(annotation.get("segmentation")) else None
    )
    if isinstance(segmentation, dict):
        if size is None:
            declared = segmentation.get("size")
            size = (
                read_size(*declared[::-1])
                if isinstance(declared, list) and len(declared) == 2
                else None
            )
        return ShapeObject(value, name, size, size, draw=partial(decode_coco, segmentation, size))
    if segmentation:
        if not isinstance(segmentation, list):
            raise ValueError("`segmentation` is neither a list of polygons nor run lengths")
        polygons = segmentation if isinstance(segmentation[0], list) else [segmentation]
        whole = [
            polygon for polygon in polygons if not isinstance(polygon, list) or len(polygon) >= 6
        ]
        return ShapeObject(value, name, size, size, tuple(map(read_points, whole or polygons)))
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4:
        raise ValueError("has neither `segmentation` nor `bbox`")
    left, top, width, height = map(read_number, box)
    corners = box_corners(left, top, width, height)
    return ShapeObject(value, name, size, size, (corners,), is_box=True)
