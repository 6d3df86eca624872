"""Fetches a run's newest checkpoint, and the files beside it, from the storage that has them."""

import os
from pathlib import Path, PurePosixPath

from yolo_seg_ddp.extras.mirror.copying import CHECKPOINTS, run_storage
from yolo_seg_ddp.run.checkpoint import MANIFEST_FILE, STATE_FILE, latest_manifest
from yolo_seg_ddp.utils.distributed import Say
from yolo_seg_ddp.utils.storage import PAUSES_S


def fetch_lost_run(folder: Path, address: str, say: Say) -> None:
    """Fill a run's folder that holds no checkpoint, if there is one at the address. Rank 0 only,
    before others look there.

    Raises UserError if the storage does not answer: a new run would take the place of the one that
    may be there.
    """
    if latest_manifest(folder / CHECKPOINTS):
        return
    storage = run_storage(folder, address, PAUSES_S)
    files = storage.files()
    complete = {
        PurePosixPath(name).parent.name
        for name in files
        if PurePosixPath(name).name == MANIFEST_FILE
    }
    if not complete:
        return
    newest = max(complete)
    say(f"{folder} has no checkpoint: fetching {newest} from {storage.shown}")

    # The checkpoint comes last, and at once: what is interrupted before begins again.
    for name in files:
        if "/" not in name:
            storage.fetch(name, files[name], folder / name)
    arriving = folder / CHECKPOINTS / f".tmp-{newest}"
    for name in (STATE_FILE, MANIFEST_FILE):
        stored = f"{CHECKPOINTS}/{newest}/{name}"
        storage.fetch(stored, files[stored], arriving / name)
    os.replace(arriving, folder / CHECKPOINTS / newest)
