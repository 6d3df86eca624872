"""Reads the labels of an input folder in any format, and assigns their rows to photographs.

A name in a label file is only compared with the photographs that are there, never opened.
"""

import functools
import operator
import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.data.labels import IGNORE_FOLDER
from yolo_seg_ddp.prepare.parsing.foreign import (
    describe_foreign,
    holds_names_or_outlines,
    unread_files,
)
from yolo_seg_ddp.prepare.parsing.formats import (
    EPRI,
    EPRI_TITLE,
    FORMATS,
    find_format,
    is_mask,
    label_files,
)
from yolo_seg_ddp.prepare.parsing.label_csv import (
    UNREADABLE_ROW,
    ClassTable,
    LabelRow,
    Problem,
    read_label_csv,
)
from yolo_seg_ddp.prepare.parsing.label_file import LabelFile
from yolo_seg_ddp.prepare.parsing.manifest import NO_PHOTOGRAPH, NO_ROW
from yolo_seg_ddp.prepare.parsing.matching import Match, match_name, match_names
from yolo_seg_ddp.prepare.parsing.rows import (
    NO_OBJECT,
    NO_OBJECTS,
    AnnotationRow,
    Lost,
    Row,
    is_ignored,
    lost_for,
    place_of,
)
from yolo_seg_ddp.prepare.parsing.sources import (
    Photograph,
    Source,
    find_label_csv,
    find_photographs,
    inside,
)
from yolo_seg_ddp.prepare.parsing.split import SPLITS, split_of_folder
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.text import counted

DUPLICATE_ROW = "duplicate row"
# end of the names of folders into which LabelMe's converters draw the labels
DRAWINGS = "visualization"
RowsByKey = dict[str, tuple[Row, ...]]


@dataclass(frozen=True)
class Labelled:
    """The photographs of the input, the rows of those to build by key, and the classes that the
    label files name.

    looked_for: the classes that the labels of each photograph list, by its key; a photograph
    without an entry was searched for all.
    """

    title: str
    photographs: dict[str, Photograph]
    rows: RowsByKey
    class_names: tuple[str, ...] | None
    lost: Lost  # objects that no photograph has
    origins: dict[str, str]  # where the name of each class stands
    looked_for: dict[str, frozenset[str]]

    def summary(self) -> str:
        """Return a line about the input: the format, photographs, regions and classes."""
        rows = [
            row for rows in self.rows.values() for row in rows if isinstance(row, AnnotationRow)
        ]
        num_regions = sum(row.counts.total() for row in rows)
        line = f"{self.title}, {counted(len(self.rows), 'photograph')}"
        if self.class_names is None:
            return line
        return (
            f"{line}, {counted(num_regions, 'region')} of {counted(len(self.class_names), 'class')}"
        )


def read_sources(
    sources: Sequence[Source],
    keep_unlabelled: bool,
    problems: list[Problem],
    trust_links: bool,
    *,
    may_join: bool,
    announce: Callable[[str], None],
) -> Labelled:
    """Read the labels of all folders of the input as those of one; announce what each holds.

    EPRI's labels have the classes of dataset.yaml. may_join: the user has said which names are one
    class. Raises UserError for names that may be one, and when there is nothing to build.
    """
    joined = Labelled(f"{len(sources)} folders", {}, {}, None, Counter(), {}, {})
    lists: dict[str, Sequence[str]] = {}
    for source in sources:
        found: list[Problem] = []
        labels = read_labels(
            source.folder, source.label_format, keep_unlabelled, found, trust_links
        )
        if not source.name:
            problems += found
            announce(labels.summary())
            return labels
        announce(f"{source.folder}: {labels.summary()}")
        below = f"{source.name}/"
        problems += [replace(one, place=below + one.place) for one in found]
        names = labels.class_names or load_dataset_yaml(DEFAULT_DATASET_YAML).names
        lists[str(source.folder)] = names
        every = frozenset(names)
        joined.lost.update(labels.lost)
        joined.origins.update(labels.origins | joined.origins)
        for old_key, old in labels.photographs.items():
            photograph = old.of_input(source.name)
            key = photograph.key
            joined.photographs[key] = photograph
            if old_key in labels.rows:
                joined.looked_for[key] = labels.looked_for.get(old_key, every)
                joined.rows[key] = tuple(
                    replace(row, file_name=below + row.file_name)
                    if isinstance(row, LabelRow)
                    else replace(row, place=below + row.file_name)
                    for row in labels.rows[old_key]
                )
    return replace(joined, class_names=_names_of_all(lists, may_join))


