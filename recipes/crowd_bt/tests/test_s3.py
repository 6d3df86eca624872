"""S3 as it is and as it fails: moto's server behind a proxy that delays and cuts off answers."""

import json
import os
import shutil
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from crowd_bt import s3_source, train
from crowd_bt.comparisons import load_prepared
from crowd_bt.make_data import MakeConfig, Picture, write_annotators
from crowd_bt.options import TrainConfig
from numpy.random import default_rng

from recipes.crowd_bt.tests.small import write_data
from tests.support.local_server import LocalServer
from tests.support.plugin import free_port
from tests.support.recipes import assert_refused, run_command
from utils.common.errors import UserError

pytest.importorskip("boto3", reason="needs boto3 (pip install -r recipes/crowd_bt/requirements.txt)")
moto_server = pytest.importorskip("moto.server", reason="needs moto (pip install -r requirements-dev.txt)")

BUCKET, PREFIX = "surface-quality-dataset", "quack_v2_data_user_logs/"
KEY_ID, SECRET = "AKIAOFTHETEST", "the-secret-of-the-test"
PAIR = {"img1": "a.png", "img2": "b.png", "choice": "left", "pair_type": "gold_gold"}
LOG = {"comparisons": [{**PAIR, "img1_category": "POS_4", "img2_category": "POS_1"}] * 10}
NOT_PASSED_ON = ("transfer-encoding", "connection", "content-length", "server", "date")


class Proxy(LocalServer):
    """Passes requests on to moto; the objects named in `faults` come late, slowly or not whole."""

    def __init__(self, target_port: int) -> None:
        super().__init__(Handler)
        self.target_port = target_port
        self.faults: dict[str, str] = {}  # a word of the path: late, slow or short
        self.times_left = 10**6  # how often faults happen before the server is well
        self.paths: list[str] = []


