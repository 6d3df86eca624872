"""`download.json`: the files in a raw-data folder and their origin, so that a repeated run skips them."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from utils.common.errors import UserError
from utils.common.files import new_file

LEDGER_NAME = "download.json"


@dataclass(frozen=True)
class Entry:
    """One downloaded object: the label file or a circuit's zip.

    `url` has no user, password or query. `files` maps paths relative to the raw-data folder to sizes in bytes; it is
    empty until the object is complete. `max_images` is None if all photographs were requested.
    """

    url: str
    size_bytes: int
    etag: str
    md5: str
    max_images: int | None = None
    num_photographs: int = 0
    is_complete: bool = False
    files: dict[str, int] = dataclasses.field(default_factory=dict)

    def covers(self, max_images: int | None) -> bool:
        """Return whether the download includes the photographs requested now."""
        return self.is_complete and (
            self.max_images is None or (max_images is not None and max_images <= self.max_images)
        )


class Ledger:
    """The entries of a raw-data folder by object name. Raises UserError when the file is damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / LEDGER_NAME
        self._entries: dict[str, Entry] = {}
        if self._file.exists():
            try:
                content = json.loads(self._file.read_text(encoding="utf-8"))
                self._entries = {name: Entry(**values) for name, values in content["objects"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{self._file}: not readable ({type(error).__name__}); delete it and run again"
                ) from error

    def entry(self, name: str) -> Entry | None:
        """Return an object's entry, or None."""
        return self._entries.get(name)

    def is_in_place(self, name: str) -> bool:
        """Return whether an object is complete and all its files still exist with their sizes."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_complete and all(map(self._has_size, entry.files.items()))

    def record(self, name: str, entry: Entry) -> None:
        """Set an object's entry and write the file atomically."""
        self._entries[name] = entry
        objects = {name: dataclasses.asdict(entry) for name, entry in sorted(self._entries.items())}
        part = self._file.with_name(LEDGER_NAME + ".part")
        with new_file(part) as stream:
            stream.write(json.dumps({"version": 1, "objects": objects}, indent=1).encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, self._file)

    def _has_size(self, item: tuple[str, int]) -> bool:
        file = self._folder / item[0]
        return file.is_file() and file.stat().st_size == item[1]
