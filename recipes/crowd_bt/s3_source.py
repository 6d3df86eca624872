"""Annotators' logs in S3: downloaded once per machine and kept in the prepared format.

Credentials come from the normal AWS chain (environment, ~/.aws, instance role) and are never
printed or written.
"""

import json
import time
from contextlib import ExitStack
from typing import Any

from crowd_bt.annotators import read_crowd
from crowd_bt.comparisons import METADATA_FILE, read_json, write_prepared
from crowd_bt.options import TrainConfig

from yolo_seg_ddp.utils.distributed import Say
from yolo_seg_ddp.utils.errors import UserError, one_line, printable
from yolo_seg_ddp.utils.files import local_rank_first
from yolo_seg_ddp.utils.storage import Storage

LOG_NAME = "comparison_data.json"
PAUSES_S = (0.5, 1.0)  # before the second try and the third one
MAX_LOG_BYTES = 1 << 30


def prepare_from_s3(config: TrainConfig, say: Say) -> None:
    """Download all logs and write them to `config.prepared_folder`, unless it holds them already.

    Raises UserError.
    """
    folder = config.prepared_folder
    place = f"s3://{config.s3_bucket}/{config.s3_prefix}"
    source = {"bucket": config.s3_bucket, "prefix": config.s3_prefix}
    with local_rank_first(folder / ".lock"), ExitStack() as at_end:
        # who waits for it sees that, and takes a new one
        at_end.callback((folder / ".lock").unlink)
        if (folder / METADATA_FILE).is_file():
            earlier = read_json(folder / METADATA_FILE)
            if (
                not isinstance(earlier, dict)
                or {name: earlier.get(name) for name in source} != source
            ):
                raise UserError(
                    f"{folder}: holds comparisons of another source; remove it, or name another "
                    "folder beside --data-source s3: --prepared-data-dir"
                )
            say(f"Comparisons of {place}: {folder} (remove it to download them again)")
            return
        logs, missing = download_logs(config.s3_bucket, config.s3_prefix)
        crowd = read_crowd(logs)
        if not crowd.rows:
            raise UserError(f"{place}: no usable comparison; {crowd.notes[-1]}")
        for note in (*missing, *crowd.notes):
            say(note)
        metadata = {
            **source,
            "downloaded": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "user_reliabilities": crowd.reliabilities,
        }
        write_prepared(folder, crowd.rows, metadata, config.seed)
        say(f"Downloaded {len(logs)} logs from {place} to {folder}")


def download_logs(bucket: str, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Return each user's log, and a line about each one that is missing or no JSON. Raises
    UserError.

    A user is a folder below `prefix`, its log `<prefix><user>/comparison_data.json`.
    """
    storage = Storage(f"s3://{bucket}/{prefix}", "--s3-bucket", PAUSES_S)
    files = storage.files()
    users = sorted({name.partition("/")[0] for name in files if "/" in name})
    if not users:
        raise UserError(
            f"{storage.shown}: no user's folder there; check --s3-bucket and --s3-prefix"
        )
    logs, notes = {}, []
    for user in users:
        name = f"{user}/{LOG_NAME}"
        place = f"{storage.shown}/{printable(name, 200)}"
        if name not in files:
            notes.append(f"WARNING: {place}: not there; this user is left out")
        elif files[name].size_bytes > MAX_LOG_BYTES:
            raise UserError(f"{place}: {files[name].size_bytes} bytes, more than any log has")
        else:
            try:
                logs[user] = json.loads(storage.read(name, files[name]))
            except (ValueError, RecursionError) as error:
                notes.append(f"WARNING: {place}: no JSON ({one_line(error, 80)}); left out")
    return logs, notes
