"""Builds `{train,val}/{images,labels}` from raw photographs and labels: parallel, resumable, reproducible."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
from tqdm import tqdm

from utils.common.cores import usable_cpu_count
from utils.common.errors import UserError, printable
from utils.common.files import write_bytes_atomic
from utils.data.images import ImageError
from utils.data.labels import LabelError
from utils.data.parsing.label_csv import UNREADABLE_ROW, ClassTable, LabelRow, Problem, read_label_csv
from utils.data.parsing.manifest import (
    NO_PHOTOGRAPH,
    NO_ROW,
    by_severity,
    dataset_yaml_text,
    make_manifest,
    manifest_bytes,
)
from utils.data.parsing.photograph import PhotographOptions, build_image, build_label
from utils.data.parsing.sources import (
    UNREADABLE_PHOTOGRAPH,
    Photograph,
    PhotographReader,
    find_label_csv,
    find_photographs,
)
from utils.data.parsing.split import SPLITS, assign_splits, output_stems
from utils.data.parsing.state import (
    DATASET_FILE,
    MANIFEST_FILE,
    BuildState,
    Entry,
    open_output,
    output_files,
    remove_unexpected,
)

DUPLICATE_ROW = "duplicate row"


@dataclass(frozen=True)
class BuildOptions:
    """The options that affect the output folder."""

    photograph: PhotographOptions
    split_by: str
    val_fraction: float
    keep_unlabelled: bool

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        shared = values.pop("photograph")
        del shared["class_names"]
        return {**shared, **values}


@dataclass(frozen=True)
class Job:
    """One photograph to build, its label rows, its output name and split, and its entry from an earlier run."""

    photograph: Photograph
    rows: tuple[LabelRow, ...]
    place: str
    stem: str
    split: str
    previous: Entry | None


def build_dataset(
    input_folder: Path, output_folder: Path, options: BuildOptions, num_workers: int, *, trust_links: bool = False
) -> dict[str, Any]:
    """Build or complete the processed data set and return its manifest; `num_workers` 0 means all usable cores.

    Removes all other files from the four output folders. Raises UserError without usable input.
    """
    if output_folder.resolve().is_relative_to(input_folder.resolve()):
        raise UserError(f"--output {output_folder} lies inside --input {input_folder}; name a folder beside it")
    problems: list[Problem] = []
    csv_file = find_label_csv(input_folder)
    photographs = find_photographs(input_folder, problems, trust_links)
    rows = _rows_by_key(csv_file, photographs, options.keep_unlabelled, problems)
    chosen = {key: photographs[key] for key in rows}
    splits = assign_splits(chosen.values(), options.split_by, options.val_fraction)
    stems = output_stems(chosen.values())
    with open_output(output_folder) as state:
        jobs = [
            Job(chosen[key], rows[key], _place(csv_file, rows[key]), stems[key], splits[key], state.entries.get(key))
            for key in chosen
        ]
        entries = _build_all(jobs, state, options.photograph, num_workers or usable_cpu_count(), problems)
        if not entries:
            worst = by_severity(problems)[0]  # a job yields an entry or a problem
            raise UserError(f"{input_folder}: none of {len(jobs)} photographs is usable; {worst.place}: {worst.text}")
        usable = [chosen[entry.key] for entry in entries]
        final_splits = assign_splits(usable, options.split_by, options.val_fraction)
        entries = [_move(output_folder, entry, final_splits[entry.key]) for entry in entries]
        remove_unexpected(output_folder, entries)
        state.rewrite(entries)
        problems += [_complaint(csv_file, rows[entry.key], item) for entry in entries for item in entry.complaints]
        names = options.photograph.class_names
        manifest = make_manifest(entries, chosen, problems, options.to_dict(), names)
        write_bytes_atomic(output_folder / DATASET_FILE, dataset_yaml_text(manifest).encode())
        write_bytes_atomic(output_folder / MANIFEST_FILE, manifest_bytes(manifest))
    return manifest


def _rows_by_key(
    csv_file: Path, photographs: dict[str, Photograph], keep_unlabelled: bool, problems: list[Problem]
) -> dict[str, tuple[LabelRow, ...]]:
    """Return the rows of each photograph to build, sorted by key. Raises UserError when there is none."""
    rows: dict[str, tuple[LabelRow, ...]] = {}
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
    for key, photograph in photographs.items():
        if key not in rows:
            text = f"no row in {csv_file.name}; " + ("kept without objects" if keep_unlabelled else "skipped")
            problems.append(Problem(printable(photograph.source), text, NO_ROW))
            if keep_unlabelled:
                rows[key] = ()
    if not rows:
        raise UserError(f"{csv_file}: none of its rows names one of the {len(photographs)} photographs beside it")
    return dict(sorted(rows.items()))


def _build_all(
    jobs: list[Job], state: BuildState, options: PhotographOptions, num_threads: int, problems: list[Problem]
) -> list[Entry]:
    """Build all photographs in threads; return the entries of the usable ones, sorted by key."""
    classes = ClassTable(options.class_names)
    entries: list[Entry] = []
    # Until the build is complete, the folder mixes two data sets, which no manifest describes.
    (state.folder / MANIFEST_FILE).unlink(missing_ok=True)
    opencv_threads = cv2.getNumThreads()
    cv2.setNumThreads(1)  # a photograph per thread; more OpenCV threads would only compete for cores
    pool = ThreadPoolExecutor(num_threads)
    try:
        with PhotographReader() as reader:
            futures = [pool.submit(_build_one, job, state.folder, reader, options, classes) for job in jobs]
            try:
                for future in tqdm(as_completed(futures), total=len(futures), unit="photo", disable=None):
                    result = future.result()
                    if isinstance(result, Problem):
                        problems.append(result)
                        continue
                    entries.append(result)
                    if state.entries.get(result.key) != result:
                        state.append(result)
            finally:
                pool.shutdown(cancel_futures=True)  # waits for the photographs in progress
    finally:
        cv2.setNumThreads(opencv_threads)
    return sorted(entries, key=lambda entry: entry.key)


def _build_one(
    job: Job, folder: Path, reader: PhotographReader, options: PhotographOptions, classes: ClassTable
) -> Entry | Problem:
    image_fingerprint = options.image_fingerprint(job.photograph.stamp)
    label_fingerprint = options.label_fingerprint(image_fingerprint, [row.digest for row in job.rows])
    image_file, label_file = output_files(folder, job.split, job.stem)
    kept = _keep_image(job, folder, image_fingerprint)
    try:
        if kept and kept.label_fingerprint == label_fingerprint and _has_digest(label_file, kept.label_digest):
            return dataclasses.replace(kept, split=job.split)
        if kept:
            jpeg, facts, image = b"", kept.facts, (kept.image_bytes, kept.image_digest)
        else:
            jpeg, facts = build_image(reader.read(job.photograph), options.long_side_px)
            image = (len(jpeg), _digest(jpeg))
        label = build_label([row.text for row in job.rows], facts, options, classes)
    except ImageError as error:
        return Problem(printable(job.photograph.source), f"{error}; skipped", UNREADABLE_PHOTOGRAPH)
    except LabelError as error:
        return Problem(job.place, f"{error}; {printable(job.photograph.name)} is skipped", UNREADABLE_ROW)
    if jpeg:
        write_bytes_atomic(image_file, jpeg)
    write_bytes_atomic(label_file, label.text.encode())
    return Entry(
        key=job.photograph.key,
        stem=job.stem,
        split=job.split,
        image_fingerprint=image_fingerprint,
        label_fingerprint=label_fingerprint,
        image_bytes=image[0],
        image_digest=image[1],
        label_digest=_digest(label.text.encode()),
        facts=facts,
        exif_frame=label.exif_frame,
        objects=dict(label.objects),
        unknown_values=dict(label.unknown_values),
        complaints=label.complaints,
    )


def _keep_image(job: Job, folder: Path, image_fingerprint: str) -> Entry | None:
    """Return the earlier entry if its image is still valid; move the image to this run's split if needed."""
    previous = job.previous
    if previous is None or previous.image_fingerprint != image_fingerprint or previous.stem != job.stem:
        return None
    wanted = output_files(folder, job.split, job.stem)[0]
    for split in (job.split, *SPLITS):
        image_file = output_files(folder, split, job.stem)[0]
        if image_file.is_file() and image_file.stat().st_size == previous.image_bytes:
            if image_file != wanted:
                os.replace(image_file, wanted)
            return previous
    return None


def _move(folder: Path, entry: Entry, split: str) -> Entry:
    """Move a photograph's files to its final split, which can change when other photographs are unusable."""
    if split != entry.split:
        sources, targets = output_files(folder, entry.split, entry.stem), output_files(folder, split, entry.stem)
        for source, target in zip(sources, targets, strict=True):
            os.replace(source, target)
    return dataclasses.replace(entry, split=split)


def _place(csv_file: Path, rows: tuple[LabelRow, ...]) -> str:
    return f"{csv_file.name}:{','.join(str(row.line) for row in rows)}"


def _complaint(csv_file: Path, rows: tuple[LabelRow, ...], complaint: tuple[int, str, str]) -> Problem:
    row, kind, text = complaint
    return Problem(f"{csv_file.name}:{rows[row].line}", f"{printable(rows[row].image_name)}: {text}", kind)


def _has_digest(file: Path, digest: str) -> bool:
    try:
        return _digest(file.read_bytes()) == digest
    except FileNotFoundError:
        return False


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
