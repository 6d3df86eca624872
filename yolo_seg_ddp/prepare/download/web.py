"""Opens sources by their address. The source at an https address, Azure Blob storage or a mirror,
continues broken transfers.

Azure supports `Range: bytes=a-b`, not suffix ranges, and open ranges `bytes=a-` only in newer API
versions, so requests give both ends (Microsoft, "Specifying the range header for Blob service
operations").
An address may have a secret in its query (a SAS token) or before the @: messages and files never
contain it.
"""

import json
import os
import re
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urljoin, urlsplit
from urllib.request import url2pathname

import numpy as np
import requests
from remotezip import RemoteZip
from requests.adapters import HTTPAdapter
from tqdm import tqdm
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.util import Retry

from yolo_seg_ddp.data.images import ImageError, Stretch, decode_image
from yolo_seg_ddp.prepare.download.source import (
    CHUNK_BYTES,
    FolderSource,
    Progress,
    RemoteFile,
    RetryPolicy,
    md5_base64,
)
from yolo_seg_ddp.utils.contents import read_mapping
from yolo_seg_ddp.utils.errors import UsageError, UserError
from yolo_seg_ddp.utils.files import MAX_READ_BYTES, is_plain_file, new_file
from yolo_seg_ddp.utils.zips import BoundedZip

DEFAULT_BASE_URL = (
    "https://publicstorageaccnt.blob.core.windows.net/drone-distribution-inspection-imagery/"
)
CIRCUIT_CANDIDATES = tuple(
    f"{number}{letter}" for number in range(1, 31) for letter in ("", "a", "b")
)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
BUSY_STATUSES = (408, 429, 500, 502, 503, 504)
MAX_RETRY_AFTER_S = 120
SILENCE_S = 30  # after which a server that sends nothing of a picture is left
ZIP_DIRECTORY_BYTES = 1 << 20  # about 7,000 entries; a larger directory needs a second request


