"""Builds `{train,val}/{images,labels}` from raw photographs and labels: parallel, resumable,
reproducible.
"""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from yolo_seg_ddp.data.images import ImageError, one_opencv_thread, read_image
from yolo_seg_ddp.data.labels import LabelError, whole_photograph
from yolo_seg_ddp.prepare.near_duplicates import (
    MEASURED_PX,
    same_pictures,
    small_grey,
    thumbnail,
)
from yolo_seg_ddp.prepare.parsing.account import make_account
from yolo_seg_ddp.prepare.parsing.joining import join_copies
from yolo_seg_ddp.prepare.parsing.label_csv import UNREADABLE_ROW, ClassTable, Problem
from yolo_seg_ddp.prepare.parsing.manifest import (
    UNUSABLE_PHOTOGRAPH,
    by_severity,
    dataset_yaml_text,
    make_manifest,
)
from yolo_seg_ddp.prepare.parsing.photograph import (
    UNKNOWN_CLASS,
    UNUSABLE_OBJECT,
    PhotographOptions,
    build_image,
    build_label,
)
from yolo_seg_ddp.prepare.parsing.reading import Labelled, read_sources
from yolo_seg_ddp.prepare.parsing.rows import AnnotationRow, Row, digest_of, place_of
from yolo_seg_ddp.prepare.parsing.sources import (
    UNREADABLE_PHOTOGRAPH,
    Photograph,
    PhotographReader,
    ReadFile,
    Source,
    find_stretch,
)
from yolo_seg_ddp.prepare.parsing.split import (
    TEST,
    TIME,
    TIME_GAP_S,
    TRAIN,
    VAL,
    assign_splits,
    bursts,
    choose_split,
    listed_by,
    output_stems,
)
from yolo_seg_ddp.prepare.parsing.state import (
    DATASET_FILE,
    MANIFEST_FILE,
    BuildState,
    Entry,
    keep_image,
    move,
    open_output,
    output_files,
    remove_unexpected,
    write_labels,
)
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.files import write_bytes_atomic, write_text_atomic
from yolo_seg_ddp.utils.option_names import nearest
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.text import counted
from yolo_seg_ddp.utils.threads import ordered_map

MIN_LEVELS = 32  # of grey in at least one photograph; fewer are said
MAX_LOST_SHARE = 0.5  # of the objects; more end the command


@dataclass(frozen=True)
class BuildOptions:
    """The options that affect the output folder.

    `time_gap_s`: the longest pause in seconds inside a group, if `split_by` is `time`.
    `use_file_classes`: take the classes of the label files if those of `photograph` do not cover
    them.
    """

    photograph: PhotographOptions
    split_by: str
    val_fraction: float
    keep_unlabelled: bool
    keep_unusable: bool = False
    use_file_classes: bool = False
    time_gap_s: float = TIME_GAP_S

    def to_dict(self) -> dict[str, Any]:
        """Return the options for manifest.json and dataset.yaml.

        The classes are left out: the data show them.
        """
        values = dataclasses.asdict(self)
        shared = values.pop("photograph")
        del values["use_file_classes"]
        if not self.keep_unusable:
            del values["keep_unusable"]
        del shared["class_names"]
        if not self.photograph.boxes:
            del shared["boxes"]
        if self.photograph.stretch is None:
            del shared["stretch"]
        if self.split_by != TIME:
            del values["time_gap_s"]
        return {**shared, **values}


@dataclass(frozen=True)
class Job:
    """One photograph to build, its label rows, its output name and split, its entry from an earlier
    run, and the numbers of the classes that nobody looked for in it.

    The split may change at the end: only when all photographs are built is it known which of them
    show the same picture.
    """

    photograph: Photograph
    rows: tuple[Row, ...]
    stem: str
    split: str
    previous: Entry | None
    unsearched: tuple[int, ...]


