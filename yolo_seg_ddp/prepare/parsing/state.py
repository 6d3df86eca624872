"""The journal of finished photographs, from which a killed run resumes, and the output folder's
lock.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import filelock

from yolo_seg_ddp.data.labels import IGNORE_FOLDER
from yolo_seg_ddp.prepare.near_duplicates import SIGNATURE_BYTES
from yolo_seg_ddp.prepare.parsing.photograph import ImageMetadata
from yolo_seg_ddp.prepare.parsing.rows import digest_of
from yolo_seg_ddp.prepare.parsing.sources import OWN_FILES
from yolo_seg_ddp.prepare.parsing.split import SPLITS, TEST
from yolo_seg_ddp.utils.contents import parse_json
from yolo_seg_ddp.utils.errors import UserError, reason_of
from yolo_seg_ddp.utils.files import in_the_way, read_bytes, write_bytes_atomic

STATE_FILE = ".parse_state.jsonl"
MAX_JOURNAL_BYTES = 2_000_000_000
LOCK_FILE = ".parse.lock"
MANIFEST_FILE, DATASET_FILE, PICTURE_FILE = OWN_FILES
FOLDERS = [f"{split}/{kind}" for split in SPLITS for kind in ("images", "labels", IGNORE_FOLDER)]


@dataclass(frozen=True)
class Entry:
    """One finished photograph.

    The fingerprints identify the inputs and options of its two files.
    """

    key: str
    stem: str
    split: str
    image_fingerprint: str
    label_fingerprint: str
    image_bytes: int
    image_digest: str
    label_digest: str
    facts: ImageMetadata  # these two names are keys of the journal: `facts` and `found`
    exif_frame: str
    objects: dict[str, int]
    unknown_values: dict[str, int]
    lost: dict[str, int]
    found: list[tuple[str, str, int]]
    merged: dict[str, int]
    complaints: list[tuple[int, str, str]]
    # regions to ignore by class; empty for all classes
    ignored: dict[str, int] = field(default_factory=dict)
    unsearched: list[str] = field(default_factory=list)  # classes that nobody looked for

    @property
    def has_regions(self) -> bool:
        """Whether a file of regions to ignore is beside its label."""
        return bool(self.ignored or self.unsearched)


class BuildState:
    """The entries of earlier runs, and the journal to which this run appends.

    Only one thread may write it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / STATE_FILE
        lines = (
            read_bytes(file, MAX_JOURNAL_BYTES).decode("utf-8", "replace").splitlines()
            if file.exists()
            else []
        )
        self.entries = {entry.key: entry for entry in map(_from_line, lines) if entry is not None}
        self.rewrite(self.entries.values())  # drops an incomplete line of a killed run
        self._journal: TextIO = file.open("a", encoding="utf-8")

    def record(self, entry: Entry) -> None:
        """Write a finished photograph's entry and flush it."""
        self._journal.write(_to_line(entry))
        self._journal.flush()

    def rewrite(self, entries: Iterable[Entry]) -> None:
        """Replace the whole journal by `entries`."""
        lines = [_to_line(entry) for entry in sorted(entries, key=lambda entry: entry.key)]
        write_bytes_atomic(self.folder / STATE_FILE, "".join(lines).encode())

    def close(self) -> None:
        self._journal.close()


@contextmanager
def open_output(
    folder: Path, *, has_test: bool = False, trust_links: bool = False
) -> Iterator[BuildState]:
    """Lock an output folder and yield its state. If the run ends without an image, remove what it
    created.

    Raises UserError when the folder is locked, cannot be written, or holds images or labels of
    another program. A link in place of one of its folders is an error too, unless links are
    trusted: the run removes files that it does not expect.
    """
    existed = folder.exists()
    folders = [folder / name for name in FOLDERS]
    for path in () if trust_links else (*folders, *(path.parent for path in folders)):
        if path.is_symlink():
            raise UserError(
                f"{path}: is a link; remove it, or pass --trust-links to write where it leads"
            )
    if not (folder / STATE_FILE).exists() and any(_files_in(folder)):
        raise UserError(
            f"{folder}: holds images or labels that parse_labels.py did not make; name another "
            "--output"
        )
    try:
        for path in folders:
            if path.name != IGNORE_FOLDER and (has_test or path.parent.name != TEST):
                path.mkdir(parents=True, exist_ok=True)
        if problem := in_the_way(folder / LOCK_FILE, folder / STATE_FILE):
            raise UserError(problem)
        with filelock.FileLock(folder / LOCK_FILE, timeout=0):
            state = BuildState(folder)
            try:
                yield state
            finally:
                state.close()
                # remove the empty folders and the state, and leave all other files
                if not any(_files_in(folder)):
                    (folder / STATE_FILE).unlink(missing_ok=True)
                    if not existed:
                        (folder / LOCK_FILE).unlink(missing_ok=True)
                    for path in [folder / name for name in (*FOLDERS, *SPLITS)] + [folder] * (
                        not existed
                    ):
                        with suppress(OSError):  # not empty
                            path.rmdir()
    except filelock.Timeout as error:
        raise UserError(
            f"{folder}: another parse_labels.py is writing here; wait for it to end"
        ) from error
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {reason_of(error)}") from error


