"""Reads a YOLO data-set YAML: image folders and class names."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from yolo_seg_ddp.utils.contents import mapping, read_back
from yolo_seg_ddp.utils.environment import SCRIPTS_FOLDER
from yolo_seg_ddp.utils.errors import DataErrors, UserError, one_line, printable
from yolo_seg_ddp.utils.files import read_text, walk
from yolo_seg_ddp.utils.text import counted

DEFAULT_DATASET_YAML = SCRIPTS_FOLDER / "dataset.yaml"
MAX_LIST_BYTES = 500_000_000
MAX_VALUE = 1e9  # of a picture's pixel
TRUST_LINKS_HELP = "follow links and paths that leave the data's folder"
# of a corrected `names` block; of files that are not read
MAX_SHOWN_CLASSES, MAX_SHOWN_SUFFIXES = 1000, 9
OWN_ADVICE = "run python parse_labels.py first, or name another data set with --data"
OUTSIDE_ADVICE = (
    "set `path` to a folder that contains both, or pass --trust-links if you trust the data set"
)
IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".bmp",
    ".tif",
    ".tiff",
    ".webp",
    ".jpe",
    ".jfif",
    ".jp2",
    ".avif",
)
BESIDE = re.compile(  # what lies beside photographs: labels, tables, facts, archives
    r"\.(txt|jsonl?|ndjson|xml|csv|tsv|xlsx|ya?ml|srt|xmp|md|html?|cache|db|ini|log|km[lz]|"
    r"geojson|gpkg|tfw|prj|zip|np[yz]|pt"
    r"|py|pdf|mrk|nav|obs|bin|rtk|lock|part|cff|bib)$|^(licen[cs]e|copying|readme|notice|citation|"
    r"authors|changelog)[^.]*$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class DatasetSpec:
    """The content of a data-set YAML. `splits` maps `train`, `val` and `test` to image folders or
    list files.

    With `trust_links` links and entries may lead out of the data set's root, as in Ultralytics.
    """

    yaml_file: Path
    root: Path
    names: tuple[str, ...]
    splits: dict[str, tuple[Path, ...]]
    trust_links: bool = False
    # of the photographs of more than 8 bits that it was made of
    stretch: tuple[float, float] | None = None
    cache_dir: str | None = None

    @property
    def cache_folder(self) -> Path:
        """The folder of the packed photographs: below `cache_dir` one of this data set, else
        `.cache` in it.

        If it is a link, it may be written only if links are trusted.
        """
        if self.cache_dir:
            place = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:8]
            return Path(os.path.realpath(self.cache_dir), f"{self.root.name}-{place}")
        folder = self.root / ".cache"
        return Path(os.path.realpath(folder)) if self.trust_links else folder

    def holds(self, path: Path) -> bool:
        """Return whether a path, after following links, is inside the data set's root, or all links
        are trusted.
        """
        return self.trust_links or Path(os.path.realpath(path)).is_relative_to(self.root)

    def problem_with(self, path: Path) -> str:
        """Return why a file may not be opened; an empty string if it may, or
        if it does not exist.
        """
        if not self.holds(path):
            return f"lies outside {self.root}, or is a link that leaves it; {OUTSIDE_ADVICE}"
        try:
            return "" if stat.S_ISREG(path.stat().st_mode) else "not a regular file"
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(error.strerror).lower()

    def image_files(self, split: str, announce: Callable[[str], None] | None = None) -> list[Path]:
        """Return a split's images, sorted, and announce how many hidden files, such as ._1.JPG of
        macOS, were skipped.

        Raises UserError when the split is missing or empty.
        """
        if split not in self.splits:
            present = ", ".join(self.splits) or "none"
            raise UserError(
                f"{self.yaml_file}: no split `{split}`; it has {present}: add `{split}: "
                "FOLDER/images`"
            )
        every = sorted(
            {file for source in self.splits[split] for file in _list_files(self, split, source)}
        )
        found = [file for file in every if file.suffix.lower() in IMAGE_SUFFIXES]
        files = [file for file in found if is_photograph(file.name)]
        others = not_read(every)
        if announce and others:
            announce(f"{split}: {others}")
        if announce and len(files) < len(found):
            hidden = next(file for file in found if not is_photograph(file.name))
            announce(
                f"{split}: {len(found) - len(files)} hidden files skipped, such as {_shown(hidden)}"
            )
        if not files:
            sources = ", ".join(map(str, self.splits[split]))
            advice = OWN_ADVICE if _is_default(self) else f"images are {', '.join(IMAGE_SUFFIXES)}"
            raise UserError(
                f"{self.yaml_file}: {split}: no images in {sources}; {others or advice}"
            )
        return files


def load_dataset_yaml(
    path: str | Path, *, trust_links: bool = False, cache_dir: str | None = None
) -> DatasetSpec:
    """Read a data-set YAML. Relative paths are relative to the YAML file's folder; `~` in `path` is
    the home folder.

    Raises UserError naming the file and the key that is wrong.
    """
    file = Path(path)
    try:
        content = read_back(
            file, mapping, "expected keys `path`, `train`, `val` and `names`", is_yaml=True
        )
    except OSError as error:
        inside = sorted(file.glob("*.yaml")) if file.is_dir() else []
        such_as = f", such as {_shown(inside[0])}" if inside else ""
        raise UserError(
            f"{file}: {error.strerror}; name a data-set YAML with --data{such_as}"
        ) from error
    entries = {}
    for key in ("path", "train", "val", "test"):
        value = content.get(key)
        entries[key] = value if isinstance(value, list) else [value]
        for entry in entries[key]:
            if entry is not None and not (isinstance(entry, str) and entry.isprintable()):
                shown = ascii(entry)[:60] if isinstance(entry, str) else f"a {type(entry).__name__}"
                raise UserError(f"{file}: {key}: {shown} is not a path")
    place = str(content.get("path") or ".")
    try:
        root = (file.parent / Path(place).expanduser()).resolve()
    except (RuntimeError, OSError) as error:  # no such user; links in a circle
        raise UserError(f"{file}: path: {printable(place, 400)}: {one_line(error)}") from error
    splits = {
        split: tuple(_source(root, str(entry)) for entry in entries[split])
        for split in ("train", "val", "test")
        if content.get(split)
    }
    stretch = content.get("stretch")
    if stretch is not None and not is_stretch(stretch):
        raise UserError(
            f"{file}: `stretch` is not a list of two numbers, the values that become black and "
            "white"
        )
    return DatasetSpec(
        file,
        root,
        _class_names(file, content),
        splits,
        trust_links,
        stretch=tuple(stretch) if stretch else None,
        cache_dir=cache_dir,
    )


def is_stretch(values: Any) -> bool:
    """Return whether values from a file are two numbers, the values that become black and white."""
    are_numbers = (
        isinstance(values, list)
        and len(values) == 2
        and all(type(value) in (int, float) for value in values)
    )
    return are_numbers and -MAX_VALUE <= values[0] < values[1] <= MAX_VALUE


def _source(root: Path, entry: str) -> Path:
    """Return the path of a split's entry. Roboflow writes `../train/images` for `train/images`."""
    inside = root / entry.removeprefix("../")
    return (
        inside
        if entry.startswith("../") and not (root / entry).exists() and inside.exists()
        else root / entry
    )


