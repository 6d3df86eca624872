"""Finds the label files of the input folder, EPRI's CSV or an annotation tool's JSON, and the rows of each photograph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.common.errors import UserError, printable
from utils.sources.parsing.coco import CocoFile
from utils.sources.parsing.json_stream import JsonStream
from utils.sources.parsing.label_csv import ClassTable, Problem, read_label_csv
from utils.sources.parsing.label_studio import LabelStudioFile
from utils.sources.parsing.manifest import NO_PHOTOGRAPH, NO_ROW
from utils.sources.parsing.matching import match_names
from utils.sources.parsing.rows import AnnotationRow, Row
from utils.sources.parsing.sources import Photograph, find_label_csv, find_photographs

AUTO, EPRI, COCO, LABEL_STUDIO = "auto", "epri", "coco", "labelstudio"
FORMAT_CHOICES = (AUTO, EPRI, COCO, LABEL_STUDIO)
FILES: dict[str, type[CocoFile] | type[LabelStudioFile]] = {COCO: CocoFile, LABEL_STUDIO: LabelStudioFile}
HOW_TO_EXPORT = {
    COCO: "export as COCO 1.0 and unzip it there, so that annotations/instances_*.json lies beside images/",
    LABEL_STUDIO: "export as JSON and put the file beside the photographs",
}
DUPLICATE_ROW = "duplicate row"
RowsByKey = dict[str, tuple[Row, ...]]


@dataclass(frozen=True)
class Labelled:
    """The photographs of the input, the rows of those to build by key, and the classes that the label files name."""

    photographs: dict[str, Photograph]
    rows: RowsByKey
    class_names: tuple[str, ...] | None


def read_labels(
    folder: Path, label_format: str, keep_unlabelled: bool, problems: list[Problem], trust_links: bool
) -> Labelled:
    """Find labels and photographs in the input folder. Raises UserError when there is nothing to build."""
    chosen = choose_format(folder) if label_format == AUTO else label_format
    if chosen == EPRI:
        csv_file = find_label_csv(folder)
        photographs = find_photographs(folder, problems, trust_links)
        rows = _rows_of_csv(csv_file, photographs, problems)
        return Labelled(photographs, _complete(rows, photographs, csv_file, keep_unlabelled, problems), None)
    label_files = _json_files(folder, chosen)
    photographs = find_photographs(folder, problems, trust_links, by_path=True)
    read = [FILES[chosen](file, problems) for file in label_files]
    found = [row for file in read for row in file.rows()]
    rows = _rows_of_annotations(found, photographs, problems)
    names = tuple(dict.fromkeys(name for file in read for name in file.names()))
    return Labelled(photographs, _complete(rows, photographs, label_files[0], keep_unlabelled, problems), names)


def choose_format(folder: Path) -> str:
    """Return the format of the labels: EPRI's if there is a CSV or no JSON file, else by the file's first character."""
    if not folder.is_dir() or any(path.suffix.lower() == ".csv" for path in folder.iterdir() if path.is_file()):
        return EPRI
    files = _candidates(folder, COCO)
    if not files:
        return EPRI
    with JsonStream(files[0]) as stream:
        return LABEL_STUDIO if stream.peek() == "[" else COCO


def choose_classes(known: Sequence[str], named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the known classes if they cover all that the label files name, else those of the files."""
    table = ClassTable(known)
    if named is None or all(table.find(name) is not None for name in named):
        return tuple(known)
    return tuple(named)


def _json_files(folder: Path, label_format: str) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name another --input")
    files = _candidates(folder, label_format)
    if not files:
        raise UserError(f"{folder}: no JSON file with labels; {HOW_TO_EXPORT[label_format]}")
    if label_format == LABEL_STUDIO and len(files) > 1:
        found = ", ".join(path.name for path in files[:5])
        raise UserError(f"{folder}: which JSON file holds the labels? Found {found}; keep one")
    return files


def _candidates(folder: Path, label_format: str) -> list[Path]:
    """Return the JSON files that may hold labels, COCO's in `annotations` first."""
    places = [(folder / "annotations", "instances_*.json"), (folder / "annotations", "*.json")]
    places = places if label_format == COCO else []
    for place, pattern in [*places, (folder, "*.json")]:
        files = sorted(path for path in place.glob(pattern) if path.is_file() and not path.name.startswith("."))
        if files:
            return files
    return []


def _rows_of_csv(csv_file: Path, photographs: dict[str, Photograph], problems: list[Problem]) -> RowsByKey:
    """Return the rows of each photograph in EPRI's CSV."""
    rows: RowsByKey = {}
    for row in read_label_csv(csv_file, problems):
        key, place = row.image_name.lower(), f"{csv_file.name}:{row.line}"
        if key not in photographs:
            problems.append(Problem(place, f"no photograph called {printable(row.image_name)}", NO_PHOTOGRAPH))
        elif any(row.digest == other.digest for other in rows.get(key, ())):
            text = f"repeats line {rows[key][0].line} for {printable(row.image_name)}; ignored"
            problems.append(Problem(place, text, DUPLICATE_ROW))
        else:
            if key in rows:
                text = f"a further row for {printable(row.image_name)} (line {rows[key][0].line}); merged"
                problems.append(Problem(place, text, DUPLICATE_ROW))
            rows[key] = (*rows.get(key, ()), row)
    return rows


def _rows_of_annotations(
    found: Iterable[AnnotationRow], photographs: dict[str, Photograph], problems: list[Problem]
) -> RowsByKey:
    """Return the rows of each photograph in annotation files."""
    rows: RowsByKey = {}
    found = list(found)
    for row, match in zip(found, match_names((row.names for row in found), photographs), strict=True):
        shown = printable(row.image_name, 200)
        if match.key is None:
            problems.append(Problem(row.file_name, f"{shown}: {match.reason}", NO_PHOTOGRAPH))
        elif any(row.digest == other.digest for other in rows.get(match.key, ())):
            problems.append(Problem(row.file_name, f"{shown}: repeats its labels; ignored", DUPLICATE_ROW))
        else:
            if match.key in rows:
                problems.append(Problem(row.file_name, f"{shown}: listed again; the labels are merged", DUPLICATE_ROW))
            rows[match.key] = (*rows.get(match.key, ()), row)
    return rows


def _complete(
    rows: RowsByKey,
    photographs: dict[str, Photograph],
    label_file: Path,
    keep_unlabelled: bool,
    problems: list[Problem],
) -> RowsByKey:
    """Report photographs without a row; return the rows of those to build, sorted by key. Raises UserError without any."""
    rows = dict(rows)
    for key, photograph in photographs.items():
        if key not in rows:
            text = f"no row in {label_file.name}; " + ("kept without objects" if keep_unlabelled else "skipped")
            problems.append(Problem(printable(photograph.source), text, NO_ROW))
            if keep_unlabelled:
                rows[key] = ()
    if not rows:
        raise UserError(f"{label_file}: none of its rows names one of the {len(photographs)} photographs beside it")
    return dict(sorted(rows.items()))
