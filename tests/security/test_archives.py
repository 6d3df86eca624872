"""Hostile archives: what is written is bounded and lies inside, whoever opens them: download_data.py or parse_labels.py."""

from __future__ import annotations

import stat
import struct
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.sources.download.archives import CSV, LABELS, folder_with, get, get_from_folder, zip_bytes
from tests.support.azure_server import AzureServer, Blob
from tests.support.hostile_jobs import build, peak_mb
from utils.common.bounded_zip import MAX_DIRECTORY_BYTES, BoundedZip, TooManyMembers
from utils.common.errors import UserError
from utils.data.images import encode_jpeg

PHOTO = encode_jpeg(np.full((30, 40, 3), 90, np.uint8))


def tiny_members(count: int) -> bytes:
    """Return a zip of `count` empty members, made by hand: zipfile would take a minute for a million."""
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 5, 0) + b"a.jpg"
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0) + b"a.jpg"
    directory = entry * count
    zip64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), len(local))
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(local) + len(directory), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return local + directory + zip64 + locator + end


def changed(byte_of_directory: int = 0, byte_of_file: int = 0) -> bytes:
    """Return a zip of a photograph with one bit flipped, at a place in its directory or in the file."""
    data = bytearray(zip_bytes({"1 (1).JPG": PHOTO}))
    place = data.index(b"PK\1\2") + byte_of_directory if byte_of_directory else byte_of_file
    data[place] ^= 1
    return bytes(data)


def claims_millions() -> bytes:
    """Return a small zip whose end record claims a directory of 4 GB."""
    data = bytearray(zip_bytes({"1 (1).JPG": PHOTO}))
    end = data.rindex(b"PK\5\6")
    struct.pack_into("<HHII", data, end + 8, 65_534, 65_534, 0xFFFFFFF0, 0)
    return bytes(data)


def lying_size(claimed_bytes: int) -> bytes:
    """Return a zip whose headers claim fewer bytes than its member unpacks to."""
    data = bytearray(zip_bytes({"1 (1).JPG": bytes(5_000_000)}, zipfile.ZIP_DEFLATED))
    for start, offset in ((data.index(b"PK\3\4"), 22), (data.index(b"PK\1\2"), 24)):
        struct.pack_into("<I", data, start + offset, claimed_bytes)
    return bytes(data)


HOSTILE = {
    "text outside": (zip_bytes({"harmless.jpg": PHOTO, "../evil.txt": b"bad"}), "leaves the folder"),
    "parent": (zip_bytes({"../../evil.jpg": PHOTO}), "leaves the folder"),
    "absolute": (zip_bytes({"/tmp/evil.jpg": PHOTO}), "leaves the folder"),
    "backslashes": (zip_bytes({"..\\..\\evil.jpg": PHOTO}), "leaves the folder"),
    "drive": (zip_bytes({"C:/evil.jpg": PHOTO}), "leaves the folder"),
    "link": (zip_bytes({"link.jpg": b"/etc/passwd"}, mode=stat.S_IFLNK | 0o777), "is a link or a device"),
    "device": (zip_bytes({"disk.jpg": b""}, mode=stat.S_IFBLK | 0o666), "is a link or a device"),
    "pipe": (zip_bytes({"pipe.jpg": b""}, mode=stat.S_IFIFO | 0o666), "is a link or a device"),
    "bomb": (zip_bytes({"bomb.jpg": bytes(50_000_000)}, zipfile.ZIP_DEFLATED), "unpacks to more than 200 times"),
    "lying": (lying_size(900_000), "1 .1..JPG' (is damaged|cannot be read)"),
    "members": (tiny_members(200_000), "200,000 members"),
    "encrypted": (changed(byte_of_directory=8), "is encrypted"),
    "flipped bit": (changed(byte_of_file=100), "1 .1..JPG' (is damaged|cannot be read)"),
    "no zip": (b"not a zip at all", "is damaged|cannot be read"),
    "cut off": (zip_bytes({"1 (1).JPG": PHOTO})[:-30], "is damaged|cannot be read"),
    "claim": (claims_millions(), "4,294,967,280 bytes are too many"),
}


