"""Finds the label files of the input folder, EPRI's CSV or an annotation tool's files, and the rows of each photograph.

A name in a label file is only compared with the photographs that are there, never opened.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from utils.common.errors import UserError, printable
from utils.sources.parsing.coco import CocoFile
from utils.sources.parsing.json_stream import JsonStream
from utils.sources.parsing.label_csv import ClassTable, Problem, read_label_csv
from utils.sources.parsing.label_studio import LabelStudioFile
from utils.sources.parsing.labelme import LabelMeFile
from utils.sources.parsing.manifest import NO_PHOTOGRAPH, NO_ROW
from utils.sources.parsing.rows import AnnotationRow, LabelFile, Row, place_of
from utils.sources.parsing.sources import Photograph, find_label_csv, find_photographs, leaves

AUTO, EPRI, COCO, LABEL_STUDIO, LABEL_ME = "auto", "epri", "coco", "labelstudio", "labelme"
FORMAT_CHOICES = (AUTO, EPRI, COCO, LABEL_STUDIO, LABEL_ME)
COCO_KEYS, LABEL_ME_KEYS = ("categories", "images", "annotations"), ("shapes", "imagePath")
DUPLICATE_ROW = "duplicate row"
_UPLOAD_PREFIX = re.compile(r"^[0-9a-f]{6,12}-")  # Label Studio puts it before the name of an uploaded file
RowsByKey = dict[str, tuple[Row, ...]]


@dataclass(frozen=True)
class Format:
    """An annotation tool's format. Its files are those of the first of `patterns` that any has, one or `several`.

    per_photograph: each photograph has its own file, and its path in it is relative to the file's folder.
    """

    reader: type[LabelFile]
    patterns: tuple[str, ...]
    several: bool
    how_to_export: str
    per_photograph: bool = False


FORMATS = {
    COCO: Format(
        CocoFile,
        ("annotations/instances_*.json", "annotations/*.json", "*.json"),
        True,
        "export as COCO 1.0 and unzip it there, so that annotations/instances_*.json lies beside images/",
    ),
    LABEL_STUDIO: Format(LabelStudioFile, ("*.json",), False, "export as JSON and put the file beside the photographs"),
    LABEL_ME: Format(LabelMeFile, ("**/*.json",), True, "save LabelMe's files there, beside the photographs", True),
}


@dataclass(frozen=True)
class Labelled:
    """The photographs of the input, the rows of those to build by key, and the classes that the label files name."""

    photographs: dict[str, Photograph]
    rows: RowsByKey
    class_names: tuple[str, ...] | None


@dataclass(frozen=True)
class Match:
    """The key of the photograph that a name stands for, or the reason why there is none."""

    key: str | None
    reason: str = ""
    is_exact: bool = True


def read_labels(
    folder: Path, label_format: str, keep_unlabelled: bool, problems: list[Problem], trust_links: bool
) -> Labelled:
    """Find labels and photographs in the input folder. Raises UserError when there is nothing to build."""
    chosen = choose_format(folder) if label_format == AUTO else label_format
    rows: list[Row]
    if chosen == EPRI:
        (file,), names = _inside([find_label_csv(folder)], folder, problems, trust_links), None
        photographs = find_photographs(folder, problems, trust_links)
        rows = list(read_label_csv(file, problems))
        matches = [_match_name(row.image_name, photographs) for row in rows]
    else:
        tool = FORMATS[chosen]
        files = _label_files(folder, tool, problems, trust_links)
        photographs = find_photographs(folder, problems, trust_links, by_path=True)
        read = [tool.reader(file, problems) for file in files]
        annotated = [row for labels in read for row in labels.rows()]
        names = tuple(dict.fromkeys(name for labels in read for name in labels.names()))
        if tool.per_photograph:
            names = tuple(sorted(names))
        matches = match_names([_photograph_names(row, folder, tool) for row in annotated], photographs)
        rows, file = [*annotated], folder if tool.per_photograph else files[0]
    by_key = _rows_by_key(rows, matches, problems)
    return Labelled(photographs, _complete(by_key, photographs, file, keep_unlabelled, problems), names)


def choose_format(folder: Path) -> str:
    """Return the format of the labels: EPRI's if there is a CSV or no JSON file, else by its layout."""
    if not folder.is_dir() or any(path.suffix.lower() == ".csv" for path in folder.iterdir() if path.is_file()):
        return EPRI
    files = _candidates(folder, FORMATS[COCO]) or _candidates(folder, FORMATS[LABEL_ME])
    if not files:
        return EPRI
    return next(filter(None, map(_format_of, files)), COCO)  # COCO's reader then says what is wrong


