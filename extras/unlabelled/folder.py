"""The data set that is written: labelled photographs, new ones with labels and regions to ignore, and a note of each that is done."""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from utils.common.errors import UserError
from utils.common.files import parse_json, read_text, write_bytes_atomic, write_text_atomic
from utils.data.dataset_yaml import DatasetSpec, label_file_for
from utils.data.labels import format_yolo_label

NOTES, DATASET = ".unlabelled", "dataset.yaml"
TEXTS = ("labels", "ignore")
Outlines = Sequence[tuple[int, np.ndarray]]


def put(file: Path, target: Path) -> None:
    """Give a photograph a second name, or copy it to another file system, atomically. One of equal size that is there stays."""
    if target.exists() and target.stat().st_size == file.stat().st_size:
        return
    part = target.with_name(f".{target.stem}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(file.resolve(), part)
    except OSError:
        shutil.copyfile(file, part)
    os.replace(part, target)


def free_names(files: Sequence[Path], taken: Collection[str] = ()) -> dict[str, Path]:
    """Return each file by its stem, with a number in front if another file or `taken` has the stem, whatever its case."""
    used = {stem.lower() for stem in taken}
    names = {}
    for file in files:
        names_of_it = chain([file.stem], (f"{number}-{file.stem}" for number in count(2)))
        name = next(each for each in names_of_it if each.lower() not in used)
        used.add(name.lower())
        names[name] = file
    return names


class NewData:
    """The folder of the new data set. Each new photograph that is done has a note, `NAME.json`, written after its other files.

    labelled: photographs by split and name; new: those without labels by name; settings: all on which their labels depend.
    """

    def __init__(
        self, folder: Path, labelled: Mapping[str, Mapping[str, Path]], new: Mapping[str, Path], settings: Any
    ) -> None:
        self.folder, self.notes, self.labelled, self.new = folder, folder / NOTES, labelled, new
        self.settings = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def image(self, split: str, name: str, file: Path) -> Path:
        """Return the place of a photograph."""
        return self.folder / split / "images" / f"{name}{file.suffix}"

    def text(self, split: str, kind: str, name: str) -> Path:
        """Return the place of one of its TEXTS."""
        return self.folder / split / kind / f"{name}.txt"

    def begin(self) -> None:
        """Put the labelled photographs there; take away what an earlier run made with other settings or of other photographs."""
        self.notes.mkdir(parents=True, exist_ok=True)
        (self.folder / DATASET).unlink(missing_ok=True)
        for place in (self.folder / split / kind for split in self.labelled for kind in ("images", *TEXTS)):
            place.mkdir(parents=True, exist_ok=True)
        for note in self.notes.glob("*.json"):
            if not self.is_done(note.stem):
                with suppress(ValueError, LookupError):  # a damaged note is of a photograph that is made again
                    self.image("train", note.stem, Path(self.read(note.stem)["file"])).unlink(missing_ok=True)
                for kind in TEXTS:
                    self.text("train", kind, note.stem).unlink(missing_ok=True)
                note.unlink()
        for split, names in self.labelled.items():
            for name, file in names.items():
                labels = label_file_for(file)
                ignored = Path("/ignore/".join(str(labels).rsplit("/labels/", 1)))
                for kind, source in (("labels", labels), ("ignore", ignored)):
                    if source.exists() and (kind == "labels" or source != labels):
                        write_bytes_atomic(self.text(split, kind, name), source.read_bytes())
                put(file, self.image(split, name, file))

    def is_done(self, name: str) -> bool:
        """Return whether a photograph was finished with these settings."""
        with suppress(OSError, ValueError, LookupError):
            return name in self.new and self.read(name)["made_of"] == self._made_of(name)
        return False

    def add(self, name: str, labels: Outlines, ignored: Outlines, facts: Mapping[str, Any]) -> None:
        """Write a photograph and its outlines, in shares of its size, and the note at the end. With `left_out`, the note alone."""
        if not facts["left_out"]:
            for kind, outlines in zip(TEXTS, (labels, ignored), strict=True):
                write_text_atomic(self.text("train", kind, name), format_yolo_label(outlines))
            put(self.new[name], self.image("train", name, self.new[name]))
        note = {"made_of": self._made_of(name), "file": str(self.new[name]), **facts}
        write_text_atomic(self.notes / f"{name}.json", json.dumps(note) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """Return a photograph's note."""
        return dict(parse_json(read_text(self.notes / f"{name}.json")))

    def all_notes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the notes of all new photographs, one at a time."""
        return ((name, self.read(name)) for name in self.new)

    def finish(self, spec: DatasetSpec) -> Path:
        """Write the data set's YAML, without which nobody trains on a half of it; return its path."""
        content: dict[str, Any] = {split: f"{split}/images" for split in self.labelled}
        content |= {"names": dict(enumerate(spec.names))} | ({"stretch": [*spec.stretch]} if spec.stretch else {})
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        write_text_atomic(self.folder / DATASET, "# Made by python -m extras.unlabelled.\n" + text)
        return self.folder / DATASET

    def _made_of(self, name: str) -> list[str]:
        status = self.new[name].stat()
        return [self.settings, str(self.new[name].resolve()), f"{status.st_size} {status.st_mtime_ns}"]


def refuse_foreign(folder: Path, spec: DatasetSpec) -> None:
    """Raise UserError if something else than an earlier result lies in the output folder."""
    if (folder.exists() and any(folder.iterdir()) and not (folder / NOTES).is_dir()) or folder.resolve() == spec.root:
        raise UserError(f"--output {folder}: holds something else; name a new folder")