def files_below(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}


def fetch(archive: bytes, folder: Path, remote: bool) -> None:
    """Download one circuit into `folder/raw`, from a folder beside it or by range requests from a server."""
    if not remote:
        get_from_folder(folder_with(folder, archive), folder / "raw")
        return
    with AzureServer() as server:
        server.blobs = {LABELS: Blob(CSV), "Circuit1.zip": Blob(archive)}
        get(server, folder / "raw", max_images=1)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("remote", [False, True])
def test_a_hostile_archive_writes_nothing_anywhere(tmp_path: Path, kind: str, remote: bool) -> None:
    archive, message = HOSTILE[kind]
    (tmp_path / "deep").mkdir()
    start_s = time.process_time()
    with pytest.raises(UserError, match=message) as refused:
        fetch(archive, tmp_path / "deep", remote)
    assert time.process_time() - start_s < 10
    assert str(refused.value).isprintable()
    written = {name: size for name, size in files_below(tmp_path).items() if not name.startswith("deep/mirror/")}
    assert all(name.startswith("deep/raw/") and not name.lower().endswith(".jpg") for name in written)
    assert sum(written.values()) < 10_000
    assert not Path("/tmp/evil.jpg").exists()


def test_an_archive_in_an_archive_is_no_photograph(tmp_path: Path) -> None:
    inner = zip_bytes({"../../evil.jpg": PHOTO})
    fetch(zip_bytes({"inner.zip": inner, "inner.jpg": inner}), tmp_path, remote=False)
    assert set(files_below(tmp_path / "raw" / "Circuit1")) == {"inner.jpg"}  # a name is believed; parsing looks inside
    with pytest.raises(UserError, match=r"inner\.jpg: not a picture"):
        build_in(tmp_path, "inner.jpg")


def build_in(folder: Path, *names: str) -> list[dict[str, str]]:
    rows = "".join(f"\"{{'objects': []}}\",{name}\n" for name in names)
    (folder / "raw" / "Overhead-Distribution-Labels.csv").write_text("Label,External ID\n" + rows)
    return build(folder)


@pytest.mark.parametrize("kind", HOSTILE)
def test_parsing_goes_on_without_a_hostile_archive(tmp_path: Path, kind: str) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "Circuit1.zip").write_bytes(HOSTILE[kind][0])
    (raw / "good.jpg").write_bytes(PHOTO)
    before_mb = peak_mb()
    problems = build_in(
        tmp_path, "good.jpg", *(f"{name}.jpg" for name in ("evil", "link", "disk", "pipe", "bomb", "1 (1)"))
    )
    assert peak_mb() - before_mb < 300
    written = files_below(tmp_path / "processed")
    built = {Path(name).stem for name in written if name.endswith(".jpg")}
    # A member's folders mean nothing when it is read where it lies, so these two are pictures like any other.
    assert built == {"good"} | ({"evil"} if kind in ("absolute", "drive") else set())
    assert any("Circuit1.zip" in item["place"] or "no photograph called" in item["text"] for item in problems)
    assert set(files_below(tmp_path)) == {
        *(f"processed/{name}" for name in written),
        *(f"raw/{n}" for n in files_below(raw)),
    }
    assert sum(written.values()) < 50_000


def test_control_an_unbounded_zip_reads_so_many(tmp_path: Path) -> None:
    file = tmp_path / "many.zip"
    file.write_bytes(tiny_members(100_001))
    with zipfile.ZipFile(file) as archive:
        assert len(archive.infolist()) == 100_001
    with pytest.raises(TooManyMembers):
        BoundedZip(file)
    file.write_bytes(tiny_members(1000))
    with BoundedZip(file) as archive:
        assert len(archive.infolist()) == 1000
    assert file.stat().st_size < MAX_DIRECTORY_BYTES