def _format_of(file: Path) -> str:
    """Return the format of a JSON file by its first keys; an empty string if it has none of a format, or is not JSON."""
    with suppress(UserError), closing(JsonStream(file)) as stream:
        if stream.peek() == "[":
            return LABEL_STUDIO
        for key in stream.keys():  # noqa: SIM118 - not a dictionary
            if key in COCO_KEYS + LABEL_ME_KEYS:
                return LABEL_ME if key in LABEL_ME_KEYS else COCO
            stream.skip()
    return ""


def choose_classes(known: Sequence[str], named: Sequence[str] | None) -> tuple[str, ...]:
    """Return the known classes if they cover all that the label files name, else those of the files."""
    table = ClassTable(known)
    if named is None or all(table.find(name) is not None for name in named):
        return tuple(known)
    return tuple(named)


def match_names(wanted: Iterable[Sequence[str]], photographs: Mapping[str, Photograph]) -> list[Match]:
    """Return a match for each list of alternative names, by file name and as many folders as agree.

    A match whose folders differ counts only if no other name claims the photograph. Upper and lower case do not matter.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    by_upload: dict[str, list[str]] = defaultdict(list)
    for key in photographs:
        name = PurePosixPath(key).name
        by_name[name].append(key)
        by_upload[_as_uploaded(name)].append(key)
    names = [tuple(alternatives) for alternatives in wanted]
    matches = [_match(alternatives, by_name, by_upload) for alternatives in names]
    claims: dict[str | None, set[tuple[str, ...] | None]] = defaultdict(set)
    for alternatives, match in zip(names, matches, strict=True):
        claims[match.key].add(None if match.is_exact else alternatives)
    disputed = Match(
        None, "other names fit the only photograph called so; put the photographs into the folders of the names"
    )
    return [match if match.is_exact or len(claims[match.key]) == 1 else disputed for match in matches]


def _match(alternatives: Sequence[str], by_name: Mapping[str, list[str]], by_upload: Mapping[str, list[str]]) -> Match:
    """Return the best match of some names of one photograph."""
    reason = "no name of a photograph"
    for name in alternatives:
        parts = [part for part in re.split(r"[\\/]+", name.lower()) if part not in ("", ".")]
        if not parts:
            continue
        if ".." in parts:
            reason = "the name leads out of the folder; write it below the folder of the photographs"
            continue
        original = _UPLOAD_PREFIX.sub("", parts[-1])
        keys = by_name.get(parts[-1]) or by_name.get(original) or by_upload.get(_as_uploaded(original))
        if keys:
            return _best(parts, keys)
        reason = f"no photograph called {printable(parts[-1])}"
    return Match(None, reason)


def _best(parts: Sequence[str], keys: list[str]) -> Match:
    depth = {key: len(PurePosixPath(key).parts) for key in keys}
    common = {key: _num_common(parts, PurePosixPath(key).parts) for key in keys}
    most = max(common.values())
    best = [key for key in keys if common[key] == most]
    if most == len(parts):  # images/a.jpg rather than images/old/a.jpg
        shortest = min(depth[key] for key in best)
        best = [key for key in best if depth[key] == shortest]
    if len(best) > 1:
        return Match(None, f"{len(best)} photographs have this name, such as {printable(best[0])}; name the folder")
    return Match(best[0], is_exact=most == len(parts))


def _num_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return how many parts agree at the end; the file name, for which uploads have other spellings, always counts."""
    number = 1
    while number < min(len(first), len(second)) and first[-1 - number] == second[-1 - number]:
        number += 1
    return number


