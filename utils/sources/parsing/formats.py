"""The label formats that are read, and how a folder's format is found by the content of its files."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from utils.common.errors import UserError
from utils.sources.parsing.coco import CocoFile
from utils.sources.parsing.cvat import CvatFile
from utils.sources.parsing.json_stream import JsonStream
from utils.sources.parsing.label_csv import LABEL_CSV, NAME_COLUMN
from utils.sources.parsing.label_studio import LabelStudioFile
from utils.sources.parsing.labelme import LabelMeFile
from utils.sources.parsing.mask_images import VOC_CLASSES, MaskFile, is_mask
from utils.sources.parsing.rows import LabelFile
from utils.sources.parsing.via import ViaFile
from utils.sources.parsing.yolo_text import YoloFile, looks_like_labels

AUTO, EPRI, COCO, LABEL_STUDIO, LABEL_ME = "auto", "epri", "coco", "labelstudio", "labelme"
VIA, CVAT, YOLO, MASKS = "via", "cvat", "yolo", "masks"
COCO_KEYS, LABEL_ME_KEYS = ("images", "annotations"), ("shapes", "imagePath")
LABEL_STUDIO_KEYS = ("data", "completions", "annotation_id", "annotator", "lead_time")  # the last three: JSON-MIN
HEAD_BYTES = 65_536
_COMMENT, _ELEMENT = re.compile(rb"<!--.*?-->", re.DOTALL), re.compile(rb"<([A-Za-z_][\w.:-]*)")


@dataclass(frozen=True)
class Format:
    """An annotation tool's format. Its files are those of the first of `patterns` that any has, one or `several`.

    title: what the report calls it. by_file: names of photographs are relative to the label file's folder. sorts_names: the
    files list only classes in use. has_rows_per_file: several files may belong to a photograph. missing_is_empty: a
    photograph without a label file has no objects, if others of its folder have one. takes_folder: the reader wants the
    input folder, in which it looks for a list of the classes.
    """

    title: str
    reader: Callable[..., LabelFile]
    patterns: tuple[str, ...]
    how_to_export: str
    several: bool = True
    by_file: bool = False
    sorts_names: bool = False
    has_rows_per_file: bool = False
    missing_is_empty: bool = False
    takes_folder: bool = False


FORMATS = {
    COCO: Format(
        "COCO file",
        CocoFile,
        (
            *("annotations/instances_*.json", "annotations/*.json", "*.json"),
            *("*/_annotations.coco.json", "*/annotations/instances_*.json"),
        ),
        "export as COCO 1.0 and unzip it there, so that annotations/instances_*.json lies beside images/",
    ),
    LABEL_STUDIO: Format(
        "Label Studio export",
        LabelStudioFile,
        ("*.json", "**/*.json"),
        "export as JSON and put the file beside the photographs",
        several=False,
    ),
    LABEL_ME: Format(
        "LabelMe's files",
        LabelMeFile,
        ("**/*.json",),
        "save LabelMe's files there, beside the photographs",
        by_file=True,
        sorts_names=True,
    ),
    VIA: Format(
        "VGG Image Annotator's file",
        ViaFile,
        ("*.json", "**/*.json"),
        "save the project, or export annotations as JSON",
        by_file=True,
        sorts_names=True,
    ),
    CVAT: Format(
        "CVAT for images",
        CvatFile,
        ("annotations.xml", "*.xml", "**/annotations.xml"),
        "export as CVAT for images 1.1 and unzip it there",
    ),
    YOLO: Format(
        "YOLO labels",
        YoloFile,
        ("**/*.txt",),
        "put data.yaml beside the folders train and valid, each with images/ and labels/",
        by_file=True,
        missing_is_empty=True,
        takes_folder=True,
    ),
    MASKS: Format(
        "mask PNGs",
        MaskFile,
        (f"**/{VOC_CLASSES}/*.png", "**/*.png", "**/*.PNG"),
        "put a.png into masks/ for a.jpg in images/",
        by_file=True,
        has_rows_per_file=True,
        takes_folder=True,
    ),
}
FORMAT_CHOICES = (AUTO, EPRI, *FORMATS)
EPRI_TITLE = "EPRI's labels"


def find_format(folder: Path) -> str:
    """Return the format of the first file whose content is of one, in the order of FORMATS; an empty string without any."""
    if any(_is_epri(file) for file in candidates(folder, ("*.csv", "*.CSV"))):
        return EPRI
    files = dict.fromkeys(file for tool in FORMATS.values() for file in candidates(folder, tool.patterns))
    return next(filter(None, map(format_of, files)), "")


def candidates(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of the first pattern that any has, sorted, without hidden ones."""
    for pattern in patterns:
        files = sorted(
            path
            for path in folder.glob(pattern)
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        if files:
            return files
    return []


def format_of(file: Path) -> str:
    """Return the format of a file by its content; an empty string if it is of none, or cannot be read."""
    suffix = file.suffix.lower()
    with suppress(UserError, OSError):
        if suffix == ".json":
            return _json_format(file)
        if suffix == ".xml":
            return CVAT if first_element(file) == "annotations" else ""
        if suffix == ".txt":
            return YOLO if looks_like_labels(file) else ""
        return MASKS if is_mask(file) else ""
    return ""


def first_element(file: Path) -> str:
    """Return the name of an XML file's first element; empty if there is none near its beginning."""
    with file.open("rb") as stream:
        match = _ELEMENT.search(_COMMENT.sub(b"", stream.read(HEAD_BYTES)))
    return match[1].decode("ascii", "replace") if match else ""


def _json_format(file: Path) -> str:
    """Return the format of a JSON file by its first keys. Raises UserError when it is not JSON."""
    with closing(JsonStream(file)) as stream:
        if stream.peek() == "[":
            first = next((item.raw for item in stream.items()), None)
            return LABEL_STUDIO if isinstance(first, dict) and not first.keys().isdisjoint(LABEL_STUDIO_KEYS) else ""
        for key in stream.keys():  # noqa: SIM118 - not a dictionary
            if key in LABEL_ME_KEYS:
                return LABEL_ME
            if key.startswith("_via_"):
                return VIA
            if key in COCO_KEYS and stream.peek() == "[":
                return COCO
            if stream.peek() != "{":
                stream.skip()
            elif {"filename", "regions"} <= stream.item().raw.keys():
                return VIA
    return ""


def _is_epri(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as stream:
        return file.name.lower() == LABEL_CSV.lower() or NAME_COLUMN.encode() in stream.readline(HEAD_BYTES)
    return False
