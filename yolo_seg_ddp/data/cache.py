"""What the packed cache and the block store share: files of records, how they are packed, found
again and mended.

    .cache/<split>-<kind>-<algorithm>-<k>-of-<K>.<suffix>
        the records that machine k of K packed, one after the other
    .cache/<split>-<kind>-<algorithm>-<k>-of-<K>.json
        each record's photograph, by path and digest, its place and size
    .cache/<split>-digests-<k>-of-<K>.json
        the digest of each photograph's content, its size and times

A record is found by its photograph's path and digest. So a copy of the data set, with other times,
packs nothing again, and neither does another list of photographs or another number of machines. The
record of a photograph whose content changed is never used again: a new one is appended. A killed
packing continues behind what it saved last.

`os.pread` reads the records: the page cache holds one copy per machine, and a cold read is eight
times as fast as through a memory map. The data set may come from elsewhere: a link is never
followed, and each file has checksums.
"""

import functools
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from yolo_seg_ddp.data.fingerprint import digest_while, times_of
from yolo_seg_ddp.utils.contents import mapping, parse_json
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.errors import DataErrors, UserError, print_warning, printable
from yolo_seg_ddp.utils.files import (
    in_the_way,
    is_plain_file,
    local_rank_first,
    new_file,
    regular_only,
    write_text_atomic,
)
from yolo_seg_ddp.utils.threads import ordered_map

T = TypeVar("T")
Record = tuple[bytes, tuple[int, int]]  # a photograph's bytes in the file, and its (height, width)
Make = Callable[[Path], Record | str]
UNREADABLE_INDEX = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    OverflowError,
    AttributeError,
    RecursionError,
)
MIN_FREE_FRACTION = 1.2
# How often a packing writes down what it has finished, and after how many photographs.
SAVES, MIN_BETWEEN_SAVES = 50, 64
# of a part's index, with an entry for each record
COLUMNS = ("paths", "digests", "places", "sizes")


