"""Both caches: the pixels a fresh read gives, built once, mended or built again whenever they could
be wrong.
"""

import errno
import json
import os
import pickle
import re
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.data.caches import (
    BLOCKS,
    EACH_KIND,
    PACKED,
    SIZE_PX,
    Kind,
    opened,
    packed_in,
    place_in,
    refusal,
    write_photo,
    write_photos,
)
from tests.support.ranks import run_ranks
from yolo_seg_ddp.data import cache, packed_images
from yolo_seg_ddp.data.cache import index_text
from yolo_seg_ddp.data.images import encode_jpeg, load_photo
from yolo_seg_ddp.data.packed_images import PackedImages, open_images
from yolo_seg_ddp.utils.errors import UserError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_photos(tmp_path / "photos")


def assert_right(packed: PackedImages, files: list[Path]) -> None:
    for position, file in enumerate(files):
        np.testing.assert_array_equal(packed.read(position), load_photo(file, SIZE_PX))


def contents(kind: Kind, store: Any) -> list[np.ndarray]:
    return [kind.whole(store, position) for position in range(len(store.index.sizes))]


def touched(*files: Path) -> None:
    for file in files:
        os.utime(file, ns=(1, 1))


def rewritten(file: Path) -> None:
    """Change a photograph's content; its size and times stay."""
    facts = file.stat()
    file.write_bytes(encode_jpeg(np.full((70, 90, 3), 40, np.uint8)).ljust(facts.st_size, b"\0"))
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


@EACH_KIND
def test_only_a_photograph_with_another_content_is_packed_again(
    files: list[Path], tmp_path: Path, kind: Kind
) -> None:
    said: list[str] = []
    first = opened(kind, files, tmp_path / ".cache", said).index
    assert len(said) == 1
    assert (
        "packing 4 train photographs at 64 px"
        if kind is PACKED
        else "their own size, in blocks, into"
    ) in said[0]
    for change, lines in (
        (lambda: touched(first.pixel_files[0]), []),
        (lambda: touched(*files), ["reading 4 train photographs for their digests"]),
        (
            lambda: rewritten(files[0]),
            ["reading 1 train", "packing 1 train", "  continuing at 3/4"],
        ),
        (
            lambda: write_photo(files[2], 99, (60, 20)),
            ["reading 1 train", "packing 1 train", "  continuing at 3/4"],
        ),
        (lambda: None, []),
    ):
        change()
        said.clear()
        store = opened(kind, files, tmp_path / ".cache", said)
        assert [line[: len(begin)] for line, begin in zip(said, lines, strict=True)] == lines
        fresh = opened(kind, files, tmp_path / f"fresh-{len(list(tmp_path.iterdir()))}")
        assert store.index.sizes.tolist() == fresh.index.sizes.tolist()
        for now, expected in zip(contents(kind, store), contents(kind, fresh), strict=True):
            np.testing.assert_array_equal(now, expected)
    assert len(packed_in(tmp_path / ".cache")) == 2
    moved = tmp_path / "moved"
    for folder in ("photos", ".cache"):
        shutil.copytree(tmp_path / folder, moved / folder, copy_function=shutil.copyfile)
    said.clear()
    opened(kind, sorted((moved / "photos").iterdir()), moved / ".cache", said)
    assert said == ["reading 4 train photographs for their digests"]


