"""The block store: windows show the photograph's pixels in their place; a damaged or unfinished file is never used."""

from __future__ import annotations

import json
import os
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from utils.common.errors import UserError
from utils.data import blocks, cache_file
from utils.data.blocks import BLOCK_PX, BlockStore, level_shapes, open_blocks
from utils.data.cache_file import index_text
from utils.data.images import read_image, write_jpeg

SHAPES = [(300, 700), (1031, 517), (40, 30), (256, 512)]


def smooth(seed: int, shape: tuple[int, int]) -> np.ndarray:
    noise = np.random.default_rng(seed).integers(90, 160, (9, 7, 3), dtype=np.uint8)
    return cv2.resize(noise, shape[::-1], interpolation=cv2.INTER_CUBIC)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photographs")
    files = [folder / f"1 ({number}).{'png' if number == 1 else 'jpg'}" for number in range(len(SHAPES))]
    for number, (file, shape) in enumerate(zip(files, SHAPES, strict=True)):
        if file.suffix == ".jpg":
            write_jpeg(file, smooth(number, shape))
        else:
            cv2.imwrite(str(file), smooth(number, shape))
    return files


def opened(files: list[Path], folder: Path, said: list[str] | None = None) -> BlockStore:
    return open_blocks(files, folder, "train", ([] if said is None else said).append)


