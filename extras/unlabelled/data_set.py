"""The data set that is written, and the labelled photographs of which no copy may come into it."""

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from utils.common.cores import usable_cpu_count
from utils.common.errors import UserError
from utils.common.files import parse_json, read_text, write_bytes_atomic, write_text_atomic
from utils.common.threads import ordered_map
from utils.data.dataset_yaml import DatasetSpec, label_file_for
from utils.data.images import read_image
from utils.data.labels import format_yolo_label
from utils.sources import near_duplicates as near
from utils.sources.parsing.rows import digest_of

NOTES, DATASET, SETTINGS = ".unlabelled", "dataset.yaml", "settings.json"
MOST_COMPARED = 8  # labelled photographs, the most similar ones, with which a new one is compared in detail


class Originals:
    """The labelled photographs: 10 kB are kept of each."""

    def __init__(self, files: Sequence[tuple[str, Path]]) -> None:
        """Read photographs, each with its split. Raises ImageError."""
        thumbs = list(ordered_map(lambda one: _thumb(read_image(one[1], near.MEASURED_PX)), files, usable_cpu_count()))
        self.digests = {digest_of(file.read_bytes()): f"{split}/{file.name}" for split, file in files}
        self.known = [(*entry, thumb) for entry, thumb in zip(files, thumbs, strict=True) if thumb is not None]
        self.table = np.array([_unit(_signature(thumb)) for *_, thumb in self.known])

    def shown_by(self, file: Path, photo: np.ndarray) -> str:
        """Return the labelled photograph that a new one is a copy of, or of val and test one that it overlaps; else nothing."""
        same, thumb = self.digests.get(digest_of(file.read_bytes()), ""), _thumb(photo)
        if same or thumb is None or not self.known:
            return same
        turned = np.array([_unit(each) for each in near.orientations(_signature(thumb))])
        alike = (turned @ self.table.T).max(axis=0)
        for number in np.argsort(-alike, kind="stable")[:MOST_COMPARED]:
            split, original, other = self.known[number]
            found = near.likeness(other, thumb) if alike[number] >= near.LIKELY else near.Likeness()
            if found.is_copy or (found.is_same and split != "train"):
                return f"{split}/{original.name}"
        return ""


def _thumb(photo: np.ndarray) -> np.ndarray | None:
    grey = near.small_grey(photo)
    return near.thumbnail(grey) if grey.std() >= near.UNIFORM_CONTRAST else None


def _signature(thumb: np.ndarray) -> np.ndarray:
    return np.frombuffer(near.signature(thumb), np.uint8).reshape(near.SIGNATURE_PX, -1)


def _unit(values: np.ndarray) -> np.ndarray:
    flat = values.astype(np.float32).ravel() - values.mean()
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


def free_names(files: Sequence[Path], taken: Collection[str] = ()) -> dict[str, Path]:
    """Return each file by its stem, with a number in front if another file or `taken` has the stem, whatever its case."""
    used, names = {stem.lower() for stem in taken}, {}
    for file in files:
        tried = chain([file.stem], (f"{number}-{file.stem}" for number in count(2)))
        name = next(each for each in tried if each.lower() not in used)
        used.add(name.lower())
        names[name] = file
    return names


class NewData:
    """The folder of the new data set. new: photographs by name. Each that is done has a note, written after its other files."""

    def __init__(self, folder: Path, new: Mapping[str, Path]) -> None:
        self.folder, self.notes, self.new = folder, folder / NOTES, new

    def file(self, name: str, kind: str, split: str = "train") -> Path:
        """Return the labels or the regions to ignore of a photograph."""
        return self.folder / split / kind / f"{name}.txt"

    def begin(self, labelled: Mapping[str, Mapping[str, Path]], settings: Mapping[str, Any]) -> None:
        """Put the labelled photographs, by split and name, there. Raises UserError if other settings made what lies there."""
        photos, place = [str(file) for file in self.new.values()], self.notes / SETTINGS
        text = json.dumps({**settings, "photos": photos})
        others = [each for each in self.folder.glob("*") if each != self.notes]
        if others and not (place.exists() and read_text(place) == text):
            other = "holds something else, or was made of other photographs, labels or options"
            raise UserError(f"--output {self.folder}: {other}; name a new folder")
        self.notes.mkdir(parents=True, exist_ok=True)
        write_text_atomic(place, text)
        for folder in (self.folder / split / kind for split in labelled for kind in ("images", "labels", "ignore")):
            folder.mkdir(parents=True, exist_ok=True)
        for split, names in labelled.items():
            for name, file in names.items():
                labels = label_file_for(file)
                ignored = Path("/ignore/".join(str(labels).rsplit("/labels/", 1)))
                for kind, source in (("labels", labels), ("ignore", ignored)):
                    if source.exists() and (kind == "labels" or source != labels):
                        write_bytes_atomic(self.file(name, kind, split), source.read_bytes())
                self._put(file, split, name)

    def add(self, name: str, outlines: Mapping[str, Sequence[tuple[int, np.ndarray]]], note: Mapping[str, Any]) -> None:
        """Write a photograph's outlines, in shares of its size, and its note at the end; of one that is left out the note alone."""
        for kind in outlines if not note["left_out"] else ():
            write_text_atomic(self.file(name, kind), format_yolo_label(outlines[kind]))
        if not note["left_out"]:
            self._put(self.new[name], "train", name)
        write_text_atomic(self.notes / f"{name}.json", json.dumps(note) + "\n")

    def waiting(self) -> list[str]:
        """Return the names of photographs that are not done."""
        return [name for name in self.new if not (self.notes / f"{name}.json").exists()]

    def note(self, name: str) -> dict[str, Any]:
        """Return the note of a photograph that is done; perhaps it was deleted by hand."""
        note = parse_json(read_text(self.notes / f"{name}.json"))
        is_deleted = not note["left_out"] and not self.file(name, "labels").exists()
        return {**note, "left_out": "deleted by hand"} if is_deleted else note

    def finish(self, spec: DatasetSpec, splits: Collection[str]) -> Path:
        """Write the data set's YAML at the end: nobody trains on a half of it. Return its path."""
        content: dict[str, Any] = {split: f"{split}/images" for split in splits} | {
            "names": dict(enumerate(spec.names))
        }
        content |= {"stretch": [*spec.stretch]} if spec.stretch else {}
        write_text_atomic(self.folder / DATASET, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
        return self.folder / DATASET

    def _put(self, file: Path, split: str, name: str) -> None:
        """Give a photograph a second name, atomically, or copy it to another file system."""
        target = self.folder / split / "images" / f"{name}{file.suffix}"
        if not target.exists():
            part = target.with_name(f".{name[-40:]}.part")
            part.unlink(missing_ok=True)
            try:
                os.link(file.resolve(), part)
            except OSError:
                shutil.copyfile(file, part)
            os.replace(part, target)
