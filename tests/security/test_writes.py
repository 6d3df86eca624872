"""Archives that want to write elsewhere, and what is written inside a stranger's folder."""

import json
import os
import stat
import struct
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.caches import EACH_KIND, Kind, opened, refusal, write_photo
from tests.prepare.download.archives import (
    CSV,
    LABELS,
    circuit,
    folder_with,
    get,
    get_from_folder,
    zip_bytes,
)
from tests.prepare.parsing.raw_folder import polygon, write_csv
from tests.support.azure_server import AzureServer, Blob
from tests.support.hostile_jobs import build, peak_mb
from yolo_seg_ddp.data.cache import index_text
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import encode_jpeg
from yolo_seg_ddp.prepare.download.raw_data import LEDGER_NAME
from yolo_seg_ddp.prepare.download.source import RemoteFile
from yolo_seg_ddp.prepare.download.web import PartFile
from yolo_seg_ddp.prepare.sample import write_sample
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import write_text_atomic

PHOTO = encode_jpeg(np.full((30, 40, 3), 90, np.uint8))


def tiny_members(count: int) -> bytes:
    """Return a zip of `count` empty members, made by hand: zipfile would take a minute for a
    million.
    """
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 5, 0) + b"a.jpg"
    entry = (
        struct.pack(
            "<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0
        )
        + b"a.jpg"
    )
    directory = entry * count
    zip64 = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), len(local)
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(local) + len(directory), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return local + directory + zip64 + locator + end


def changed(byte_of_directory: int = 0, byte_of_file: int = 0) -> bytes:
    """Return a zip of a photograph with one bit flipped, at a place in its directory or in the
    file.
    """
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
    "text outside": (
        zip_bytes({"harmless.jpg": PHOTO, "../evil.txt": b"bad"}),
        "leaves the folder",
    ),
    "parent": (zip_bytes({"../../evil.jpg": PHOTO}), "leaves the folder"),
    "absolute": (zip_bytes({"/tmp/evil.jpg": PHOTO}), "leaves the folder"),
    "backslashes": (zip_bytes({"..\\..\\evil.jpg": PHOTO}), "leaves the folder"),
    "drive": (zip_bytes({"C:/evil.jpg": PHOTO}), "leaves the folder"),
    "link": (
        zip_bytes({"link.jpg": b"/etc/passwd"}, mode=stat.S_IFLNK | 0o777),
        "is a link or a device",
    ),
    "device": (zip_bytes({"disk.jpg": b""}, mode=stat.S_IFBLK | 0o666), "is a link or a device"),
    "pipe": (zip_bytes({"pipe.jpg": b""}, mode=stat.S_IFIFO | 0o666), "is a link or a device"),
    "bomb": (
        zip_bytes({"bomb.jpg": bytes(50_000_000)}, zipfile.ZIP_DEFLATED),
        "unpacks to more than 200 times",
    ),
    "lying": (lying_size(900_000), "1 .1..JPG' (is damaged|cannot be read)"),
    "members": (tiny_members(200_000), "200,000 members in a directory"),
    "encrypted": (changed(byte_of_directory=8), "is encrypted"),
    "flipped bit": (changed(byte_of_file=100), "1 .1..JPG' (is damaged|cannot be read)"),
    "no zip": (b"not a zip at all", "is damaged|cannot be read"),
    "cut off": (zip_bytes({"1 (1).JPG": PHOTO})[:-30], "is damaged|cannot be read"),
    "claim": (claims_millions(), "4,294,967,280 bytes are too many"),
}


