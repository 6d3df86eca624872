"""Addresses; transfers that break off, wait, or change on the way, and servers that refuse."""

import sys
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.prepare.download.archives import (
    FAST,
    LABELS,
    circuit,
    files_under,
    get,
    photograph,
    zip_bytes,
)
from tests.support.azure_server import AzureServer, Blob
from yolo_seg_ddp.prepare.download import RetryPolicy, download, expand_circuits, open_source
from yolo_seg_ddp.prepare.download.source import Progress
from yolo_seg_ddp.prepare.download.web import MAX_RETRY_AFTER_S
from yolo_seg_ddp.utils.errors import UsageError, UserError


def test_all_asks_for_every_known_name(server: AzureServer, tmp_path: Path) -> None:
    server.blobs["Circuit13b.zip"] = Blob(zip_bytes(circuit(13, 1)))
    assert expand_circuits(open_source(server.url, FAST), ["all"]) == ["1", "10", "13b"]
    for name in ("Circuit2.zip", "Circuit10.zip", "Circuit13b.zip", "notes.zip"):
        (tmp_path / name).touch()
    assert expand_circuits(open_source(str(tmp_path)), ["ALL"]) == ["2", "10", "13b"]


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


# What goes wrong with the zip of Circuit1, the statuses of its requests, and whether the second
# asks for the rest only.
FAULTS: dict[str, tuple[dict[str, Any], list[int], bool]] = {
    "dropped twice": ({"drop_after": [600_000, 100_000]}, [200, 206, 206], True),
    # Nine failures, but never three in a row without a new byte: attempts start afresh when bytes
    # arrive.
    "dropped nine times": ({"drop_after": [100_000, 0, 0] * 3}, [200] + [206] * 9, True),
    "short body": ({"short_by": [300_000]}, [200, 206], True),
    "busy": ({"statuses": [503, 502]}, [503, 502, 200], False),
    "another range": (
        {"md5": "", "drop_after": [600_000], "shifted_by": [-1]},
        [200, 206, 200],
        False,
    ),
    "a later range": (
        {"md5": "", "drop_after": [600_000], "shifted_by": [9]},
        [200, 206, 200],
        False,
    ),
    "without ranges": ({"accepts_ranges": False, "drop_after": [500_000]}, [200, 200], False),
    "without an ETag": ({"etag": "", "drop_after": [500_000]}, [200, 200], False),
    "with a weak ETag": ({"etag": 'W/"0x8D1"', "drop_after": [500_000]}, [200, 200], False),
}


