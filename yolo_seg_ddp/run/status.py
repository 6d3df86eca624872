"""The lock of a run's folder, and `status.json`, the run's state for launchers.

The lock is the kernel's (flock): it disappears with its process, however that ends.
"""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from yolo_seg_ddp.utils.contents import read_mapping
from yolo_seg_ddp.utils.errors import EXIT_LOCKED, UserError
from yolo_seg_ddp.utils.files import output_folder, write_text_atomic

STATUS_FILE = "status.json"
RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
WAIT_FOR_OWNER_S = 60.0  # the previous process of the run may still be ending


class FolderInUse(UserError):
    """Another process trains in this folder."""

    exit_code = EXIT_LOCKED


class RunLock:
    """Holds a run's folder for this process until `release`, or until the process ends.

    The lock file is `.<name>.lock` beside the folder, because the folder may be renamed. Raises
    FolderInUse, which names the owner, when another process still holds the lock after `wait_s`.
    """

    def __init__(self, folder: Path, wait_s: float = WAIT_FOR_OWNER_S) -> None:
        folder = Path(folder).absolute()
        output_folder(str(folder.parent), "--save-dir").mkdir(parents=True, exist_ok=True)
        self._owner_file = folder.with_name(f".{folder.name}.owner.json")
        # `run_on_main` acquires it in a thread.
        self._lock = FileLock(
            str(folder.with_name(f".{folder.name}.lock")), timeout=wait_s, thread_local=False
        )
        try:
            self._lock.acquire()
        except Timeout as timeout:
            owner = read_mapping(self._owner_file)
            is_known = {"pid", "host", "since"} <= owner.keys()
            who = (
                "process {pid} on {host} (since {since})".format(**owner)
                if is_known
                else "another process"
            )
            raise FolderInUse(
                f"{folder}: {who} trains there; wait for it, or choose another --save-dir"
            ) from timeout
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
        write_text_atomic(self._owner_file, json.dumps(owner) + "\n")

    def release(self) -> None:
        """Release the folder for the next process."""
        self._owner_file.unlink(missing_ok=True)
        self._lock.release()


def write_status(folder: Path, state: str, reason: str = "", **progress: Any) -> None:
    """Write status.json atomically: the state, its reason, and progress such as epoch and step."""
    content = {
        "state": state,
        "reason": reason,
        **progress,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    write_text_atomic(
        folder / STATUS_FILE, json.dumps({**content, "updated": _now()}, indent=2) + "\n"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