@EACH_KIND
def test_a_photograph_that_is_written_while_it_is_packed_keeps_no_pixels_of_its_old_content(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    make, written = getattr(kind.module, kind.makes_record), list[Path]()

    def slow(file: Path, **options: Any) -> Any:
        record = make(file, **options)
        if file == files[2] and not written:
            written.append(write_photo(file, 99, (60, 20)))
        return record

    monkeypatch.setattr("yolo_seg_ddp.data.blocks._estimate", lambda files: 1000)
    monkeypatch.setattr(kind.module, kind.makes_record, slow)
    store = opened(kind, files, tmp_path / ".cache")
    assert store.shape(2) == (60, 20)
    said: list[str] = []
    opened(kind, files, tmp_path / ".cache", said)
    assert said == []


DAMAGES: dict[str, Any] = {
    "no index": lambda index, pixels: index.unlink(),
    "empty index": lambda index, pixels: index.write_text(""),
    "list": lambda index, pixels: index.write_text("[]"),
    "cut index": lambda index, pixels: index.write_text(index.read_text()[:-9]),
    "one digit": lambda index, pixels: index.write_text(index.read_text().replace("30]", "31]")),
    "a path less": lambda index, pixels: index.write_text(
        changed(index, "paths", lambda paths: paths[:3])
    ),
    "numbers for texts": lambda index, pixels: index.write_text(
        changed(index, "digests", lambda digests: [1, 2, 3, 4])
    ),
    "before the file": lambda index, pixels: index.write_text(
        changed(index, "places", lambda at: [[-9, 5], *at[1:]])
    ),
    "huge sizes": lambda index, pixels: index.write_text(
        changed(index, "sizes", lambda sizes: [[2**20, 2**20]] * 4)
    ),
    "brackets": lambda index, pixels: index.write_text("[" * 100_000),
    "cut pixels": lambda index, pixels: os.truncate(pixels, 100),
    "no pixels": lambda index, pixels: pixels.unlink(),
}


def changed(index: Path, name: str, change: Callable[[list[Any]], list[Any]]) -> str:
    """Return an index with another column, and the right checksum."""
    content = json.loads(index.read_text())
    del content["checksum"]
    return index_text({**content, name: change(content[name])})


@EACH_KIND
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cache_that_is_not_whole_is_built_again(
    files: list[Path], tmp_path: Path, damage: str, kind: Kind
) -> None:
    (pixels,) = opened(kind, files, tmp_path / ".cache").index.pixel_files
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
    files: list[Path],
    tmp_path: Path,
    kind: Kind,
    offset: int,
    num_bytes: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = opened(kind, files, tmp_path / ".cache")
    expected = [kind.whole(store, position) for position in range(len(files))]
    file, start = store.index.pixel_files[0], offset
    before = file.read_bytes()
    wrong = bytes(byte ^ 1 for byte in before[start : start + num_bytes])
    file.write_bytes(before[:start] + (wrong + before[start + num_bytes :] if num_bytes else b""))
    damaged = type(store)(store.index)  # it has checked nothing yet
    if kind is PACKED:  # the first read checks all rows, also those that it does not return
        np.testing.assert_array_equal(damaged.read(0, range(9, 12)), expected[0][9:12])
    for position in (0, 0, 1, 2, 3):
        np.testing.assert_array_equal(kind.whole(damaged, position), expected[position])
    assert (
        capfd.readouterr().err.count("the bytes of 1 (0).JPG were damaged and have been made again")
        == 1
    )
    assert file.read_bytes() == before


@EACH_KIND
def test_killed_builds_continue(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    whole = opened(kind, files, tmp_path / "whole").index.pixel_files[0].read_bytes()
    monkeypatch.setattr(cache, "MIN_BETWEEN_SAVES", 1)
    monkeypatch.setattr("yolo_seg_ddp.data.blocks._estimate", lambda files: 1000)
    make, made, is_killed = getattr(kind.module, kind.makes_record), list[Path](), True

    def killed(file: Path, **options: Any) -> Any:
        if file == files[2] and is_killed:
            raise KeyboardInterrupt
        made.append(file)
        return make(file, **options)

    monkeypatch.setattr(kind.module, kind.makes_record, killed)
    with pytest.raises(KeyboardInterrupt):
        opened(kind, files, tmp_path / ".cache")
    with next((tmp_path / ".cache").glob(f"*{kind.suffix}")).open("ab") as part:
        part.write(b"half a record")
    is_killed, said = False, list[str]()
    made.clear()
    again = opened(kind, files, tmp_path / ".cache", said)
    assert "continuing at 2/4" in said[1]
    assert sorted(made) == sorted(files[2:])
    assert again.index.pixel_files[0].read_bytes() == whole
    assert len(packed_in(tmp_path / ".cache")) == 2


@EACH_KIND
def test_a_full_disk_means_no_cache_and_one_line(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    with monkeypatch.context() as patch:
        usage = namedtuple("usage", "total used free")
        patch.setattr(cache.shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10_000))
        assert re.search(
            r" 0\.0 GiB free, about 0\.0 are needed", refusal(kind, files, tmp_path / ".cache")
        )
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # another program filled it meanwhile
    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", Mock(side_effect=full))
        assert "No space left on device" in refusal(kind, files, tmp_path / ".cache")
    assert packed_in(tmp_path / ".cache") == []
    before = opened(kind, files[:3], tmp_path / ".cache").index.pixel_files[0].read_bytes()
    monkeypatch.setattr(cache.os, "fsync", Mock(side_effect=full))
    said: list[str] = []
    assert "No space left on device" in refusal(kind, files, tmp_path / ".cache")
    kept = opened(kind, files[:3], tmp_path / ".cache", said).index
    assert (said, kept.pixel_files[0].read_bytes()) == ([], before)


@EACH_KIND
def test_an_unreadable_photograph_is_named_and_the_others_stay_packed(
    files: list[Path], tmp_path: Path, kind: Kind
) -> None:
    whole, said = files[2].read_bytes(), list[str]()
    files[2].write_bytes(whole[:300])
    for lines in (1, 0):
        with pytest.raises(UserError, match=r"1 \(2\)\.JPG: unreadable photograph"):
            opened(kind, files, tmp_path / ".cache", said)
        assert len(said) == lines
        said.clear()
    files[2].write_bytes(whole)
    assert len(opened(kind, files, tmp_path / ".cache", said).index.sizes) == 4
    assert said[1:] == ["  continuing at 3/4"]
    files[3].unlink()
    with pytest.raises(UserError, match=r"1 \(3\)\.JPG: No such file"):
        opened(kind, files, tmp_path / ".cache")


@EACH_KIND
def test_a_reader_reaches_another_process_without_its_open_file(
    files: list[Path], tmp_path: Path, kind: Kind
) -> None:
    store = opened(kind, files, tmp_path / ".cache")
    expected = kind.whole(store, 1)
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301 # our own, from the line before
    assert copy._descriptors == {}
    np.testing.assert_array_equal(kind.whole(copy, 1), expected)
    child = os.fork()
    if child == 0:
        try:
            is_right = (
                np.array_equal(kind.whole(store, 1), expected)
                and (os.getpid(), 0) in store._descriptors
            )
            os._exit(0 if is_right else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_packed_pixels_are_those_of_a_fresh_read_in_any_order(
    files: list[Path], tmp_path: Path
) -> None:
    packed = opened(PACKED, files, tmp_path / ".cache")
    index = packed.index
    assert_right(packed, files)
    for position in (3, 1, 1, 0):
        whole = packed.read(position)
        np.testing.assert_array_equal(whole, load_photo(files[position], SIZE_PX))
        assert packed.shape(position) == whole.shape[:2]
        for rows in (range(1), range(7, 19), range(20, len(whole))):
            np.testing.assert_array_equal(
                packed.read(position, rows), whole[rows.start : rows.stop]
            )
    assert index.sizes.tolist() == [[27, 64], [64, 32], [40, 30], [32, 64]]  # never enlarged
    num_bytes = index.pixel_files[0].stat().st_size
    assert index.places[-1, 2] == num_bytes == index.sizes.prod(1).sum() * 3 + 4 * len(files)


def test_other_lists_splits_and_sizes_live_side_by_side(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    for variant in (files, files[:-1], files[::-1]):
        assert_right(opened(PACKED, variant, tmp_path / ".cache", said), variant)
    assert len(said) == 1, "packed once"
    for _ in range(2):
        said.clear()
        for size_px, split in ((SIZE_PX, "train"), (32, "train"), (SIZE_PX, "val")):
            assert isinstance(
                open_images(files, size_px, place_in(tmp_path / "sizes", said, split)), PackedImages
            )
    assert said == []
    assert len(packed_in(tmp_path / "sizes")) == 6


def test_what_an_older_version_packed_is_removed_and_what_is_not_used_is_named(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".cache").mkdir()
    for suffix in ("u8", "json"):
        (tmp_path / ".cache" / f"train-64-b83fca42-{'0' * 16}.{suffix}").write_text(
            "of an older version"
        )
    (tmp_path / ".cache" / "train-640-0.u8").write_text("of another size")
    said: list[str] = []
    opened(PACKED, files, tmp_path / ".cache", said)
    assert said[0].startswith(
        "removed train-64-* of an older version, 0.00 GiB: packed photographs are now found by"
    )
    assert len(said) == 2
    assert len(packed_in(tmp_path / ".cache")) == 3
    for number, file in enumerate(files):
        write_photo(file, 50 + number, (64, 64))
    opened(PACKED, files, tmp_path / ".cache", said)
    assert re.search(
        r"\.cache also holds 0\.00 GiB of train-64-.* that are of no photograph in this list; "
        r"delete",
        said[3],
    )
    monkeypatch.setattr(packed_images, "ALGORITHM", "another")
    assert_right(opened(PACKED, files, tmp_path / ".cache", said), files)
    assert len(packed_in(tmp_path / ".cache")) == 3


def test_damage_that_cannot_be_mended_is_named_in_one_line(
    files: list[Path], tmp_path: Path
) -> None:
    index = opened(PACKED, files, tmp_path / ".cache").index
    (pixel_file,) = index.pixel_files
    content, photograph = pixel_file.read_bytes(), files[0].read_bytes()
    pixel_file.write_bytes(b"\x80\x00" + content[2:])
    files[0].write_bytes(files[3].read_bytes())
    with pytest.raises(
        UserError, match=r"\.u8: damaged, and 1 \(0\)\.JPG no longer gives the same bytes; delete"
    ):
        PackedImages(index).read(0)
    os.link(pixel_file, tmp_path / "second")
    files[0].write_bytes(photograph)
    with pytest.raises(
        UserError,
        match=r"u8: damaged, and cannot be mended: not a regular file with one name; delete",
    ):
        PackedImages(index).read(0)
    pixel_file.unlink()
    with pytest.raises(
        UserError, match=r"\.u8: No such file or directory; the next start builds the file"
    ):
        PackedImages(index).read(1)


def build_and_tell(files: list[Path], folder: Path) -> tuple[list[str], str, bytes]:
    said: list[str] = []
    packed = opened(PACKED, files, folder, said)
    return (
        said,
        packed.index.pixel_files[0].name,
        b"".join(packed.read(at).tobytes() for at in range(len(files))),
    )


def test_processes_that_start_at_once_build_one_cache(files: list[Path], tmp_path: Path) -> None:
    answers = run_ranks(build_and_tell, 2, files, tmp_path / ".cache", join=False)
    expected = b"".join(load_photo(file, SIZE_PX).tobytes() for file in files)
    assert [answer[2] for answer in answers] == [expected, expected]
    assert sorted(len(said) for said, _, _ in answers) == [0, 1]
    assert [file.name for file in packed_in(tmp_path / ".cache")][1:] == [answers[0][1]]


def test_a_folder_that_cannot_be_written_turns_the_cache_off(
    files: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    why = refusal(PACKED, files, tmp_path / "file" / "cache")
    assert re.search(
        r"cannot be written; without it a photograph is decoded each time it is shown, in \d+ ms",
        why,
    )
