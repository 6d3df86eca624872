"""The data set that is written, and the labelled photographs of which no copy may come into it."""

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from yolo_seg_ddp.data.dataset_yaml import DatasetSpec, label_file_for
from yolo_seg_ddp.data.images import read_image
from yolo_seg_ddp.data.labels import ANY_CLASS, IGNORE_FOLDER, Photo, format_yolo_label, label_rows
from yolo_seg_ddp.predict.opening import cores_of
from yolo_seg_ddp.prepare import near_duplicates as near
from yolo_seg_ddp.prepare.parsing.rows import DIGEST_BYTES, digest_of
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.contents import parse_json
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import read_text, write_bytes_atomic, write_text_atomic
from yolo_seg_ddp.utils.threads import ordered_map

NOTES = ".unlabelled"
Outlines = Sequence[tuple[int, np.ndarray]]
MOST_TIMES = 20  # that a labelled photograph is there
BLANK = np.zeros((near.THUMB_PX, near.THUMB_PX), np.uint8)
# labelled photographs, the most similar ones, with which a new one is compared in detail
MOST_COMPARED = 8


class Originals:
    """The labelled photographs: 10 kB are kept of each."""

    def __init__(self, files: Sequence[tuple[str, Path]], ranks: distributed.RankInfo) -> None:
        """Read photographs, each with its split.

        The ranks share them: every rank must reach this. Raises ImageError.
        """
        shares = [range(rank, len(files), ranks.world_size) for rank in range(ranks.world_size)]
        looks = ordered_map(
            lambda number: _look(files[number][1]), shares[ranks.rank], cores_of(ranks)
        )
        seen = [*distributed.apart(looks)]
        thumbs = [BLANK if thumb is None else thumb for _, thumb in seen]
        arrays = {
            "digest": np.array([digest for digest, _ in seen], np.uint8).reshape(-1, DIGEST_BYTES),
            "has_detail": np.array([thumb is not None for _, thumb in seen], bool),
            "thumb": np.array(thumbs, np.uint8).reshape(-1, *BLANK.shape),
        }
        parts = distributed.gather_arrays(arrays)
        order = np.argsort(np.concatenate(shares))
        digest, has_detail, thumb = (
            np.concatenate([part[name] for part in parts])[order] for name in arrays
        )
        self.digests = {
            row.tobytes(): f"{split}/{file.name}"
            for row, (split, file) in zip(digest, files, strict=True)
        }
        self.known = [
            (*files[number], thumb[number]) for number in np.flatnonzero(has_detail).tolist()
        ]
        self.table = np.array([_turned(thumb)[0] for *_, thumb in self.known])

    def shown_by(self, file: Path, photo: np.ndarray) -> str:
        """Return the labelled photograph that a new one is a copy of, or of val and test one that
        it overlaps; else nothing.
        """
        same, thumb = self.digests.get(digest_of(file.read_bytes()), ""), _thumb(photo)
        if same or thumb is None or not self.known:
            return same
        alike = (_turned(thumb) @ self.table.T).max(axis=0)
        for number in np.argsort(-alike, kind="stable")[:MOST_COMPARED]:
            split, original, other = self.known[number]
            found = near.likeness(other, thumb) if alike[number] >= near.LIKELY else near.Likeness()
            if found.is_copy or (found.is_same and split != "train"):
                return f"{split}/{original.name}"
        return ""


def _look(file: Path) -> tuple[list[int], np.ndarray | None]:
    return list(digest_of(file.read_bytes())), _thumb(read_image(file, near.MEASURED_PX))


def _thumb(photo: np.ndarray) -> np.ndarray | None:
    grey = near.small_grey(photo)
    return near.thumbnail(grey) if grey.std() >= near.UNIFORM_CONTRAST else None


def _turned(thumb: np.ndarray) -> np.ndarray:
    """Return a thumbnail's signature in its eight orientations, without its mean and of length 1:
    (8, SIGNATURE_BYTES).
    """
    square = np.frombuffer(near.signature(thumb), np.uint8).reshape(near.SIGNATURE_PX, -1)
    flat = (
        np.array([each.ravel() for each in near.orientations(square)], np.float32) - square.mean()
    )
    return flat / np.linalg.norm(flat, axis=1, keepdims=True).clip(1e-6)


def free_names(files: Sequence[Path], taken: Collection[str] = ()) -> dict[str, Path]:
    """Return each file by its stem, with a number in front if another file or `taken` has the stem,
    whatever its case.
    """
    used, names = {stem.lower() for stem in taken}, {}
    # Of each stem: numbers that were tried are not free later.
    numbers = {file.stem.lower(): count(2) for file in files}
    for file in files:
        tried = chain(
            [file.stem], (f"{number}-{file.stem}" for number in numbers[file.stem.lower()])
        )
        name = next(each for each in tried if each.lower() not in used)
        used.add(name.lower())
        names[name] = file
    return names


def files_of_labels(file: Path) -> dict[str, Path]:
    """Return the files of a photograph's labels and regions to ignore, by kind, that exist."""
    # Both are one outside folders named images.
    kinds = {label_file_for(file, kind): kind for kind in (IGNORE_FOLDER, "labels")}
    return {kind: source for source, kind in kinds.items() if source.exists()}


