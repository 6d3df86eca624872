"""An unfinished download on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from utils.common.files import is_own_file, new_file
from utils.sources.download.source import RemoteFile


class PartFile:
    """`target.part`, and `target.part.json` with the version of the file that its bytes belong to."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._note = target.with_name(target.name + ".part.json")
        self.path = target.with_name(target.name + ".part")

    def usable_bytes(self, remote: RemoteFile) -> int:
        """Return the number of bytes of `remote` on disk; discard bytes of another version."""
        version = {"etag": remote.etag, "size_bytes": remote.size_bytes}
        if remote.has_strong_etag and is_own_file(self.path) and self._read_note() == version:
            size_bytes = self.path.stat().st_size
            if size_bytes <= remote.size_bytes:
                return size_bytes
        self.discard()
        self._note.write_text(json.dumps(version), encoding="utf-8")
        return 0

    def discard(self) -> None:
        """Remove all bytes."""
        self._note.unlink(missing_ok=True)
        new_file(self.path).close()

    def finish(self) -> None:
        """Flush the complete file and rename it to `target`."""
        with self.path.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(self.path, self._target)
        self._note.unlink(missing_ok=True)

    def _read_note(self) -> Any:
        try:
            return json.loads(self._note.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None  # no note, or an incomplete one
