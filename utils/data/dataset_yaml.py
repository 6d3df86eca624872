"""Reads a YOLO data-set YAML: image folders and class names."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.common.errors import UserError, printable

DEFAULT_DATASET_YAML = Path(__file__).resolve().parent.parent.parent / "dataset.yaml"
MAX_LIST_BYTES = 500_000_000
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class DatasetSpec:
    """The content of a data-set YAML. `splits` maps `train`, `val` and `test` to image folders or list files."""

    yaml_file: Path
    root: Path
    names: tuple[str, ...]
    splits: dict[str, tuple[Path, ...]]

    def holds(self, path: Path) -> bool:
        """Return whether a path, after following links, is inside the data set's root."""
        return Path(os.path.realpath(path)).is_relative_to(self.root)

    def problem_with(self, path: Path) -> str:
        """Return why a file may not be opened; an empty string if it may, or if it does not exist."""
        if not self.holds(path):
            return f"lies outside {self.root}, or is a link that leaves it; set `path` to a folder that contains both"
        try:
            return "" if stat.S_ISREG(path.stat().st_mode) else "not a regular file"
        except FileNotFoundError:
            return ""
        except OSError as error:
            return str(error.strerror).lower()

    def image_files(self, split: str) -> list[Path]:
        """Return a split's images, sorted. Raises UserError when the split is missing or empty."""
        if split not in self.splits:
            raise UserError(f"{self.yaml_file}: no split `{split}`; it has {', '.join(self.splits) or 'none'}")
        files = sorted({file for source in self.splits[split] for file in _list_images(self, split, source)})
        if not files:
            sources = ", ".join(map(str, self.splits[split]))
            raise UserError(f"{self.yaml_file}: {split}: no images in {sources}; run python parse_labels.py first")
        return files


def load_dataset_yaml(path: str | Path) -> DatasetSpec:
    """Read a data-set YAML. Relative paths are relative to the YAML file's folder.

    Raises UserError naming the file and the key that is wrong.
    """
    file = Path(path)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; name a data-set YAML with --data") from error
    except yaml.YAMLError as error:
        raise UserError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected keys `path`, `train`, `val` and `names`")
    _check_paths(file, content)
    root = (file.parent / str(content.get("path") or ".")).resolve()
    splits = {}
    for split in ("train", "val", "test"):
        if content.get(split):
            entries = content[split] if isinstance(content[split], list) else [content[split]]
            splits[split] = tuple(_source(root, str(entry)) for entry in entries)
    return DatasetSpec(file, root, _class_names(file, content.get("names")), splits)


def _source(root: Path, entry: str) -> Path:
    """Return the path of a split's entry. Roboflow writes `../train/images` for `train/images`."""
    inside = root / entry.removeprefix("../")
    return inside if entry.startswith("../") and not (root / entry).exists() and inside.exists() else root / entry


def is_photograph(name: str) -> bool:
    """Return whether a file name is a photograph's; hidden files, such as `._1.JPG` of macOS, are not."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


def label_file_for(image_file: Path) -> Path:
    """Return an image's label file: the last folder named `images` becomes `labels` (YOLO's convention)."""
    parts = list(image_file.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _check_paths(file: Path, content: dict[str, Any]) -> None:
    for key in ("path", "train", "val", "test"):
        entries = content.get(key) if isinstance(content.get(key), list) else [content.get(key)]
        for entry in entries or ():
            if entry is not None and not (isinstance(entry, str) and entry.isprintable()):
                shown = ascii(entry)[:60] if isinstance(entry, str) else f"a {type(entry).__name__}"
                raise UserError(f"{file}: {key}: {shown} is not a path")


def _class_names(file: Path, names: Any) -> tuple[str, ...]:
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        raise UserError(f"{file}: `names` must list the classes, such as `0: conductor`")
    if set(names) != set(range(len(names))):
        raise UserError(f"{file}: `names` must be numbered 0 to {len(names) - 1} without gaps, found {list(names)}")
    for name in names.values():
        if not isinstance(name, str | int | float) or not str(name).isprintable():
            shown = ascii(name)[:60] if isinstance(name, str) else f"a {type(name).__name__}"
            raise UserError(f"{file}: `names` holds {shown}, not the name of a class")
    return tuple(str(names[index]) for index in range(len(names)))


def _list_images(spec: DatasetSpec, split: str, source: Path) -> Iterator[Path]:
    if not spec.holds(source):
        raise UserError(
            f"{spec.yaml_file}: {split}: {printable(str(source))} lies outside {spec.root}; "
            "set `path` to a folder that contains it"
        )
    if source.is_dir():
        yield from _images_below(spec, source)
    elif source.suffix == ".txt" and source.is_file():
        yield from _listed_images(spec, source)
    else:
        raise UserError(f"{spec.yaml_file}: {split}: {source} does not exist; run python parse_labels.py first")


def _images_below(spec: DatasetSpec, folder: Path) -> Iterator[Path]:
    """Yield the images below a folder without following linked folders."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _images_below(spec, path)
            elif path.suffix.lower() in IMAGE_SUFFIXES:
                problem = "" if entry.is_file(follow_symlinks=False) else spec.problem_with(path)
                if problem:
                    raise UserError(f"{printable(str(path), 400)}: {problem}")
                yield path


def _listed_images(spec: DatasetSpec, list_file: Path) -> Iterator[Path]:
    """Yield the images of a list file: one path a line, relative to the list's folder."""
    try:
        if list_file.stat().st_size > MAX_LIST_BYTES:
            raise UserError(f"{list_file}: larger than {MAX_LIST_BYTES // 1_000_000} MB, not a list of images")
        lines = list_file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{list_file}: not a text file") from error
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
        yield path