def is_photograph(name: str) -> bool:
    """Return whether a file name is a photograph's; hidden files, such as `._1.JPG` of macOS, are
    not.
    """
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def not_read(files: Iterable[Path]) -> str:
    """Return how many files are neither photographs that are read nor what lies beside them; an
    empty text if none is.
    """
    left = [
        file
        for file in sorted(files)
        if "." not in (file.name[:1], file.parent.name[:1])
        and not (file.suffix.lower() in IMAGE_SUFFIXES or BESIDE.search(file.name))
    ]
    if not left:
        return ""
    kinds = Counter(file.suffix or "without suffix" for file in left).most_common(
        MAX_SHOWN_SUFFIXES
    )
    shown = ", ".join(f"{printable(suffix)} ({number:,})" for suffix, number in kinds)
    return (
        f"{counted(len(left), 'file')} not read: {shown}; such as {_shown(left[0])}; convert "
        "photographs to JPEG"
    )


def _shown(path: Path) -> str:
    return printable(str(path), 400)


def label_file_for(image_file: Path, folder: str = "labels") -> Path:
    """Return an image's label file: the last folder named `images` becomes `labels` (YOLO's
    convention), or `folder`.
    """
    parts = list(image_file.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = folder
            break
    return Path(*parts).with_suffix(".txt")


def _class_names(file: Path, content: dict[str, Any]) -> tuple[str, ...]:
    if content.get("kpt_shape"):
        raise UserError(
            f"{file}: `kpt_shape`: its labels are key points, which have no outlines; label "
            "polygons"
        )
    names, num_classes = content.get("names"), content.get("nc")
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        message = f"{file}: `names` must list the classes, such as `0: conductor`"
        if names or not isinstance(num_classes, int) or not 0 < num_classes <= MAX_SHOWN_CLASSES:
            raise UserError(message)
        block = _names_block({number: f"class_{number}" for number in range(num_classes)})
        raise DataErrors(
            f"{message}; `nc` alone does not name them: see above",
            [f"{file}: write, for example", *block],
        )
    for name in names.values():
        if not isinstance(name, str | int | float) or not str(name).isprintable():
            shown = ascii(name)[:60] if isinstance(name, str) else f"a {type(name).__name__}"
            raise UserError(f"{file}: `names` holds {shown}, not the name of a class")
    numbered = {
        int(key) if isinstance(key, str) and key.isdecimal() else key: name
        for key, name in names.items()
    }
    if set(numbered) != set(range(len(names))):
        message = (
            f"{file}: `names` must be numbered 0 to {len(names) - 1} without gaps, found "
            f"{str(list(names))[:200]}"
        )
        raise DataErrors(
            message, _renumbered(file, numbered) if len(numbered) == len(names) else ()
        )
    if num_classes is not None and num_classes != len(names):
        raise UserError(
            f"{file}: `nc` is {ascii(num_classes)[:20]} but `names` lists {len(names)} classes: "
            "make them agree"
        )
    return tuple(str(numbered[index]) for index in range(len(names)))


def _renumbered(file: Path, names: dict[Any, Any]) -> list[str]:
    """Return lines that show how to number classes without gaps; none if the numbers are not
    usable.
    """
    if not all(isinstance(key, int) and 0 <= key < MAX_SHOWN_CLASSES for key in names):
        return []
    in_order = [names[key] for key in sorted(names)]
    filled = {key: names.get(key, f"unused_{key}") for key in range(max(names) + 1)}
    return [
        f"{file}: if the labels use the numbers 0 to {len(names) - 1}, write",
        *_names_block(dict(enumerate(in_order))),
        f"{file}: if the labels use the numbers {min(names)} to {max(names)}, write",
        *_names_block(filled),
    ]


def _names_block(names: dict[int, Any]) -> list[str]:
    return yaml.safe_dump({"names": names}, allow_unicode=True, sort_keys=False).splitlines()


def _list_files(spec: DatasetSpec, split: str, source: Path) -> Iterator[Path]:
    if not spec.holds(source):
        raise UserError(
            f"{spec.yaml_file}: {split}: {printable(str(source))} lies outside {spec.root}; "
            f"{OUTSIDE_ADVICE}"
        )
    if source.is_dir():
        yield from _files_below(spec, source)
    elif source.suffix == ".txt" and source.is_file():
        yield from _listed_images(spec, source)
    else:
        advice = OWN_ADVICE if _is_default(spec) else _where_else(spec, source)
        raise UserError(f"{spec.yaml_file}: {split}: {source} does not exist; {advice}")


def _is_default(spec: DatasetSpec) -> bool:
    return spec.yaml_file.resolve() == DEFAULT_DATASET_YAML


def _where_else(spec: DatasetSpec, source: Path) -> str:
    """Return what to write for a folder that does not exist: Ultralytics takes `path` from the
    working folder, too.
    """
    home, entry = spec.yaml_file.parent.resolve(), os.path.relpath(source, spec.root)
    from_here = Path.cwd() / os.path.relpath(spec.root, home)
    for root, path in ((home, "."), (from_here, str(from_here))):
        if (root / entry).exists():
            return (
                f"`path` counts from the YAML's folder: write `path: {printable(path, 400)}` for "
                f"{_shown(root / entry)}"
            )
    if not spec.root.is_dir():
        return (
            f"its `path`, {_shown(spec.root)}, does not exist; without `path` the YAML's own "
            "folder counts"
        )
    parent = next(folder for folder in source.parents if folder.is_dir())
    folders = sorted(
        each.name for each in parent.iterdir() if each.is_dir() and not each.name.startswith(".")
    )
    return f"{_shown(parent)} holds {printable(', '.join(folders[:9]), 400) or 'no folders'}"


def _files_below(spec: DatasetSpec, folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, hidden ones too.

    Follows linked folders only if links are trusted, each once.
    """
    visited = {os.path.realpath(folder)}

    def enters(path: Path) -> bool:
        if not spec.trust_links:
            if path.is_symlink() and not spec.holds(path):
                raise UserError(f"{_shown(path)}: {spec.problem_with(path)}")
            return not path.is_symlink()
        known = len(visited)
        visited.add(os.path.realpath(path))
        return len(visited) > known

    for place, entries in walk(folder, enters):
        for entry in entries:
            path = place / entry.name
            if path.suffix.lower() in IMAGE_SUFFIXES:
                is_plain = entry.is_file(follow_symlinks=False) or not is_photograph(path.name)
                problem = "" if is_plain else spec.problem_with(path)
                if problem:
                    raise UserError(f"{_shown(path)}: {problem}")
            yield path


def _listed_images(spec: DatasetSpec, list_file: Path) -> Iterator[Path]:
    """Yield the images of a list file: one path a line, relative to the list's folder."""
    try:
        if list_file.stat().st_size > MAX_LIST_BYTES:
            raise UserError(
                f"{list_file}: larger than {MAX_LIST_BYTES // 1_000_000} MB, not a list of images"
            )
        lines = read_text(list_file).split("\n")
    except OSError as error:
        raise UserError(f"{list_file}: {error.strerror}") from error
    missing, is_there = "", False
    for number, line in enumerate(lines, start=1):
        name = line.strip()
        if not name:
            continue
        path = Path(os.path.normpath(list_file.parent / name))
        if not name.isprintable() or "\\" in name or re.match(r"[A-Za-z]+:", name):
            problem = "not a path as this system writes it"
        elif path.suffix.lower() not in IMAGE_SUFFIXES:
            problem = f"not an image ({', '.join(IMAGE_SUFFIXES)})"
        else:
            problem = spec.problem_with(path)
        if problem:
            raise UserError(f"{list_file}:{number}: {printable(name)}: {problem}")
        is_there = is_there or path.exists()
        missing = missing or name
        yield path
    if missing and not is_there:
        parts = Path(missing).parts
        # CVAT's lists name folders that are not there.
        shorter = (Path(*parts[number:]) for number in range(1, len(parts)))
        found = next((each for each in shorter if (list_file.parent / each).exists()), None)
        advice = "a path counts from the list's folder"
        advice += f": write {_shown(found)} for it" if found else ""
        raise UserError(
            f"{list_file}: none of its photographs exists, such as {printable(missing, 400)}; "
            f"{advice}"
        )


def list_photos(source: str) -> list[Path]:
    """Return the photographs that `--source` names, sorted, or in the order of a list.

    Raises UserError if there are none.
    """
    path = Path(source)
    if path.is_file():
        return list(_listed(path)) if path.suffix.lower() == ".txt" else [path]
    if path.is_dir():
        tree = walk(
            path,
            lambda folder: not folder.is_symlink(),
            lambda folder, reason: print(f"skipped {_shown(folder)}: {reason}"),
        )
        found: Iterator[Path] = (
            folder / entry.name for folder, entries in tree for entry in entries
        )
    else:
        try:
            found = map(Path, glob.glob(source, recursive=True))
        except RecursionError as error:
            raise UserError(
                f"--source {source}: folders too deep for a pattern; name the folder"
            ) from error
    every = [file for file in found if file.is_file()]
    files, others = sorted(file for file in every if is_photograph(file.name)), not_read(every)
    if not files:
        if not (glob.has_magic(source) or os.path.lexists(source)):
            raise UserError(f"--source {source}: no such file or folder")
        raise UserError(
            f"--source {source}: no photographs there ({others or ', '.join(IMAGE_SUFFIXES)})"
        )
    if others and os.environ.get("RANK", "0") == "0":
        print(f"--source: {others}", flush=True)
    return files


def _listed(file: Path) -> Iterator[Path]:
    """Yield the photographs of a text file, one path a line, seen from the working folder or else
    from the file's own.
    """
    names = [line.strip() for line in read_text(file).split("\n")]
    for number, name in enumerate(names, 1):
        found = [
            path
            for path in (Path(name), file.parent / name)
            if is_photograph(path.name) and path.is_file()
        ]
        if name and not found:
            raise UserError(
                f"{file}:{number}: {printable(name, 400)}: no photograph, neither from here nor "
                "from the list's folder"
            )
        yield from found[:1]
    if not any(names):
        raise UserError(f"--source {file}: names no photograph; write one path a line")