def read_labels(
    folder: Path,
    label_format: str,
    keep_unlabelled: bool,
    problems: list[Problem],
    trust_links: bool,
) -> Labelled:
    """Find labels and photographs in the input folder.

    Raises UserError when there is nothing to build.
    """
    if label_format != EPRI:
        return _read_tool(folder, FORMATS[label_format], keep_unlabelled, problems, trust_links)
    (file,) = inside([find_label_csv(folder)], folder, problems, trust_links)
    photographs = find_photographs(folder, problems, trust_links)
    rows = list(read_label_csv(file, problems))
    by_key, lost = _rows_by_key(
        rows, [match_name(row.image_name, photographs) for row in rows], problems
    )
    by_key = _complete(
        by_key, photographs, file, photographs.keys() if keep_unlabelled else (), problems
    )
    problems += unread_files(folder, {file}, (), photographs, EPRI_TITLE)
    return Labelled(EPRI_TITLE, photographs, by_key, None, lost, {}, {})


def _read_tool(
    folder: Path,
    tool: type[LabelFile],
    keep_unlabelled: bool,
    problems: list[Problem],
    trust_links: bool,
) -> Labelled:
    """Read a folder that one tool has labelled."""
    # 1. The label files, and the rows that they have for photographs.
    files = inside(label_files(folder, tool), folder, problems, trust_links)
    photographs = find_photographs(folder, problems, trust_links, by_path=True)
    read = _read_label_files(folder, tool, files, problems)
    every = frozenset(name for labels in read for name in labels.names)
    rows = _rows_with_lists(read, tool, every)

    # 2. Pictures that are masks or drawings are no photographs.
    masks = {labels.path for labels in read if labels.rows or labels.is_damaged} | {
        row.file for row in rows
    }
    photographs = {
        key: item
        for key, item in photographs.items()
        if (item.member or item.file not in masks)
        and not PurePosixPath(key).parent.name.endswith(DRAWINGS)
    }
    by_key, lost = _rows_by_key(
        rows, _matches(rows, folder, tool, photographs), problems, tool.several_files_a_photograph
    )
    tool.one_source(read, by_key, problems)
    without_rows = (
        [] if tool.are_pictures else [photographs[key] for key in photographs.keys() - by_key]
    )
    unused = {one.file for one in without_rows if not one.member and is_mask(one.file)}
    photographs = {
        key: item for key, item in photographs.items() if item.member or item.file not in unused
    }

    # 3. Files that were not read. One of them may name the classes of masks.
    used = {labels.path for labels in read if not labels.is_other}
    left = unread_files(folder, used, unused, photographs, tool.title)
    problems += left
    if tool.are_pictures and not any(labels.class_list for labels in read):
        for one in (one for one in left if holds_names_or_outlines(folder / one.place)):
            raise UserError(
                f"{folder}: no list names the classes of the masks, but {one.place} may: "
                f"{one.text}. Or move such files to "
                "another folder, so that the masks are read alone"
            )

    # 4. Photographs without a row, and the classes that were looked for in each photograph.
    is_kept = keep_unlabelled or tool.missing_is_empty
    kept = _empty(by_key, photographs, keep_unlabelled) if is_kept else set()
    by_key = _complete(
        by_key, photographs, folder if tool.names_are_relative else files[0], kept, problems
    )
    # Without a row a photograph was searched for what all lists have.
    common = every.intersection(*{row.listed for row in rows})
    looked_for = {
        key: functools.reduce(operator.or_, lists_of) if lists_of else common
        for key, members in by_key.items()
        for lists_of in [[row.listed for row in members if isinstance(row, AnnotationRow)]]
    }
    subsets = {
        key: row.subset
        for key, members in by_key.items()
        for row in members
        if isinstance(row, AnnotationRow)
    }
    photographs = {
        key: replace(item, subset=subsets.get(key, "")) for key, item in photographs.items()
    }

    # 5. The classes, and where each name stands.
    names = _class_names(read, files, problems)
    if not names:
        what = f"{tool.title} of {counted(len(by_key), 'photograph')}"
        raise UserError(
            f"{folder}: {what}, but without any object; draw outlines and export them again"
        )
    origins: dict[str, str] = {}
    for labels in read:
        origins |= {name: labels.origin_of(name) for name in labels.names if name not in origins}
    return Labelled(
        tool.title,
        photographs,
        by_key,
        tuple(sorted(names) if tool.lists_used_classes else names),
        sum((labels.lost for labels in read), lost),
        origins,
        looked_for,
    )