@pytest.fixture(scope="module")
def store(photographs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> BlockStore:
    return opened(photographs, tmp_path_factory.mktemp("cache"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("position", range(len(SHAPES)))
def test_any_window_shows_the_photographs_pixels(photographs: list[Path], store: BlockStore, position: int) -> None:
    image = read_image(photographs[position]).astype(float)
    (height, width), rng = SHAPES[position], np.random.default_rng(position)
    assert store.shape(position) == (height, width)
    corners = [(0.0, 0.0, width, height)]
    for _ in range(12):
        x, y = np.sort(rng.uniform(0, width, 2)), np.sort(rng.uniform(0, height, 2))
        corners.append((x[0], y[0], max(x[1], x[0] + 1), max(y[1], y[0] + 1)))
    for left, top, right, bottom in corners:
        pixels, place = store.read(position, (left, top, right, bottom), 0)
        x, y = place[:, 2].astype(int)
        assert place[:, :2].tolist() == [[1, 0], [0, 1]]
        assert x <= left
        assert y <= top
        assert (x, y) == (int(left), int(top))
        assert pixels.shape[1] == min(np.ceil(right), width) - x
        assert pixels.shape[0] == min(np.ceil(bottom), height) - y
        original = image[y : y + pixels.shape[0], x : x + pixels.shape[1]]
        assert np.abs(pixels - original).mean() < 3


def test_a_fourth_channel_changes_no_colour(store: BlockStore) -> None:
    for box in ((0, 0, 700, 300), (200, 100, 300, 280)):
        three, four = (store.read(0, box, 0, channels)[0] for channels in (3, 4))
        assert four.shape[2] == 4
        np.testing.assert_array_equal(three, four[..., :3])


def test_each_level_averages_the_photograph_and_says_where_it_lies(photographs: list[Path], store: BlockStore) -> None:
    for position, (height, width) in enumerate(SHAPES):
        image = read_image(photographs[position])
        for level, (rows, columns) in enumerate(level_shapes(height, width)):
            pixels, place = store.read(position, (0, 0, width, height), level)
            assert pixels.shape == (rows, columns, 3)
            np.testing.assert_allclose(place @ [columns, rows, 1], (width, height))
            averaged = cv2.resize(image, (columns, rows), interpolation=cv2.INTER_AREA).astype(float)
            assert np.abs(pixels - averaged).mean() < 2.5
            part, place = store.read(position, (width * 0.4, height * 0.3, width * 0.9, height * 0.8), level)
            x, y = np.rint(place[:, 2] * (columns / width, rows / height)).astype(int)
            np.testing.assert_array_equal(part, pixels[y : y + part.shape[0], x : x + part.shape[1]])
    assert level_shapes(1031, 517) == [(1031, 517), (516, 259), (258, 130)][: len(level_shapes(1031, 517))]
    assert max(level_shapes(3648, 5472)[-1]) <= 512


def test_the_level_is_the_coarsest_that_shows_enough(store: BlockStore) -> None:
    chosen = [store.level_for(1, scale) for scale in (1.5, 1, 0.64, 0.62, 0.5, 0.32, 0.1, 0.001)]
    assert chosen == [0, 0, 0, 1, 1, 1, 2, 2]
    assert store.level_for(2, 0.01) == 0  # no other level


def test_a_window_reads_only_the_blocks_it_touches(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = blocks.simplejpeg.decode_jpeg

    def counting(data: Any, **options: Any) -> np.ndarray:
        decoded.append(len(data))
        return decode(data, **options)

    monkeypatch.setattr(blocks.simplejpeg, "decode_jpeg", counting)
    store.read(1, (10, BLOCK_PX + 1, 200, 2 * BLOCK_PX), 0)
    assert len(decoded) == 1
    store.read(1, (BLOCK_PX - 1, BLOCK_PX - 1, BLOCK_PX + 1, BLOCK_PX + 1), 0)
    assert len(decoded) == 5


def test_the_second_opening_builds_nothing_and_a_later_date_does(photographs: list[Path], tmp_path: Path) -> None:
    said: list[str] = []
    copies = [tmp_path / file.name for file in photographs]
    for file, copy in zip(photographs, copies, strict=True):
        copy.write_bytes(file.read_bytes())
    first = opened(copies, tmp_path / ".cache", said)
    opened(copies, tmp_path / ".cache", said)
    assert len(said) == 1
    assert "packing 4 train photographs at their own size, in blocks, into" in said[0]
    os.utime(copies[0], ns=(1, 1))
    assert opened(copies, tmp_path / ".cache", said).index.pixel_file != first.index.pixel_file
    assert len(said) == 2
    assert names_in(tmp_path / ".cache") == [".jpegs", ".json"]


@pytest.mark.parametrize("damage", ["no index", "cut index", "huge sizes", "cut blocks", "no blocks"])
def test_a_store_that_is_not_whole_is_built_again(photographs: list[Path], tmp_path: Path, damage: str) -> None:
    store = opened(photographs, tmp_path)
    file = store.index.pixel_file
    content = file.read_bytes()
    index_file = file.with_suffix(".json")
    if damage == "no index":
        index_file.unlink()
    elif damage == "cut index":
        index_file.write_text(index_file.read_text()[:-7])
    elif damage == "huge sizes":
        index = json.loads(index_file.read_text())
        del index["checksum"]
        index_file.write_text(index_text({**index, "sizes": [[2**20, 2**20]] * len(SHAPES)}))
    elif damage == "cut blocks":
        os.truncate(file, 1000)
    else:
        file.unlink()
    assert opened(photographs, tmp_path).index.pixel_file.read_bytes() == content


@pytest.mark.parametrize("place", ["length", "checksum", "one bit", "block", "end"])
def test_a_flipped_byte_in_the_block_store_is_trained_on(
    photographs: list[Path], store: BlockStore, tmp_path: Path, place: str, capfd: pytest.CaptureFixture[str]
) -> None:
    damaged = opened(photographs, tmp_path)
    file, begin = damaged.index.pixel_file, int(damaged.index.offsets[0])
    whole = bytearray(file.read_bytes())
    start = begin + {"length": 1, "checksum": 4 * 9, "one bit": 900, "block": 500, "end": 300}[place]
    if place == "end":
        os.truncate(file, start)
    else:
        whole[start] ^= 1
        file.write_bytes(whole if place != "block" else whole[:start] + bytes(500) + whole[start + 500 :])
    for position in (0, 0, 1, 2, 3):
        pixels, _ = damaged.read(position, (0, 0, *SHAPES[position][::-1]), 0)
        np.testing.assert_array_equal(pixels, store.read(position, (0, 0, *SHAPES[position][::-1]), 0)[0])
    assert capfd.readouterr().err.count("the bytes of 1 (0).jpg were damaged and have been made again") == 1
    assert file.read_bytes() == store.index.pixel_file.read_bytes()


def test_a_block_that_the_window_does_not_touch_is_not_checked(
    photographs: list[Path], store: BlockStore, tmp_path: Path
) -> None:
    damaged = opened(photographs, tmp_path)
    file, end = damaged.index.pixel_file, int(damaged.index.offsets[1])
    content = bytearray(file.read_bytes())
    content[end - 9] ^= 1  # in the last level's last block
    file.write_bytes(content)
    damaged.read(0, (0, 0, 700, 300), 0)
    assert file.read_bytes() == content
    last = len(level_shapes(300, 700)) - 1
    np.testing.assert_array_equal(damaged.read(0, (0, 0, 700, 300), last)[0], store.read(0, (0, 0, 700, 300), last)[0])
    assert file.read_bytes() == store.index.pixel_file.read_bytes()


def test_a_killed_build_continues_to_the_same_file(
    photographs: list[Path], store: BlockStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_file, "MIN_BETWEEN_SAVES", 1)
    monkeypatch.setattr(blocks, "_estimate", lambda files: 1000)
    encode = blocks._encode
    encoded: list[Path] = []

    def killed(file: Path) -> Any:
        if file == photographs[2]:
            raise KeyboardInterrupt
        return encode(file)

    monkeypatch.setattr(blocks, "_encode", killed)
    with pytest.raises(KeyboardInterrupt):
        opened(photographs, tmp_path)
    assert names_in(tmp_path) == [".json", ".part"]
    with next(tmp_path.glob("*.part")).open("ab") as part:
        part.write(b"half a record")

    def noted(file: Path) -> Any:
        encoded.append(file)
        return encode(file)

    monkeypatch.setattr(blocks, "_encode", noted)
    said: list[str] = []
    again = opened(photographs, tmp_path, said)
    assert "continuing at 2/4" in said[1]
    assert sorted(encoded) == sorted(photographs[2:])
    assert again.index.pixel_file.read_bytes() == store.index.pixel_file.read_bytes()
    assert names_in(tmp_path) == [".jpegs", ".json"]


def test_a_full_disk_is_refused_in_one_line(
    photographs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        usage = namedtuple("usage", "total used free")
        patch.setattr(cache_file.shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 10_000))
        with pytest.raises(UserError, match=r"--windows needs a copy .* 0\.0 GiB free, about 0\.0 are needed$"):
            opened(photographs, tmp_path)
    monkeypatch.setattr(cache_file.os, "fsync", raise_no_space)  # another program filled it meanwhile
    with pytest.raises(UserError, match=r"--windows needs .*No space left on device$"):
        opened(photographs, tmp_path)
    assert names_in(tmp_path) == []


def raise_no_space(descriptor: int) -> None:
    raise OSError(28, os.strerror(28))


def test_an_unreadable_photograph_is_named_and_leaves_nothing(photographs: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "1 (9).jpg"
    broken.write_bytes(photographs[0].read_bytes()[:300])
    with pytest.raises(UserError, match=r"1 \(9\)\.jpg: unreadable photograph"):
        opened([*photographs, broken], tmp_path / ".cache")
    assert names_in(tmp_path / ".cache") == []


def test_a_store_crosses_to_another_process_without_its_open_file(store: BlockStore) -> None:
    expected, _ = store.read(0, (0, 0, 300, 300), 0)
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301 # our own, from this line
    assert copy._descriptor is None
    np.testing.assert_array_equal(copy.read(0, (0, 0, 300, 300), 0)[0], expected)
