"""What a data set holds, by content, so that a run notices when it is resumed on other photographs, labels or classes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils.common.cores import usable_cpu_count
from utils.common.errors import UserError
from utils.common.threads import ordered_map
from utils.data.labels import Photo

DIGEST_BYTES = 8
BLOCK_BYTES, MOST_BLOCKS = 65_536, 4  # of a photograph's file that are read: the whole file up to 256 KiB
UNREADABLE = ("", "")  # of a photograph that `--skip-bad` leaves out


@dataclass(frozen=True)
class Fingerprint:
    """The names of the classes, and of each photograph, by its split and path, digests of its file and of its labels."""

    names: tuple[str, ...]
    photographs: Mapping[str, tuple[str, str]]

    @property
    def digest(self) -> str:
        """One digest of everything."""
        return _digest([self.to_json().encode()])

    def to_json(self) -> str:
        """Return the text from which `from_json` reads this again."""
        return json.dumps({"names": self.names, "photographs": dict(sorted(self.photographs.items()))})

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Raises ValueError, KeyError, TypeError or AttributeError for another text."""
        content = json.loads(text)
        photographs = {str(key): (str(file), str(labels)) for key, (file, labels) in content["photographs"].items()}
        return cls(tuple(map(str, content["names"])), photographs)

    def changes_since(self, before: Fingerprint) -> list[str]:
        """Return what differs in the photographs and labels, each with a number and an example."""
        now, then = self.photographs, before.photographs
        both = [key for key in sorted(now.keys() & then.keys()) if UNREADABLE not in (now[key], then[key])]
        found = {
            "photographs were added": sorted(key for key in now.keys() - then.keys() if now[key] != UNREADABLE),
            "photographs are gone": sorted(key for key in then.keys() - now.keys() if then[key] != UNREADABLE),
            "photographs have another content": [key for key in both if now[key][0] != then[key][0]],
            "photographs have other labels": [key for key in both if now[key][1] != then[key][1]],
        }
        return [f"{len(keys)} {what} (such as {keys[0]})" for what, keys in found.items() if keys]


def take_fingerprint(
    names: Sequence[str], splits: Mapping[str, Sequence[Photo]], root: Path, skipped: Iterable[str] = ()
) -> Fingerprint:
    """Return the fingerprint of the photographs of each split; their paths are relative to `root`.

    The order of the objects in a label file counts, since training depends on it. `skipped` are paths of photographs
    that cannot be read. Raises UserError for a photograph that is gone.
    """
    listed = [(split, photo) for split, photos in splits.items() for photo in photos]
    files = ordered_map(_digest_of_file, [photo.file for _, photo in listed], usable_cpu_count())
    photographs = {
        f"{split} {_relative(photo.file, root)}": (file, _digest_of_labels(photo))
        for (split, photo), file in zip(listed, files, strict=True)
    }
    return Fingerprint(tuple(names), {**dict.fromkeys(skipped, UNREADABLE), **photographs})


def _relative(file: Path, root: Path) -> str:
    return (file.relative_to(root) if file.is_relative_to(root) else file).as_posix()


def _digest_of_file(file: Path) -> str:
    """Return a digest of a file's size and of up to MOST_BLOCKS blocks, the first and the last among them."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            starts = range(0, size, BLOCK_BYTES)
            if len(starts) > MOST_BLOCKS:
                starts = np.linspace(0, size - BLOCK_BYTES, MOST_BLOCKS).astype(int).tolist()
            parts = [str(size).encode()]
            for start in starts:
                stream.seek(start)
                parts.append(stream.read(BLOCK_BYTES))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; run python parse_labels.py again") from error
    return _digest(parts)


def _digest_of_labels(photo: Photo) -> str:
    outlines = [np.asarray(outline, np.float32).tobytes() for outline in photo.polygons]
    return _digest([np.asarray(photo.class_ids, np.int64).tobytes(), *outlines])


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