def remove_unexpected(folder: Path, entries: Iterable[Entry]) -> None:
    """Remove files without an entry from the output folders."""
    files = ((entry, output_files(folder, entry.split, entry.stem)) for entry in entries)
    expected = {
        path for entry, paths in files for path in (paths if entry.has_regions else paths[:2])
    }
    for path in [path for path in _files_in(folder) if path not in expected]:
        path.unlink()


def output_files(folder: Path, split: str, stem: str) -> tuple[Path, Path, Path]:
    """Return the image and the label file of one photograph, and that of its regions to ignore,
    which it may not have.
    """
    place = folder / split
    return (
        place / "images" / f"{stem}.jpg",
        place / "labels" / f"{stem}.txt",
        place / IGNORE_FOLDER / f"{stem}.txt",
    )


def write_labels(folder: Path, split: str, stem: str, text: str, ignored_text: str) -> str:
    """Write the labels of a photograph and its regions to ignore, if it has some; return their
    digest.
    """
    _, label_file, ignore_file = output_files(folder, split, stem)
    write_bytes_atomic(label_file, text.encode())
    if ignored_text:
        ignore_file.parent.mkdir(exist_ok=True)
        write_bytes_atomic(ignore_file, ignored_text.encode())
    return digest_of(b"\0".join(filter(None, [text.encode(), ignored_text.encode()]))).hex()


def keep_image(folder: Path, entry: Entry, split: str) -> bool:
    """Return whether an earlier entry's image is still there; move it to this run's split if
    needed.
    """
    wanted = output_files(folder, split, entry.stem)[0]
    for place in (split, *SPLITS):
        image_file = output_files(folder, place, entry.stem)[0]
        if image_file.is_file() and image_file.stat().st_size == entry.image_bytes:
            if image_file != wanted:
                os.replace(image_file, wanted)
            return True
    return False


def move(folder: Path, entry: Entry, split: str) -> Entry:
    """Move a photograph's files to its final split, which can change when other photographs are
    unusable.
    """
    if split != entry.split:
        sources, targets = (
            output_files(folder, entry.split, entry.stem),
            output_files(folder, split, entry.stem),
        )
        for source, target in list(zip(sources, targets, strict=True))[: 2 + entry.has_regions]:
            target.parent.mkdir(exist_ok=True)
            os.replace(source, target)
    return dataclasses.replace(entry, split=split)


def _files_in(folder: Path) -> Iterator[Path]:
    for place in (folder / name for name in FOLDERS):
        if place.is_dir():
            yield from (path for path in sorted(place.iterdir()) if not path.is_dir())


def _to_line(entry: Entry) -> str:
    values = dataclasses.asdict(entry)
    if not entry.unsearched:
        del values["unsearched"]
    return json.dumps(values, sort_keys=True) + "\n"


def _from_line(line: str) -> Entry | None:
    """Return None for an incomplete line or one of another version; its photograph is then built
    again.
    """
    try:
        values: dict[str, Any] = parse_json(line)
        values["facts"] = metadata = ImageMetadata(**values["facts"])
        if values["split"] not in SPLITS or len(bytes.fromhex(metadata.signature)) not in (
            0,
            SIGNATURE_BYTES,
        ):
            return None
        if metadata.taken:
            datetime.fromisoformat(metadata.taken)
        values["complaints"] = [
            (int(row), str(kind), str(text)) for row, kind, text in values["complaints"]
        ]
        values["found"] = [
            (str(label), str(kind), int(number)) for label, kind, number in values["found"]
        ]
        return Entry(**values)
    except (ValueError, TypeError, KeyError):
        return None
