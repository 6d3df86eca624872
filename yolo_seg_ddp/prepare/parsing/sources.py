"""Finds the label CSV and the photographs, in folders and zips, and reads photographs."""

import itertools
import os
import re
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from yolo_seg_ddp.data.dataset_yaml import IMAGE_SUFFIXES, is_photograph
from yolo_seg_ddp.data.images import ImageError, Stretch, deep_values, stretch_of
from yolo_seg_ddp.prepare.parsing.label_csv import LABEL_CSV, Problem
from yolo_seg_ddp.utils.errors import UserError, one_line, printable
from yolo_seg_ddp.utils.files import walk
from yolo_seg_ddp.utils.zips import BoundedZip, is_bomb

# at most so many photographs are looked at, and values of each
STRETCH_PHOTOGRAPHS, STRETCH_VALUES = 32, 50_000
MAX_PHOTOGRAPH_BYTES = 1_000_000_000
DUPLICATE_PHOTOGRAPH = "duplicate photograph"
UNREADABLE_ARCHIVE = "unreadable archive"
UNREADABLE_PHOTOGRAPH = "unreadable photograph"
UNREAD_FILE = "file not read"
# The first two beside each other: a data set of parse_labels.py.
OWN_FILES = ("manifest.json", "dataset.yaml", "labels.jpg")
ReadFile = Callable[[Path], bytes]


@dataclass(frozen=True)
class Source:
    """A folder of --input with labels of one format.

    name: of the folder in keys and messages; empty if it is the only one. read_file: returns the
    bytes of a photograph that is in no zip.
    """

    label_format: str
    name: str
    folder: Path
    read_file: ReadFile = Path.read_bytes


def names_of_inputs(addresses: Sequence[str]) -> list[str]:
    """Return a name for each folder, or address in a storage: its path below what all have in
    common.

    A single one has no name. Raises UserError if one lies inside another.
    """
    if len(addresses) == 1:
        return [""]
    paths = [
        "/" + address.partition("://")[2] if "://" in address else os.path.realpath(address)
        for address in addresses
    ]
    pairs = itertools.permutations(zip(addresses, paths, strict=True), 2)
    for (address, path), (other, place) in pairs:
        if Path(path).is_relative_to(place):
            raise UserError(
                f"--input {address} is in --input {other}, so its photographs would be read "
                "twice; leave one of them out"
            )
    return [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]


@dataclass(frozen=True)
class Photograph:
    """One photograph of the input.

    `source` is its path below the input folder, including its zip if it is in one.
    """

    name: str
    source: str
    circuit: str
    file: Path
    member: str | None
    size_bytes: int
    stamp: str  # changes with the bytes: size, and CRC in the zip or modification time
    is_known_by_path: bool = False
    subset: str = ""  # in which the labels list it, such as `train`
    input_name: str = ""  # of the folder of --input, if there are several

    def of_input(self, name: str) -> "Photograph":
        """Return the photograph as one of the folder `name` among several."""
        source = f"{name}/{self.source}"
        circuit = _circuit(source, self.is_known_by_path)
        return replace(self, source=source, circuit=circuit, input_name=name)

    @property
    def key(self) -> str:
        """The name in lower case, to match the label CSV; with its folders if it is known by its
        path. The source, if there are several folders.
        """
        if self.input_name:
            return self.source
        return ((self.member or self.source) if self.is_known_by_path else self.name).lower()


class PhotographReader(ExitStack):
    """Reads photographs, also from several threads. Keeps zips open, because listing thousands of
    members is slow.

    `read_file` returns the bytes of a photograph that is in no zip.
    """

    def __init__(self, read_file: ReadFile = Path.read_bytes) -> None:
        super().__init__()
        self._read_file = read_file
        self._archives: dict[Path, zipfile.ZipFile] = {}
        self._lock = threading.Lock()

    def read(self, photograph: Photograph) -> bytes:
        """Return a photograph's bytes; verify the checksum of a zip member. Raises ImageError."""
        if photograph.size_bytes > MAX_PHOTOGRAPH_BYTES:
            raise ImageError(f"{photograph.size_bytes} bytes, more than any photograph")
        try:
            if photograph.member is None:
                return self._read_file(photograph.file)
            with self._lock:
                if photograph.file not in self._archives:
                    self._archives[photograph.file] = self.enter_context(
                        BoundedZip(photograph.file)
                    )
                archive = self._archives[photograph.file]
            member = archive.getinfo(photograph.member)
            if is_bomb(member):
                raise ImageError(
                    f"unpacks from {member.compress_size} to {member.file_size} bytes: not a "
                    "photograph"
                )
            return archive.read(member)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError) as error:
            # RuntimeError: encrypted members, and NotImplementedError for unknown compression.
            raise ImageError(f"cannot be read ({one_line(error, 120)})") from error


