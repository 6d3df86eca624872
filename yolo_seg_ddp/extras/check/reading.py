"""Reads the photographs and labels of all splits on threads.

Errors become findings and do not stop it.
"""

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from yolo_seg_ddp.data.dataset import find_label_file
from yolo_seg_ddp.data.dataset_yaml import DatasetSpec, is_photograph, label_file_for
from yolo_seg_ddp.data.images import ImageError, one_opencv_thread
from yolo_seg_ddp.data.labels import (
    LabelError,
    Photo,
    may_have_regions,
    read_regions,
    with_regions_of,
)
from yolo_seg_ddp.extras.check.findings import Finding, View, shown_path
from yolo_seg_ddp.extras.check.outlines import Labels, Row, check_rows, read_rows
from yolo_seg_ddp.extras.check.pictures import Picture, measure
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.threads import ordered_map

NO_LABEL_FILES = ("classes.txt",)  # annotation tools write it beside the labels


@dataclass(frozen=True)
class Entry:
    """A photograph of a split, with its labels, measures and findings; `picture` is None if it is
    unreadable.
    """

    split: str
    file: Path
    label_file: Path
    rows: list[Row]
    findings: list[Finding]
    picture: Picture | None
    # regions: class ids, ANY_CLASS for all, and outlines in 0..1
    ignored: Sequence[tuple[int, np.ndarray]]
    unsearched: np.ndarray  # int64: classes that nobody looked for


def read_all(
    spec: DatasetSpec, size_px: int, num_threads: int, announce: Callable[[str], None]
) -> tuple[list[Entry], list[Finding]]:
    """Read all splits; return a record for each photograph, and the label files without one.

    size_px: the network's input size, at which small outlines are judged. Raises UserError without
    any photograph.
    """
    if not spec.splits:
        raise UserError(f"{spec.yaml_file}: has none of `train`, `val` and `test`")
    jobs = [(split, file) for split in spec.splits for file in spec.image_files(split, announce)]
    read = functools.partial(_read_entry, spec, size_px, functools.cache(spec.holds))
    with one_opencv_thread():
        entries = list(Progress("photographs", len(jobs))(ordered_map(read, jobs, num_threads)))
    return entries, _labels_without_photo(spec, jobs)


def _read_entry(
    spec: DatasetSpec, size_px: int, holds_folder: Callable[[Path], bool], job: tuple[str, Path]
) -> Entry:
    split, file = job
    picture = None
    findings = list[Finding]()
    try:
        picture = measure(file)
    except (ImageError, OSError) as error:
        reason = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
        findings.append(Finding("unreadable_photo", split, file, reason.removeprefix(f"{file}: ")))
    width, height = (picture.width, picture.height) if picture else (1, 1)
    scale = size_px / max(width, height)
    labels = Labels(split, file, label_file_for(file), spec.names, (width * scale, height * scale))
    rows: list[Row] = []
    regions = Photo(file, np.zeros(0, np.int64), [])
    try:
        if find_label_file(spec, file, holds_folder) is None:
            text = f"no {shown_path(labels.file)}"
            findings.append(
                Finding("no_label_file", split, file, text, views=(View(file, file.name),))
            )
        else:
            rows, wrong = read_rows(labels)
            findings += wrong + check_rows(labels, rows)
        if may_have_regions(file.parent):
            regions = with_regions_of(regions, *read_regions(spec, file, holds_folder))
    except LabelError as error:
        reason = str(error).removeprefix(f"{labels.file}: ")
        findings.append(Finding("unreadable_label", split, labels.file, reason))
    return Entry(
        split,
        file,
        labels.file,
        rows,
        findings,
        picture,
        tuple(zip(regions.ignored_ids, regions.ignored, strict=True)),
        regions.ignored_ids[regions.unsearched],
    )


def _labels_without_photo(spec: DatasetSpec, jobs: Sequence[tuple[str, Path]]) -> list[Finding]:
    """Return the label files, in the folders of the photographs' label files, that belong to no
    photograph there.
    """
    split_of = {label_file_for(file).parent: split for split, file in reversed(jobs)}
    stems: dict[Path, set[str]] = {folder: set() for folder in split_of}
    # Also those of a list that are missing.
    for _, file in jobs:
        stems[label_file_for(file).parent].add(label_file_for(file).name)
    for image_folder in {file.parent for _, file in jobs if file.parent.is_dir()}:
        for name in os.listdir(image_folder):
            if is_photograph(name):
                label_file = label_file_for(image_folder / name)
                stems[label_file.parent].add(label_file.name)
    findings = []
    for folder, split in split_of.items():
        if folder.is_dir() and spec.holds(folder):
            names = {
                name
                for name in os.listdir(folder)
                if name.endswith(".txt") and not name.startswith(".")
            }
            lists = {source for sources in spec.splits.values() for source in sources}
            findings += [
                Finding("label_without_photo", split, folder / name, "no photograph has this name")
                for name in sorted(names - stems[folder] - set(NO_LABEL_FILES))
                if folder / name not in lists
            ]
    return findings
