"""Describes a folder in which no labels of a known format were found, and what is missing."""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from yolo_seg_ddp.data.dataset_yaml import BESIDE, IMAGE_SUFFIXES, not_read
from yolo_seg_ddp.prepare.parsing.formats import EPRI_TITLE, EXTRA_READERS, FORMATS, format_of
from yolo_seg_ddp.prepare.parsing.label_csv import Problem
from yolo_seg_ddp.prepare.parsing.label_file import HEAD_BYTES, first_element, read_json
from yolo_seg_ddp.prepare.parsing.sources import OWN_FILES, UNREAD_FILE, all_files
from yolo_seg_ddp.utils.errors import UserError, one_line, printable
from yolo_seg_ddp.utils.files import walk

EPRI_FOLDER = Path("data/raw")  # into which download_data.py writes
MAX_SUFFIXES, MAX_KEYS = 6, 5  # that a message lists
MISSING_EXTRA = (
    "; Label Studio, LabelMe, VIA, CVAT for images, RSML, Pascal VOC and mask pictures need "
    "yolo_seg_ddp/extras/labels, which is not in this folder: "
    "get it from the project's repository"
)
OTHER_FORMATS = {
    ".ndjson": "Labelbox's NDJSON is not read: export as COCO",
    ".jsonl": "JSON Lines are not read: export as COCO",
    ".tfrecord": "TFRecord is not read: export as COCO",
    ".npy": "NumPy arrays are not read: save the masks as PNG",
    ".npz": "NumPy arrays are not read: save the masks as PNG",
    ".mat": "MATLAB's files are not read: save the masks as PNG",
    ".svg": "SVG is not read: export as COCO",
    ".geojson": "GeoJSON is not read: export as COCO",
    ".zip": "a zip in a subfolder is not opened: unzip it there",
    ".txt": "the texts hold no YOLO labels, lines of a class's number and coordinates",
}
SUFFIXES = {".json", ".xml", ".csv", *OTHER_FORMATS}  # of files that may hold labels
# Whose JSON a file probably is, by a key in it.
TOOLS = {
    b'"className"': "SuperAnnotate's",
    b'"classTitle"': "Supervisely's",
    b'"imgHeight"': "Cityscapes'",
    b'"label_classes"': "Hasty's",
    b'"asset"': "VoTT's",
    b'"imsize"': "ADE20K's",
    b'"slots"': "Darwin's",
}
_NAMES_OR_OUTLINES = re.compile(
    rb'"(class(es|_?name|_?title|_?id)?|labels?|categor(y|ies)|objects?|instances|shapes|'
    rb"polygons?|points|segmentation"
    rb'|annotations?|regions)"\s*:|^\d+ # \d+ # ',  # the last: a text of ADE20K
    re.IGNORECASE | re.MULTILINE,
)
# Files of a known other purpose: hidden ones, texts about the data set, lists of classes.
_BESIDE_LABELS = re.compile(
    r"\.|(licen[cs]e|copying|readme|notice|citation|authors|changelog|requirements)\b"
    r"|(classes|class_names|labels|labelmap|obj|_darknet)\.(txt|names|labels|data)$|"
    r"obj_class_to_machine_color\.json$",
    re.IGNORECASE,
)


def unread_files(
    folder: Path,
    used: Collection[Path],
    masks: Collection[Path],
    photographs: Iterable[str],
    title: str,
) -> list[Problem]:
    """Return a problem for each kind of file in a folder that is neither used nor a photograph nor
    of a known other purpose.

    masks: those that are not used. photographs: their paths. title: of the labels that were read,
    if there are any.
    """
    names = {
        part
        for path in photographs
        for part in (PurePosixPath(path).name, PurePosixPath(path).stem)
    }
    kinds: dict[str, list[Path]] = {}
    others = []
    for file in sorted({*all_files(folder)} - {*used}):
        name, suffix = file.name.lower(), file.suffix.lower()
        if file not in masks:
            if suffix in IMAGE_SUFFIXES or _has_other_purpose(folder, file, names):
                continue
            if suffix not in SUFFIXES:
                others.append(file.relative_to(folder))
                continue
        # A kind is what follows the name of a photograph, else the name without words that hold
        # numbers.
        ends = (match.start() for match in re.finditer(r"[^a-z0-9]", name))
        end = next((end for end in ends if name[:end] in names), 0)
        kinds.setdefault(name[end:] if end else re.sub(r"\w*\d\w*", "#", name), []).append(file)

    problems = []
    for first, *more in kinds.values():
        text = "cannot be read"
        if label_format := format_of(first):
            source = title if title != FORMATS[label_format].title else "others like it"
            text = (
                f"{FORMATS[label_format].title}: not used, the labels are read from "
                f"{source or 'the folder of --input alone'}"
            )
        elif not first.is_file():
            text = "lies in a zip, in which only photographs are read: unzip it there"
        else:
            with suppress(OSError):
                text = _reason(first) or OTHER_FORMATS[first.suffix.lower()]
        text += f" ({len(more) + 1:,} such files)" if more else ""
        problems.append(
            Problem(printable(first.relative_to(folder).as_posix(), 400), text, UNREAD_FILE)
        )
    if text := not_read(others):
        problems.append(Problem(printable(others[0].as_posix(), 400), text, UNREAD_FILE))
    return problems


