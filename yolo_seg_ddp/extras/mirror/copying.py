"""Copies a run's folder to an object storage while it grows.

A thread of rank 0 looks for a new checkpoint and copies the folder's present state. The training
hands it nothing and waits for it only at its end. At each moment the storage holds a complete
checkpoint, and files beside it that are at least as new.
"""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from yolo_seg_ddp.run.checkpoint import MANIFEST_FILE, STATE_FILE
from yolo_seg_ddp.run.sending import FolderSender
from yolo_seg_ddp.utils.storage import Storage

CHECKPOINTS = "checkpoint"


def run_storage(folder: Path, address: str, pauses_s: tuple[float, ...] = ()) -> Storage:
    """Return the place of a run at an address.

    Raises UsageError for an address that cannot be used.
    """
    return Storage(f"{address.rstrip('/')}/{folder.absolute().name}", "--mirror", pauses_s)


class Mirror(FolderSender):
    """Copies a run's folder while it is a context manager and at its end.

    `resumes`: the storage may hold the same run.
    """

    finish_wait_s = 240.0  # below the 300 s after which other ranks give up to wait for this one

    def __init__(self, folder: Path, address: str, resumes: bool) -> None:
        super().__init__("--mirror", folder)
        # Here and not in the thread: a loader process that is forked during an import could wait
        # for it without end.
        self._storage = run_storage(folder, address)
        self._sets_aside = not resumes
        self._copied: dict[str, tuple[int, int]] = {}  # by name: time and size
        self._newest: str | None = None  # the checkpoint of the last copy

    def _send(self, state: str) -> None:
        manifests = self._folder.glob(f"{CHECKPOINTS}/step-*/{MANIFEST_FILE}")
        newest = max((path.parent.name for path in manifests), default="")
        if newest != self._newest or state:
            # While a copy is slow, the training may remove the checkpoint: the next look finds a
            # newer one.
            with suppress(FileNotFoundError):
                self._copy(newest)
                self._newest = newest

    def _copy(self, newest: str) -> None:
        """Copy what the storage lacks of the folder and of its newest checkpoint, then remove older
        checkpoints there.
        """
        if self._sets_aside:
            self._set_aside()
        # The manifest comes last: a checkpoint without one counts for nothing.
        names = [
            path.name
            for path in sorted(self._folder.iterdir())
            if path.is_file() and path.name[0] != "."
        ]
        names += [
            f"{CHECKPOINTS}/{newest}/{name}" for name in (STATE_FILE, MANIFEST_FILE) if newest
        ]
        for name in names:
            file = self._folder / name
            status = file.stat()
            version = (status.st_mtime_ns, status.st_size)
            if self._copied.get(name) == version:
                continue
            # These are replaced as a whole, while others grow.
            if file.suffix == ".pt":
                self._storage.tried(
                    name, lambda path, file=file: self._storage.system.put_file(str(file), path)
                )
            else:
                self._storage.tried(name, self._storage.system.pipe_file, file.read_bytes())
            self._copied[name] = version
        for name in self._storage.files(CHECKPOINTS):
            if newest and not name.startswith(f"{CHECKPOINTS}/{newest}/"):
                self._storage.tried(name, self._storage.system.rm)

    def _set_aside(self) -> None:
        """Rename the copy of an earlier run, as the training has renamed its folder."""
        files = self._storage.files()
        saved = [file.time_s for name, file in files.items() if name.endswith(MANIFEST_FILE)]
        if saved:
            # The name is the same when this is repeated after an error.
            aside = f"{self._storage.root}-{datetime.fromtimestamp(max(saved), UTC):%Y%m%dT%H%M%SZ}"
            for name in files:
                self._storage.tried(name, self._storage.system.copy, f"{aside}/{name}")
            for name in files:
                self._storage.tried(name, self._storage.system.rm)
        self._sets_aside = False
