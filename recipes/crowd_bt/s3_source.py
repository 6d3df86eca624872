"""Annotators' logs in S3: downloaded once per machine and kept in the prepared format.

Credentials come from the normal AWS chain (environment, ~/.aws, instance role) and are never printed or written.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from crowd_bt.annotators import read_crowd
from crowd_bt.comparisons import METADATA_FILE, read_json, write_prepared
from crowd_bt.options import TrainConfig

from utils.common.config import without_secrets
from utils.common.errors import UserError, one_line, printable
from utils.common.files import local_rank_first
from utils.distributed import Say

LOG_NAME = "comparison_data.json"
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
OBJECT_TIMEOUT_S = 600.0  # for one whole log, so that a very slow source does not block the training for ever
NUM_TRIES = 3
FIRST_PAUSE_S = 0.5  # before the second try; twice as long before the third
CHUNK_BYTES = 1 << 16
MAX_LOG_BYTES = 1 << 30
_MISSING = ("NoSuchKey", "404")
_REFUSED = (
    *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "403"),
    *("AuthFailure", "UnrecognizedClientException", "AuthorizationHeaderMalformed"),
)


def prepare_from_s3(config: TrainConfig, say: Say) -> None:
    """Download all logs and write them to `config.prepared_folder`, unless it holds them already. Raises UserError."""
    folder, place = config.prepared_folder, f"s3://{config.s3_bucket}/{config.s3_prefix}"
    source = {"bucket": config.s3_bucket, "prefix": config.s3_prefix}
    with local_rank_first(folder / ".lock"), ExitStack() as at_end:
        at_end.callback((folder / ".lock").unlink)  # who waits for it sees that, and takes a new one
        if (folder / METADATA_FILE).is_file():
            found = read_json(folder / METADATA_FILE)
            if not isinstance(found, dict) or {name: found.get(name) for name in source} != source:
                raise UserError(
                    f"{folder}: holds comparisons of another source; remove it, or name another folder beside "
                    f"--data-source s3: --prepared-data-dir"
                )
            say(f"Comparisons of {place}: {folder} (remove it to download them again)")
            return
        logs, missing = download_logs(config.s3_bucket, config.s3_prefix)
        crowd = read_crowd(logs)
        if not crowd.rows:
            raise UserError(f"{place}: no usable comparison; {crowd.notes[-1]}")
        for note in (*missing, *crowd.notes):
            say(note)
        facts = {**source, "downloaded": time.strftime("%Y-%m-%dT%H:%M:%S"), "user_reliabilities": crowd.reliabilities}
        write_prepared(folder, crowd.rows, facts, config.seed)
        say(f"Downloaded {len(logs)} logs from {place} to {folder}")


def download_logs(bucket: str, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Return each user's log, and a line about each one that is missing or no JSON. Raises UserError.

    A user is a common prefix below `prefix`, its log `<prefix><user>/comparison_data.json`.
    """
    client = open_client()
    place = f"s3://{bucket}/{prefix}"
    users = _tried(lambda: list(_users(client, bucket, prefix)), place)
    if not users:
        raise UserError(f"{place}: no user's folder there; check --s3-bucket and --s3-prefix")
    logs, notes = {}, []
    for user in users:
        key = f"{prefix}{user}/{LOG_NAME}"
        file = f"s3://{bucket}/{printable(key, 200)}"
        data = _tried(lambda key=key: _read_object(client, bucket, key), file)  # type: ignore[misc]
        if data is None:
            notes.append(f"WARNING: {file}: not there; this user is left out")
            continue
        try:
            logs[user] = json.loads(data)
        except (ValueError, RecursionError) as error:
            notes.append(f"WARNING: {file}: no JSON ({one_line(error, 80)}); left out")
    return logs, notes


def open_client() -> Any:
    """Return boto3's client for S3; AWS_ENDPOINT_URL may name another server."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise UserError("boto3 is missing: pip install -r requirements.txt in this folder") from error
    limits = Config(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"total_max_attempts": NUM_TRIES, "mode": "standard"},
    )
    return boto3.session.Session().client("s3", config=limits)  # the default session keeps old credentials


def _users(client: Any, bucket: str, prefix: str) -> Iterator[str]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"):
        for found in page.get("CommonPrefixes", []):
            yield found["Prefix"].removeprefix(prefix).rstrip("/")


def _read_object(client: Any, bucket: str, key: str) -> bytes | None:
    """Return an object's whole content, or None if it does not exist. Raises OSError if the transfer is too slow."""
    from botocore.exceptions import ClientError

    try:
        answer = client.get_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in _MISSING:
            return None
        raise
    size = answer["ContentLength"]
    if size > MAX_LOG_BYTES:
        raise UserError(f"s3://{bucket}/{printable(key, 200)}: {size} bytes, more than any log has")
    deadline_s, parts, num_bytes = time.monotonic() + OBJECT_TIMEOUT_S, [], 0
    for part in answer["Body"].iter_chunks(CHUNK_BYTES):
        parts.append(part)
        num_bytes += len(part)
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{num_bytes} of {size} bytes after {OBJECT_TIMEOUT_S:g} s")
    if num_bytes != size:
        raise OSError(f"only {num_bytes} of {size} bytes arrived")
    return b"".join(parts)


def _tried(action: Callable[[], Any], place: str) -> Any:
    """Return the action's result; try three times when the connection fails. Raises UserError in one line.

    boto3 repeats requests, but not the reading of an answer's body.
    """
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, IncompleteReadError
    from botocore.exceptions import ConnectionError as NoConnection
    from urllib3.exceptions import HTTPError

    for attempt in range(NUM_TRIES):
        try:
            return action()
        except ClientError as error:
            raise UserError(_refusal(error, place)) from None  # the error's chain holds the request's headers
        except (HTTPClientError, IncompleteReadError, HTTPError, OSError) as error:
            reason = one_line(Exception(without_secrets(str(error))))
        except NoConnection as error:  # boto3 has tried three times
            cure = "check the network and AWS_ENDPOINT_URL"
            raise UserError(f"{place}: {one_line(Exception(without_secrets(str(error))))}; {cure}") from None
        except BotoCoreError as error:  # no credentials, no region, a wrong name: it would be the same again
            cure = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run aws configure"
            raise UserError(f"{place}: {one_line(error)}; {cure}") from None
        if attempt + 1 < NUM_TRIES:
            time.sleep(FIRST_PAUSE_S * 2**attempt)
    raise UserError(f"{place}: {reason} ({NUM_TRIES} tries); run the same command again")


def _refusal(error: Any, place: str) -> str:
    code = printable(str(error.response.get("Error", {}).get("Code", "unknown")))
    if code in _REFUSED:
        return f"{place}: the server refuses these credentials ({code}); check AWS_PROFILE or AWS_ACCESS_KEY_ID"
    if code == "NoSuchBucket":
        return f"{place}: there is no such bucket; check --s3-bucket"
    return f"{place}: the server answers {code}; run the same command again"