def set_faults(blob: Blob, faults: dict[str, Any]) -> None:
    for name, value in faults.items():
        setattr(blob, name, deque(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_transfer_that_breaks_off_is_completed(
    server: AzureServer, tmp_path: Path, fault: str
) -> None:
    faults, statuses, continues = FAULTS[fault]
    blob = server.blobs["Circuit1.zip"]
    set_faults(blob, faults)
    get(server, tmp_path)
    requests = server.gets("Circuit1.zip")
    assert [request.status for request in requests] == statuses
    assert (tmp_path / "Circuit1" / "1 (6).JPG").read_bytes() == photograph(6)
    if continues:
        assert requests[1].range == f"bytes={requests[0].num_bytes}-{len(blob.content) - 1}"
        assert requests[1].if_match == blob.etag
        assert server.bytes_sent("Circuit1.zip") == len(blob.content)
    elif not blob.etag.startswith('"'):
        assert all(not request.if_match and not request.range for request in requests)


@pytest.mark.parametrize(
    ("faults", "message", "num_requests"),
    [
        ({"statuses": [503] * 9}, "answered 503", FAST.max_attempts),
        (
            {"accepts_ranges": False, "drop_after": [500_000] * 50},
            "3 times in a row",
            FAST.max_attempts + 1,
        ),
        ({"md5": "AAAAAAAAAAAAAAAAAAAAAA=="}, "MD5 was wrong twice", 2),
    ],
)
def test_a_server_that_stays_busy_drops_or_lies_is_given_up(
    server: AzureServer, tmp_path: Path, faults: dict[str, Any], message: str, num_requests: int
) -> None:
    set_faults(server.blobs["Circuit1.zip"], faults)
    with pytest.raises(UserError, match=message):
        get(server, tmp_path)
    assert len(server.gets("Circuit1.zip")) == num_requests
    assert not (tmp_path / "Circuit1").exists()
    assert not (tmp_path / "Circuit1.zip").exists()


@pytest.fixture
def part_bytes(server: AzureServer, tmp_path: Path) -> int:
    """Return how much of Circuit1.zip an earlier run left as a part file."""
    server.blobs["Circuit1.zip"].drop_after = deque([700_000, 0, 0, 0])
    with pytest.raises(UserError, match="run the same command again to continue"):
        get(server, tmp_path)
    assert not (tmp_path / "Circuit1.zip").exists()
    server.requests.clear()
    return (tmp_path / "Circuit1.zip.part").stat().st_size


def test_later_run_continues_a_part_file(
    server: AzureServer, tmp_path: Path, part_bytes: int
) -> None:
    assert part_bytes == 700_000
    get(server, tmp_path)
    assert (
        server.bytes_sent("Circuit1.zip") == len(server.blobs["Circuit1.zip"].content) - part_bytes
    )
    assert len(list((tmp_path / "Circuit1").iterdir())) == 6


@pytest.mark.usefixtures("part_bytes")
def test_part_file_of_another_version_starts_again(server: AzureServer, tmp_path: Path) -> None:
    changed = {f"1 ({index}).JPG": photograph(index + 100) for index in range(1, 7)}
    server.blobs["Circuit1.zip"] = Blob(zip_bytes(changed), etag='"0x8D2"')
    get(server, tmp_path)
    assert [request.range for request in server.gets("Circuit1.zip")] == [""]
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(101)


def test_part_file_damaged_on_disk_is_found_by_its_md5(
    server: AzureServer, tmp_path: Path, part_bytes: int
) -> None:
    (tmp_path / "Circuit1.zip.part").write_bytes(bytes(part_bytes))
    get(server, tmp_path)
    assert [request.range for request in server.gets("Circuit1.zip")][-1] == ""
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(1)


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


def test_a_changed_etag_starts_again(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = server.blobs["Circuit1.zip"]
    blob.drop_after = deque([500_000])
    changed = Blob(zip_bytes({"1 (1).JPG": photograph(77)}), etag='"0x8D2"')
    monkeypatch.setattr(
        RetryPolicy, "wait", lambda *_: server.blobs.update({"Circuit1.zip": changed})
    )
    get(server, tmp_path)
    assert [request.status for request in server.gets("Circuit1.zip")] == [200, 412, 200]
    assert (tmp_path / "Circuit1" / "1 (1).JPG").read_bytes() == photograph(77)


def test_drop_and_503_while_taking_photographs_which_needs_range_requests(
    server: AzureServer, tmp_path: Path
) -> None:
    server.blobs["Circuit1.zip"] = blob = Blob(zip_bytes(circuit(1, 40)))
    # two directories, then a photograph breaks off twice
    blob.drop_after = deque([1 << 20, 1 << 20, 0, 50_000])
    blob.statuses = deque([503])
    report = get(server, tmp_path, max_images=4)
    assert report.num_photographs == len(files_under(tmp_path / "Circuit1")) == 4
    blob.accepts_ranges = False
    with pytest.raises(UserError, match="without --max-images"):
        get(server, tmp_path, max_images=5)


def test_unknown_name_forbidden_and_silent_servers(server: AzureServer, tmp_path: Path) -> None:
    del server.blobs[LABELS]
    assert get(server, tmp_path).missing == (LABELS,)
    server.blobs["Circuit10.zip"].statuses = deque([403])
    with pytest.raises(UserError, match="403; the publisher may ask to accept its terms"):
        get(server, tmp_path, "10")
    assert get(server, tmp_path, "99", "10").missing == (LABELS, "Circuit99.zip")
    assert (tmp_path / "Circuit10" / "10 (1).JPG").is_file(), "the others are kept"


def test_login_page_instead_of_labels_is_refused(server: AzureServer, tmp_path: Path) -> None:
    server.blobs[LABELS] = Blob(b"<html>please log in</html>")
    with pytest.raises(UserError, match="not the label file"):
        get(server, tmp_path)
    assert not (tmp_path / LABELS).exists()


def test_unencrypted_redirect_is_refused(
    server: AzureServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests

    monkeypatch.setattr(
        requests.Session, "get_redirect_target", lambda *_: "http://example.org/a.zip?sig=hush-hush"
    )
    with pytest.raises(
        UserError, match=r"a redirect to http://example\.org: not encrypted"
    ) as caught:
        get(server, tmp_path)
    assert "hush" not in str(caught.value)


def test_secrets_are_sent_never_shown(
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
    cases: list[tuple[str, dict[str, Any]]] = [
        ("2", {"max_images": 1}),
        ("3", {}),
        ("4", {}),
        ("5", {"max_images": 1}),
    ]
    for number, options in cases:
        with pytest.raises(UserError) as caught:
            download(source, tmp_path / "failing", [number], retry=FAST, **options)
        messages.append(str(caught.value))
    closed = url.replace(str(server.url.split(":")[2].split("/")[0]), "1")
    with pytest.raises(UserError, match=r"127\.0\.0\.1.* cannot be reached") as caught:
        download(open_source(closed, FAST), tmp_path / "failing", ["9"], retry=FAST)
    messages.append(str(caught.value))
    streams = capsys.readouterr()
    written = "".join(file.read_text() for file in tmp_path.rglob("*.json"))
    everything = "\n".join([*messages, streams.out, streams.err, written])
    assert "hush" not in everything
    assert all("\n" not in message for message in messages)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_one_moving_line_or_separate_lines(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr("yolo_seg_ddp.prepare.download.source.SECONDS_BETWEEN_LINES", 0.0)
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