def find_label_csv(folder: Path) -> Path:
    """Return the label CSV in the input folder: the one with EPRI's name, else the only CSV.

    Raises UserError.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; run python download_data.py, or name another --input"
        )
    files = sorted(
        path for path in folder.iterdir() if path.suffix.lower() == ".csv" and path.is_file()
    )
    named = [path for path in files if path.name.lower() == LABEL_CSV.lower()]
    chosen = named or files
    if not chosen:
        raise UserError(f"{folder}: no {LABEL_CSV}; run python download_data.py")
    if len(chosen) > 1:
        names = ", ".join(path.name for path in chosen[:5])
        raise UserError(
            f"{folder}: which CSV holds the labels? Found {names}; keep one, or call it {LABEL_CSV}"
        )
    return chosen[0]


def find_photographs(
    folder: Path, problems: list[Problem], trust_links: bool = False, by_path: bool = False
) -> dict[str, Photograph]:
    """Return all photographs below the input folder, and in zips directly in it, by `key`;
    `by_path`: with their folders.

    If a photograph is both a file and in a zip, the file is used, unless its size differs (an
    incomplete extraction). Links out of the folder are followed only with `trust_links`: they could
    expose any file. Such links, further copies and unreadable zips are added to `problems`. Raises
    UserError when there is no photograph.
    """
    root = None if trust_links else os.path.realpath(folder)
    photographs: dict[str, Photograph] = {}
    for photograph in _in_folders(folder, root, problems, by_path):
        if photograph.key in photographs:
            problems.append(_duplicate(photograph, photographs[photograph.key]))
        else:
            photographs[photograph.key] = photograph
    in_zips: set[str] = set()
    for photograph in _in_archives(folder, root, problems, by_path):
        kept = photographs.get(photograph.key)
        if kept is None or (kept.member is None and kept.size_bytes != photograph.size_bytes):
            photographs[photograph.key] = photograph
        if kept is not None and (
            photograph.key in in_zips or kept.size_bytes != photograph.size_bytes
        ):
            problems.append(
                _duplicate(kept if kept.member is None else photograph, photographs[photograph.key])
            )
        in_zips.add(photograph.key)
    if not photographs:
        cure = (
            f"put them beside the labels ({', '.join(IMAGE_SUFFIXES)})"
            if by_path
            else "run python download_data.py"
        )
        raise UserError(f"{folder}: no photographs and no zip with photographs; {cure}")
    return dict(sorted(photographs.items()))


def _duplicate(ignored: Photograph, kept: Photograph) -> Problem:
    return Problem(
        printable(ignored.source),
        f"ignored, {printable(kept.source)} is used",
        DUPLICATE_PHOTOGRAPH,
    )


def _in_folders(
    folder: Path, root: str | None, problems: list[Problem], by_path: bool
) -> Iterator[Photograph]:
    """Yield the photographs in the input folder.

    Follows links only below `root`; None: all. Each folder once.
    """
    visited = {_identity(folder)}

    def enters(path: Path) -> bool:
        identity = _identity(path)
        if path.name.startswith(".") or identity in visited or leaves(path, root, folder, problems):
            return False
        visited.add(identity)
        return True

    def report(path: Path, reason: str) -> None:
        place = printable(path.relative_to(folder).as_posix())
        problems.append(
            Problem(place, f"folder cannot be read: {reason}; skipped", UNREADABLE_PHOTOGRAPH)
        )

    for place, entries in walk(folder, enters, report):
        names = [entry.name for entry in entries]
        outputs = OWN_FILES if {*OWN_FILES[:2]} <= {*names} else ()
        for name in (name for name in names if is_photograph(name) and name not in outputs):
            path = Path(place, name)
            if leaves(path, root, folder, problems):
                continue
            source = path.relative_to(folder).as_posix()
            # False, too, in a folder that may be listed but not entered
            if not os.path.isfile(path):
                text = "not a regular file, or its folder forbids access; skipped"
                problems.append(Problem(printable(source), text, UNREADABLE_PHOTOGRAPH))
                continue
            status = path.stat()
            stamp = f"file {status.st_size} {status.st_mtime_ns}"
            yield Photograph(
                name, source, _circuit(source, by_path), path, None, status.st_size, stamp, by_path
            )


def _identity(folder: Path) -> tuple[int, int] | Path:
    """Return the identity of a folder, which does not depend on its path; the path of a folder that
    cannot be reached.

    `os.path.realpath` would take 15 s for 1,100 nested folders.
    """
    try:
        status = folder.stat()
    except OSError:  # `walk` reports it
        return folder
    return status.st_dev, status.st_ino


def leaves(path: Path, root: str | None, folder: Path, problems: list[Problem]) -> bool:
    """Return whether a path is a link out of `root` (None: trust all links); add such a link to
    `problems`.
    """
    if (
        root is None
        or not os.path.islink(path)
        or Path(os.path.realpath(path)).is_relative_to(root)
    ):
        return False
    text = (
        f"a link that leaves {folder}, skipped; put the files there, let {folder} itself be the "
        "link, "
        "or pass --trust-links"
    )
    problems.append(
        Problem(printable(path.relative_to(folder).as_posix()), text, UNREADABLE_PHOTOGRAPH)
    )
    return True


def inside(
    files: list[Path], folder: Path, problems: list[Problem], trust_links: bool
) -> list[Path]:
    """Return the files without links out of the folder: an error message could quote any file of
    the user.
    """
    root = None if trust_links else os.path.realpath(folder)
    inside = [file for file in files if not leaves(file, root, folder, problems)]
    if not inside:
        raise UserError(f"{files[0]}: {problems[-1].text}")
    return inside


def _in_archives(
    folder: Path, root: str | None, problems: list[Problem], by_path: bool
) -> Iterator[Photograph]:
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() != ".zip" or path.name.startswith(".") or not path.is_file():
            continue
        if leaves(path, root, folder, problems):
            continue
        try:
            with BoundedZip(path) as archive:
                members = sorted(archive.infolist(), key=lambda member: member.filename)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            cure = "copy it again" if by_path else "run python download_data.py again"
            text = f"not a readable zip ({one_line(error, 120)}); {cure}"
            problems.append(Problem(printable(path.name), text, UNREADABLE_ARCHIVE))
            continue
        for member in members:
            inside = PurePosixPath(member.filename)
            hidden = any(part.startswith((".", "__MACOSX")) for part in inside.parts)
            if not member.is_dir() and not hidden and is_photograph(inside.name):
                source = f"{path.name}/{member.filename}"
                stamp = f"zip {member.file_size} {member.CRC:08x}"
                circuit, size = _circuit(source, by_path), member.file_size
                yield Photograph(
                    inside.name, source, circuit, path, member.filename, size, stamp, by_path
                )


def find_stretch(
    photographs: Sequence[Photograph], read_file: ReadFile = Path.read_bytes
) -> Stretch | None:
    """Return the values that become black and white in all photographs of more than 8 bits; None if
    all have 8.
    """
    deep = [one for one in photographs if one.name.lower().endswith((".png", ".tif", ".tiff"))]
    seen = []
    with PhotographReader(read_file) as reader:
        for one in deep[:: len(deep) // STRETCH_PHOTOGRAPHS + 1]:
            with suppress(ImageError):  # the photograph is named when it is built
                if (values := deep_values(reader.read(one))) is not None:
                    seen.append(values.ravel()[:: values.size // STRETCH_VALUES + 1])
    return stretch_of(np.concatenate(seen)) if seen else None


def all_files(folder: Path) -> Iterator[Path]:
    """Yield the files in the input folder, except in linked folders, and in the zips directly in
    it.
    """
    for place, entries in walk(
        folder, lambda path: path.name[:1] != "." and not path.is_symlink(), lambda *_: None
    ):
        yield from (place / entry.name for entry in entries)
    for path in folder.glob("*.zip"):
        with (
            suppress(OSError, zipfile.BadZipFile, ValueError, NotImplementedError),
            BoundedZip(path) as archive,
        ):
            yield from (
                path / member.filename for member in archive.infolist() if not member.is_dir()
            )


def _circuit(source: str, by_path: bool) -> str:
    """Return a photograph's circuit: from a folder or zip named `Circuit…`, else from the name `4
    (176).JPG`.

    Else the first folder, or all folders if photographs are known by their path.
    """
    *folders, name = PurePosixPath(source).parts
    matches = [re.match(r"circuit[ _-]*(\w+)", part, flags=re.IGNORECASE) for part in folders]
    matches.append(re.match(r"(\w+) *\(\d+\)", name))
    if match := next(filter(None, matches), None):
        return f"Circuit{match[1].lower()}"
    return printable("/".join(folders if by_path else folders[:1])) or "unknown"