def files_below(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.lstat().st_size
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def fetch(archive: bytes, folder: Path, remote: bool) -> None:
    """Download one circuit into `folder/raw`, from a folder beside it or by range requests from a
    server.
    """
    if not remote:
        get_from_folder(folder_with(folder, archive), folder / "raw")
        return
    with AzureServer() as server:
        server.blobs = {LABELS: Blob(CSV), "Circuit1.zip": Blob(archive)}
        get(server, folder / "raw", max_images=1)


@pytest.mark.parametrize(
    ("kind", "remote"),
    [*((kind, False) for kind in HOSTILE), *((kind, True) for kind in ("parent", "link", "lying"))],
)
def test_a_hostile_archive_writes_nothing_anywhere(tmp_path: Path, kind: str, remote: bool) -> None:
    archive, message = HOSTILE[kind]
    (tmp_path / "deep").mkdir()
    start_s = time.process_time()
    with pytest.raises(UserError, match=message) as refused:
        fetch(archive, tmp_path / "deep", remote)
    assert time.process_time() - start_s < 10
    assert str(refused.value).isprintable()
    written = {
        name: size
        for name, size in files_below(tmp_path).items()
        if not name.startswith("deep/mirror/")
    }
    assert all(
        name.startswith("deep/raw/") and not name.lower().endswith(".jpg") for name in written
    )
    assert sum(written.values()) < 10_000
    assert not Path("/tmp/evil.jpg").exists()


def test_an_archive_in_an_archive_is_no_photograph(tmp_path: Path) -> None:
    inner = zip_bytes({"../../evil.jpg": PHOTO})
    fetch(zip_bytes({"inner.zip": inner, "inner.jpg": inner}), tmp_path, remote=False)
    # a name is believed; parsing looks inside
    assert set(files_below(tmp_path / "raw" / "Circuit1")) == {"inner.jpg"}
    with pytest.raises(UserError, match=r"inner\.jpg: not a picture"):
        build_in(tmp_path, "inner.jpg")


OBJECT = polygon("conductor", (1, 1), (9, 1), (9, 9))


def build_in(folder: Path, *names: str) -> list[dict[str, str]]:
    write_csv(folder / "raw", [(name, [OBJECT] if name == "good.jpg" else []) for name in names])
    return build(folder)


@pytest.mark.parametrize("kind", ["parent", "absolute", "bomb", "lying", "claim"])
def test_parsing_goes_on_without_a_hostile_archive(tmp_path: Path, kind: str) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "Circuit1.zip").write_bytes(HOSTILE[kind][0])
    (raw / "good.jpg").write_bytes(PHOTO)
    before_mb = peak_mb()
    problems = build_in(
        tmp_path, *(f"{n}.jpg" for n in ("good", "evil", "link", "disk", "pipe", "bomb", "1 (1)"))
    )
    assert peak_mb() - before_mb < 300
    written = files_below(tmp_path / "processed")
    built = {Path(name).stem for name in written if name.endswith(".jpg")}
    # A member's folders mean nothing when it is read where it lies, so this one is a picture like
    # any other.
    assert built == {"good"} | ({"evil"} if kind == "absolute" else set())
    assert any(
        "Circuit1.zip" in item["place"] or "no photograph called" in item["text"]
        for item in problems
    )
    assert set(files_below(tmp_path)) == {
        *(f"processed/{name}" for name in written),
        *(f"raw/{n}" for n in files_below(raw)),
    }
    assert sum(written.values()) < 50_000


# --- What is written inside a data set from elsewhere never goes through a link to another file of
# the user


SECRET = b"the user's own file\n" * 50


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "set" / "images"
    folder.mkdir(parents=True)
    return [write_photo(folder / f"{number}.jpg", number, (40, 60)) for number in range(2)]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "VICTIM").write_bytes(SECRET)
    return tmp_path / "home" / "VICTIM"


def places(kind: Kind, files: list[Path]) -> list[Path]:
    """Return the files that a build writes, none of which exists any more."""
    folder = files[0].parent.parent / ".cache"
    opened(kind, files, folder)
    made = sorted(folder.iterdir())
    assert len(made) == 4  # records, their index, the digests, the lock
    for file in made:
        file.unlink()
    return made


@EACH_KIND
def test_a_link_in_the_cache_overwrites_a_file_of_the_user(
    kind: Kind, files: list[Path], victim: Path
) -> None:
    makers: dict[str, Callable[[Path], None]] = {
        "a link": lambda place: place.symlink_to(os.path.relpath(victim, place.parent)),
        "a folder": Path.mkdir,
        "a pipe or a device": os.mkfifo,
    }
    for place in places(kind, files):
        for what, make in makers.items():
            make(place)
            said: list[str] = []
            why = refusal(kind, files, place.parent, said)
            assert f"{place}: {what} is in the place of this file; remove it" in why
            assert said == []
            place.rmdir() if what == "a folder" else place.unlink()
    assert victim.read_bytes() == SECRET
    assert list(victim.parent.iterdir()) == [victim]
    folder = files[0].parent.parent / ".cache"
    (folder / "train-64-of-the-user").mkdir()
    (folder / "train-blocks-of-the-user").mkdir()
    opened(kind, files, folder)
    assert len(list(folder.glob("*-of-the-user"))) == 2