def _as_uploaded(name: str) -> str:
    """Return a file name as Django stores an uploaded file: spaces become underscores, other signs vanish."""
    return re.sub(r"[^-\w.]", "", name.strip().replace(" ", "_"))


def _match_name(name: str, photographs: Mapping[str, Photograph]) -> Match:
    """Return the photograph of EPRI's name, which has no folders."""
    key = name.lower()
    return Match(key) if key in photographs else Match(None, f"no photograph called {printable(name)}")


def _label_files(folder: Path, chosen: Format, problems: list[Problem], trust_links: bool) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name another --input")
    files = _candidates(folder, chosen)
    if not files:
        raise UserError(f"{folder}: no JSON file with labels; {chosen.how_to_export}")
    if len(files) > 1 and not chosen.several:
        names = ", ".join(path.name for path in files[:5])
        raise UserError(f"{folder}: which JSON file holds the labels? Found {names}; keep one")
    return _inside(files, folder, problems, trust_links)


def _inside(files: list[Path], folder: Path, problems: list[Problem], trust_links: bool) -> list[Path]:
    """Return the files that are no links out of the folder: a message about one could quote any file of the user."""
    root = None if trust_links else os.path.realpath(folder)
    inside = [file for file in files if not leaves(file, root, folder, problems)]
    if not inside:
        raise UserError(f"{files[0]}: {problems[-1].text}")
    return inside


def _photograph_names(row: AnnotationRow, folder: Path, chosen: Format) -> tuple[str, ...]:
    """Return the paths of a row's photograph relative to the input folder; those that leave it begin with `..` or `/`."""
    if not chosen.per_photograph:
        return row.names
    return tuple(os.path.normpath(row.file.parent.relative_to(folder) / name) for name in row.names)


def _candidates(folder: Path, chosen: Format) -> list[Path]:
    """Return the files that may hold labels."""
    for pattern in chosen.patterns:
        files = sorted(
            path
            for path in folder.glob(pattern)
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        )
        if files:
            return files
    return []


def _rows_by_key(rows: Sequence[Row], matches: Sequence[Match], problems: list[Problem]) -> RowsByKey:
    """Return the rows of each photograph. A row without one, and one that repeats another, is a problem."""
    by_key: RowsByKey = {}
    for row, match in zip(rows, matches, strict=True):
        earlier = by_key.get(match.key or "", ())
        is_same = any(row.digest == other.digest for other in earlier)
        if match.key is None:
            prefix = "" if row.line else f"{printable(row.image_name, 200)}: "
            problems.append(Problem(place_of([row]), prefix + match.reason, NO_PHOTOGRAPH))
        elif earlier:
            problems.append(Problem(place_of([row]), _repeat_text(row, earlier[0], is_same), DUPLICATE_ROW))
        if match.key is not None and not is_same:
            by_key[match.key] = (*earlier, row)
    return by_key


def _repeat_text(row: Row, first: Row, is_same: bool) -> str:
    """Return what is said about a further row of a photograph, which may be the `first` again."""
    if row.line is None:
        what = "repeats its labels; ignored" if is_same else "listed again; the labels are merged"
        return f"{printable(row.image_name, 200)}: {what}"
    shown = printable(row.image_name)
    if is_same:
        return f"repeats line {first.line} for {shown}; ignored"
    return f"a further row for {shown} (line {first.line}); merged"


def _complete(
    rows: RowsByKey,
    photographs: Mapping[str, Photograph],
    label_file: Path,
    keep_unlabelled: bool,
    problems: list[Problem],
) -> RowsByKey:
    """Report photographs without a row; return the rows of those to build, sorted by key. Raises UserError without any."""
    for key, photograph in photographs.items():
        if key not in rows:
            text = f"no row in {label_file.name}; " + ("kept without objects" if keep_unlabelled else "skipped")
            problems.append(Problem(printable(photograph.source), text, NO_ROW))
            if keep_unlabelled:
                rows[key] = ()
    if not rows:
        raise UserError(f"{label_file}: none of its rows names one of the {len(photographs)} photographs beside it")
    return dict(sorted(rows.items()))
