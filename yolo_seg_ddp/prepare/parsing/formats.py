"""The label formats that can be read.

The format of a folder is found by the content of its files.
"""

from contextlib import suppress
from pathlib import Path

from yolo_seg_ddp.prepare.parsing.coco import CocoFile
from yolo_seg_ddp.prepare.parsing.label_csv import LABEL_CSV, NAME_COLUMN
from yolo_seg_ddp.prepare.parsing.label_file import HEAD_BYTES, LabelFile, read_json
from yolo_seg_ddp.prepare.parsing.yolo_text import YoloFile
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.extras import find_extra

AUTO, EPRI, YOLO = "auto", "epri", YoloFile.format
# none without its folder
EXTRA_READERS: tuple[type[LabelFile], ...] = getattr(find_extra("labels"), "READERS", ())
# if a folder holds two, the first counts
READERS: tuple[type[LabelFile], ...] = (CocoFile, *EXTRA_READERS, YoloFile)
FORMATS = {
    reader.format: reader for reader in sorted(READERS, key=lambda reader: reader.are_pictures)
}
FORMAT_CHOICES = (AUTO, EPRI, *FORMATS)
EPRI_TITLE = "EPRI's labels"


def find_format(folder: Path) -> str:
    """Return the format of the first file of a known format, in the order of FORMATS; an empty
    string without any.
    """
    if any(_is_epri(file) for file in candidates(folder, ("*.csv", "*.CSV"))):
        return EPRI
    files = dict.fromkeys(
        file for tool in FORMATS.values() for file in candidates(folder, tool.patterns)
    )
    return next(filter(None, map(format_of, files)), "")


def candidates(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of the first pattern that any has, sorted, without hidden ones."""
    for pattern in patterns:
        files = sorted(
            path
            for path in folder.glob(pattern)
            if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        if files:
            return files
    return []


def label_files(folder: Path, chosen: type[LabelFile]) -> list[Path]:
    """Return the files of a format.

    Raises UserError without any, and for several of a format that has one.
    """
    files = candidates(folder, chosen.patterns) if folder.is_dir() else []
    if not files:
        raise UserError(f"{folder}: no {' or '.join(chosen.patterns)}; {chosen.how_to_export}")
    if not chosen.several_files and len(files) > 1:
        alike = [file for file in files if FORMATS.get(format_of(file)) is chosen]
        if len(alike) != 1:
            names = ", ".join(str(path.relative_to(folder)) for path in (alike or files)[:5])
            raise UserError(f"{folder}: which file holds the labels? Found {names}; keep one")
        files = alike
    elif len(files) > 1 and any(file.suffix.lower() == ".json" for file in files):
        # Exports of the same labels in other formats often lie side by side.
        files = [file for file in files if FORMATS.get(format_of(file), chosen) is chosen] or files
    return files


def format_of(file: Path) -> str:
    """Return the format of a file by its content; an empty string if it is of none, or cannot be
    read.
    """
    with suppress(UserError, OSError):
        if file.suffix.lower() == ".json":
            return _json_format(file)
        return next((name for name, reader in FORMATS.items() if reader.is_of_format(file)), "")
    return ""


def is_mask(file: Path) -> bool:
    """Return whether a picture holds labels and is no photograph."""
    return any(reader.are_pictures and reader.is_of_format(file) for reader in FORMATS.values())


def _json_format(file: Path) -> str:
    """Return the format of a JSON file by its first keys. Raises UserError when it is not JSON."""
    content = read_json(file)
    if isinstance(content, dict):
        values = [*content.items()]
    else:
        first = content[:1] if isinstance(content, list) else []
        values = [(None, item) for item in first if isinstance(item, dict)]
    owners = (
        name
        for key, value in values
        for name, tool in FORMATS.items()
        if tool.is_json_of_format(key, value)
    )
    return next(owners, "")


def _is_epri(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as stream:
        return file.name.lower() == LABEL_CSV.lower() or NAME_COLUMN.encode() in stream.readline(
            HEAD_BYTES
        )
    return False
