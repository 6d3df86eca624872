"""Describes a folder in which no labels of a known format were found, and what is missing."""

import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from utils.common.errors import UserError, one_line, printable
from utils.common.files import BoundedZip, walk
from utils.data.dataset_yaml import IMAGE_SUFFIXES
from utils.sources.parsing.formats import EPRI_TITLE, EXTRA_READERS, FORMATS
from utils.sources.parsing.json_stream import JsonStream
from utils.sources.parsing.label_file import HEAD_BYTES, first_element

EPRI_FOLDER = Path("data/raw")  # into which download_data.py writes
MAX_SUFFIXES, MAX_KEYS = 6, 5  # that a message lists
LABEL_SUFFIXES = (".json", ".xml", ".txt", ".csv", ".yaml")
MISSING_EXTRA = (
    "; Label Studio, LabelMe, VIA, CVAT for images, RSML and mask pictures need extras/labels, which is not in this folder: "
    "get it from the project's repository"
)
OTHER_FORMATS = {
    ".ndjson": "Labelbox's NDJSON is not read: export as COCO",
    ".tfrecord": "TFRecord is not read: export as COCO",
    ".npy": "NumPy arrays are not read: save the masks as PNG",
    ".mat": "MATLAB's files are not read: save the masks as PNG",
    ".svg": "SVG is not read: export as COCO",
    ".geojson": "GeoJSON is not read: export as COCO",
    ".txt": "the texts hold no YOLO labels, lines of a class's number and coordinates",
}


def describe_foreign(folder: Path) -> str:
    """Return in one line what a folder holds, what is missing, and which formats are read."""
    if not folder.is_dir():
        return "no such folder; " + _cure(folder)
    files = [
        place / entry.name for place, entries in walk(folder, lambda path: path.name[:1] != ".") for entry in entries
    ]
    files = [file for file in files if not file.name.startswith(".")]
    if not files:
        return "is empty; " + _cure(folder)
    suffixes = Counter(file.suffix.lower() or "without suffix" for file in files)
    found = ", ".join(f"{number:,} {printable(suffix)}" for suffix, number in suffixes.most_common(MAX_SUFFIXES))
    more = f" and {len(suffixes) - MAX_SUFFIXES} more kinds" if len(suffixes) > MAX_SUFFIXES else ""
    formats = ", ".join(tool.title for tool in FORMATS.values())
    return (
        f"holds no labels of a known format, only {found}{more}: {_missing(files)}. "
        f"Known formats: {formats}, {EPRI_TITLE} (docs/labels.md)" + ("" if EXTRA_READERS else MISSING_EXTRA)
    )


def _cure(folder: Path) -> str:
    advice = "name the folder of your photographs and labels with --input"
    return f"{advice}, or run python download_data.py for EPRI's data" if folder == EPRI_FOLDER else advice


def _missing(files: list[Path]) -> str:
    """Return the likeliest reason why there are no labels."""
    for file in files:
        with suppress(OSError):
            if reason := _reason(file):
                return f"{printable(file.name)} {reason}"
    texts = [text for suffix, text in OTHER_FORMATS.items() if any(file.suffix.lower() == suffix for file in files)]
    if texts:
        return texts[0]
    if any(file.suffix.lower() in IMAGE_SUFFIXES for file in files):
        return "the file with the labels is missing; export it from your tool and put it beside the photographs"
    return "photographs and labels are missing"


def _reason(file: Path) -> str:
    """Return why a file that may hold labels is not read; an empty string if it may not."""
    suffix = file.suffix.lower()
    if suffix == ".zip":
        with suppress(zipfile.BadZipFile, ValueError, NotImplementedError), BoundedZip(file) as archive:
            names = [name for name in archive.namelist() if name.lower().endswith(LABEL_SUFFIXES)]
            return f"holds {printable(names[0])}: unzip it there" if names else ""
        return ""
    if suffix == ".xml":
        element = first_element(file)
        text = file.read_bytes()[:HEAD_BYTES]
        if element == "annotation" and (b"<polygon" in text or b"<segm" in text):
            return "is LabelMe's XML, whose polygons are not read: export as COCO, or from CVAT as CVAT for images 1.1"
        what = "Pascal VOC's boxes, which have no outlines" if element == "annotation" else f"<{printable(element)}>"
        return f"holds {what}: export polygons or masks" if element else "is not XML: export it again"
    if suffix == ".csv":
        with file.open("rb") as stream:
            header = stream.readline(400).decode("utf-8", "replace").strip()
        return f"is a CSV other than EPRI's ({printable(header, 60)}): export as JSON"
    return _json_reason(file) if suffix == ".json" else ""


def _json_reason(file: Path) -> str:
    try:
        with JsonStream(file) as stream:
            if stream.peek() != "{":
                return "is a list of other items than Label Studio's tasks: export as COCO"
            keys = []
            for key in stream.keys():  # noqa: SIM118 - not a dictionary
                keys.append(printable(key, 20))
                stream.skip()
    except UserError as error:
        return f"cannot be read ({one_line(error, 200)})"
    return f"has only {', '.join(keys[:MAX_KEYS]) or 'no keys'}: export as COCO"
