"""The packed cache: the pixels a fresh read gives, built once, and built again whenever it could be wrong."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections import namedtuple
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.support.ranks import run_ranks
from utils.common.errors import UserError
from utils.data import cache, cache_file
from utils.data.cache import PackedImages, load_photo, open_or_build
from utils.data.cache_file import CacheIndex

SIZE_PX = 64
SHAPES = [(48, 64), (200, 100), (30, 30), (65, 129), (64, 64)]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "photos"
    folder.mkdir()
    return [write_photo(folder / f"4 ({number}).JPG", number, shape) for number, shape in enumerate(SHAPES)]


def write_photo(file: Path, seed: int, shape: tuple[int, int]) -> Path:
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    cv2.imwrite(str(file), cv2.resize(noise, shape[::-1], interpolation=cv2.INTER_CUBIC))
    return file


def opened(files: list[Path], folder: Path, said: list[str] | None = None) -> CacheIndex:
    lines: list[str] = []
    index = open_or_build(files, SIZE_PX, folder, "train", (lines if said is None else said).append)
    assert index is not None
    return index


def assert_right(index: CacheIndex, files: list[Path]) -> None:
    packed = PackedImages(index)
    for position, file in enumerate(files):
        np.testing.assert_array_equal(packed.read(position), load_photo(file, SIZE_PX))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_packed_pixels_are_those_of_a_fresh_read_in_any_order(files: list[Path], tmp_path: Path) -> None:
    index = opened(files, tmp_path / ".cache")
    assert_right(index, files)
    packed = PackedImages(index)
    for position in (4, 1, 1, 0):
        np.testing.assert_array_equal(packed.read(position), load_photo(files[position], SIZE_PX))
    assert index.sizes.tolist() == [[48, 64], [64, 32], [30, 30], [32, 64], [64, 64]]  # never enlarged
    assert index.offsets[-1] == index.pixel_file.stat().st_size == index.sizes.prod(1).sum() * 3 + 4 * len(files)


def test_the_second_opening_builds_nothing(files: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    first = opened(files, tmp_path / ".cache", said)
    os.utime(first.pixel_file, ns=(1, 1))
    assert len(said) == 1
    assert "packing 5 train photographs at 64 px" in said[0]
    second = opened(files, tmp_path / ".cache", said)
    assert len(said) == 1
    assert second.pixel_file == first.pixel_file
    assert second.pixel_file.stat().st_mtime_ns == 1
    assert_right(second, files)


def test_a_changed_photograph_is_packed_again_and_the_old_file_goes(files: list[Path], tmp_path: Path) -> None:
    first = opened(files, tmp_path / ".cache")
    write_photo(files[2], 99, SHAPES[2])
    second = opened(files, tmp_path / ".cache")
    assert_right(second, files)
    assert second.pixel_file != first.pixel_file
    assert names_in(tmp_path / ".cache") == {second.pixel_file.name, second.pixel_file.with_suffix(".json").name}


def test_a_photograph_of_equal_size_but_later_date_counts_as_changed(files: list[Path], tmp_path: Path) -> None:
    first = opened(files, tmp_path / ".cache")
    os.utime(files[0], ns=(1, 1))
    assert opened(files, tmp_path / ".cache").pixel_file != first.pixel_file


def test_other_photographs_order_or_algorithm_make_another_cache(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {opened(files, tmp_path / ".cache").pixel_file.name}
    for variant in (files[:-1], files[::-1]):
        index = opened(variant, tmp_path / ".cache")
        assert_right(index, variant)
        seen.add(index.pixel_file.name)
    monkeypatch.setattr(cache, "ALGORITHM", "another")
    seen.add(opened(files, tmp_path / ".cache").pixel_file.name)
    assert len(seen) == 4


def test_other_splits_and_sizes_live_side_by_side(files: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / ".cache"
    opened(files, folder)
    for size_px, name in ((32, "train"), (SIZE_PX, "val")):
        assert open_or_build(files, size_px, folder, name, print) is not None
    said: list[str] = []
    opened(files, folder, said)
    assert said == []
    assert len(names_in(folder)) == 6


def empty_index(index_file: Path) -> None:
    index_file.write_text("")


def listed_index(index_file: Path) -> None:
    index_file.write_text("[]")


def cut_index(index_file: Path) -> None:
    index_file.write_text(index_file.read_text()[:-9])


def cut_pixels(index_file: Path) -> None:
    os.truncate(index_file.with_suffix(".u8"), 100)


def one_digit_of_the_index(index_file: Path) -> None:
    index_file.write_text(index_file.read_text().replace("[48, 64]", "[64, 48]"))


def no_pixels(index_file: Path) -> None:
    index_file.with_suffix(".u8").unlink()


@pytest.mark.parametrize(
    "damage", [empty_index, listed_index, cut_index, cut_pixels, no_pixels, one_digit_of_the_index]
)
def test_a_damaged_cache_is_built_again(files: list[Path], tmp_path: Path, damage: object) -> None:
    index = opened(files, tmp_path / ".cache")
    assert callable(damage)
    damage(index.pixel_file.with_suffix(".json"))
    said: list[str] = []
    assert_right(opened(files, tmp_path / ".cache", said), files)
    assert len(said) == 1
    assert (
        json.loads(index.pixel_file.with_suffix(".json").read_text())["offsets"][-1] == index.pixel_file.stat().st_size
    )


def test_some_rows_are_those_of_the_whole_photograph(files: list[Path], tmp_path: Path) -> None:
    packed = PackedImages(opened(files, tmp_path / ".cache"))
    for position in range(len(files)):
        whole = packed.read(position)
        assert packed.shape(position) == whole.shape[:2]
        for rows in (range(1), range(7, 19), range(20, len(whole))):
            np.testing.assert_array_equal(packed.read(position, rows), whole[rows.start : rows.stop])


@pytest.mark.parametrize("damage", ["one bit", "shorter file"])
def test_a_flipped_byte_in_the_packed_cache_is_trained_on(
    files: list[Path], tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    index = opened(files, tmp_path / ".cache")
    whole = index.pixel_file.read_bytes()
    place = int(index.offsets[3]) + 70
    if damage == "one bit":
        index.pixel_file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    else:
        os.truncate(index.pixel_file, place)
    packed = PackedImages(index)
    expected = load_photo(files[3], SIZE_PX)
    np.testing.assert_array_equal(packed.read(3, range(9, 12)), expected[9:12])  # other rows than the damaged ones
    assert capfd.readouterr().err.count("the bytes of 4 (3).JPG were damaged and have been made again") == 1
    assert_right(index, files)
    assert index.pixel_file.read_bytes() == whole


def test_damage_that_cannot_be_mended_is_named_in_one_line(files: list[Path], tmp_path: Path) -> None:
    index = opened(files, tmp_path / ".cache")
    with index.pixel_file.open("r+b") as writer:
        writer.write(b"\x80\x00")
    files[0].write_bytes(files[1].read_bytes())
    with pytest.raises(
        UserError, match=r"\.u8: damaged, and 4 \(0\)\.JPG no longer gives the same bytes; delete the file"
    ):
        PackedImages(index).read(0)
    os.link(index.pixel_file, tmp_path / "second")
    write_photo(files[0], 0, SHAPES[0])
    with pytest.raises(
        UserError, match=r"\.u8: damaged, and cannot be mended: not a regular file with one name; delete"
    ):
        PackedImages(index).read(0)
    index.pixel_file.unlink()
    with pytest.raises(UserError, match=r"\.u8: No such file or directory; the next start builds the file"):
        PackedImages(index).read(1)


def test_a_second_list_in_the_same_folder_deletes_the_first_ones_cache(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / f"train-64-{'0' * 16}.u8").write_text("of an older version")
    first, said = opened(files, tmp_path / ".cache"), list[str]()
    second = opened(files[:2], tmp_path / ".cache", said)
    assert re.search(r"\.cache also holds train-64-\* of other lists .*delete what you no longer need$", said[0])
    assert len(said) == 2
    write_photo(files[4], 99, SHAPES[4])
    assert opened(files[:2], tmp_path / ".cache", said).pixel_file == second.pixel_file
    third = opened(files, tmp_path / ".cache", said)
    assert third.pixel_file != first.pixel_file
    kept = {path.name for index in (second, third) for path in tmp_path.glob(f".cache/{index.pixel_file.stem}.*")}
    assert names_in(tmp_path / ".cache") == kept
    assert len(kept) == 4


def build_and_tell(files: list[Path], folder: Path) -> tuple[list[str], str, bytes]:
    said: list[str] = []
    index = opened(files, folder, said)
    packed = PackedImages(index)
    return said, index.pixel_file.name, b"".join(packed.read(position).tobytes() for position in range(len(files)))


def test_processes_that_start_at_once_build_one_cache(files: list[Path], tmp_path: Path) -> None:
    answers = run_ranks(build_and_tell, 2, files, tmp_path / ".cache", join=False)
    expected = b"".join(load_photo(file, SIZE_PX).tobytes() for file in files)
    assert [answer[2] for answer in answers] == [expected, expected]
    assert sorted(len(said) for said, _, _ in answers) == [0, 1]
    assert names_in(tmp_path / ".cache") == {answers[0][1], answers[1][1].replace(".u8", ".json")}


def test_a_full_disk_means_no_cache_and_one_line(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(cache_file.shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10_000))
    said: list[str] = []
    assert open_or_build(files, SIZE_PX, tmp_path / ".cache", "train", said.append) is None
    assert len(said) == 1
    assert "packed cache off" in said[0]
    assert names_in(tmp_path / ".cache") == set()


def test_an_unreadable_photograph_is_named_and_leaves_nothing(files: list[Path], tmp_path: Path) -> None:
    files[3].write_bytes(files[3].read_bytes()[:200])
    with pytest.raises(UserError, match=r"4 \(3\)\.JPG: unreadable photograph"):
        opened(files, tmp_path / ".cache")
    assert names_in(tmp_path / ".cache") == set()
    files[3].unlink()
    with pytest.raises(UserError, match=r"4 \(3\)\.JPG: No such file"):
        opened(files, tmp_path / ".cache")


def test_a_reader_crosses_to_another_process_without_its_open_file(files: list[Path], tmp_path: Path) -> None:
    packed = PackedImages(opened(files, tmp_path / ".cache"))
    packed.read(0)
    copy = pickle.loads(pickle.dumps(packed))  # noqa: S301 # our own, from the line before
    np.testing.assert_array_equal(copy.read(1), load_photo(files[1], SIZE_PX))
    child = os.fork()
    if child == 0:
        try:
            right = np.array_equal(packed.read(1), copy.read(1))
            owner, _ = packed._descriptor or (0, 0)
            os._exit(0 if right and owner == os.getpid() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_folder_that_cannot_be_written_turns_the_cache_off(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    assert open_or_build([], 32, tmp_path / "file" / "cache", "train", said.append) is None
    assert "cannot be written" in said[0]