def build_dataset(
    sources: Sequence[Source],
    output_folder: Path,
    options: BuildOptions,
    num_workers: int,
    *,
    trust_links: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Build or complete the processed data set of all sources and return its manifest;
    `num_workers` 0 means all usable cores.

    Removes all other files from the output folders. Announces what the input holds. Raises
    UserError without usable input.
    """
    # 1. What the folders hold, and the options that depend on it.
    for source in sources:
        if output_folder.resolve().is_relative_to(source.folder.resolve()):
            raise UserError(
                f"--output {output_folder} lies inside --input {source.folder}; name a folder "
                "beside it"
            )

    def read_file(path: Path) -> bytes:
        reads = (one.read_file for one in sources if path.is_relative_to(one.folder))
        return next(reads, Path.read_bytes)(path)

    problems: list[Problem] = []
    labels = read_sources(
        sources,
        options.keep_unlabelled,
        problems,
        trust_links,
        may_join=not options.use_file_classes,
        announce=announce,
    )
    chosen = {key: labels.photographs[key] for key in labels.rows}
    options = _settle(options, labels, [*chosen.values()], read_file, announce)
    shared = options.photograph
    splits = assign_splits(chosen.values(), options.split_by, options.val_fraction)
    with open_output(
        output_folder, has_test=TEST in splits.values(), trust_links=trust_links
    ) as state:
        # 2. The photographs and their label files, as far as they are not there yet.
        jobs = _jobs(labels, splits, state, shared.class_names)
        renamed = [job for job in jobs if job.stem != PurePosixPath(job.photograph.name).stem]
        if renamed:
            first = f"{printable(renamed[0].photograph.name)} is {printable(renamed[0].stem)}.jpg"
            announce(
                f"{counted(len(renamed), 'photograph')} got another name in the data set: {first}"
            )
        num_threads = num_workers or usable_cpu_count()
        entries = _build_all(jobs, state, shared, num_threads, problems, read_file)
        if not entries:
            worst = by_severity(problems)[0]  # a job yields an entry or a problem
            raise UserError(
                f"{sources[0].folder}: none of {len(jobs)} photographs is usable; {worst.place}: "
                f"{worst.text}"
            )
        for entry in entries:
            for number, kind, text in entry.complaints:
                row = labels.rows[entry.key][number]
                problems.append(
                    Problem(place_of([row]), f"{printable(row.image_name)}: {text}", kind)
                )

        # 3. One data set of all folders, and its account. What is refused here leaves no data set.
        try:
            if len(sources) > 1:
                if not options.keep_unusable:
                    _refuse_useless(sources, labels, entries, problems)
                entries, labels = _join(output_folder, entries, labels, options, num_threads)
                if gone := len(chosen) - len(labels.rows):
                    announce(
                        f"{counted(gone, 'photograph')} also in another folder: each is one "
                        "photograph with the labels of all"
                    )
            account = make_account(
                entries,
                labels,
                shared.class_names,
                "dataset.yaml" if options.use_file_classes else "--classes",
            )
            entries = _with_objects(entries, labels, options, problems)
        except UserError:
            (output_folder / DATASET_FILE).unlink(missing_ok=True)
            if not state.entries:
                remove_unexpected(output_folder, [])
            raise
        most = max((entry.facts.levels for entry in entries), default=MIN_LEVELS)
        if most < MIN_LEVELS:
            announce(
                f"the photographs have at most {most} of 256 grey levels, too few for detail: "
                "export them with all"
            )

        # 4. The final splits: copies of a photograph, and a series, stay on one side.
        usable = [chosen[entry.key] for entry in entries]
        copies = _copies(output_folder, entries, num_threads)
        series = _series(entries, options) if options.split_by == TIME else None
        final_splits = assign_splits(
            usable, options.split_by, options.val_fraction, copies + (series or [])
        )
        entries = [move(output_folder, entry, final_splits[entry.key]) for entry in entries]
        remove_unexpected(output_folder, entries)

        # 5. The files about the data set.
        state.rewrite(entries)
        manifest = make_manifest(
            entries,
            chosen,
            problems,
            options.to_dict(),
            shared.class_names,
            copies,
            series,
            account,
        )
        write_text_atomic(output_folder / DATASET_FILE, dataset_yaml_text(manifest))
        write_text_atomic(output_folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _settle(
    options: BuildOptions,
    labels: Labelled,
    photographs: Sequence[Photograph],
    read_file: ReadFile,
    announce: Callable[[str], None],
) -> BuildOptions:
    """Return the options with what the data decide: the classes, the split and the grey levels."""
    shared = options.photograph
    if options.use_file_classes and labels.class_names:
        shared = dataclasses.replace(shared, class_names=labels.class_names)
    for name in shared.boxes:
        if name not in shared.class_names:
            raise UserError(
                f"--boxes {name}: not one of {printable(', '.join(shared.class_names), 200)}"
                f"{nearest(name, shared.class_names)}"
            )
    stretch = find_stretch(photographs, read_file)
    split_by, line = choose_split(photographs, options.split_by)
    if line:
        announce(f"split: {line}")
    if stretch:
        announce(
            f"photographs of more than 8 bits: {stretch[0]:g} becomes black and {stretch[1]:g} "
            "white in all of them"
        )
    shared = dataclasses.replace(shared, stretch=stretch)
    return dataclasses.replace(options, split_by=split_by, photograph=shared)


def _join(
    output_folder: Path,
    entries: Sequence[Entry],
    labels: Labelled,
    options: BuildOptions,
    num_threads: int,
) -> tuple[list[Entry], Labelled]:
    """Return the entries and labels in which a photograph of several folders is one."""
    joined = join_copies(
        output_folder,
        entries,
        _copies(output_folder, entries, num_threads),
        labels.photographs,
        functools.partial(_thumb, output_folder),
        options.photograph.class_names,
    )
    gone = {entry.key for entry in entries} - {entry.key for entry in joined}
    rows = {key: of_photograph for key, of_photograph in labels.rows.items() if key not in gone}
    return joined, dataclasses.replace(labels, rows=rows)


def _series(entries: Sequence[Entry], options: BuildOptions) -> list[list[str]]:
    """Return the keys of photographs that were taken one after another.

    Raises UserError if none has a time.
    """
    taken = {
        entry.key: datetime.fromisoformat(entry.facts.taken)
        for entry in entries
        if entry.facts.taken
    }
    if not taken:
        raise UserError(
            f"--split-by time: none of {len(entries)} photographs has a time in EXIF; use "
            "--split-by hash"
        )
    return bursts(taken, options.time_gap_s)


def _jobs(
    labels: Labelled, splits: Mapping[str, str], state: BuildState, class_names: Sequence[str]
) -> list[Job]:
    """Return a job for each photograph.

    One of an earlier run stays in its split if this run has that split.
    """
    table = ClassTable(class_names)
    unsearched = {
        names: tuple(sorted({*range(len(class_names))} - {*map(table.find, names)}))
        for names in {*labels.looked_for.values()}
    }
    chosen = {key: labels.photographs[key] for key in labels.rows}
    stems = output_stems(chosen.values())
    # one for test exists only if this run has photographs for it
    folders = {TRAIN, VAL, *splits.values()}
    jobs = []
    for key, photograph in chosen.items():
        previous = state.entries.get(key)
        split = previous.split if previous and previous.split in folders else splits[key]
        names = labels.looked_for.get(key, frozenset())
        jobs.append(
            Job(
                photograph,
                labels.rows[key],
                stems[key],
                split,
                previous,
                unsearched.get(names, ()),
            )
        )
    return jobs


def _build_all(
    jobs: list[Job],
    state: BuildState,
    options: PhotographOptions,
    num_threads: int,
    problems: list[Problem],
    read_file: ReadFile,
) -> list[Entry]:
    """Build all photographs in threads; return the entries of the usable ones, sorted by key."""
    classes = ClassTable(options.class_names)
    entries: list[Entry] = []
    # Until the build is complete, the folder mixes two data sets, which no manifest describes.
    (state.folder / MANIFEST_FILE).unlink(missing_ok=True)
    pool = ThreadPoolExecutor(num_threads)
    with one_opencv_thread(), PhotographReader(read_file) as reader:
        futures = [
            pool.submit(_build_one, job, state.folder, reader, options, classes) for job in jobs
        ]
        try:
            for future in Progress("photographs", len(futures))(as_completed(futures)):
                result = future.result()
                if isinstance(result, Problem):
                    problems.append(result)
                    continue
                entries.append(result)
                if state.entries.get(result.key) != result:
                    state.record(result)
        finally:
            pool.shutdown(cancel_futures=True)  # waits for the photographs in progress
    return sorted(entries, key=lambda entry: entry.key)


def _with_objects(
    entries: Sequence[Entry], labels: Labelled, options: BuildOptions, problems: list[Problem]
) -> list[Entry]:
    """Leave out the photographs of which no object can be used.

    Raises UserError if too many objects are lost.
    """
    usable = sum((Counter(entry.objects) for entry in entries), Counter())
    unread_objects = sum(
        number
        for (*_, why), number in labels.lost.items()
        if why in (UNREADABLE_ROW, UNUSABLE_OBJECT)
    )
    lost = sum((Counter(entry.lost) for entry in entries), Counter({"": unread_objects}))
    others = sum((Counter(entry.unknown_values) for entry in entries), Counter())
    if options.use_file_classes:  # else objects of other classes are left out at the user's wish
        lost += others
    built = {entry.key for entry in entries}
    unread = [row for key in labels.rows.keys() - built for row in labels.rows[key]]
    lost[""] += sum(row.counts.total() for row in unread if isinstance(row, AnnotationRow))
    gone = sorted(name for name in lost if name and name not in usable)
    if not options.use_file_classes and not options.keep_unusable:
        _refuse_unknown_classes(options.photograph.class_names, usable, others)
    num_lost, total = lost.total(), lost.total() + usable.total()
    reasons = [
        item for item in problems if item.kind in (UNUSABLE_OBJECT, UNKNOWN_CLASS, UNREADABLE_ROW)
    ]
    first = f"; {reasons[0].place}: {reasons[0].text}" if reasons else ""
    if not usable:
        what = (
            f"none of {counted(total, 'object')} can be used"
            if total
            else "no photograph has an object"
        )
        raise UserError(f"{what}, so there is nothing to learn{first}")
    if gone and not options.keep_unusable:
        cure = "correct the labels, name the other classes with --classes, or pass --keep-unusable"
        raise UserError(
            f"no object of {printable(', '.join(gone), 200)} can be used: {cure}{first}"
        )
    if num_lost > MAX_LOST_SHARE * total and not options.keep_unusable:
        cure = "correct the labels, or pass --keep-unusable"
        raise UserError(
            f"{num_lost:,} of {total:,} objects, more than half, cannot be used: {cure}{first}"
        )
    kept = []
    for entry in entries:
        num_unusable = sum(entry.lost.values()) + options.use_file_classes * sum(
            entry.unknown_values.values()
        )
        if entry.objects or not num_unusable or options.keep_unusable:
            kept.append(entry)
        else:
            text = (
                f"its only {counted(num_unusable, 'object')} cannot be used; left out, or pass "
                "--keep-unusable"
            )
            problems.append(
                Problem(printable(labels.photographs[entry.key].source), text, UNUSABLE_PHOTOGRAPH)
            )
    return kept


def _refuse_useless(
    sources: Sequence[Source],
    labels: Labelled,
    entries: Sequence[Entry],
    problems: Sequence[Problem],
) -> None:
    """Raise UserError if one of several sources has objects, and none can be used."""
    names = {key: labels.photographs[key].input_name for key in labels.rows}
    has_objects = {
        names[key] for key, rows in labels.rows.items() if any(one.counts for one in rows)
    }
    useful = {names[entry.key] for entry in entries if entry.objects}
    for source in sources:
        if source.name in has_objects - useful:
            below = f"{source.name}/"
            reasons = (
                f"; {one.place}: {one.text}" for one in problems if one.place.startswith(below)
            )
            first = next(reasons, "")
            raise UserError(
                f"{source.folder}: none of its objects can be used: correct the labels, name their "
                f"classes with --classes, or leave the folder out{first}"
            )


def _refuse_unknown_classes(
    given: Sequence[str], usable: Counter[str], others: Counter[str]
) -> None:
    """Raise UserError if a class of --classes has no object, and is a misspelling or half of all
    objects have other classes.
    """
    is_most = others.total() > MAX_LOST_SHARE * (others.total() + usable.total())
    for name in (
        name for name in given if not usable[name] and (is_most or nearest(name, [*others]))
    ):
        raise UserError(
            f"--classes {name}: no object has this class{printable(nearest(name, [*others]))}. "
            f"{counted(others.total(), 'object')} of classes that --classes does not name "
            f"({printable(', '.join(others), 200)}) would become background: "
            "correct --classes, or pass --keep-unusable"
        )


def _build_one(
    job: Job,
    folder: Path,
    reader: PhotographReader,
    options: PhotographOptions,
    classes: ClassTable,
) -> Entry | Problem:
    image_fingerprint = options.image_fingerprint(job.photograph.stamp)
    whole = whole_photograph(job.unsearched)
    label_fingerprint = options.label_fingerprint(
        image_fingerprint, [*(row.digest for row in job.rows), *filter(None, [whole])]
    )
    image_file, label_file, ignore_file = output_files(folder, job.split, job.stem)
    kept = job.previous
    if kept:
        is_same = kept.image_fingerprint == image_fingerprint and kept.stem == job.stem
        kept = kept if is_same and keep_image(folder, kept, job.split) else None
    try:
        has_same_rows = kept and kept.label_fingerprint == label_fingerprint
        if kept and has_same_rows and _has_digest(label_file, ignore_file, kept.label_digest):
            return dataclasses.replace(kept, split=job.split)
        if kept:
            jpeg, metadata, image = b"", kept.facts, (kept.image_bytes, kept.image_digest)
        else:
            jpeg, metadata = build_image(
                reader.read(job.photograph), options.long_side_px, options.stretch
            )
            image = (len(jpeg), digest_of(jpeg).hex())
        label = build_label(job.rows, metadata, options, classes)
    except ImageError as error:
        return Problem(printable(job.photograph.source), f"{error}; skipped", UNREADABLE_PHOTOGRAPH)
    except LabelError as error:
        return Problem(
            place_of(job.rows),
            f"{error}; {printable(job.photograph.name)} is skipped",
            UNREADABLE_ROW,
        )
    if jpeg:
        write_bytes_atomic(image_file, jpeg)
    label_digest = write_labels(folder, job.split, job.stem, label.text, label.ignored_text + whole)
    return Entry(
        key=job.photograph.key,
        stem=job.stem,
        split=job.split,
        image_fingerprint=image_fingerprint,
        label_fingerprint=label_fingerprint,
        image_bytes=image[0],
        image_digest=image[1],
        label_digest=label_digest,
        facts=metadata,
        exif_frame=label.exif_frame,
        objects=dict(label.objects),
        unknown_values=dict(label.unknown_values),
        lost=dict(label.lost),
        found=[(*key, number) for key, number in label.counts.items()],
        merged=dict(label.merged),
        complaints=label.complaints,
        ignored=dict(label.ignored),
        unsearched=[options.class_names[number] for number in job.unsearched],
    )


def _copies(folder: Path, entries: Sequence[Entry], num_threads: int) -> list[list[str]]:
    """Return the keys of photographs that show the same picture: a list for each such picture."""

    @functools.cache
    def read_thumb(position: int) -> np.ndarray:
        return _thumb(folder, entries[position])

    try:
        groups, _ = same_pictures(
            [entry.image_digest for entry in entries],
            [bytes.fromhex(entry.facts.signature) for entry in entries],
            lambda positions: np.stack(list(ordered_map(read_thumb, positions, num_threads))),
        )
    except ImageError as error:
        raise UserError(f"{error}; remove it and start again") from error
    group_of = {entry.key: group for entry, group in zip(entries, groups.tolist(), strict=True)}
    return [keys for keys in listed_by(group_of) if len(keys) > 1]


def _thumb(folder: Path, entry: Entry) -> np.ndarray:
    image = read_image(output_files(folder, entry.split, entry.stem)[0], MEASURED_PX)
    return thumbnail(small_grey(image))


def _has_digest(label_file: Path, ignore_file: Path, digest: str) -> bool:
    try:
        files = [label_file, ignore_file] if ignore_file.exists() else [label_file]
        return digest_of(b"\0".join(file.read_bytes() for file in files)).hex() == digest
    except FileNotFoundError:
        return False
