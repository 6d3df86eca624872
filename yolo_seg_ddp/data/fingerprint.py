"""What a data set holds, by content, so that a run notices when it is resumed on other photographs,
labels or classes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from yolo_seg_ddp.data.labels import Photo
from yolo_seg_ddp.utils.contents import mapping
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.text import counted
from yolo_seg_ddp.utils.threads import ordered_map

T = TypeVar("T")
DIGEST_BYTES = 8
UNREADABLE = ("", "", "")  # of a photograph that `--skip-bad` leaves out


@dataclass(frozen=True)
class Fingerprint:
    """The names of the classes, and of each photograph, by its split and path, digests of its file
    and of its labels.

    The third text is the file's size and times: as long as they stay, a file is not read again. It
    is no part of the digest.
    """

    names: tuple[str, ...]
    photographs: Mapping[str, tuple[str, str, str]]

    @property
    def digest(self) -> str:
        """One digest of everything."""
        contents = {key: texts[:2] for key, texts in sorted(self.photographs.items())}
        return _digest([json.dumps([self.names, contents]).encode()])

    def to_json(self) -> str:
        """Return the text whose content `of_content` reads again."""
        return json.dumps(
            {"names": self.names, "photographs": dict(sorted(self.photographs.items()))}
        )

    @classmethod
    def of_content(cls, content: Any) -> Fingerprint:
        """Return the fingerprint that `to_json` wrote.

        Raises one of read_back.BAD_CONTENT for another content.
        """
        names, photographs = mapping(content)["names"], mapping(content["photographs"])
        if not all(
            isinstance(part, list) and {*map(type, part)} <= {str}
            for part in [names, *photographs.values()]
        ):
            raise ValueError("expected lists of texts")
        return cls(
            tuple(names),
            {key: (file, labels, times) for key, (file, labels, times) in photographs.items()},
        )

    def changes_since(self, before: Fingerprint) -> list[str]:
        """Return what differs in the photographs and labels, each with a number and an example; not
        their paths alone.
        """
        now, then = self.photographs, before.photographs
        in_order = [
            [(key.split()[0], *each[key][:2]) for key in sorted(each)] for each in (now, then)
        ]
        if in_order[0] == in_order[1]:  # a training uses them in this order
            return []
        both = [
            key
            for key in sorted(now.keys() & then.keys())
            if UNREADABLE not in (now[key], then[key])
        ]
        found = {
            "added": sorted(key for key in now.keys() - then.keys() if now[key] != UNREADABLE),
            "gone": sorted(key for key in then.keys() - now.keys() if then[key] != UNREADABLE),
            "with another content": [key for key in both if now[key][0] != then[key][0]],
            "with other labels": [key for key in both if now[key][1] != then[key][1]],
        }
        return [
            f"{counted(len(keys), 'photograph')} {what} (such as {keys[0]})"
            for what, keys in found.items()
            if keys
        ]


def take_fingerprint(
    names: Sequence[str],
    splits: Mapping[str, Sequence[Photo]],
    root: Path,
    skipped: Iterable[str] = (),
    before: Fingerprint | None = None,
    digests: Mapping[str, tuple[str, str]] | None = None,
) -> Fingerprint:
    """Return the fingerprint of the photographs of each split; their paths are relative to `root`.

    The order of the objects in a label file counts, since training depends on it. `skipped` are
    paths of photographs that cannot be read. `before`: an earlier fingerprint; files with its size
    and times are not read again. `digests`: those that are at hand, with the file's size and times,
    by split and path. Raises UserError for a photograph that is gone.
    """
    listed = {
        f"{split} {os.path.relpath(photo.file, root)}": photo
        for split, of in splits.items()
        for photo in of
    }
    known = {
        (key, texts[2]): texts[0] for key, texts in (before.photographs if before else {}).items()
    }
    contents = dict(digests or {})
    unread = [(key, photo.file) for key, photo in listed.items() if key not in contents]
    read = ordered_map(
        lambda item: digest_while(known, *item, lambda file: None)[:2], unread, usable_cpu_count()
    )
    contents |= zip((key for key, _ in unread), read, strict=True)
    photographs = {
        key: (contents[key][0], _digest_of_labels(photo), contents[key][1])
        for key, photo in listed.items()
    }
    return Fingerprint(tuple(names), {**dict.fromkeys(skipped, UNREADABLE), **photographs})


def digest_while(
    known: Mapping[tuple[str, str], str], path: str, file: Path, make: Callable[[Path], T]
) -> tuple[str, str, T]:
    """Return the digest of a photograph's file, the file's size and times, and what `make` returns
    of the same content.

    `known` has digests by path and times; what it has is not read. Raises UserError for a file that
    cannot be read.
    """
    while True:
        times = times_of(file)
        if not (digest := known.get((path, times), "")):
            try:
                with file.open("rb") as stream:
                    new = partial(hashlib.blake2b, digest_size=DIGEST_BYTES)
                    digest = hashlib.file_digest(stream, new).hexdigest()
            except OSError as error:
                raise _gone(file, error) from error
        made = make(file)
        if times_of(file) == times:  # else it was written meanwhile
            return digest, times, made


def times_of(file: Path) -> str:
    """Return a file's size and times.

    The time of the last change of the inode cannot be set back. Raises UserError.
    """
    try:
        facts = file.stat()
    except OSError as error:
        raise _gone(file, error) from error
    return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"


def _gone(file: Path, error: OSError) -> UserError:
    return UserError(f"{file}: {error.strerror}; run python parse_labels.py again")


def _digest_of_labels(photo: Photo) -> str:
    class_ids, outlines = photo.with_regions()
    return _digest(
        [
            class_ids.astype(np.int64).tobytes(),
            *(outline.astype(np.float32).tobytes() for outline in outlines),
        ]
    )


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