def _read_label_files(
    folder: Path, tool: type[LabelFile], files: Sequence[Path], problems: list[Problem]
) -> list[LabelFile]:
    """Read a tool's files. Where several have one name, their problems and rows name the folder."""
    more = (folder,) if tool.takes_folder else ()
    shared = Counter(file.name for file in files)
    read = list[LabelFile]()
    for file in Progress("label files", len(files))(files):
        num_problems = len(problems)
        labels = tool(file, problems, *more)
        read.append(labels)
        if shared[file.name] > 1:
            labels.place = printable(file.relative_to(folder).as_posix(), 400)
            problems[num_problems:] = [
                replace(one, place=labels.place) for one in problems[num_problems:]
            ]
    tool.agree(read)
    return read


def _rows_with_lists(
    read: Sequence[LabelFile], tool: type[LabelFile], every: frozenset[str]
) -> list[AnnotationRow]:
    """Return all files' rows with their place, and with the classes that were looked for: those of
    the file's list, or `every` class of the folder if the tool has no list.
    """
    rows = list[AnnotationRow]()
    lists = dict[frozenset[str], frozenset[str]]()
    for labels in read:
        has_list = not (tool.lists_used_classes or tool.are_pictures)
        listed = frozenset(labels.names) if has_list else every
        # one object for all files of a list
        listed = lists.setdefault(listed, listed)
        rows += [replace(row, place=labels.place, listed=listed) for row in labels.rows]
    return rows


def _class_names(
    read: Sequence[LabelFile], files: Sequence[Path], problems: list[Problem]
) -> list[str]:
    """Return the classes of all files in the order of their first appearance, without names that
    mean a region to ignore or background.
    """
    names = dict.fromkeys(name for labels in read for name in labels.names if not is_ignored(name))
    background = names.keys() & {*NO_OBJECTS}
    if background:
        text = f"{' and '.join(sorted(background))} is no class; what was labelled so is left out"
        problems.append(Problem(printable(files[0].name), text, NO_OBJECT))
    return [name for name in names if name not in background]


def _names_of_all(lists: Mapping[str, Sequence[str]], may_join: bool) -> tuple[str, ...]:
    """Return the classes of all folders, in the order of their first appearance.

    lists: the classes of each folder. Raises UserError if a name differs only by its spelling, or a
    plural, from that of another folder, unless `may_join`.
    """
    first: dict[str, str] = {}
    alike: dict[str, str] = {}
    for folder, names in lists.items():
        table = ClassTable([*first])
        for name in names:
            number = table.find(name)
            if name not in first and number is not None and table.names[number] not in names:
                other = table.names[number]
                alike[name] = f"{other} ({first[other]}) and {name} ({folder})"
        first |= {name: folder for name in names if name not in first}
    if alike and not may_join:
        one_class = shlex.join(name for name in first if name not in alike)
        raise UserError(
            f"{printable('; '.join(alike.values()), 400)} may be names of one class: "
            f"--classes {one_class} joins them, --classes {shlex.join(first)} keeps them apart"
        )
    return tuple(first)


def choose_format(folder: Path) -> str:
    """Return the format of the labels by their content.

    Raises UserError that says what else the folder holds.
    """
    chosen = find_format(folder) if folder.is_dir() else ""
    if not chosen:
        raise UserError(f"{folder}: {describe_foreign(folder)}")
    return chosen


def _empty(
    rows: RowsByKey, photographs: Mapping[str, Photograph], of_all_folders: bool
) -> set[str]:
    """Return the keys of photographs without a row that are no masks: `of_all_folders`, or only of
    folders with rows.
    """
    folders = {PurePosixPath(key).parent for key in rows}
    chosen = {
        key
        for key in photographs.keys() - rows
        if of_all_folders or PurePosixPath(key).parent in folders
    }
    return {key for key in chosen if photographs[key].member or not is_mask(photographs[key].file)}