@dataclass(frozen=True)
class CachePlace:
    """Where the packed photographs of a split lie, and who packs them.

    Photographs are known by their path from `root`, the data set's folder. `machine`: the number of
    this machine, and how many pack into the folder. With `skips_bad` photographs that cannot be
    read are left out; otherwise they raise DataErrors. `known`: digests that are noted elsewhere,
    by path and times.
    """

    root: Path
    folder: Path
    split: str
    announce: Callable[[str], None]
    machine: tuple[int, int] = (0, 1)
    skips_bad: bool = False
    known: Mapping[tuple[str, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheIndex:
    """Where the records of the N usable photographs lie, whose files are `files`.

    places: int64 (N, 3), the number of the record's file in `pixel_files`, its first byte and its
    end. sizes: int32 (N, 2) as (height, width). `unusable` holds the other photographs by their
    position among all, with a message each. `make` makes a photograph's record. `digests` are those
    of the contents, with the files' sizes and times, by path.
    """

    pixel_files: Sequence[Path]
    places: np.ndarray
    sizes: np.ndarray
    unusable: dict[int, str]
    files: Sequence[Path]
    make: Make
    digests: Mapping[str, tuple[str, str]]

    def usable(self, items: Sequence[T]) -> list[T]:
        """Return those of all photographs' `items` that belong to a usable photograph."""
        return [item for position, item in enumerate(items) if position not in self.unusable]


@dataclass(frozen=True)
class CacheKind:
    """What differs between the kinds of cache files.

    `name` is a part of the file's name and `suffix` its end; `algorithm` enters the name. `make`
    returns a photograph's bytes and its (height, width), or why it cannot be used. `estimate`
    returns the bytes of the records of some photographs. `is_consistent` tells whether records of
    sizes int32 (N, 2) may have lengths int64 (N,).
    """

    what: str
    name: str
    suffix: str
    algorithm: str
    make: Make
    estimate: Callable[[Sequence[Path]], int]
    is_consistent: Callable[[np.ndarray, np.ndarray], bool] = lambda sizes, lengths: True


class DamagedRecord(UserError):
    """A record's bytes are not those that were written."""

    def __init__(self, pixel_file: Path, why: str = "") -> None:
        super().__init__(f"{pixel_file}: damaged{why}; delete the file to build it again")


class RecordFile:
    """Reads the records of a cache, and mends them. Each process opens a file at its first read."""

    def __init__(self, index: CacheIndex) -> None:
        self.index = index
        self._descriptors: dict[tuple[int, int], int] = {}  # by process and number of the file

    def shape(self, position: int) -> tuple[int, int]:
        """Return (height, width) of photograph `position` from the index."""
        height, width = self.index.sizes[position].tolist()
        return height, width

    def _place(self, position: int) -> tuple[Path, int, int]:
        """Return a record's file, its first byte and its length."""
        number, begin, end = self.index.places[position].tolist()
        return self.index.pixel_files[number], begin, end - begin

    def _damaged(self, position: int, why: str = "") -> DamagedRecord:
        return DamagedRecord(self._place(position)[0], why)

    def _pread(self, position: int, num_bytes: int, offset: int = 0) -> bytes:
        """Return bytes of a record, from `offset` in it on."""
        number, begin, _ = self.index.places[position].tolist()
        file, key = self.index.pixel_files[number], (os.getpid(), number)
        try:
            if key not in self._descriptors:
                self._descriptors[key] = regular_only(str(file), os.O_RDONLY)
            data = os.pread(self._descriptors[key], num_bytes, begin + offset)
        except OSError as error:
            raise UserError(
                f"{file}: {error.strerror}; the next start builds the file if it is gone"
            ) from error
        if len(data) != num_bytes:
            raise self._damaged(position)
        return data

    def _mending(self, position: int, read: Callable[[], T]) -> T:
        """Return what `read` returns. If it finds a damaged record, make it again from its
        photograph, and read again.

        All processes that find the damage write the same bytes, so they need no lock.
        """
        with suppress(DamagedRecord):
            return read()
        photograph = self.index.files[position]
        pixel_file, begin, length = self._place(position)
        made = self.index.make(photograph)
        if isinstance(made, str) or (len(made[0]), made[1]) != (length, self.shape(position)):
            raise self._damaged(
                position, f", and {printable(photograph.name)} no longer gives the same bytes"
            )
        try:
            with open(pixel_file, "r+b", opener=regular_only) as output:
                output.seek(begin)
                output.write(made[0])
        except OSError as error:
            raise self._damaged(position, f", and cannot be mended: {error.strerror}") from error
        print_warning(
            f"{pixel_file}: the bytes of {printable(photograph.name)} were damaged and have been "
            "made again"
        )
        return read()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_descriptors": {}}


def open_or_build_kind(
    kind: CacheKind, files: Sequence[Path], place: CachePlace
) -> CacheIndex | str:
    """Return where the records of `files` lie; pack those that are missing. Return why not if they
    cannot be written.

    The first process on a machine packs its share while the others wait. Then it waits for the
    machines that pack into the same folder, and packs what one that died has left. Raises
    DataErrors for photographs that cannot be used.
    """
    packing = _Packing(kind, files, place)
    return packing.complete() or packing.index(kind)


def note_digests(files: Sequence[Path], place: CachePlace) -> dict[str, tuple[str, str]]:
    """Return digest and times of photographs by path, and keep them in the folder; read what is not
    known.

    Where nothing can be written, only those that are known.
    """
    packing = _Packing(None, files, place)
    packing.complete()
    return packing.digests()


class _Packing:
    """Finds the records of a split's photographs and packs the rest.

    Without a kind it only takes their digests.
    """

    def __init__(self, kind: CacheKind | None, files: Sequence[Path], place: CachePlace) -> None:
        self.kind, self.files, self.place = kind, files, place
        self.paths = [os.path.relpath(file, place.root) for file in files]
        key = hashlib.sha256(kind.algorithm.encode()).hexdigest()[:8] if kind else ""
        self.start = f"{place.split}-{kind.name}-{key}-" if kind else ""
        self._parts: dict[Path, dict[str, Any]] = {}
        # Each record's file, place in it and size, by the path and the digest of its photograph.
        self._packed: dict[tuple[str, str], tuple[Path, list[int], list[int]]] = {}
        self._survey()

    def complete(self) -> str:
        """Pack what is missing; return why it cannot be packed, or an empty text."""
        folder, (number, count) = self.place.folder, self.place.machine
        if folder.is_symlink():
            return f"{folder} is a link, which is followed only with --trust-links"
        if not self._missing:
            return ""
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return f"{folder} cannot be written"
        try:
            for step in range(count):  # this machine's share is the first
                if problem := self._complete_share((number + step) % count):
                    return problem
        except OSError as error:  # also a full disk: other programs write to it too
            return f"{error.filename or folder}: {error.strerror or error}"
        return (
            f"{folder}: photographs changed while they were packed; start again"
            if self._missing
            else ""
        )

    def index(self, kind: CacheKind) -> CacheIndex:
        """Return where all records lie.

        Raises DataErrors for photographs that cannot be used, unless they are left out.
        """
        problems, num_photographs = list(self._unusable.values()), len(self.files)
        is_none_usable = len(problems) == num_photographs
        if problems and (not self.place.skips_bad or is_none_usable):
            advice = "" if is_none_usable else "; the trainer's --skip-bad goes on without them"
            message = (
                f"{len(problems)} of {num_photographs} photographs cannot be used: "
                f"{problems[0]}{advice}"
            )
            raise DataErrors(message, problems)

        numbers = {file: number for number, file in enumerate(self._parts)}
        records = [record for record in self._records if record]
        return CacheIndex(
            pixel_files=list(self._parts),
            places=np.array([(numbers[file], *at) for file, at, _ in records], np.int64).reshape(
                -1, 3
            ),
            sizes=np.array([size for _, _, size in records], np.int32).reshape(-1, 2),
            unusable=self._unusable,
            files=[file for file, record in zip(self.files, self._records, strict=True) if record],
            make=kind.make,
            digests=self.digests(),
        )

    def digests(self) -> dict[str, tuple[str, str]]:
        """Return the digests that are known, with the files' times, by path."""
        columns = zip(self.paths, self._digests, self._times, strict=True)
        return {path: (digest, times) for path, digest, times in columns if digest}

    def _survey(self) -> None:
        """Read what the folder holds, ask for each photograph's times, and find out which are
        missing: their positions.
        """
        place, kind = self.place, self.kind
        self._known = dict(place.known)
        for file in place.folder.glob(f"{place.split}-digests-*.json"):
            self._known |= {
                (path, times): digest for path, (digest, times) in _read_notes(file).items()
            }
        self._times = [self._times_of(file) for file in self.files]
        self._digests = [
            self._known.get(key, "") for key in zip(self.paths, self._times, strict=True)
        ]
        if kind is None:
            self._missing = [
                position for position, digest in enumerate(self._digests) if not digest
            ]
            return

        parts = {
            file: _read_part(kind, file)
            for file in sorted(place.folder.glob(f"{self.start}*{kind.suffix}"))
        }
        self._parts = {file: part for file, part in parts.items() if part}
        self._packed = {}
        for file, part in self._parts.items():
            rows = zip(*(part[name] for name in COLUMNS), strict=True)
            self._packed |= {(path, digest): (file, at, size) for path, digest, at, size in rows}
        keys = zip(self.paths, self._digests, strict=True)
        self._records = [self._packed.get(key) if key[1] else None for key in keys]
        missing = [position for position, record in enumerate(self._records) if record is None]

        # A photograph that could not be used is tried again: the reason may be gone.
        noted = {path for part in self._parts.values() for path in part["unusable"]}
        tried = {
            position: kind.make(self.files[position])
            for position in missing
            if self.paths[position] in noted
        }
        self._unusable = {
            position: message for position, message in tried.items() if isinstance(message, str)
        }
        self._missing = [position for position in missing if position not in self._unusable]

    def _times_of(self, file: Path) -> str:
        try:
            return times_of(file)
        except UserError:
            if self.place.skips_bad:  # `make` says why it cannot be used
                return ""
            raise

    def _complete_share(self, share: int) -> str:
        """Pack what is missing of a machine's share, which is every so many-th photograph; return
        why it cannot be packed.
        """
        place, kind, (number, count) = self.place, self.kind, self.place.machine
        of_share = range(share, len(self.files), count)
        name = f"{share}-of-{count}"
        lock_file = place.folder / f"{place.split}-{name}.lock"
        notes_file = place.folder / f"{place.split}-digests-{name}.json"
        part_file = self._part_file(kind, name) if kind else notes_file
        if problem := in_the_way(lock_file, notes_file, part_file, part_file.with_suffix(".json")):
            return problem
        if share != number:
            self._survey()
            if not {*of_share}.intersection(self._missing):
                return ""
            place.announce(
                f"{place.split}: waiting for the share of machine {share + 1} of {count}, or "
                "packing it"
            )

        with local_rank_first(lock_file):
            self._survey()
            missing = [position for position in self._missing if position in of_share]
            # The digest of a photograph with other times than those noted tells whether its record
            # is still right.
            packed = {path for path, _ in self._packed}
            unsure = [
                at
                for at in missing
                if not self._digests[at] and (not kind or self.paths[at] in packed)
            ]
            if unsure:
                place.announce(f"reading {len(unsure)} {place.split} photographs for their digests")
                self._go_through(unsure, None, part_file, notes_file)
                missing = [position for position in self._missing if position in of_share]
            if not kind or not missing:
                return ""
            needed, free = self._make_room(kind, part_file)
            if free < needed * MIN_FREE_FRACTION:
                return (
                    f"{place.folder} has {free / 2**30:.1f} GiB free, about {needed / 2**30:.1f} "
                    "are needed"
                )
            place.announce(
                f"packing {len(missing)} {place.split} photographs {kind.what} into {part_file} "
                f"(about {needed / 2**30:.2f} GiB, {free / 2**30:.0f} GiB free)"
            )
            if len(missing) < len(of_share):
                place.announce(f"  continuing at {len(of_share) - len(missing)}/{len(of_share)}")
            self._go_through(missing, kind.make, part_file, notes_file)
        return ""

    def _part_file(self, kind: CacheKind, name: str) -> Path:
        """Return the file to which a machine appends.

        One with a second name, in a copy made of hard links, is left alone.
        """
        numbers = ("", *(f"-{number}" for number in range(2, 9)))
        files = [
            self.place.folder / f"{self.start}{name}{number}{kind.suffix}" for number in numbers
        ]
        return next(
            file for file in files if is_plain_file(file) or file.is_symlink() or not file.is_file()
        )

    def _make_room(self, kind: CacheKind, part_file: Path) -> tuple[int, int]:
        """Remove a damaged part and what an older version packed, say what is no longer used, and
        return the bytes needed and free.
        """
        place, folder = self.place, self.place.folder
        every = [file for file in folder.glob(f"{place.split}-{kind.name}-*") if not file.is_dir()]
        older = [file for file in every if not file.name.startswith(self.start)]
        if older:
            num_bytes = sum(file.lstat().st_size for file in older)
            for file in older:
                file.unlink()
            place.announce(
                f"removed {place.split}-{kind.name}-* of an older version, "
                f"{num_bytes / 2**30:.2f} GiB: packed photographs "
                "are now found by their content, so they are packed again"
            )
        if part_file not in self._parts:
            part_file.unlink(missing_ok=True)
        now = dict(zip(self.paths, self._digests, strict=True))
        lengths = {key: end - begin for key, (_, (begin, end), _) in self._packed.items()}
        unused = sum(
            length
            for (path, digest), length in lengths.items()
            if now.get(path, path) not in ("", digest)
        )
        if unused > sum(lengths.values()) / 2:
            place.announce(
                f"{folder} also holds {unused / 2**30:.2f} GiB of {self.start}* that are of no "
                "photograph in this list; "
                "delete these files if no other list needs them: what is missing is packed again"
            )
        return kind.estimate(
            [self.files[position] for position in self._missing]
        ), shutil.disk_usage(folder).free

    def _go_through(
        self, positions: list[int], make: Make | None, part_file: Path, notes_file: Path
    ) -> None:
        """Note the digests of photographs; with `make` also append their records to a part.

        Then survey again.
        """
        place, notes = self.place, _read_notes(notes_file)
        part = self._parts.get(part_file) or {name: [] for name in (*COLUMNS, "unusable")}
        items = [(self.paths[position], self.files[position]) for position in positions]
        results = ordered_map(
            functools.partial(_examined, self._known, make), items, usable_cpu_count()
        )
        with _appended(part_file, part) if make else nullcontext() as output:
            for done, ((path, _), (digest, times, record)) in enumerate(
                zip(items, results, strict=True), start=1
            ):
                if digest:
                    notes[path] = digest, times
                if isinstance(record, str):
                    part["unusable"].append(path)
                elif output and record:
                    begin = output.tell()
                    output.write(record[0])
                    entry = path, digest, [begin, output.tell()], record[1]
                    for name, value in zip(COLUMNS, entry, strict=True):
                        part[name].append(value)
                if done % max(len(items) // 20, 500) == 0:
                    place.announce(f"  {'packed' if make else 'read'} {done}/{len(items)}")
                if done % max(len(items) // SAVES, MIN_BETWEEN_SAVES) == 0 or done == len(items):
                    write_text_atomic(notes_file, json.dumps(notes))
                    if output:
                        _save_part(output, part_file, part)
        self._survey()


@contextmanager
def _appended(part_file: Path, part: dict[str, Any]) -> Iterator[BinaryIO]:
    """Open a part behind its last record.

    On a full disk it becomes what it was; what a kill leaves is for the next start.
    """
    begin = max((end for _, end in part["places"]), default=0)
    before, index_file = index_text(part), part_file.with_suffix(".json")
    try:
        with (
            open(part_file, "r+b", opener=regular_only) if begin else new_file(part_file) as output
        ):
            output.truncate(output.seek(begin))
            yield output
    except OSError:
        if begin:
            os.truncate(part_file, begin)
            write_text_atomic(index_file, before)
        else:
            part_file.unlink(missing_ok=True)
            index_file.unlink(missing_ok=True)
        raise


def _examined(
    known: Mapping[tuple[str, str], str], make: Make | None, item: tuple[str, Path]
) -> tuple[str, str, Record | str | None]:
    """Return a photograph's digest, its times, and its record or why it cannot be used."""
    path, file = item
    try:
        return digest_while(known, path, file, make or (lambda file: None))
    except UserError:  # it cannot be opened
        record = make(file) if make else None
        if make and not isinstance(record, str):
            raise
        return "", "", record


def _read_notes(file: Path) -> dict[str, tuple[str, str]]:
    """Return what is noted: digest and times by path; nothing if the file is missing or damaged."""
    try:
        with open(file, encoding="utf-8", opener=regular_only) as stream:
            content = mapping(parse_json(stream.read()))
        return {path: (str(digest), str(times)) for path, (digest, times) in content.items()}
    except UNREADABLE_INDEX:
        return {}


def _read_part(kind: CacheKind, part_file: Path) -> dict[str, Any] | None:
    """Return the index of a part if the part holds what it says; None if
    one is missing or damaged.
    """
    try:
        with open(part_file.with_suffix(".json"), encoding="utf-8", opener=regular_only) as stream:
            text = stream.read()
        content = parse_json(text)
        del content["checksum"]
        places = np.array(content["places"], np.int64).reshape(-1, 2)
        sizes = np.array(content["sizes"], np.int32).reshape(-1, 2)
        content |= {"places": places.tolist(), "sizes": sizes.tolist()}
        lengths = places[:, 1] - places[:, 0]
        texts = content["paths"] + content["digests"] + content["unusable"]
        # The size of an open file is the true one, also on NFS while another machine appends to it.
        with open(part_file, "rb", opener=regular_only) as records:
            num_bytes = os.fstat(records.fileno()).st_size
        is_right = [
            index_text(content) == text,
            {*map(type, texts)} <= {str},
            len({len(content[name]) for name in COLUMNS}) == 1,
            ((places >= 0) & (places <= num_bytes)).all(),
            (lengths > 0).all(),
            (sizes > 0).all(),
            kind.is_consistent(sizes, lengths),
        ]
        return content if all(is_right) else None
    except UNREADABLE_INDEX:
        return None


def _save_part(output: BinaryIO, part_file: Path, part: dict[str, Any]) -> None:
    """Flush the records to the disk, then write the index of those that are there."""
    output.flush()
    os.fsync(output.fileno())
    write_text_atomic(part_file.with_suffix(".json"), index_text(part))


def index_text(content: dict[str, Any]) -> str:
    """Return an index file's text: the content and its checksum."""
    return json.dumps({**content, "checksum": zlib.crc32(json.dumps(content).encode())})
