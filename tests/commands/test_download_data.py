"""The download step against a server that behaves like Azure, and against hostile archives."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

import download_data
from tests.azure_server import AzureServer, Blob
from tests.conftest import PROJECT
from utils.common.errors import UsageError, UserError
from utils.data.download import Report, RetryPolicy, download, expand_circuits, open_source
from utils.data.download.archive import MAX_MEMBERS, choose_photographs, list_photographs
from utils.data.download.progress import Progress
from utils.data.download.web import MAX_RETRY_AFTER_S

LABELS = "Overhead-Distribution-Labels.csv"
CSV = b"\xef\xbb\xbfLabel,External ID\n\"{'objects': []}\",1 (1).JPG\n"
FAST = RetryPolicy(max_attempts=3, backoff_s=0.001, connect_timeout_s=5, read_timeout_s=5)
PHOTOGRAPH_BYTES = 200_000


def photograph(number: int, size_bytes: int = PHOTOGRAPH_BYTES) -> bytes:
    return random.Random(number).randbytes(size_bytes)


def zip_bytes(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def circuit(number: int, num_photographs: int, nested: bool = False) -> dict[str, bytes]:
    prefix = f"Circuit{number}/" if nested else ""
    return {f"{prefix}{number} ({index}).JPG": photograph(index) for index in range(1, num_photographs + 1)}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[AzureServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with AzureServer() as azure:
        azure.blobs[LABELS] = Blob(CSV)
        azure.blobs["Circuit1.zip"] = Blob(zip_bytes(circuit(1, 6, nested=True)))
        azure.blobs["Circuit10.zip"] = Blob(zip_bytes({**circuit(10, 3), "read me.txt": b"hello"}))
        yield azure


def get(server: AzureServer, output: Path, *circuits: str, **options: object) -> Report:
    source = open_source(server.url, FAST)
    return download(source, output, circuits or ("1",), retry=FAST, **options)  # type: ignore[arg-type]


def folder_with(tmp_path: Path, archive: bytes) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / LABELS).write_bytes(CSV)
    (folder / "Circuit1.zip").write_bytes(archive)
    return folder


def get_from_folder(folder: Path, output: Path, **options: object) -> Report:
    return download(open_source(str(folder)), output, ["1"], **options)  # type: ignore[arg-type]


def files_under(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


# ---- the plain way


def test_labels_and_circuits_are_written_flat_and_zips_deleted(server: AzureServer, tmp_path: Path) -> None:
    report = get(server, tmp_path, "1", "10")
    expected = {f"Circuit1/1 ({i}).JPG" for i in range(1, 7)} | {f"Circuit10/10 ({i}).JPG" for i in range(1, 4)}
    assert files_under(tmp_path) == expected | {LABELS, "download.json", ".download.lock"}
    assert (tmp_path / "Circuit1" / "1 (2).JPG").read_bytes() == photograph(2)
    assert report.num_photographs == 9
    assert not report.missing
    assert len(server.gets("Circuit1.zip")) == 1


def test_second_run_sends_no_request(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path, "1", "10")
    num_requests = len(server.requests)
    report = get(server, tmp_path, "1", "10")
    assert report.is_unchanged
    assert report.num_photographs == 9
    assert len(server.requests) == num_requests


def test_ledger_records_the_object(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path)
    entry = json.loads((tmp_path / "download.json").read_text())["objects"]["Circuit1.zip"]
    blob = server.blobs["Circuit1.zip"]
    assert entry["url"] == server.url + "Circuit1.zip"
    assert (entry["etag"], entry["md5"], entry["size_bytes"]) == (blob.etag, blob.content_md5(), len(blob.content))
    assert (entry["num_photographs"], entry["max_images"], entry["is_complete"]) == (6, None, True)


def test_kept_zip_is_asked_for_again_only_when_it_is_gone(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path, keep_zips=True)
    assert (tmp_path / "Circuit1.zip").read_bytes() == server.blobs["Circuit1.zip"].content
    assert get(server, tmp_path, keep_zips=True).is_unchanged
    (tmp_path / "Circuit1.zip").unlink()
    get(server, tmp_path, keep_zips=True)
    assert len(server.gets("Circuit1.zip")) == 2


def test_missing_circuit_is_reported_and_the_others_kept(server: AzureServer, tmp_path: Path) -> None:
    report = get(server, tmp_path, "99", "10")
    assert report.missing == ("Circuit99.zip",)
    assert (tmp_path / "Circuit10" / "10 (1).JPG").is_file()


def test_all_asks_for_every_known_name(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit13b.zip"] = Blob(zip_bytes(circuit(13, 1)))
    assert expand_circuits(open_source(server.url, FAST), ["all"]) == ["1", "10", "13b"]
    for name in ("Circuit2.zip", "Circuit10.zip", "Circuit13b.zip", "notes.zip"):
        (tmp_path / name).touch()
    assert expand_circuits(open_source(str(tmp_path)), ["ALL"]) == ["2", "10", "13b"]


# ---- broken transfers


def test_dropped_connection_continues_where_it_stopped(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([len(blob.content) // 2, 100_000])
    get(server, tmp_path)
    first, second, third = server.gets("Circuit1.zip")
    assert (first.status, second.status, third.status) == (200, 206, 206)
    assert second.range == f"bytes={first.num_bytes}-{len(blob.content) - 1}"
    assert second.if_match == blob.etag
    assert server.bytes_sent("Circuit1.zip") == len(blob.content)
    assert (tmp_path / "Circuit1" / "1 (6).JPG").read_bytes() == photograph(6)


def test_later_run_continues_a_part_file(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([700_000, 0, 0, 0])
    with pytest.raises(UserError, match="run the same command again to continue"):
        get(server, tmp_path)
    kept_bytes = (tmp_path / "Circuit1.zip.part").stat().st_size
    assert kept_bytes == 700_000
    assert not (tmp_path / "Circuit1.zip").exists()
    num_sent = server.bytes_sent("Circuit1.zip")
    get(server, tmp_path)
    assert server.bytes_sent("Circuit1.zip") - num_sent == len(blob.content) - kept_bytes
    assert len(list((tmp_path / "Circuit1").iterdir())) == 6


def test_attempts_start_afresh_when_bytes_arrive(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([100_000, 0, 0] * 3)  # nine failures, but never three in a row without a new byte
    get(server, tmp_path)
    assert server.bytes_sent("Circuit1.zip") == len(blob.content)


def test_short_body_is_completed(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.short_by = deque([300_000])
    get(server, tmp_path)
    assert [request.status for request in server.gets("Circuit1.zip")] == [200, 206]
    assert server.bytes_sent("Circuit1.zip") == len(blob.content)


def test_busy_server_is_asked_again(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"].statuses = deque([503, 502])
    get(server, tmp_path)
    assert [request.status for request in server.gets("Circuit1.zip")] == [503, 502, 200]


@pytest.mark.parametrize("retry_after", ["1", "86400"])
def test_retry_after_is_obeyed_within_reason(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry_after: str
) -> None:
    waits_s: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waits_s.append)
    server.retry_after = retry_after
    server.blobs["Circuit1.zip"].statuses = deque([503])
    get(server, tmp_path)
    assert waits_s == [min(float(retry_after), MAX_RETRY_AFTER_S)]


def test_server_that_stays_busy_is_given_up(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"].statuses = deque([503] * 9)
    with pytest.raises(UserError, match="answered 503"):
        get(server, tmp_path)
    assert len(server.gets("Circuit1.zip")) == FAST.max_attempts


def test_changed_etag_starts_again(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([500_000, 0, 0, 0])
    with pytest.raises(UserError):
        get(server, tmp_path)
    changed = {f"1 ({index}).JPG": photograph(index + 100) for index in range(1, 7)}
    server.blobs["Circuit1.zip"] = Blob(zip_bytes(changed), etag='"0x8D2"')
    num_requests = len(server.gets("Circuit1.zip"))
    get(server, tmp_path)
    assert [request.range for request in server.gets("Circuit1.zip")[num_requests:]] == [""]
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(101)


def test_etag_that_changes_during_the_transfer_starts_again(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([500_000])
    changed = Blob(zip_bytes({"1 (1).JPG": photograph(77)}), etag='"0x8D2"')
    monkeypatch.setattr(RetryPolicy, "wait", lambda *_: server.blobs.update({"Circuit1.zip": changed}))
    get(server, tmp_path)
    assert [request.status for request in server.gets("Circuit1.zip")] == [200, 412, 200]
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(77)


def test_server_without_ranges_sends_all_again(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.accepts_ranges = False
    blob.drop_after = deque([500_000])
    get(server, tmp_path)
    assert [request.status for request in server.gets("Circuit1.zip")] == [200, 200]
    assert (tmp_path / "Circuit1" / "1 (3).JPG").read_bytes() == photograph(3)


def test_server_without_ranges_that_always_drops_is_given_up(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.accepts_ranges = False
    blob.drop_after = deque([500_000] * 50)
    with pytest.raises(UserError, match="3 times in a row"):
        get(server, tmp_path)
    assert len(server.gets("Circuit1.zip")) == FAST.max_attempts + 1


@pytest.mark.parametrize("etag", ["", 'W/"0x8D1"'])
def test_without_a_strong_etag_a_broken_transfer_is_not_continued(
    server: AzureServer, tmp_path: Path, etag: str
) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.etag = etag
    blob.drop_after = deque([500_000])
    get(server, tmp_path)
    assert [request.range for request in server.gets("Circuit1.zip")] == ["", ""]
    assert all(not request.if_match for request in server.gets("Circuit1.zip"))


def test_wrong_md5_is_fetched_twice_then_refused(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"].md5 = "AAAAAAAAAAAAAAAAAAAAAA=="
    with pytest.raises(UserError, match="MD5 was wrong twice"):
        get(server, tmp_path)
    assert [request.status for request in server.gets("Circuit1.zip")] == [200, 200]
    assert not (tmp_path / "Circuit1").exists()
    assert not (tmp_path / "Circuit1.zip").exists()


def test_part_file_damaged_on_disk_is_found_by_its_md5(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([500_000, 0, 0, 0])
    with pytest.raises(UserError):
        get(server, tmp_path)
    (tmp_path / "Circuit1.zip.part").write_bytes(bytes(500_000))
    get(server, tmp_path)
    assert [request.range for request in server.gets("Circuit1.zip")][-1] == ""
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(1)


def test_killed_during_extraction_does_not_download_again(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.blobs["Circuit1.zip"].md5 = ""
    replaced: list[object] = []
    real_replace = os.replace

    def dies_at_the_third_photograph(origin: Path, target: Path) -> None:
        if str(target).endswith(".JPG"):
            replaced.append(target)
            if len(replaced) == 3:
                raise KeyboardInterrupt
        real_replace(origin, target)

    monkeypatch.setattr(os, "replace", dies_at_the_third_photograph)
    with pytest.raises(KeyboardInterrupt):
        get(server, tmp_path)
    monkeypatch.setattr(os, "replace", real_replace)
    assert sorted(files_under(tmp_path / "Circuit1")) == ["1 (1).JPG", "1 (2).JPG"]
    before = (tmp_path / "Circuit1" / "1 (1).JPG").stat().st_mtime_ns
    get(server, tmp_path)
    assert len(server.gets("Circuit1.zip")) == 1
    assert len(files_under(tmp_path / "Circuit1")) == 6
    assert (tmp_path / "Circuit1" / "1 (1).JPG").stat().st_mtime_ns == before


# ---- a few photographs by range


def test_max_images_takes_photographs_without_the_rest(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"] = blob = Blob(zip_bytes(circuit(1, 40, nested=True)))
    report = get(server, tmp_path, max_images=3)
    names = files_under(tmp_path / "Circuit1")
    assert report.num_photographs == len(names) == 3
    for name in names:
        number = int(name.split("(")[1].split(")")[0])
        assert (tmp_path / "Circuit1" / name).read_bytes() == photograph(number)
    directory_bytes = 2 * (1 << 20)  # read when planning and when extracting
    assert server.bytes_sent("Circuit1.zip") < directory_bytes + 3 * PHOTOGRAPH_BYTES + 10_000
    assert server.bytes_sent("Circuit1.zip") < len(blob.content) / 2
    assert all(request.status == 206 and request.if_match for request in server.gets("Circuit1.zip"))


def test_larger_max_images_adds_to_the_smaller(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"] = Blob(zip_bytes(circuit(1, 40)))
    get(server, tmp_path, max_images=3)
    first = files_under(tmp_path / "Circuit1")
    num_sent = server.bytes_sent("Circuit1.zip")
    get(server, tmp_path, max_images=5)
    assert first < files_under(tmp_path / "Circuit1")
    assert len(files_under(tmp_path / "Circuit1")) == 5
    assert server.bytes_sent("Circuit1.zip") - num_sent < 2 * (1 << 20) + 2 * PHOTOGRAPH_BYTES + 10_000
    assert get(server, tmp_path, max_images=2).is_unchanged


def test_few_photographs_then_the_whole_circuit(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path, max_images=1)
    assert get(server, tmp_path).num_photographs == 6
    assert len(files_under(tmp_path / "Circuit1")) == 6
    assert get(server, tmp_path, max_images=1).is_unchanged


def test_drop_and_503_while_taking_photographs(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"] = blob = Blob(zip_bytes(circuit(1, 40)))
    blob.drop_after = deque([1 << 20, 1 << 20, 0, 50_000])  # two directories, then a photograph breaks off twice
    blob.statuses = deque([503])
    report = get(server, tmp_path, max_images=4)
    assert report.num_photographs == len(files_under(tmp_path / "Circuit1")) == 4


def test_lost_photograph_is_fetched_alone(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"] = Blob(zip_bytes(circuit(1, 40)))
    get(server, tmp_path)
    (tmp_path / "Circuit1" / "1 (7).JPG").unlink()
    num_sent = server.bytes_sent("Circuit1.zip")
    get(server, tmp_path)
    assert (tmp_path / "Circuit1" / "1 (7).JPG").read_bytes() == photograph(7)
    assert server.bytes_sent("Circuit1.zip") - num_sent < 2 * (1 << 20) + PHOTOGRAPH_BYTES + 10_000


def test_max_images_needs_range_requests(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"].accepts_ranges = False
    with pytest.raises(UserError, match="without --max-images"):
        get(server, tmp_path, max_images=2)


def test_chosen_photographs_are_spread_and_nested() -> None:
    members = zipfile.ZipFile(io.BytesIO(zip_bytes({f"1 ({i}).JPG": b"x" for i in range(1, 101)}))).infolist()
    few, more = (choose_photographs(members, count) for count in (10, 20))
    assert {member.filename for member in few} < {member.filename for member in more}
    numbers = [int(member.filename[3:-5]) for member in few]
    assert numbers == sorted(numbers)  # the archive's order: one pass over the file
    assert numbers[-1] - numbers[0] > 40


# ---- answers that are not the data


def test_unknown_name_forbidden_and_silent_servers(server: AzureServer, tmp_path: Path) -> None:
    del server.blobs[LABELS]
    assert get(server, tmp_path).missing == (LABELS,)
    server.blobs["Circuit10.zip"].statuses = deque([403])
    with pytest.raises(UserError, match="403; the publisher may ask to accept its terms"):
        get(server, tmp_path, "10")


def test_login_page_instead_of_labels_is_refused(server: AzureServer, tmp_path: Path) -> None:
    server.blobs[LABELS] = Blob(b"<html>please log in</html>")
    with pytest.raises(UserError, match="not the label file"):
        get(server, tmp_path)
    assert not (tmp_path / LABELS).exists()


def test_labels_edited_by_hand_are_not_overwritten(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path)
    (tmp_path / LABELS).write_bytes(CSV + b"mine")
    with pytest.raises(UserError, match="delete it"):
        get(server, tmp_path)
    assert (tmp_path / LABELS).read_bytes().endswith(b"mine")


def test_other_data_under_the_same_name_is_refused(server: AzureServer, tmp_path: Path) -> None:
    mirror = folder_with(tmp_path, zip_bytes({"1 (1).JPG": b"another photograph"}))
    output = tmp_path / "raw"
    get_from_folder(mirror, output)
    with pytest.raises(UserError, match="use another --output"):
        get(server, output)
    assert (output / "Circuit1" / "1 (1).JPG").read_bytes() == b"another photograph"


def test_same_data_at_another_address_is_accepted(server: AzureServer, tmp_path: Path) -> None:
    get(server, tmp_path)
    with AzureServer() as mirror:
        mirror.blobs = server.blobs
        assert get(mirror, tmp_path).is_unchanged
        assert {request.method for request in mirror.requests} == {"HEAD"}


def test_redirect_to_an_unencrypted_server_is_refused(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests

    monkeypatch.setattr(
        requests.Session, "get_redirect_target", lambda *_: "http://example.org/Circuit1.zip?sig=hush-hush"
    )
    with pytest.raises(UserError, match=r"a redirect to http://example\.org: not encrypted") as caught:
        get(server, tmp_path)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.org/x", "use https://example.org"),
        ("ftp://user:hush@example.org/x", "expected https"),
        ("https://", "expected https"),
        ("https://example.org:notaport/", "port"),
        ("/no/such/folder", "no such folder"),
        ("file:///no/such/folder", "no such folder"),
    ],
)
def test_bad_base_url(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        open_source(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("circuit_name", ["", "../1", "1/2", "Circuit1", "0", "13bb", "-1"])
def test_bad_circuit(tmp_path: Path, circuit_name: str) -> None:
    with pytest.raises(UsageError, match="--circuits"):
        expand_circuits(open_source(str(tmp_path)), ["1", circuit_name])


def test_secrets_in_the_address_are_sent_and_never_shown(
    server: AzureServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url.replace("http://", "http://someone:hush1@").rstrip("/") + "?sv=1&sig=hush2"
    server.blobs["Circuit1.zip"].drop_after = deque([300_000])
    source = open_source(url, FAST)
    download(source, tmp_path / "raw", ["1"], retry=FAST)
    download(source, tmp_path / "few", ["10"], max_images=1, retry=FAST)
    assert {request.query for request in server.requests} == {"sv=1&sig=hush2"}
    messages = []
    server.blobs["Circuit2.zip"] = Blob(b"x" * 5000)
    server.blobs["Circuit3.zip"] = Blob(zip_bytes(circuit(3, 2)), statuses=deque([403]))
    server.blobs["Circuit4.zip"] = Blob(zip_bytes(circuit(4, 2)), drop_after=deque([0] * 9))
    server.blobs["Circuit5.zip"] = Blob(zip_bytes(circuit(5, 2)), statuses=deque([503] * 30))
    for number, options in (("2", {"max_images": 1}), ("3", {}), ("4", {}), ("5", {"max_images": 1})):
        with pytest.raises(UserError) as caught:
            download(source, tmp_path / "failing", [number], retry=FAST, **options)
        messages.append(str(caught.value))
    closed = url.replace(str(server.url.split(":")[2].split("/")[0]), "1")
    with pytest.raises(UserError, match="cannot be reached") as caught:
        download(open_source(closed, FAST), tmp_path / "failing", ["9"], retry=FAST)
    messages.append(str(caught.value))
    assert "127.0.0.1" in messages[-1]
    streams = capsys.readouterr()
    written = "".join(file.read_text() for file in tmp_path.rglob("*.json"))
    everything = "\n".join([*messages, streams.out, streams.err, written])
    assert "hush" not in everything
    assert all("\n" not in message for message in messages)


# ---- disk, locks, folders


def test_full_disk_is_refused_before_anything_is_fetched(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = server.blobs["Circuit1.zip"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * len(blob.content)))
    with pytest.raises(UserError, match=r"needs 0\.0 GiB"):  # both the zip and its photographs, and the labels
        get(server, tmp_path)
    assert not any(request.method == "GET" for request in server.requests)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2 * len(blob.content) + len(CSV)))
    assert get(server, tmp_path).num_photographs == 6


def test_archive_that_unpacks_to_more_than_expected_is_refused_when_it_does_not_fit(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = {f"1 ({index}).JPG": photograph(index, 5_000) * 20 for index in range(5)}
    server.blobs["Circuit1.zip"] = blob = Blob(zip_bytes(members, zipfile.ZIP_DEFLATED))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3 * len(blob.content)))
    with pytest.raises(UserError, match=r"needs 0\.0 GiB"):
        get(server, tmp_path)
    assert (tmp_path / "Circuit1.zip").is_file()
    assert not (tmp_path / "Circuit1").exists()


def test_photograph_of_the_right_size_and_wrong_content_is_written_again(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 2)))
    (tmp_path / "raw" / "Circuit1").mkdir(parents=True)
    (tmp_path / "raw" / "Circuit1" / "1 (2).JPG").write_bytes(bytes(PHOTOGRAPH_BYTES))
    get_from_folder(folder, tmp_path / "raw")
    assert (tmp_path / "raw" / "Circuit1" / "1 (2).JPG").read_bytes() == photograph(2)


def test_two_downloads_into_one_folder(server: AzureServer, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".download.lock"), pytest.raises(UserError, match="another download"):
        get(server, tmp_path)


def test_output_that_is_a_file(server: AzureServer, tmp_path: Path) -> None:
    (tmp_path / "raw").write_text("a file")
    with pytest.raises(UserError, match="raw: File exists"):
        get(server, tmp_path / "raw")


def test_folder_and_file_url_give_the_same(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 4, nested=True)))
    get_from_folder(folder, tmp_path / "raw")
    download(open_source(folder.as_uri()), tmp_path / "raw2", ["1"], keep_zips=True)
    assert files_under(tmp_path / "raw2") - files_under(tmp_path / "raw") == {"Circuit1.zip"}
    assert (tmp_path / "raw" / "Circuit1" / "1 (4).JPG").read_bytes() == photograph(4)
    assert get_from_folder(folder, tmp_path / "raw").is_unchanged


def test_folder_may_be_the_output_itself(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 4)))
    get_from_folder(folder, folder)
    assert {LABELS, "Circuit1.zip", "Circuit1/1 (1).JPG"} <= files_under(folder)


def test_damaged_ledger_is_named(server: AzureServer, tmp_path: Path) -> None:
    (tmp_path / "download.json").write_text('{"objects": [')
    with pytest.raises(UserError, match=r"download\.json: not readable"):
        get(server, tmp_path)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_one_moving_line_or_separate_lines(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr("utils.data.download.progress.SECONDS_BETWEEN_LINES", 0.0)
    progress = Progress(4_000_000)
    progress.move_to(1_000_000)
    progress.advance(2_000_000)
    progress.note("a note")
    progress.move_to(2_000_000)  # a part that must come again
    progress.advance(2_000_000)
    progress.close()
    shown = capsys.readouterr().err
    assert progress.position == 4_000_000
    assert progress.summary().startswith("4.0 MB in ")
    assert "a note\n" in shown
    assert ("  3 of 4 MB (75 %)" in shown) != is_terminal
    assert ("4.00M" in shown) == is_terminal


# ---- hostile archives


def special(name: str, mode: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(name)
        info.external_attr = mode << 16
        archive.writestr(info, "/etc/passwd")
    return buffer.getvalue()


def encrypted() -> bytes:
    content = bytearray(zip_bytes({"1 (1).JPG": b"secret"}))
    content[content.index(b"PK\x01\x02") + 8] |= 0x1
    return bytes(content)


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (zip_bytes({"1 (1).JPG": b"good", "../evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"a/../../evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"..\\evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"/tmp/evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"C:\\evil.jpg": b"bad"}), "leaves the folder"),
        (zip_bytes({"../evil.txt": b"bad"}), "leaves the folder"),
        (special("link.jpg", stat.S_IFLNK | 0o777), "is a link or a device"),
        (special("device.jpg", stat.S_IFCHR | 0o666), "is a link or a device"),
        (encrypted(), "is encrypted"),
        (zip_bytes({"bomb.jpg": bytes(20_000_000)}, zipfile.ZIP_DEFLATED), "unpacks to more than 200 times"),
        (b"not a zip at all", "is damaged"),
        (zip_bytes({"1 (1).JPG": b"x" * 1000})[:-30], "is damaged"),
    ],
)
def test_hostile_archive_writes_nothing(tmp_path: Path, archive: bytes, message: str) -> None:
    folder = folder_with(tmp_path, archive)
    output = tmp_path / "deep" / "raw"
    before = files_under(tmp_path)
    with pytest.raises(UserError, match=message):
        get_from_folder(folder, output)
    assert files_under(tmp_path) - before <= {"deep/raw/.download.lock"}


def test_oversized_member_and_too_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = zipfile.ZipFile(io.BytesIO(zip_bytes({"1 (1).JPG": b"x"})))
    archive.infolist()[0].file_size = archive.infolist()[0].compress_size = 200_000_001
    with pytest.raises(UserError, match="more than 200 MB"):
        list_photographs(archive, "here")
    monkeypatch.setattr(archive, "filelist", archive.infolist() * (MAX_MEMBERS + 1))
    with pytest.raises(UserError, match="100,001 members"):
        list_photographs(archive, "here")


def test_lying_size_is_stopped_by_the_checksum(tmp_path: Path) -> None:
    content = bytearray(zip_bytes({"1 (1).JPG": b"\x01\x02" * 50_000}, zipfile.ZIP_DEFLATED))
    directory = content.index(b"PK\x01\x02")
    content[directory + 24 : directory + 28] = (1000).to_bytes(4, "little")
    folder = folder_with(tmp_path, bytes(content))
    with pytest.raises(UserError, match="is damaged"):
        get_from_folder(folder, tmp_path / "raw")
    assert files_under(tmp_path / "raw" / "Circuit1") == set()


def test_flipped_bit_is_found(tmp_path: Path) -> None:
    content = bytearray(zip_bytes(circuit(1, 2)))
    content[1000] ^= 1
    with pytest.raises(UserError, match=r"'1 \(1\)\.JPG' is damaged"):
        get_from_folder(folder_with(tmp_path, bytes(content)), tmp_path / "raw")


def test_other_files_repeated_names_and_resource_forks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    members = {"a/1 (1).JPG": b"first", "b/1 (1).jpg": b"second", "notes.txt": b"x", "__MACOSX/._1 (1).JPG": b"fork"}
    report = get_from_folder(folder_with(tmp_path, zip_bytes(members)), tmp_path / "raw")
    assert report.num_photographs == 1
    assert (tmp_path / "raw" / "Circuit1" / "1 (1).JPG").read_bytes() == b"first"
    line = capsys.readouterr().err
    assert "2 other files in the archive ignored" in line
    assert "1 with a repeated name skipped, the first '1 (1).jpg'" in line


def test_link_in_the_circuit_folder_is_replaced_not_followed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, zip_bytes({"1 (1).JPG": b"photograph"}))
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    target = tmp_path / "raw" / "Circuit1"
    target.mkdir(parents=True)
    for name in ("1 (1).JPG", ".1 (1).JPG.part"):
        (target / name).symlink_to(outside)
    get_from_folder(folder, tmp_path / "raw")
    assert outside.read_bytes() == b"precious"
    assert (target / "1 (1).JPG").read_bytes() == b"photograph"
    assert not (target / "1 (1).JPG").is_symlink()


# ---- the script


def test_sample_takes_an_optional_number() -> None:
    complete = download_data.with_sample_size
    assert complete(["--sample"]) == ["--sample", "240"]
    assert complete(["--sample", "--output", "x"]) == ["--sample", "240", "--output", "x"]
    assert complete(["--sample", "12", "--seed", "3"]) == ["--sample", "12", "--seed", "3"]
    assert complete(["--sample=12"]) == ["--sample=12"]
    assert complete([]) == []


@pytest.mark.parametrize(
    "arguments",
    [["--max-images", "0"], ["--sample", "0"], ["--keep-zips", "--max-images", "3"], ["--sample", "--max-images", "3"]],
)
def test_options_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        download_data.main(arguments)


def test_script_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, zip_bytes(circuit(1, 2)))
    arguments = ["--base-url", str(folder), "--output", str(tmp_path / "raw")]
    with pytest.raises(UserError, match=r"has no Circuit10\.zip"):
        download_data.main(arguments)
    assert len(files_under(tmp_path / "raw" / "Circuit1")) == 2
    assert download_data.main([*arguments, "--circuits", "1"]) == 0
    assert "all 2 photographs are there, nothing to do" in capsys.readouterr().out


def test_keyboard_stop_leaves_a_part_file_that_continues(server: AzureServer, tmp_path: Path) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([600_000, *[0] * 50])  # then nothing comes: the script waits between attempts
    command = [
        sys.executable,
        "download_data.py",
        "--circuits",
        "1",
        "--base-url",
        server.url,
        "--output",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 20
    while len(server.gets("Circuit1.zip")) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.rstrip().endswith("stopped by the keyboard; run the same command again to continue")
    assert "Traceback" not in errors
    blob.drop_after.clear()
    assert get(server, tmp_path).num_photographs == 6
    assert server.bytes_sent("Circuit1.zip") == len(blob.content)
