"""Files in an object storage: moto's S3 server, over HTTP, which vanishes, returns, and sends less
or other bytes.
"""

import os
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import download_data
import parse_labels
from tests.prepare.parsing.raw_folder import tree, write_raw_folder
from tests.support.recipes import run_command
from tests.support.s3_server import ALWAYS, KEY_ID, SECRET, S3Server, s3_server, use_empty_server
from yolo_seg_ddp.prepare.parsing.sources import LABEL_CSV
from yolo_seg_ddp.utils import storage
from yolo_seg_ddp.utils.errors import UsageError, UserError
from yolo_seg_ddp.utils.storage import Storage, StoredFile

BUCKET = "epri"


@pytest.fixture(scope="module")
def moto() -> Iterator[S3Server]:
    with s3_server(BUCKET) as server:
        yield server


@pytest.fixture
def server(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty bucket, with short pauses before the second try and the third one."""
    use_empty_server(moto, BUCKET, monkeypatch)
    return moto


def open_storage(folder: str = "raw", pauses_s: tuple[float, ...] = (0.01, 0.02)) -> Storage:
    return Storage(f"s3://{BUCKET}/{folder}", "--source", pauses_s)


def fetch(folder: Path, names: str = "raw") -> int:
    opened = open_storage(names)
    return opened.fetch_all(opened.files(), folder)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        fetch(folder)
    message = str(caught.value)
    assert not any(part in message for part in ("\n", KEY_ID, SECRET))
    return message


def write_unpacked_folder(folder: Path) -> set[str]:
    """Write the folder of raw photographs with its zip unpacked; return the names of the
    photographs.
    """
    write_raw_folder(folder)
    (folder / "Circuit2").mkdir()
    with zipfile.ZipFile(folder / "Circuit2.zip") as archive:
        for name in archive.namelist():
            (folder / name).write_bytes(archive.read(name))
    (folder / "Circuit2.zip").unlink()
    return tree(folder).keys() - {LABEL_CSV}


def parts(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.part"))


def test_a_folder_is_fetched_once(
    server: S3Server,
    tmp_path: Path,
) -> None:
    raw = write_raw_folder(tmp_path / "raw")
    server.put({f"raw/{name}": body for name, body in tree(raw).items()})
    arguments = ("--source", f"s3://{BUCKET}/raw/", "--output", tmp_path / "copy")
    assert run_command(download_data, *arguments) == 0
    assert tree(tmp_path / "copy") == tree(raw)
    server.requests.clear()
    assert run_command(download_data, *arguments) == 0
    # the list
    assert [request for request in server.requests if request.startswith("GET")] == [
        f"GET /{BUCKET}"
    ]

    # Another time, as after `cp`: the MD5 tells that the bytes are the same.
    os.utime(tmp_path / "copy" / LABEL_CSV, (1, 1))
    assert fetch(tmp_path / "copy") == 0
    server.put({f"raw/{LABEL_CSV}": b"new"})
    assert fetch(tmp_path / "copy") == 1
    assert (tmp_path / "copy" / LABEL_CSV).read_bytes() == b"new"


def test_a_file_that_was_changed_here_is_not_replaced(server: S3Server, tmp_path: Path) -> None:
    server.put({"raw/labels.csv": b"stored"})
    fetch(tmp_path)
    (tmp_path / "labels.csv").write_bytes(b"corrected here")
    in_an_hour_s = time.time() + 3600
    os.utime(tmp_path / "labels.csv", (in_an_hour_s, in_an_hour_s))
    assert (
        refusal(tmp_path)
        == f"{tmp_path}/labels.csv: differs from the stored file, and is newer; remove it to get "
        "the stored one"
    )
    assert (tmp_path / "labels.csv").read_bytes() == b"corrected here"


def test_a_broken_transfer_continues_where_it_broke(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "BLOCK_BYTES", 1000)
    content = os.urandom(5500)
    server.put({"raw/Circuit1.zip": content})
    opened = open_storage()
    file = opened.files()["Circuit1.zip"]
    block, num_blocks = opened._block, 0

    def break_after_two(path: str, start: int, end: int) -> bytes:
        nonlocal num_blocks
        num_blocks += 1
        if num_blocks > 2:
            server.faults = {"Circuit1": "short"}
        return block(path, start, end)

    opened._block = break_after_two  # type: ignore[method-assign]
    with pytest.raises(
        UserError, match=r"^s3://epri/raw/Circuit1.zip: .*; check the network and AWS_ENDPOINT_URL$"
    ):
        opened.fetch("Circuit1.zip", file, tmp_path / "Circuit1.zip")
    assert not (tmp_path / "Circuit1.zip").exists()
    assert [part.read_bytes() for part in parts(tmp_path)] == [content[:2000]]
    server.faults = {}
    server.requests.clear()
    assert fetch(tmp_path) == 1
    assert server.num_fetched("Circuit1") == 4
    assert (tmp_path / "Circuit1.zip").read_bytes() == content
    assert parts(tmp_path) == []


def test_a_server_that_returns_is_asked_again(server: S3Server, tmp_path: Path) -> None:
    server.put({"raw/a.jpg": b"a" * 3000})
    opened = open_storage(pauses_s=(0.2,) * 40)
    files = opened.files()
    server.stop()
    back = threading.Timer(0.7, server.start)
    back.start()
    assert opened.fetch_all(files, tmp_path) == 1
    back.join()
    assert (tmp_path / "a.jpg").read_bytes() == b"a" * 3000


def test_other_bytes_than_the_etag_says_are_fetched_again(server: S3Server, tmp_path: Path) -> None:
    server.put({"raw/a.jpg": b"a" * 900})
    opened = open_storage()
    files = opened.files()
    server.faults, server.times_left = {"a.jpg": "other"}, 1
    assert opened.fetch_all(files, tmp_path) == 1
    assert (tmp_path / "a.jpg").read_bytes() == b"a" * 900


def test_etags_that_are_no_md5_cost_one_transfer_more_in_all(server: S3Server) -> None:
    # S3 gives such ones to objects that it encrypts with a key of KMS.
    server.put({f"raw/{number}.jpg": b"%d" % number for number in range(3)})
    opened = open_storage()
    strange = {
        name: StoredFile(file.size_bytes, f"{number:032x}", file.time_s)
        for number, (name, file) in enumerate(opened.files().items())
    }
    opened.system.info = lambda path: {
        "size": 1,
        "ETag": strange[path[-5:]].etag,
        "mtime": strange[path[-5:]].time_s,
    }
    assert [opened.read(name, file) for name, file in strange.items()] == [b"0", b"1", b"2"]
    assert server.num_fetched(".jpg") == 4
    changed = StoredFile(1, "another version-2", 1)
    with pytest.raises(
        UserError,
        match=r"^s3://epri/raw/0.jpg: it changes or arrives damaged; run the same command",
    ):
        opened.read("0.jpg", changed)


def test_names_that_lead_elsewhere_are_left_out(server: S3Server) -> None:
    bad = (
        "../a.csv",
        "x/../../a.csv",
        "/a.csv",
        "x//a.csv",
        ".bashrc",
        "x/.git/config",
        "..\\a.csv",
        "folder/",
    )
    server.put({f"raw/{name}": b"1" for name in (*bad, "good/a b.csv")})
    assert list(open_storage().files()) == ["good/a b.csv"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "s3://key:secret@bucket/x",
            "--source s3://…@bucket/x: expected s3://bucket/folder or the like, without user and "
            "password",
        ),
        ("https://host/x", "--source https://host/x: expected s3://"),
        ("s4://bucket/x", "--source s4://bucket/x: Protocol not known: s4"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_line(address: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Storage(address, "--source")
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


def test_credentials_buckets_and_servers_that_are_not_there_are_one_line(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix = (
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or what the package of this storage reads"
    )
    server.check_keys_after(0)
    try:
        message = refusal(tmp_path)
    finally:
        server.check_keys_after(ALWAYS)
    assert message.startswith(
        f"s3://{BUCKET}/raw: The AWS Access Key Id you provided does not exist in our records."
    )
    assert message.endswith(f"(PermissionError); {fix}")
    with pytest.raises(
        UserError,
        match=r"^s3://nobodys/raw: The specified bucket does not exist .*; check the address$",
    ):
        Storage("s3://nobodys/raw", "--source").files()
    with pytest.raises(UserError, match=r"^s3://epri/empty: no files there; check the address$"):
        run_command(download_data, "--source", f"s3://{BUCKET}/empty", "--output", tmp_path)
    server.stop()
    try:
        assert refusal(tmp_path).endswith(
            "(EndpointConnectionError); check the network and AWS_ENDPOINT_URL"
        )
    finally:
        server.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    assert (
        refusal(tmp_path)
        == f"s3://{BUCKET}/raw: Unable to locate credentials (NoCredentialsError); {fix}"
    )


def test_a_full_disk_is_noticed_before_the_first_byte(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put({"raw/a.jpg": b"a" * 3000})
    usage = type(storage.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage(10**6, 10**6, 2999))
    assert refusal(tmp_path).endswith(
        "0.0 GiB are needed, 0.0 GiB are free; make room there, or use another --output"
    )
    assert server.num_fetched("a.jpg") == 0


def test_photographs_in_a_bucket_are_parsed_as_on_the_disk_and_fetched_once(
    server: S3Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    photographs = write_unpacked_folder(raw := tmp_path / "raw")
    server.put({f"raw/{name}": body for name, body in tree(raw).items()})
    printed = []
    for size in ("300", "native"):
        server.requests.clear()
        for place, output in (
            (raw, "local"),
            (f"s3://{BUCKET}/raw", "stored"),
            (f"s3://{BUCKET}/raw", "stored"),
        ):
            arguments = (
                "--input",
                place,
                "--output",
                tmp_path / size / output,
                "--long-side",
                size,
            )
            assert run_command(parse_labels, *arguments) == 0
            printed.append(capsys.readouterr().out.replace(f"/{output}", ""))
        assert [server.num_fetched(name) for name in photographs] == [1] * 6
        assert tree(tmp_path / size / "stored").keys() == tree(tmp_path / size / "local").keys()
        for name, body in tree(tmp_path / size / "local").items():
            assert name.startswith(".") or tree(tmp_path / size / "stored")[name] == body, name
    assert list(tmp_path.rglob(".labels-*")) == []


def test_a_bucket_that_vanishes_while_photographs_are_parsed_ends_in_one_line_and_loses_nothing(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photographs = write_unpacked_folder(raw := tmp_path / "raw")
    server.put({f"raw/{name}": body for name, body in tree(raw).items()})
    read, num_read = Storage.read, 0

    def vanish_after_two(self: Storage, name: str, file: StoredFile) -> bytes:
        nonlocal num_read
        num_read += 1
        if num_read == 3:
            server.stop()
        self._pauses_s = (0.01,)
        return read(self, name, file)

    monkeypatch.setattr(Storage, "read", vanish_after_two)
    arguments = (
        "--input",
        f"s3://{BUCKET}/raw",
        "--output",
        tmp_path / "processed",
        "--workers",
        "1",
    )
    with pytest.raises(UserError, match=rf"^s3://{BUCKET}/raw/.*JPG: .*; check the network"):
        run_command(parse_labels, *arguments)
    server.start()
    monkeypatch.setattr(Storage, "read", read)
    server.requests.clear()
    assert run_command(parse_labels, *arguments) == 0
    assert sum(map(server.num_fetched, photographs)) == len(photographs) - 2