def _matches(
    rows: Sequence[AnnotationRow],
    folder: Path,
    tool: type[LabelFile],
    photographs: Mapping[str, Photograph],
) -> list[Match]:
    """Return each row's photograph. One of the folders above it has the name of the row's subset or
    of the file's folder.

    No row gets a photograph in the folder of another subset. Two subsets never get the same
    photograph.
    """
    # 1. What the folders above each photograph are called.
    folders_of = {
        key: {_subset(part) for part in PurePosixPath(key).parts[:-1]} for key in photographs
    }
    known = {*SPLITS}.union(*folders_of.values())

    # 2. Rows by their subsets: those that the file names, and the folders above the file that are
    #    known.
    rows_of: dict[frozenset[str], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        subset = _subset(row.subset)
        above = () if tool.names_are_relative else row.file.relative_to(folder).parts[:-1]
        subsets = {subset, *map(_subset, above)} & known
        if subset and (tool.names_subsets or subset in (*SPLITS, "default")):
            subsets.add(subset)
        rows_of[frozenset(subsets)].append(number)

    # 3. First the photographs in folders of just these subsets, then those that are in no folder of
    #    another subset.
    named = set().union(*rows_of)
    matches = [Match(None, "no photograph")] * len(rows)
    claims: dict[str | None, set[frozenset[str]]] = defaultdict(set)
    for group, numbers in rows_of.items():
        same = [key for key in photographs if not group or folders_of[key] & named == group]
        outside = [key for key in photographs if folders_of[key] & named < group]
        for keys in (same, outside):
            left = [number for number in numbers if matches[number].key is None]
            names = [_photograph_names(rows[number], folder, tool) for number in left]
            for number, match in zip(left, match_names(names, keys), strict=True):
                # Any other reason of the first search says more than the second one's.
                if match.key is not None or "no photograph" in matches[number].reason:
                    matches[number] = match
                claims[match.key].add(group)

    # 4. A photograph of several subsets belongs to none.
    shared = Match(
        None,
        "several subsets name this photograph; put the photographs into folders of the subsets",
    )
    return [
        shared if match.key and len(claims[match.key] - {frozenset()}) > 1 else match
        for match in matches
    ]


def _photograph_names(row: AnnotationRow, folder: Path, tool: type[LabelFile]) -> tuple[str, ...]:
    """Return the paths of a row's photograph, relative to the input folder.

    A path out of it begins with `..` or `/`.
    """
    if not tool.names_are_relative:
        return row.names
    return tuple(os.path.normpath(row.file.parent.relative_to(folder) / name) for name in row.names)


def _subset(name: str) -> str:
    return split_of_folder(name) or name.lower()


def _rows_by_key(
    rows: Sequence[Row],
    matches: Sequence[Match],
    problems: list[Problem],
    may_have_several: bool = False,
) -> tuple[RowsByKey, Lost]:
    """Return the rows of each photograph, and the objects of other rows.

    Rows without a photograph and repeated ones are problems.
    """
    by_key: RowsByKey = {}
    lost: Lost = Counter()

    def is_for_regions(row: Row) -> bool:
        return isinstance(row, AnnotationRow) and IGNORE_FOLDER in row.file.parts

    for row, match in zip(rows, matches, strict=True):
        earlier = by_key.get(match.key or "", ())
        is_same = any(row.digest == other.digest for other in earlier)
        if match.key is None:
            prefix = "" if row.line else f"{printable(row.image_name, 200)}: "
            problems.append(Problem(place_of([row]), prefix + match.reason, NO_PHOTOGRAPH))
        elif earlier and (
            is_same or not (may_have_several or any(map(is_for_regions, (row, *earlier))))
        ):
            problems.append(
                Problem(place_of([row]), _repeat_text(row, earlier[0], is_same), DUPLICATE_ROW)
            )
        if match.key is not None and not is_same:
            by_key[match.key] = (*earlier, row)
        else:
            lost += lost_for(row.counts, NO_PHOTOGRAPH if match.key is None else DUPLICATE_ROW)
    if notes := [match.note for match in matches if match.note]:
        text = (
            f"{len(notes)} photographs have another extension than in the labels, such as "
            f"{notes[0]}"
        )
        problems.append(Problem(rows[0].file_name, text, "other extension"))
    return by_key, lost


def _repeat_text(row: Row, first: Row, is_same: bool) -> str:
    """Return the message about a further row of a photograph, which may repeat the `first`."""
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
    labels: Path,
    kept: Collection[str],
    problems: list[Problem],
) -> RowsByKey:
    """Report photographs without a row; return the rows of those to build, sorted by key.

    Raises UserError without any.
    """
    for key, photograph in photographs.items():
        if key not in rows:
            text = f"no row in {labels.name}; " + (
                "kept without objects" if key in kept else "skipped"
            )
            problems.append(Problem(printable(photograph.source), text, NO_ROW))
            if key in kept:
                rows[key] = ()
    if not rows:
        causes = [
            problem
            for kind in (UNREADABLE_ROW, NO_PHOTOGRAPH)
            for problem in problems
            if problem.kind == kind
        ]
        reason = "".join(f"; {problem.place}: {problem.text}" for problem in causes[:1])
        present = f"; there is {printable(next(iter(photographs)))}" if photographs else ""
        count = f"{counted(len(photographs), 'photograph')} beside it"
        raise UserError(f"{labels}: none of its rows names one of the {count}{reason}{present}")
    return dict(sorted(rows.items()))
