"""moto's S3 server in this process, over HTTP: it vanishes and returns on demand, and answers late,
slowly or not whole.
"""

import os
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

KEY_ID, SECRET = "AKIAOFTHETEST", "the-secret-of-the-test"
ALWAYS = 10**9


class S3Server:
    """The server with one bucket. `requests` are the methods and paths so far."""

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self.app = DomainDispatcherApplication(create_backend_app)
        self.requests: list[str] = []
        self.faults: dict[str, str] = {}  # a word of the path: late, slow or short
        self.times_left = ALWAYS  # how often faults happen before the server is well
        self.port = 0
        self.start()
        self.root = f"http://127.0.0.1:{self.port}"
        keys = {
            "aws_access_key_id": KEY_ID,
            "aws_secret_access_key": SECRET,
            "region_name": "us-east-1",
        }
        self.client = boto3.client("s3", endpoint_url=self.root, **keys)
        self.client.create_bucket(Bucket=bucket)

    def start(self) -> None:
        self._http = make_server("127.0.0.1", self.port, self, threaded=True)
        self.port = self._http.port
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        faults = self.faults.items() if self.times_left > 0 else ()
        fault = next((kind for word, kind in faults if word in environ["PATH_INFO"]), "")
        self.times_left -= bool(fault)
        body = b"".join(self.app(environ, start_response))
        if fault == "late":
            time.sleep(1.0)
        if fault == "slow":
            return map(after_a_pause, body)
        if fault == "other":
            return [bytes(len(body))]
        return [body[: len(body) // 2] if fault == "short" else body]

    def put(self, objects: dict[str, bytes]) -> None:
        for name, body in objects.items():
            self.client.put_object(Bucket=self.bucket, Key=name, Body=body)

    def names(self, prefix: str = "") -> list[str]:
        """Return the keys of the bucket."""
        return [
            one["Key"]
            for one in self.client.list_objects_v2(Bucket=self.bucket, Prefix=prefix).get(
                "Contents", []
            )
        ]

    def content(self, name: str) -> bytes:
        body: bytes = self.client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        return body

    def num_fetched(self, word: str) -> int:
        """Return how many requests asked for the content of objects whose path holds a word."""
        return sum(request.startswith("GET") and word in request for request in self.requests)

    def check_keys_after(self, num_requests: int) -> None:
        """Let moto check the keys of all but the next requests."""
        address, plain = f"{self.root}/moto-api/reset-auth", {"Content-Type": "text/plain"}
        urllib.request.urlopen(
            urllib.request.Request(address, str(num_requests).encode(), plain)
        ).close()


def after_a_pause(byte: int) -> bytes:
    time.sleep(0.02)
    return bytes([byte])


@contextmanager
def s3_server(bucket: str) -> Iterator[S3Server]:
    server = S3Server(bucket)
    yield server
    server.stop()


def use_server(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the environment name the server, which is well."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    variables = {"AWS_ENDPOINT_URL": server.root, "AWS_DEFAULT_REGION": "us-east-1"}
    variables |= {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    variables |= {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server.faults, server.times_left = {}, ALWAYS
    server.requests.clear()


def use_empty_server(server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty the bucket, and let no package repeat a request by itself."""
    import s3fs

    use_server(server, monkeypatch)
    for name in server.names():
        server.client.delete_object(Bucket=bucket, Key=name)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
