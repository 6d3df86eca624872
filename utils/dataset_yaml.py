"""Reads the YOLO data-set description: where the images are and what the classes are called."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from utils.errors import UserError

DEFAULT_DATASET_YAML = Path(__file__).resolve().parent.parent / "dataset.yaml"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class DatasetSpec:
    """A data set as its YAML file describes it. `splits` maps `train`, `val`, … to image folders or list files."""

    yaml_file: Path
    root: Path
    names: tuple[str, ...]
    splits: dict[str, tuple[Path, ...]]

    def image_files(self, split: str) -> list[Path]:
        """List a split's images, sorted. Raises UserError when the split is missing or empty."""
        if split not in self.splits:
            raise UserError(f"{self.yaml_file}: no split `{split}`; it has {', '.join(self.splits) or 'none'}")
        files = sorted({file for source in self.splits[split] for file in _list_images(self.yaml_file, split, source)})
        if not files:
            sources = ", ".join(map(str, self.splits[split]))
            raise UserError(f"{self.yaml_file}: {split}: no images in {sources}; run python parse_labels.py first")
        return files


def load_dataset_yaml(path: str | Path) -> DatasetSpec:
    """Read a data-set YAML. Relative paths are taken from the YAML file's own folder.

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
    root = (file.parent / str(content.get("path") or ".")).resolve()
    splits = {}
    for split in ("train", "val", "test"):
        if content.get(split):
            entries = content[split] if isinstance(content[split], list) else [content[split]]
            splits[split] = tuple(root / str(entry) for entry in entries)
    return DatasetSpec(file, root, _class_names(file, content.get("names")), splits)


def label_file_for(image_file: Path) -> Path:
    """Return the label text beside an image: the last folder called `images` becomes `labels` (YOLO's convention)."""
    parts = list(image_file.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


def _class_names(file: Path, names: Any) -> tuple[str, ...]:
    if isinstance(names, list):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not names:
        raise UserError(f"{file}: `names` must list the classes, such as `0: conductor`")
    if set(names) != set(range(len(names))):
        raise UserError(f"{file}: `names` must be numbered 0 to {len(names) - 1} without gaps, found {list(names)}")
    return tuple(str(names[index]) for index in range(len(names)))


def _list_images(yaml_file: Path, split: str, source: Path) -> list[Path]:
    if source.is_dir():
        return [file for file in source.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES]
    if source.suffix == ".txt" and source.is_file():
        lines = (line.strip() for line in source.read_text(encoding="utf-8").splitlines())
        return [Path(os.path.normpath(source.parent / line)) for line in lines if line]
    raise UserError(f"{yaml_file}: {split}: {source} does not exist; run python parse_labels.py first")