class Handler(BaseHTTPRequestHandler):
    owner: Proxy

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.owner.paths.append(self.path)
        faults = self.owner.faults.items() if self.owner.times_left > 0 else ()
        fault = next((kind for word, kind in faults if word in self.path), "")
        self.owner.times_left -= bool(fault)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.owner.target_port}{self.path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                status, facts, body = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            status, facts, body = error.code, error.headers, error.read()
        if fault == "late":
            time.sleep(1.0)
        self.send_response(status)
        for name, value in facts.items():
            if name.lower() not in NOT_PASSED_ON:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            for byte in body if fault == "slow" else b"":
                self.wfile.write(bytes([byte]))
                time.sleep(0.02)
            if fault != "slow":
                self.wfile.write(body[: len(body) // 2] if fault == "short" else body)
        except OSError:  # the client has given up
            return
        self.close_connection = True


@pytest.fixture(scope="module")
def moto_port() -> Iterator[int]:
    """Start moto's server and fill its bucket."""
    import boto3

    server = moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    keys = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
    client.create_bucket(Bucket=BUCKET)
    objects = {f"{user}/comparison_data.json": json.dumps(LOG).encode() for user in ("ann", "bob", "dummy_1")}
    objects |= {"carl/notes.txt": b"no log", "dora/comparison_data.json": b'{"comparisons": ['}
    for name, body in objects.items():
        client.put_object(Bucket=BUCKET, Key=f"{PREFIX}{name}", Body=body)
    yield port
    server.stop()


@pytest.fixture
def proxy(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with Proxy(moto_port) as proxy:
        facts = {"AWS_ENDPOINT_URL": proxy.root, "AWS_DEFAULT_REGION": "us-east-1"}
        facts |= {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}
        facts |= {"AWS_CONFIG_FILE": "/nonexistent", "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent"}
        for name, value in facts.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(s3_source, "FIRST_PAUSE_S", 0.01)
        monkeypatch.setattr(s3_source, "NUM_TRIES", 2)
        yield proxy


def prepare(folder: Path, **options: Any) -> list[str]:
    lines: list[str] = []
    config = TrainConfig(data_source="s3", data_dir=str(folder), **options)
    s3_source.prepare_from_s3(config, lines.append)
    return lines


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        prepare(folder, **options)
    message = str(caught.value)
    assert not any(part in message for part in ("\n", KEY_ID, SECRET))
    assert not (folder / "prepared" / "metadata.json").exists()
    return message


def test_logs_are_downloaded_once_and_kept_prepared(tmp_path: Path, proxy: Proxy) -> None:
    lines = prepare(tmp_path)
    assert lines[0].endswith("carl/comparison_data.json: not there; this user is left out")
    assert "dora/comparison_data.json: no JSON" in lines[1]
    assert lines[2] == "20 comparisons of 2 users; dropped 1 test users"
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("")
    found = load_prepared(tmp_path / "prepared", tmp_path, print)
    assert (len(found.train), len(found.val)) == (16, 4)
    assert {(row.annotator_id, row.annotator_reliability) for row in found.of("all")} == {("ann", 1.0), ("bob", 1.0)}
    num_requests = len(proxy.paths)
    assert "remove it to download them again" in prepare(tmp_path)[0]
    assert len(proxy.paths) == num_requests
    with assert_refused("holds comparisons of another source"):
        prepare(tmp_path, s3_prefix="other/")
    written = "".join(file.read_text() for file in (tmp_path / "prepared").glob("*.json"))
    assert KEY_ID not in written
    assert SECRET not in written


def test_the_guides_s3_line_trains_after_make_data_and_after_the_remedy_that_an_error_names(
    tmp_path: Path, proxy: Proxy
) -> None:
    # What make_data.py had written stood in the place of the download, and --prepared-data-dir switched S3 off.
    pytest.importorskip("timm", reason="needs timm (pip install -r recipes/crowd_bt/requirements.txt)")
    data, images = tmp_path / "data", write_data(tmp_path / "pictures") / "images"
    write_annotators(data, [Picture(str(number), number % 7) for number in range(42)], MakeConfig(), default_rng(0))
    for name, file in zip(("a.png", "b.png"), sorted(images.iterdir()), strict=False):
        shutil.copy(file, images / name)
    places = ("--image-dir", images, "--data-dir", data, "--checkpoint-dir", tmp_path / "run", "--device", "cpu")
    small = (
        "--backbone",
        "test_resnet",
        "--no-pretrained",
        "--input-size",
        "32",
        "--epochs",
        "1",
        "--num-workers",
        "0",
    )
    line = ("--data-source", "s3", "--batch-size", "8", *small, *places)
    assert run_command(train, *line) == 0
    assert json.loads((data / "prepared" / "metadata.json").read_text())["num_users"] == 2
    assert json.loads((tmp_path / "run" / "evaluation_results.json").read_text())["total"] == 4
    shutil.rmtree(data / "prepared")
    shutil.move(data / "simulated", data / "prepared")  # as make_data.py wrote it once
    with assert_refused("holds comparisons of another source", "beside --data-source s3: --prepared-data-dir"):
        run_command(train, *line)
    assert run_command(train, *line, "--prepared-data-dir", tmp_path / "other", "--no-auto-resume") == 0
    assert json.loads((tmp_path / "other" / "metadata.json").read_text())["bucket"] == BUCKET
    assert not [file for file in tmp_path.rglob("*.lock") if file.is_file()]


def test_a_body_that_is_cut_off_is_read_again_and_then_refused(tmp_path: Path, proxy: Proxy) -> None:
    proxy.faults, proxy.times_left = {"ann/": "short"}, 1
    assert "20 comparisons of 2 users; dropped 1 test users" in prepare(tmp_path / "again")
    proxy.times_left = 10
    message = refusal(tmp_path / "refused")
    assert f"s3://{BUCKET}/{PREFIX}ann/comparison_data.json: " in message
    assert message.endswith("(2 tries); run the same command again")


def test_an_answer_that_comes_late_or_drips_is_given_up(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_source, "READ_TIMEOUT_S", 0.3)
    proxy.faults = {"bob/": "late"}
    assert "bob/comparison_data.json: Read timeout" in refusal(tmp_path)
    monkeypatch.setattr(s3_source, "OBJECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(s3_source, "CHUNK_BYTES", 8)
    proxy.faults = {"bob/": "slow"}
    assert "bytes after 0.2 s" in refusal(tmp_path)


def test_wrong_and_absent_credentials_are_one_line(
    tmp_path: Path, proxy: Proxy, moto_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_credentials_after(requests: int) -> None:
        address = f"http://127.0.0.1:{moto_port}/moto-api/reset-auth"
        plain = {"Content-Type": "text/plain"}
        urllib.request.urlopen(urllib.request.Request(address, str(requests).encode(), plain)).close()

    check_credentials_after(0)
    try:
        assert "the server refuses these credentials (InvalidAccessKeyId)" in refusal(tmp_path)
    finally:
        check_credentials_after(10**9)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "Unable to locate credentials; set AWS_ACCESS_KEY_ID" in refusal(tmp_path)


def test_absent_buckets_users_and_servers_are_one_line(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no such bucket; check --s3-bucket" in refusal(tmp_path, s3_bucket="nobodys")
    assert "no user's folder there; check --s3-bucket and --s3-prefix" in refusal(tmp_path, s3_prefix="nothing/")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    assert "Could not connect to the endpoint URL" in refusal(tmp_path)
