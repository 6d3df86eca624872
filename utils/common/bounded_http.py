"""JSON over HTTP with a server that may be dead, slow or hostile: every wait and every answer is bounded.

Redirects are refused, so that credentials reach no other server. Proxies are those of the environment (`https_proxy`, `no_proxy`).
"""

from __future__ import annotations

import http.client
import io
import json
import math
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from utils.common.errors import one_line, printable

WAIT_S = 8.0  # for a connection, for the next bytes of an answer, and for sending a block
MOST_ANSWER_S = 30.0
MOST_UPLOAD_S = 600.0
MOST_ANSWER_BYTES = 4 << 20
MOST_ERROR_BYTES = 64 << 10
BLOCK_BYTES = 256 << 10


class ServerError(Exception):
    """A request failed. The message is one printable line; `code` is the server's own name of the error, if it gave one."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class JsonServer:
    """Sends requests to the addresses below `url`, with `headers` such as credentials. Every method raises ServerError.

    progress_s: when, by `time.monotonic`, the server last completed an answer or was sent a block of a file.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url.rstrip("/")
        self.progress_s = -math.inf
        self._headers = dict(headers)
        self._opener = urllib.request.build_opener(_RefuseRedirects, _Http, _Https)

    def call(self, method: str, path: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send `content` as JSON and return the answer's JSON object."""
        body = None if content is None else json.dumps(content).encode()
        data = self._send(method, path, body, {"Content-Type": "application/json"})
        answer = _parsed(data)
        if answer is None:
            raise ServerError(f"{self.url} answers with something else than a JSON object: {_shown(data)}")
        return answer

    def upload(self, path: str, file: Path) -> None:
        """Send a file by PUT. Raises OSError when it cannot be opened."""
        with file.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size_bytes)}
            self._send("PUT", path, self._blocks(stream, size_bytes), headers)

    def _send(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> bytes:
        try:
            request = urllib.request.Request(
                self.url + path, data=body, headers={**self._headers, **headers}, method=method
            )
            with self._opener.open(request, timeout=WAIT_S) as answer:
                data: bytes = answer.read(MOST_ANSWER_BYTES + 1)
            self.progress_s = time.monotonic()
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except urllib.error.URLError as error:
            reason = error.reason
            raise ServerError(f"{self.url}: {_words(reason) if isinstance(reason, Exception) else reason}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"{self.url}: {_words(error)}") from error
        if len(data) > MOST_ANSWER_BYTES:
            raise ServerError(f"{self.url}: an answer is longer than {MOST_ANSWER_BYTES >> 20} MiB")
        return data

    def _refusal(self, error: urllib.error.HTTPError) -> ServerError:
        try:
            place = urlsplit(error.headers.get("Location", "")).netloc.rpartition("@")[2]
            data = error.read(MOST_ERROR_BYTES)
        except (OSError, http.client.HTTPException, ValueError):
            place, data = "", b""
        if 300 <= error.code < 400:
            target = printable(place) or "another page"
            return ServerError(f"{self.url}: HTTP {error.code} redirects to {target}; not followed")
        answer = _parsed(data) or {}
        code, message = str(answer.get("error_code", "")), str(answer.get("message", ""))
        words = printable(" ".join(f"{code} {message}".split()), 200) or _shown(data)
        return ServerError(f"{self.url}: HTTP {error.code} {words}".rstrip(), code)

    def _blocks(self, stream: IO[bytes], size_bytes: int) -> Iterator[bytes]:
        """Yield the first `size_bytes` of a file, which may grow meanwhile."""
        end_s = time.monotonic() + MOST_UPLOAD_S
        while size_bytes > 0 and (block := stream.read(min(BLOCK_BYTES, size_bytes))):
            if time.monotonic() > end_s:
                raise TimeoutError(f"a file was not received within {MOST_UPLOAD_S:.0f} s")
            size_bytes -= len(block)
            yield block
            self.progress_s = time.monotonic()


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _shown(data: bytes) -> str:
    return printable(" ".join(data[:60].decode("utf-8", "replace").split()))


def _words(error: Exception) -> str:
    return one_line(error) if str(error) else type(error).__name__


class _RefuseRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *facts: Any) -> None:
        """Return None: then urllib raises the redirect as an HTTPError."""


class _BoundedStream(io.RawIOBase):
    """Reads an answer until MOST_ANSWER_S have passed since its beginning, however slowly its bytes come."""

    def __init__(self, stream: io.RawIOBase, connection: socket.socket) -> None:
        self._stream = stream
        self._connection = connection
        self._end_s = time.monotonic() + MOST_ANSWER_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"an answer takes longer than {MOST_ANSWER_S:.0f} s")
        self._connection.settimeout(min(left_s, WAIT_S))
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *facts: Any, **more: Any) -> None:
        super().__init__(sock, *facts, **more)
        self.fp = io.BufferedReader(_BoundedStream(self.fp.detach(), sock))  # headers and body are read from it


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req)  # the default context verifies certificates
