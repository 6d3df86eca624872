"""Both caches: the pixels a fresh read gives, built once, mended or built again whenever they could be wrong."""

import errno
import json
import os
import pickle
import re
from collections import namedtuple
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.data.caches import BLOCKS, EACH_KIND, PACKED, SIZE_PX, Kind, opened, suffixes_in, write_photo, write_photos
from tests.support.ranks import run_ranks
from utils.common.errors import UserError
from utils.data import cache
from utils.data.cache import PackedImages, index_text, load_photo, open_images


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_photos(tmp_path / "photos")


def assert_right(packed: PackedImages, files: list[Path]) -> None:
    for position, file in enumerate(files):
        np.testing.assert_array_equal(packed.read(position), load_photo(file, SIZE_PX))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


@EACH_KIND
def test_only_a_changed_photograph_makes_a_second_opening_build(files: list[Path], tmp_path: Path, kind: Kind) -> None:
    said: list[str] = []
    first = opened(kind, files, tmp_path / ".cache", said).index.pixel_file
    os.utime(first, ns=(1, 1))
    assert opened(kind, files, tmp_path / ".cache", said).index.pixel_file == first
    assert first.stat().st_mtime_ns == 1
    assert len(said) == 1
    assert ("packing 4 train photographs at 64 px" if kind is PACKED else "their own size, in blocks, into") in said[0]
    os.utime(files[0], ns=(1, 1))  # the same bytes with a later date
    second = opened(kind, files, tmp_path / ".cache", said).index.pixel_file
    write_photo(files[2], 99, (40, 30))
    third = opened(kind, files, tmp_path / ".cache", said).index.pixel_file
    assert len({first, second, third}) == 3
    assert len(said) == 3
    assert names_in(tmp_path / ".cache") == {third.name, third.with_suffix(".json").name}


DAMAGES: dict[str, Any] = {
    "no index": lambda index, pixels: index.unlink(),
    "empty index": lambda index, pixels: index.write_text(""),
    "list": lambda index, pixels: index.write_text("[]"),
    "cut index": lambda index, pixels: index.write_text(index.read_text()[:-9]),
    "one digit": lambda index, pixels: index.write_text(index.read_text().replace("30]", "31]")),
    "huge sizes": lambda index, pixels: index.write_text(with_sizes(json.loads(index.read_text()))),
    "brackets": lambda index, pixels: index.write_text("[" * 100_000),
    "cut pixels": lambda index, pixels: os.truncate(pixels, 100),
    "no pixels": lambda index, pixels: pixels.unlink(),
}


def with_sizes(content: dict[str, Any]) -> str:
    del content["checksum"]
    return index_text({**content, "sizes": [[2**20, 2**20]] * 4})


@EACH_KIND
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cache_that_is_not_whole_is_built_again(files: list[Path], tmp_path: Path, damage: str, kind: Kind) -> None:
    pixels = opened(kind, files, tmp_path / ".cache").index.pixel_file
    index = pixels.with_suffix(".json")
    before = pixels.read_bytes(), index.read_text()
    DAMAGES[damage](index, pixels)
    said: list[str] = []
    opened(kind, files, tmp_path / ".cache", said)
    assert len(said) == 1
    assert (pixels.read_bytes(), index.read_text()) == before


