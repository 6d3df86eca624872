"""A local HTTP server with the manners of Azure Blob storage, and with faults on demand."""

import base64
import hashlib
import re
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlsplit

from tests.support.local_server import LocalServer


@dataclass
class Blob:
    """One object. The queues are used up one request at a time, GET by GET."""

    content: bytes
    etag: str = '"0x8D1"'
    md5: str | None = None  # None: the right one; empty: no header
    accepts_ranges: bool = True
    drop_after: deque[int] = field(default_factory=deque)  # body bytes before the connection is cut
    # bytes missing from a body whose Content-Length says so too
    short_by: deque[int] = field(default_factory=deque)
    statuses: deque[int] = field(default_factory=deque)  # answered instead
    # bytes by which a range begins late, which its header says
    shifted_by: deque[int] = field(default_factory=deque)

    def content_md5(self) -> str:
        if self.md5 is not None:
            return self.md5
        return base64.b64encode(hashlib.md5(self.content).digest()).decode()


@dataclass(frozen=True)
class Request:
    """What was asked and answered. `num_bytes` counts the body that was really sent."""

    method: str
    name: str
    range: str
    if_match: str
    query: str
    status: int
    num_bytes: int


class AzureServer(LocalServer):
    """Serves `blobs` under `url` while it is a context manager; `requests` is the log."""

    def __init__(self) -> None:
        self.blobs: dict[str, Blob] = {}
        self.requests: list[Request] = []
        self.retry_after = "0"  # seconds, sent with 429 and 503
        super().__init__(_Handler)
        self.url = f"{self.root}/imagery/"

    def gets(self, name: str) -> list[Request]:
        return [
            request for request in self.requests if request.name == name and request.method == "GET"
        ]

    def bytes_sent(self, name: str) -> int:
        return sum(request.num_bytes for request in self.requests if request.name == name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: AzureServer

    def do_HEAD(self) -> None:
        blob = self._blob()
        if blob and self._status(blob, takes_fault=False) == 200:
            self._answer(200, blob, len(blob.content), content_md5=True)

    def do_GET(self) -> None:
        blob = self._blob()
        if blob is None or self._status(blob, takes_fault=True) != 200:
            return
        size, asked = len(blob.content), self.headers.get("Range", "")
        if not asked or not blob.accepts_ranges:
            self._send(200, blob, 0, size)
            return
        # neither suffix nor open ranges, as old API versions
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        if match is None or int(match[1]) >= size:
            self._answer(416, None, 0)
            return
        start = int(match[1]) + (blob.shifted_by.popleft() if blob.shifted_by else 0)
        self._send(206, blob, start, min(start + int(match[2]) + 1 - int(match[1]), size))

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean; `requests` is the log."""

    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/imagery/")

    def _blob(self) -> Blob | None:
        blob = self.owner.blobs.get(self._name())
        if blob is None:
            self._answer(404, None, 0)
        return blob

    def _status(self, blob: Blob, takes_fault: bool) -> int:
        """Answer a queued fault or a failed If-Match and return its status; 200 leaves the answer
        to the caller.
        """
        status = 200
        if takes_fault and blob.statuses:
            status = blob.statuses.popleft()
        elif self.headers.get("If-Match", blob.etag) != blob.etag:
            status = 412
        if status != 200:
            self._answer(status, None, 0)
        return status

    def _send(self, status: int, blob: Blob, start: int, end: int) -> None:
        if blob.short_by:
            end -= blob.short_by.popleft()
        body = blob.content[start:end]
        is_cut = bool(blob.drop_after)
        sent = body[: blob.drop_after.popleft()] if is_cut else body
        self._answer(
            status,
            blob,
            len(body),
            content_range=f"bytes {start}-{end - 1}/{len(blob.content)}",
            body=sent,
        )
        if is_cut:
            self.close_connection = True

    def _answer(
        self,
        status: int,
        blob: Blob | None,
        length: int,
        content_range: str = "",
        content_md5: bool = False,
        body: bytes = b"",
    ) -> None:
        asked, if_match = self.headers.get("Range", ""), self.headers.get("If-Match", "")
        query = urlsplit(self.path).query
        self.owner.requests.append(
            Request(self.command, self._name(), asked, if_match, query, status, len(body))
        )
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if status in (429, 503):
            self.send_header("Retry-After", self.owner.retry_after)
        if blob:
            self.send_header("ETag", blob.etag)
            if blob.accepts_ranges:
                self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", content_range)
        if blob and content_md5 and blob.content_md5():
            self.send_header("Content-MD5", blob.content_md5())
        try:
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the client was stopped, as some tests want
            self.close_connection = True