class HttpSource:
    """Reads from `base_url`.

    Sends its query (a SAS token) with every request and never prints it.
    """

    is_local = False

    def __init__(self, base_url: str, retry: RetryPolicy) -> None:
        self._base = checked_url(base_url)
        self._retry = retry
        self._timeout_s = (retry.connect_timeout_s, retry.read_timeout_s)
        self._session = _Session()
        # so that Content-Length is the file's size
        self._session.headers["Accept-Encoding"] = "identity"
        again = _AnnouncedRetry(
            total=retry.max_attempts - 1,
            backoff_factor=retry.backoff_s,
            backoff_max=retry.max_backoff_s,
            backoff_jitter=retry.backoff_s / 2,
            status_forcelist=BUSY_STATUSES,
            allowed_methods={"GET", "HEAD"},
            raise_on_status=False,
        )
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))

    def shown(self, name: str = "") -> str:
        """Return the address of a file without user, password and query."""
        return f"{self._base.scheme}://{_host_and_port(self._base)}{self._path(name)}"

    def describe(self, name: str) -> RemoteFile | None:
        """Send a HEAD request. Raises UserError for any status but 200 and 404."""
        with self._request("HEAD", name, {}) as response:
            if response.status_code == 404:
                return None
            self._refuse(response, name)
            headers = response.headers
            if not headers.get("Content-Length", "").isdigit():
                raise UserError(
                    f"{self.shown(name)}: the server sends no Content-Length; try another "
                    "--base-url"
                )
            return RemoteFile(
                name=name,
                size_bytes=int(headers["Content-Length"]),
                etag=headers.get("ETag", ""),
                md5=headers.get("Content-MD5", ""),
                accepts_ranges=headers.get("Accept-Ranges", "").lower() == "bytes",
            )

    def fetch(self, remote: RemoteFile, target: Path, progress: Progress) -> RemoteFile:
        """Download to `target`, continuing `target.part` if its ETag is still valid. Raises
        UserError after `max_attempts` failures without a new byte, or when the MD5 is wrong twice.
        """
        start = progress.position
        part = PartFile(target)
        num_failures = num_bad_sums = furthest = 0
        while True:
            offset = part.usable_bytes(remote)
            progress.move_to(start + offset)
            try:
                self._receive(remote, part.path, offset, start, progress)
                if not remote.md5 or md5_base64(part.path) == remote.md5:
                    part.finish()
                    return remote
                part.discard()
                num_bad_sums += 1
                if num_bad_sums == 2:
                    raise UserError(
                        f"{self.shown(remote.name)}: its MD5 was wrong twice; try again later"
                    )
                progress.note(f"{remote.name}: wrong MD5, downloading it once more")
            except _TransferBroken as broken:
                reached = part.path.stat().st_size
                num_failures = 0 if reached > furthest else num_failures + 1
                furthest = max(furthest, reached)
                if num_failures >= self._retry.max_attempts:
                    raise UserError(
                        f"{self.shown(remote.name)}: {broken} after {reached / 1e6:.1f} of "
                        f"{remote.size_bytes / 1e6:.1f} "
                        f"MB, {num_failures} times in a row; run the same command again to continue"
                    ) from None
                progress.note(f"{remote.name}: {broken} after {reached / 1e6:.1f} MB, asking again")
                self._retry.wait(num_failures + 1)
                if isinstance(broken, _FileChanged):
                    part.discard()
                    if (latest := self.describe(remote.name)) is None:
                        gone = "it disappeared from the server during the download"
                        raise UserError(f"{self.shown(remote.name)}: {gone}") from None
                    remote = latest

    def open_zip(self, remote: RemoteFile) -> zipfile.ZipFile:
        """Open an archive by range requests for one ETag.

        Raises remotezip's and zipfile's errors.
        """
        open_remote: Any = _BoundedRemoteZip  # RemoteZip has no type hints
        return open_remote(  # type: ignore[no-any-return]
            self._url(remote.name),
            initial_buffer_size=ZIP_DIRECTORY_BYTES,
            session=self._session,
            support_suffix_range=False,
            headers={"If-Match": remote.etag} if remote.has_strong_etag else {},
            timeout=self._timeout_s,
            allow_redirects=True,
        )

    def circuit_names(self, candidates: tuple[str, ...]) -> list[str]:
        """Return the candidates whose zip exists; a container cannot
        be listed without credentials.
        """
        return [circuit for circuit in candidates if self.describe(f"Circuit{circuit}.zip")]

    def _receive(
        self, remote: RemoteFile, part: Path, offset: int, start: int, progress: Progress
    ) -> None:
        """Append the bytes after `offset` to `part`.

        Raises _TransferBroken when the transfer ends early.
        """
        if offset == remote.size_bytes:
            return
        headers = {"If-Match": remote.etag} if remote.has_strong_etag else {}
        if offset:
            headers["Range"] = f"bytes={offset}-{remote.size_bytes - 1}"
        with self._request("GET", remote.name, headers) as response:
            if (
                response.status_code in (412, 416)
                or response.headers.get("ETag", remote.etag) != remote.etag
            ):
                raise _FileChanged("the file changed on the server")
            self._refuse(response, remote.name)
            if response.status_code != 206:
                offset = 0  # the server ignores the range and sends the whole file
                progress.move_to(start)
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
                raise _FileChanged("the server sent another range than asked for")
            size_bytes = _append(response, part, offset, remote.size_bytes, progress)
        if size_bytes < remote.size_bytes:
            raise _TransferBroken("the server ended the transfer")

    def _request(self, method: str, name: str, headers: dict[str, str]) -> requests.Response:
        try:
            return self._session.request(
                method,
                self._url(name),
                headers=headers,
                stream=True,
                timeout=self._timeout_s,
                allow_redirects=True,
            )
        except requests.RequestException as error:
            # The error's message contains the URL with its secrets: `from None` hides it.
            raise UserError(
                f"{self.shown(name)}: {_reason(error)}; check the network, name a mirror or a "
                "folder with --base-url, "
                "or take the built-in sample with --sample"
            ) from None

    def _refuse(self, response: requests.Response, name: str) -> None:
        status = response.status_code
        if status < 400:
            return
        if status in (401, 403, 409):  # Azure's status if public access is off: 409
            fix = (
                "the publisher may ask to accept its terms first and hand out another address: "
                "give it to --base-url"
            )
        elif status == 404:
            fix = "check --base-url"
        elif status in BUSY_STATUSES:
            fix = (
                f"asked {self._retry.max_attempts} times; run the same command again later to "
                "continue"
            )
        else:
            fix = "try another --base-url"
        raise UserError(f"{self.shown(name)}: the server answered {status}; {fix}")

    def _path(self, name: str) -> str:
        return f"{self._base.path.rstrip('/')}/{quote(name)}"

    def _url(self, name: str) -> str:
        return self._base._replace(path=self._path(name)).geturl()


Source = FolderSource | HttpSource


def open_source(base_url: str, retry: RetryPolicy | None = None) -> Source:
    """Open an https address, a file:// address or a local folder.

    Raises UserError for anything else.
    """
    parts = urlsplit(base_url)
    if parts.scheme in ("http", "https"):
        return HttpSource(base_url, retry or RetryPolicy())
    if parts.scheme == "file" and parts.hostname in (None, "localhost"):
        return FolderSource(Path(url2pathname(parts.path)))
    if "://" in base_url:
        raise UsageError(
            f"--base-url {parts.scheme}://…: expected https://host/path, file:///path or a local "
            "folder"
        )
    return FolderSource(Path(base_url).expanduser())


def expand_circuits(source: Source, circuits: Sequence[str]) -> list[str]:
    """Check the requested circuits; replace `all` by those that the source has.

    A server cannot be listed without credentials, so it is asked for Circuit1 to Circuit30, each
    also with a and b.
    """
    names = [circuit.lower() for circuit in circuits]
    for name in names:
        if name != "all" and not re.fullmatch(r"[1-9][0-9]*[a-z]?", name):
            raise UsageError(
                f"--circuits {name}: expected circuit numbers such as 1, 10 or 13b, or all"
            )
    if "all" not in names:
        return list(dict.fromkeys(names))
    names = source.circuit_names(CIRCUIT_CANDIDATES)
    if not names:
        raise UserError(f"{source.shown()}: no Circuit*.zip there; check --base-url")
    return names