@pytest.mark.parametrize(
    ("kind", "offset", "num_bytes"),
    [
        (PACKED, 70, 1),
        (PACKED, 70, 0),  # the file ends there
        (BLOCKS, 1, 1),  # a block's length
        (BLOCKS, 4 * 9, 1),  # a block's checksum
        (BLOCKS, 900, 1),
        (BLOCKS, 500, 500),
        (BLOCKS, 300, 0),
    ],
)
def test_a_flipped_byte_in_a_cache_is_trained_on(
    files: list[Path], tmp_path: Path, kind: Kind, offset: int, num_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    store = opened(kind, files, tmp_path / ".cache")
    expected = [kind.whole(store, position) for position in range(len(files))]
    file, start = store.index.pixel_file, int(store.index.offsets[0]) + offset
    before = file.read_bytes()
    wrong = bytes(byte ^ 1 for byte in before[start : start + num_bytes])
    file.write_bytes(before[:start] + (wrong + before[start + num_bytes :] if num_bytes else b""))
    damaged = type(store)(store.index)  # it has checked nothing yet
    if kind is PACKED:  # the first read checks all rows, also those that it does not return
        np.testing.assert_array_equal(damaged.read(0, range(9, 12)), expected[0][9:12])
    for position in (0, 0, 1, 2, 3):
        np.testing.assert_array_equal(kind.whole(damaged, position), expected[position])
    assert capfd.readouterr().err.count("the bytes of 1 (0).JPG were damaged and have been made again") == 1
    assert file.read_bytes() == before


@EACH_KIND
def test_killed_builds_continue(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    whole = opened(kind, files, tmp_path / "whole").index.pixel_file.read_bytes()
    monkeypatch.setattr(cache, "MIN_BETWEEN_SAVES", 1)
    monkeypatch.setattr("utils.data.blocks._estimate", lambda files: 1000)
    make, made, is_killed = getattr(kind.module, kind.makes_record), list[Path](), True

    def killed(file: Path, **options: Any) -> Any:
        if file == files[2] and is_killed:
            raise KeyboardInterrupt
        made.append(file)
        return make(file, **options)

    monkeypatch.setattr(kind.module, kind.makes_record, killed)
    with pytest.raises(KeyboardInterrupt):
        opened(kind, files, tmp_path / ".cache")
    assert suffixes_in(tmp_path / ".cache") == [".json", ".part"]
    with next((tmp_path / ".cache").glob("*.part")).open("ab") as part:
        part.write(b"half a record")
    is_killed, said = False, list[str]()
    made.clear()
    again = opened(kind, files, tmp_path / ".cache", said)
    assert "continuing at 2/4" in said[1]
    assert sorted(made) == sorted(files[2:])
    assert again.index.pixel_file.read_bytes() == whole
    assert suffixes_in(tmp_path / ".cache") == sorted([".json", kind.suffix])


@EACH_KIND
def test_a_full_disk_means_no_cache_and_one_line(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    def refusal() -> str:
        said: list[str] = []
        try:
            assert kind.opens(files, tmp_path / ".cache", said) is None
        except UserError as error:
            said.append(str(error))
        assert said[-1].startswith(kind.refuses_in)
        assert suffixes_in(tmp_path / ".cache") == []
        return said[-1]

    with monkeypatch.context() as patch:
        usage = namedtuple("usage", "total used free")
        patch.setattr(cache.shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10_000))
        assert re.search(r" 0\.0 GiB free, about 0\.0 are needed$", refusal())
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # another program filled it meanwhile
    monkeypatch.setattr(cache.os, "fsync", Mock(side_effect=full))
    assert refusal().endswith("No space left on device")


@EACH_KIND
def test_an_unreadable_photograph_is_named_and_leaves_nothing(files: list[Path], tmp_path: Path, kind: Kind) -> None:
    files[3].write_bytes(files[3].read_bytes()[:300])
    with pytest.raises(UserError, match=r"1 \(3\)\.JPG: unreadable photograph"):
        opened(kind, files, tmp_path / ".cache")
    assert suffixes_in(tmp_path / ".cache") == []
    files[3].unlink()
    with pytest.raises(UserError, match=r"1 \(3\)\.JPG: No such file"):
        opened(kind, files, tmp_path / ".cache")


@EACH_KIND
def test_a_reader_reaches_another_process_without_its_open_file(files: list[Path], tmp_path: Path, kind: Kind) -> None:
    store = opened(kind, files, tmp_path / ".cache")
    expected = kind.whole(store, 1)
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301 # our own, from the line before
    assert copy._descriptor is None
    np.testing.assert_array_equal(kind.whole(copy, 1), expected)
    child = os.fork()
    if child == 0:
        try:
            is_right = np.array_equal(kind.whole(store, 1), expected) and store._descriptor[0] == os.getpid()
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_packed_pixels_are_those_of_a_fresh_read_in_any_order(files: list[Path], tmp_path: Path) -> None:
    packed = opened(PACKED, files, tmp_path / ".cache")
    index = packed.index
    assert_right(packed, files)
    for position in (3, 1, 1, 0):
        whole = packed.read(position)
        np.testing.assert_array_equal(whole, load_photo(files[position], SIZE_PX))
        assert packed.shape(position) == whole.shape[:2]
        for rows in (range(1), range(7, 19), range(20, len(whole))):
            np.testing.assert_array_equal(packed.read(position, rows), whole[rows.start : rows.stop])
    assert index.sizes.tolist() == [[27, 64], [64, 32], [40, 30], [32, 64]]  # never enlarged
    assert index.offsets[-1] == index.pixel_file.stat().st_size == index.sizes.prod(1).sum() * 3 + 4 * len(files)


def test_other_contents_make_another_cache(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    for variant in (files, files[:-1], files[::-1]):
        packed = opened(PACKED, variant, tmp_path / ".cache")
        assert_right(packed, variant)
        seen.add(packed.index.pixel_file.name)
    monkeypatch.setattr(cache, "ALGORITHM", "another")
    seen.add(opened(PACKED, files, tmp_path / ".cache").index.pixel_file.name)
    assert len(seen) == 4
    for _ in range(2):  # other splits and sizes live side by side
        said: list[str] = []
        for size_px, name in ((SIZE_PX, "train"), (32, "train"), (SIZE_PX, "val")):
            assert open_images(files, size_px, tmp_path / "sizes", name, said.append) is not None
    assert said == []
    assert len(names_in(tmp_path / "sizes")) == 6


def test_a_second_list_in_the_same_folder_deletes_the_first_ones_cache(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / f"train-64-{'0' * 16}.u8").write_text("of an older version")
    first, said = opened(PACKED, files, tmp_path / ".cache").index, list[str]()
    second = opened(PACKED, files[:2], tmp_path / ".cache", said).index
    assert re.search(r"\.cache also holds train-64-\* of other lists .*delete what you no longer need$", said[0])
    assert len(said) == 2
    write_photo(files[3], 99, (256, 512))
    assert opened(PACKED, files[:2], tmp_path / ".cache", said).index.pixel_file == second.pixel_file
    third = opened(PACKED, files, tmp_path / ".cache", said).index
    assert third.pixel_file != first.pixel_file
    kept = {path.name for index in (second, third) for path in tmp_path.glob(f".cache/{index.pixel_file.stem}.*")}
    assert names_in(tmp_path / ".cache") == kept
    assert len(kept) == 4


def test_damage_that_cannot_be_mended_is_named_in_one_line(files: list[Path], tmp_path: Path) -> None:
    index = opened(PACKED, files, tmp_path / ".cache").index
    content, photograph = index.pixel_file.read_bytes(), files[0].read_bytes()
    index.pixel_file.write_bytes(b"\x80\x00" + content[2:])
    files[0].write_bytes(files[3].read_bytes())
    with pytest.raises(UserError, match=r"\.u8: damaged, and 1 \(0\)\.JPG no longer gives the same bytes; delete"):
        PackedImages(index).read(0)
    os.link(index.pixel_file, tmp_path / "second")
    files[0].write_bytes(photograph)
    with pytest.raises(UserError, match=r"u8: damaged, and cannot be mended: not a regular file with one name; delete"):
        PackedImages(index).read(0)
    index.pixel_file.unlink()
    with pytest.raises(UserError, match=r"\.u8: No such file or directory; the next start builds the file"):
        PackedImages(index).read(1)


def build_and_tell(files: list[Path], folder: Path) -> tuple[list[str], str, bytes]:
    said: list[str] = []
    packed = opened(PACKED, files, folder, said)
    return said, packed.index.pixel_file.name, b"".join(packed.read(at).tobytes() for at in range(len(files)))


def test_processes_that_start_at_once_build_one_cache(files: list[Path], tmp_path: Path) -> None:
    answers = run_ranks(build_and_tell, 2, files, tmp_path / ".cache", join=False)
    expected = b"".join(load_photo(file, SIZE_PX).tobytes() for file in files)
    assert [answer[2] for answer in answers] == [expected, expected]
    assert sorted(len(said) for said, _, _ in answers) == [0, 1]
    assert names_in(tmp_path / ".cache") == {answers[0][1], answers[1][1].replace(".u8", ".json")}


def test_a_folder_that_cannot_be_written_turns_the_cache_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    assert open_images([], 32, tmp_path / "file" / "cache", "train", said.append) is None
    assert "cannot be written" in said[0]