def _has_other_purpose(folder: Path, file: Path, names: Collection[str]) -> bool:
    """Return whether a file is of a known other purpose: about the data set, a list of photographs,
    of this product.
    """
    if _BESIDE_LABELS.match(file.name) or "__MACOSX" in file.parts:
        return True
    if file.name == OWN_FILES[0]:
        return (file.parent / OWN_FILES[1]).is_file()
    if file.suffix.lower() in (".xml", ".txt"):
        with suppress(OSError), file.open(encoding="utf-8", errors="replace") as stream:
            line = stream.readline(HEAD_BYTES).strip().lower()
            words = line.split()
            return (
                "<pamdataset" in line
                or line.endswith(IMAGE_SUFFIXES)
                or (len(words) in (1, 2) and words[0] in names)
            )
    if file.suffix.lower() == ".zip":
        return file.parent == folder
    return file.suffix.lower() not in SUFFIXES and BESIDE.search(file.name) is not None


def holds_names_or_outlines(file: Path) -> bool:
    """Return whether a JSON file, or one of ADE20K's texts, by its beginning names classes or has
    outlines.
    """
    with suppress(OSError), file.open("rb") as stream:
        return file.suffix.lower() in (".json", ".txt") and bool(
            _NAMES_OR_OUTLINES.search(stream.read(HEAD_BYTES))
        )
    return False


def describe_foreign(folder: Path) -> str:
    """Return in one line what a folder holds, what is missing, and which formats are read."""
    if not folder.is_dir():
        return "no such folder; " + _cure(folder)
    files = [
        place / entry.name
        for place, entries in walk(folder, lambda path: path.name[:1] != ".")
        for entry in entries
    ]
    files = [file for file in files if not file.name.startswith(".")]
    if not files:
        return "is empty; " + _cure(folder)
    suffixes = Counter(file.suffix.lower() or "without suffix" for file in files)
    kinds = ", ".join(
        f"{number:,} {printable(suffix)}" for suffix, number in suffixes.most_common(MAX_SUFFIXES)
    )
    more = f" and {len(suffixes) - MAX_SUFFIXES} more kinds" if len(suffixes) > MAX_SUFFIXES else ""
    formats = ", ".join(tool.title for tool in FORMATS.values())
    missing = "photographs and labels are missing"
    if suffixes.keys() & {*IMAGE_SUFFIXES}:
        missing = (
            "the file with the labels is missing; export it from your tool and put it beside the "
            "photographs"
        )
    for left in unread_files(folder, (), (), (), "")[:1]:  # the likeliest reason
        missing = f"{left.place}: {left.text}"
    return (
        f"holds no labels of a known format, only {kinds}{more}: {missing}. "
        f"Known formats: {formats}, {EPRI_TITLE} (docs/labels.md)"
        + ("" if EXTRA_READERS else MISSING_EXTRA)
    )


def _cure(folder: Path) -> str:
    advice = "name the folder of your photographs and labels with --input"
    return (
        f"{advice}, or run python download_data.py for EPRI's data"
        if folder == EPRI_FOLDER
        else advice
    )


def _reason(file: Path) -> str:
    """Return why a file that may hold labels is not read; an empty string
    if the suffix tells it.
    """
    suffix = file.suffix.lower()
    if suffix == ".xml":
        element = first_element(file)
        text = file.read_bytes()[:HEAD_BYTES]
        if element == "annotation" and (b"<polygon" in text or b"<segm>" in text):
            return (
                "is LabelMe's XML, whose polygons are not read: export as COCO, or from CVAT as "
                "CVAT for images 1.1"
            )
        return (
            f"holds <{printable(element)}>: export polygons or masks"
            if element
            else "is not XML: export it again"
        )
    if suffix == ".csv":
        with file.open("rb") as stream:
            header = stream.readline(400).decode("utf-8", "replace").strip()
        return (
            f"is a CSV other than EPRI's ({printable(header, 60)}): if it holds labels, export "
            "them as JSON"
        )
    return _json_reason(file) if suffix == ".json" else ""


def _json_reason(file: Path) -> str:
    try:
        content = read_json(file)
    except UserError as error:
        return f"cannot be read ({one_line(error, 200)})"
    if not isinstance(content, dict):
        return "is a list of other items than Label Studio's tasks: export as COCO"
    with file.open("rb") as text:
        head = text.read(HEAD_BYTES)
    tool = next((f"is probably {name}: " for key, name in TOOLS.items() if key in head), "")
    keys = [printable(key, 20) for key in content]
    return (
        f"{tool}has only {', '.join(keys[:MAX_KEYS]) or 'no keys'}: if these are labels, export "
        "them as COCO"
    )
