"""Copies a run's folder to an object storage while it grows.

A thread of rank 0 looks for a new checkpoint and copies the folder's present state. The training hands it nothing and waits for
it only at its end. At each moment the storage holds a complete checkpoint, and files beside it that are at least as new.
"""

from datetime import UTC, datetime
from pathlib import Path

from utils.common.errors import one_line, print_warning
from utils.common.storage import Storage
from utils.common.threads import BackgroundWatch
from utils.run.checkpoint import MANIFEST_FILE, STATE_FILE
from utils.run.records import read_status
from utils.run.status import FINISHED

CHECKPOINTS = "checkpoint"
POLL_S = 2.0
MOST_BACKOFF_S = 60.0
FINISH_WAIT_S = 240.0  # at the end; below the 300 s after which other ranks give up to wait for this one
STOP_WAIT_S = 20.0  # at any other end; schedulers grant 30 seconds between a stop and a kill


def run_storage(folder: Path, address: str, pauses_s: tuple[float, ...] = ()) -> Storage:
    """Return the place of a run at an address. Raises UsageError for an address that cannot be used."""
    return Storage(f"{address.rstrip('/')}/{folder.absolute().name}", "--mirror", pauses_s)


class Mirror(BackgroundWatch):
    """Copies a run's folder while it is a context manager and at its end. `resumes`: the storage may hold the same run."""

    def __init__(self, folder: Path, address: str, resumes: bool) -> None:
        super().__init__("mirror")
        # Here and not in the thread: a loader process that is forked during an import could wait for it without end.
        self._storage = run_storage(folder, address)
        self._folder = folder
        self._sets_aside = not resumes
        self._copied: dict[str, tuple[int, int]] = {}  # by name: time and size
        self._state = ""  # the checkpoint of the last copy
        self._problem = "nothing was copied yet"

    def __exit__(self, *error: object) -> None:
        is_finished = read_status(self._folder).get("state") == FINISHED
        self._max_wait_s = FINISH_WAIT_S if is_finished else STOP_WAIT_S
        super().__exit__(*error)
        if self._problem:
            lacks = f"{self._storage.shown} lacks the last state of this run: {self._problem}"
            print_warning(f"{lacks}; the same training command copies the rest")

    def _watch(self) -> None:
        delay_s, has_warned, is_over = POLL_S, False, False
        while not is_over:
            is_over = self._is_over.wait(delay_s)
            newest = max(
                (path.parent.name for path in self._folder.glob(f"{CHECKPOINTS}/step-*/{MANIFEST_FILE}")), default=""
            )
            if newest == self._state and not (self._problem or is_over):
                continue
            self._problem = self._problem or "the last copy did not end in time"
            try:
                self._copy(newest)
            except Exception as error:  # noqa: BLE001 # whatever the storage answers, the training continues
                self._problem, delay_s = one_line(error, 400), min(2 * delay_s, MOST_BACKOFF_S)
                if not has_warned:
                    print_warning(f"{self._problem}; training continues, and the rest is copied when this works")
                has_warned = True
                continue
            if has_warned:
                print(f"{self._storage.shown} is there again, and has everything", flush=True)
            self._state, self._problem, delay_s, has_warned = newest, "", POLL_S, False

    def _copy(self, newest: str) -> None:
        """Copy what the storage lacks of the folder and of its newest checkpoint, then remove older checkpoints there."""
        if self._sets_aside:
            self._set_aside()
        # The manifest comes last: a checkpoint without one counts for nothing.
        names = [path.name for path in sorted(self._folder.iterdir()) if path.is_file() and path.name[0] != "."]
        names += [f"{CHECKPOINTS}/{newest}/{name}" for name in (STATE_FILE, MANIFEST_FILE) if newest]
        for name in names:
            file = self._folder / name
            status = file.stat()
            version = (status.st_mtime_ns, status.st_size)
            if self._copied.get(name) == version:
                continue
            if file.suffix == ".pt":  # replaced as a whole, while others grow
                self._storage.tried(name, lambda path, file=file: self._storage.system.put_file(str(file), path))
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