def fetch_picture(url: str, stretch: Stretch | None = None) -> np.ndarray:
    """Return the picture at an https address, of at most MAX_READ_BYTES: RGB uint8 (H, W, 3)."""
    parts = checked_url(url, "source")
    shown = f"source {parts.scheme}://{_host_and_port(parts)}{parts.path}"
    try:
        with _Session() as session, session.get(url, stream=True, timeout=SILENCE_S) as response:
            response.raise_for_status()
            data = response.raw.read(MAX_READ_BYTES + 1, decode_content=True)
        if len(data) > MAX_READ_BYTES:
            raise ImageError(f"larger than {MAX_READ_BYTES // 10**6} MB, more than any photograph")
        return decode_image(data, stretch=stretch)
    except ImageError as error:
        raise ImageError(f"{shown}: {error}") from error
    # its message may hold secrets of the address
    except (requests.RequestException, HTTPError) as error:
        raise UserError(f"{shown}: {_reason(error)}; check the address and the network") from None


class PartFile:
    """`target.part`, and `target.part.json` with the version of the file that
    its bytes belong to.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._note = target.with_name(target.name + ".part.json")
        self.path = target.with_name(target.name + ".part")

    def usable_bytes(self, remote: RemoteFile) -> int:
        """Return the number of bytes of `remote` on disk; discard bytes of another version."""
        version = {"etag": remote.etag, "size_bytes": remote.size_bytes}
        if (
            remote.has_strong_etag
            and is_plain_file(self.path)
            and read_mapping(self._note) == version
        ):
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


def checked_url(url: str, place: str = "--base-url") -> SplitResult:
    """Split an address.

    Raises UsageError unless it is https, or http to this machine; `place` is its source.
    """
    parts = urlsplit(url)
    try:
        shown = f"{parts.scheme}://{_host_and_port(parts)}"
    except ValueError:
        raise UsageError(f"{place}: the port is not a number between 0 and 65535") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{place} {shown}: expected https://host/path or a local folder")
    if parts.scheme == "http" and parts.hostname not in LOCAL_HOSTS:
        raise UsageError(f"{place} {shown}: not encrypted; use https://{_host_and_port(parts)}")
    return parts._replace(fragment="")


class _BoundedRemoteZip(RemoteZip, BoundedZip):
    """A remote zip whose directory size is checked before it is fetched."""


class _TransferBroken(Exception):
    """The transfer ended early. The received bytes are kept."""


class _FileChanged(_TransferBroken):
    """The kept bytes belong to another version of the file."""


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Return the target of a redirect. Raises UserError if it is not https."""
        target = super().get_redirect_target(resp)
        if target:
            checked_url(urljoin(resp.url, target), "a redirect to")
        return target


class _AnnouncedRetry(Retry):
    def get_retry_after(self, response: BaseHTTPResponse) -> float | None:
        """Return the server's Retry-After in seconds, at most MAX_RETRY_AFTER_S."""
        seconds = super().get_retry_after(response)
        return None if seconds is None else min(seconds, MAX_RETRY_AFTER_S)

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        """Print the reason, then wait for Retry-After or the back-off time."""
        why = (
            f"the server answers {response.status}" if response else "the server cannot be reached"
        )
        tqdm.write(f"{why}, asking again ({len(self.history)})", file=sys.stderr)
        super().sleep(response)


def _append(
    response: requests.Response, part: Path, offset: int, end: int, progress: Progress
) -> int:
    """Write the body after `offset` and return the file's size.

    Raises _FileChanged when it exceeds `end`.
    """
    size_bytes = offset
    with part.open("ab" if offset else "wb") as sink:
        try:
            # read1 returns whatever has arrived, so that nothing is lost when the connection
            # breaks.
            while chunk := response.raw.read1(CHUNK_BYTES):
                size_bytes += len(chunk)
                if size_bytes > end:
                    raise _FileChanged("the server sent more than it announced")
                sink.write(chunk)
                progress.advance(len(chunk))
        except HTTPError as error:
            silent = isinstance(error, ReadTimeoutError)
            raise _TransferBroken(
                "the server stopped sending" if silent else "the connection broke off"
            ) from None
    return size_bytes


def _host_and_port(parts: SplitResult) -> str:
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return host if parts.port is None else f"{host}:{parts.port}"


def _reason(error: requests.RequestException | HTTPError) -> str:
    """Return a message about a transfer error that does not contain the address."""
    if isinstance(error, requests.exceptions.SSLError):
        return "the server's certificate was not accepted"
    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    if isinstance(error, requests.ConnectionError):
        return "the server cannot be reached"
    if isinstance(error, requests.HTTPError):
        return f"the server answered {error.response.status_code}"
    return f"the transfer failed ({type(error).__name__})"
