"""Transfers that break off, wait, or change on the way, and servers that refuse."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.sources.download.archives import FAST, LABELS, circuit, files_under, get, photograph, zip_bytes
from tests.support.azure_server import AzureServer, Blob
from utils.common.errors import UserError
from utils.sources.download import RetryPolicy, download, open_source
from utils.sources.download.web import MAX_RETRY_AFTER_S


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


def test_drop_and_503_while_taking_photographs(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"] = blob = Blob(zip_bytes(circuit(1, 40)))
    blob.drop_after = deque([1 << 20, 1 << 20, 0, 50_000])  # two directories, then a photograph breaks off twice
    blob.statuses = deque([503])
    report = get(server, tmp_path, max_images=4)
    assert report.num_photographs == len(files_under(tmp_path / "Circuit1")) == 4


def test_max_images_needs_range_requests(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit1.zip"].accepts_ranges = False
    with pytest.raises(UserError, match="without --max-images"):
        get(server, tmp_path, max_images=2)


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
    cases: list[tuple[str, dict[str, Any]]] = [("2", {"max_images": 1}), ("3", {}), ("4", {}), ("5", {"max_images": 1})]
    for number, options in cases:
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
