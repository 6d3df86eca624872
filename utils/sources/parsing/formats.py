"""The label formats that can be read. The format of a folder is found by the content of its files."""

import re
from contextlib import suppress
from pathlib import Path

from utils.common.errors import UserError
from utils.sources.parsing.coco import CocoFile
from utils.sources.parsing.cvat import CvatFile
from utils.sources.parsing.json_stream import JsonStream
from utils.sources.parsing.label_csv import LABEL_CSV, NAME_COLUMN
from utils.sources.parsing.label_studio import LabelStudioFile
from utils.sources.parsing.labelme import LabelMeFile
from utils.sources.parsing.mask_images import MaskFile, is_mask
from utils.sources.parsing.rows import LabelFile
from utils.sources.parsing.rsml import RsmlFile
from utils.sources.parsing.via import ViaFile
from utils.sources.parsing.yolo_text import YoloFile, looks_like_labels

AUTO, EPRI, COCO, LABEL_STUDIO, LABEL_ME = "auto", "epri", "coco", "labelstudio", "labelme"
VIA, CVAT, YOLO, MASKS, RSML = "via", "cvat", "yolo", "masks", "rsml"
COCO_KEYS, LABEL_ME_KEYS = ("images", "annotations"), ("shapes", "imagePath")
LABEL_STUDIO_KEYS = ("data", "completions", "annotation_id", "annotator", "lead_time")  # the last three: JSON-MIN
HEAD_BYTES = 65_536
_COMMENT, _ELEMENT = re.compile(rb"<!--.*?-->", re.DOTALL), re.compile(rb"<([A-Za-z_][\w.:-]*)")
FORMATS: dict[str, type[LabelFile]] = {
    COCO: CocoFile,
    LABEL_STUDIO: LabelStudioFile,
    LABEL_ME: LabelMeFile,
    VIA: ViaFile,
    CVAT: CvatFile,
    RSML: RsmlFile,
    YOLO: YoloFile,
    MASKS: MaskFile,
}
FORMAT_CHOICES = (AUTO, EPRI, *FORMATS)
EPRI_TITLE = "EPRI's labels"


def find_format(folder: Path) -> str:
    """Return the format of the first file of a known format, in the order of FORMATS; an empty string without any."""
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
        if suffix == ".rsml":
            return RSML if first_element(file) == "rsml" else ""
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
    with JsonStream(file) as stream:
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
