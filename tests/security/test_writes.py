"""What is written inside a data set from elsewhere never goes through a link to another file of the user."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.data.caches import EACH_KIND, Kind, write_photo
from tests.sources.download.archives import circuit, folder_with, get_from_folder, zip_bytes
from utils.common.errors import UserError
from utils.common.files import regular_only, write_text_atomic
from utils.data.cache_file import CacheIndex, index_text
from utils.data.dataset_yaml import load_dataset_yaml
from utils.sources.download.raw_data import LEDGER_NAME
from utils.sources.download.source import RemoteFile
from utils.sources.download.web import PartFile
from utils.sources.sample import write_sample

SECRET = b"the user's own file\n" * 50


def opens(kind: Kind, files: list[Path], folder: Path, said: list[str]) -> CacheIndex | None:
    """Return the index of a cache; None if there can be none, which was then said."""
    try:
        store = kind.opens(files, folder, said)
    except UserError as error:
        said.append(str(error))
        return None
    return None if store is None else store.index


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
    index = opens(kind, files, folder, [])
    assert index is not None
    found = [index.pixel_file, *map(index.pixel_file.with_suffix, (".json", ".part")), folder / "train.lock"]
    for file in found:
        file.unlink(missing_ok=True)
    return found


@EACH_KIND
def test_a_link_in_the_cache_overwrites_a_file_of_the_user(kind: Kind, files: list[Path], victim: Path) -> None:
    for place in places(kind, files):
        place.symlink_to(os.path.relpath(victim, place.parent))
        said: list[str] = []
        assert opens(kind, files, place.parent, said) is None
        assert victim.read_bytes() == SECRET
        assert len(said) == 1
        assert said[0].endswith(f"{place}: a link is in the place of this file; remove it")
        place.unlink()
    assert list(victim.parent.iterdir()) == [victim]


@EACH_KIND
def test_folders_and_pipes_where_the_cache_has_files_end_in_one_line(kind: Kind, files: list[Path]) -> None:
    for place in places(kind, files):
        for make, what in ((place.mkdir, "a folder"), (lambda place=place: os.mkfifo(place), "a pipe or a device")):
            make()
            said: list[str] = []
            assert opens(kind, files, place.parent, said) is None
            assert len(said) == 1
            assert said[0].endswith(f"{place}: {what} is in the place of this file; remove it")
            place.rmdir() if what == "a folder" else place.unlink()
    folder = files[0].parent.parent / ".cache"
    (folder / "train-64-of-the-user").mkdir()
    (folder / "train-blocks-of-the-user").mkdir()
    assert opens(kind, files, folder, []) is not None
    assert len(list(folder.glob("*-of-the-user"))) == 2


@EACH_KIND
def test_a_cache_folder_that_is_a_link_is_followed_only_with_trust_links(
    kind: Kind, files: list[Path], victim: Path
) -> None:
    root = files[0].parent.parent
    (root / "data.yaml").write_text("train: images\nnames: [pole]\n")
    (root / ".cache").symlink_to(victim.parent)
    said: list[str] = []
    assert opens(kind, files, load_dataset_yaml(root / "data.yaml").cache_folder, said) is None
    assert list(victim.parent.iterdir()) == [victim]
    assert said[0].endswith(".cache is a link, which is followed only with --trust-links")
    index = opens(kind, files, load_dataset_yaml(root / "data.yaml", trust_links=True).cache_folder, said)
    assert index is not None
    assert index.pixel_file.parent == victim.parent


@EACH_KIND
def test_a_killed_build_in_a_copy_by_hard_links_leaves_the_other_copy_alone(
    kind: Kind, files: list[Path], victim: Path
) -> None:
    _, index_file, part, _ = places(kind, files)
    os.link(victim, part)
    index_file.write_text(index_text({"offsets": [0, 20], "sizes": [[1, 1]], "unusable": {}}))
    assert opens(kind, files, part.parent, []) is not None
    assert victim.read_bytes() == SECRET


@EACH_KIND
def test_an_index_of_many_brackets_is_built_again(kind: Kind, files: list[Path]) -> None:
    _, index_file, _, _ = places(kind, files)
    index_file.write_text("[" * 100_000)
    assert opens(kind, files, index_file.parent, []) is not None


def test_a_link_with_the_name_of_a_temporary_file_is_not_written_through(tmp_path: Path, victim: Path) -> None:
    file = tmp_path / "index.json"
    (tmp_path / f".{os.getpid()}-{threading.get_ident()}.index.json.part").symlink_to(victim)
    write_text_atomic(file, "new")
    assert file.read_text() == "new"
    assert victim.read_bytes() == SECRET


def test_only_regular_files_are_opened(tmp_path: Path, victim: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(victim)
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
            regular_only(str(path), os.O_RDONLY)
    os.link(victim, tmp_path / "second name")
    with pytest.raises(OSError, match="one name"):
        regular_only(str(victim), os.O_WRONLY)
    os.close(regular_only(str(victim), os.O_RDONLY))


def test_links_in_the_raw_folder_are_not_written_through(tmp_path: Path, victim: Path) -> None:
    source, output = folder_with(tmp_path, zip_bytes(circuit(1, 2))), tmp_path / "raw"
    output.mkdir()
    for name in (f"{LEDGER_NAME}.part", "Overhead-Distribution-Labels.csv.part", "Circuit1.zip.part"):
        (output / name).symlink_to(victim)
    get_from_folder(source, output, keep_zips=True)
    part, note = PartFile(output / "Circuit2.zip"), output / "Circuit2.zip.part.json"
    for make_note in (
        lambda: note.symlink_to(victim),
        lambda: note.write_text('{"etag": "\\"a\\"", "size_bytes": 9999}'),
    ):
        note.unlink(missing_ok=True)
        make_note()
        part.path.unlink(missing_ok=True)
        part.path.symlink_to(victim)
        assert part.usable_bytes(RemoteFile("Circuit2.zip", 9999, '"a"', "", accepts_ranges=True)) == 0
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
    with pytest.raises(UserError, match=r"Circuit1: is a link, and nothing is written through links; remove it$"):
        get_from_folder(source, tmp_path / "raw")
    victim.rename(tmp_path / "VICTIM")  # the sample refuses a folder with other files in any case
    with pytest.raises(UserError, match=r"Circuit1: is a link, and nothing is written through links; remove it$"):
        write_sample(tmp_path / "sample", 1)
    assert not list(victim.parent.iterdir())