@EACH_KIND
def test_a_linked_cache_folder_is_followed_only_with_trust_links(
    kind: Kind, files: list[Path], victim: Path
) -> None:
    root = files[0].parent.parent
    (root / "data.yaml").write_text("train: images\nnames: [pole]\n")
    (root / ".cache").symlink_to(victim.parent)
    why = refusal(kind, files, load_dataset_yaml(root / "data.yaml").cache_folder)
    assert list(victim.parent.iterdir()) == [victim]
    assert ".cache is a link, which is followed only with --trust-links" in why
    index = opened(
        kind, files, load_dataset_yaml(root / "data.yaml", trust_links=True).cache_folder
    ).index
    assert index.pixel_files[0].parent == victim.parent


@EACH_KIND
def test_a_killed_build_in_a_hard_linked_copy_spares_the_other_one(
    kind: Kind, files: list[Path], victim: Path
) -> None:
    (part,) = (file for file in places(kind, files) if file.suffix == kind.suffix)
    os.link(victim, part)
    entry = {
        "paths": ["images/0.jpg"],
        "digests": ["0" * 16],
        "places": [[0, 7]],
        "sizes": [[1, 1]],
        "unusable": [],
    }
    part.with_suffix(".json").write_text(index_text(entry))
    opened(kind, files, part.parent)
    assert victim.read_bytes() == SECRET


def test_a_link_with_the_name_of_a_temporary_file_is_not_written_through(
    tmp_path: Path, victim: Path
) -> None:
    file = tmp_path / "index.json"
    (tmp_path / f".{os.getpid()}-{threading.get_ident()}.index.json.part").symlink_to(victim)
    write_text_atomic(file, "new")
    assert file.read_text() == "new"
    assert victim.read_bytes() == SECRET


def test_links_in_the_raw_folder_are_not_written_through(tmp_path: Path, victim: Path) -> None:
    source, output = folder_with(tmp_path, zip_bytes(circuit(1, 2))), tmp_path / "raw"
    output.mkdir()
    for name in (
        f"{LEDGER_NAME}.part",
        "Overhead-Distribution-Labels.csv.part",
        "Circuit1.zip.part",
    ):
        (output / name).symlink_to(victim)
    get_from_folder(source, output, keep_zips=True)
    part, note = PartFile(output / "Circuit2.zip"), output / "Circuit2.zip.part.json"
    for is_link in (True, False):
        note.unlink(missing_ok=True)
        note.symlink_to(victim) if is_link else note.write_text(
            '{"etag": "\\"a\\"", "size_bytes": 9999}'
        )
        part.path.unlink(missing_ok=True)
        part.path.symlink_to(victim)
        assert (
            part.usable_bytes(RemoteFile("Circuit2.zip", 9999, '"a"', "", accepts_ranges=True)) == 0
        )
        assert json.loads(note.read_text())["size_bytes"] == 9999
        assert victim.read_bytes() == SECRET
    (output / LEDGER_NAME).unlink()
    (output / LEDGER_NAME).symlink_to(victim)
    with pytest.raises(UserError, match=r"download\.json: a link is in the place"):
        get_from_folder(source, output)


def test_a_circuits_folder_that_is_a_link_is_not_filled(tmp_path: Path, victim: Path) -> None:
    source = folder_with(tmp_path, zip_bytes(circuit(1, 2)))
    for output in (tmp_path / "raw", tmp_path / "sample"):
        output.mkdir()
        (output / "Circuit1").symlink_to(victim.parent)
    refusal = r"Circuit1: is a link, and nothing is written through links; remove it$"
    with pytest.raises(UserError, match=refusal):
        get_from_folder(source, tmp_path / "raw")
    victim.rename(tmp_path / "VICTIM")  # the sample refuses a folder with other files in any case
    with pytest.raises(UserError, match=refusal):
        write_sample(tmp_path / "sample", 1)
    assert not list(victim.parent.iterdir())