def renumbered_rows(photo: Photo, numbers: Sequence[int]) -> dict[str, str]:
    """Return the rows of a photograph's labels and regions to ignore, by kind, with other numbers
    of the classes; no regions of classes that nobody looked for.
    """
    number_of = {ANY_CLASS: ANY_CLASS, **dict(enumerate(numbers))}
    unsearched = photo.ignored_ids[photo.unsearched]
    return {
        kind: "".join(
            f"{number_of[number]} {' '.join(fields[1:])}\n"
            for _, fields in label_rows(source)
            if (number := int(float(fields[0]))) not in unsearched or kind == "labels"
        )
        for kind, source in files_of_labels(photo.file).items()
    }


class NewData:
    """The folder of the new data set. new: photographs by name; split_of: the splits of those that
    are not for training.

    Each that is done has a note, written after its other files.
    """

    def __init__(
        self, folder: Path, new: Mapping[str, Path], split_of: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.notes, self.new = folder, folder / NOTES, new
        self.split_of = defaultdict(lambda: "train", split_of or {})

    def file(self, name: str, kind: str, split: str = "") -> Path:
        """Return the labels or the regions to ignore of a photograph, a new one without `split`."""
        return self.folder / (split or self.split_of[name]) / kind / f"{name}.txt"

    def begin(
        self, labelled: Mapping[str, Mapping[str, Path]], settings: Mapping[str, Any]
    ) -> list[str]:
        """Put the labelled photographs, by split and name, there; return which new ones are not
        done.

        Raises UserError if something else lies there, also if it was made of other photographs or
        with other settings.
        """
        files = [
            (str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in self.new.values()
        ]
        text, place = json.dumps({**settings, "photos": files}), self.notes / "settings.json"
        is_same = place.exists() and read_text(place) == text
        if not is_same and any(each != self.notes for each in self.folder.glob("*")):
            other = "holds something else, or was made of other photographs, labels or options"
            raise UserError(f"--output {self.folder}: {other}; name a new folder")
        self.notes.mkdir(parents=True, exist_ok=True)
        write_text_atomic(place, text)
        for split, names in labelled.items():
            for kind in ("images", "labels", IGNORE_FOLDER):
                (self.folder / split / kind).mkdir(parents=True, exist_ok=True)
            self._take(split, names)
        return [name for name in self.new if not (self.notes / f"{name}.json").exists()]

    def add(
        self,
        name: str,
        outlines: Mapping[str, Outlines],
        note: Mapping[str, Any],
        rows: Mapping[str, str],
    ) -> None:
        """Write a photograph's outlines, in shares of its size, then rows of people's, and its note
        at the end; of one that is left out the note alone.
        """
        if not note["left_out"]:
            for kind in ("labels", IGNORE_FOLDER):
                text = format_yolo_label(outlines[kind]) + rows.get(kind, "")
                write_text_atomic(self.file(name, kind), text)
            self._put(self.new[name], self.split_of[name], name)
        write_text_atomic(self.notes / f"{name}.json", json.dumps(note) + "\n")

    def note(self, name: str) -> dict[str, Any]:
        """Return the note of a photograph that is done; perhaps it was deleted by hand."""
        note = parse_json(read_text(self.notes / f"{name}.json"))
        is_deleted = not note["left_out"] and not self.file(name, "labels").exists()
        return {**note, "left_out": "deleted by hand"} if is_deleted else note

    def repeat(self, labelled: Mapping[str, Path], num_added: int) -> int:
        """Let the labelled photographs of train be three quarters of it; return how often each is
        there then.
        """
        times = min(max(round(3 * num_added / max(len(labelled), 1)), 1), MOST_TIMES)
        self._take("train", free_names([*labelled.values()] * (times - 1), [*labelled, *self.new]))
        return times

    def finish(self, spec: DatasetSpec, splits: Sequence[str]) -> None:
        """Write the data set's YAML at the end, so that nobody trains on a half of it."""
        content: dict[str, Any] = {
            "names": dict(enumerate(spec.names)),
            **{one: f"{one}/images" for one in splits},
        }
        content |= {"stretch": [*spec.stretch]} if spec.stretch else {}
        write_text_atomic(
            self.folder / "dataset.yaml",
            yaml.safe_dump(content, sort_keys=False, allow_unicode=True),
        )

    def _take(self, split: str, files: Mapping[str, Path]) -> None:
        """Put labelled photographs, by name, into a split with their labels and regions."""
        for name, file in files.items():
            for kind, source in files_of_labels(file).items():
                write_bytes_atomic(self.file(name, kind, split), source.read_bytes())
            self._put(file, split, name)

    def _put(self, file: Path, split: str, name: str) -> None:
        """Give a photograph a second name, atomically, or copy it to another file system."""
        target = self.folder / split / "images" / f"{name}{file.suffix}"
        if target.exists():
            return
        part = target.with_name(f".{name[-40:]}.part")
        part.unlink(missing_ok=True)
        try:
            os.link(file.resolve(), part)
        except OSError:
            shutil.copyfile(file, part)
        os.replace(part, target)
