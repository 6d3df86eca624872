"""The block store: windows show the photograph's pixels in their place, from no more blocks than
they touch.
"""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.data.caches import BLOCKS, SHAPES, opened, write_photos
from yolo_seg_ddp.data import blocks
from yolo_seg_ddp.data.blocks import BLOCK_PX, BlockStore, level_shapes
from yolo_seg_ddp.data.images import read_image


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_photos(tmp_path_factory.mktemp("photographs"))


@pytest.fixture(scope="module")
def store(photographs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> BlockStore:
    stored: BlockStore = opened(BLOCKS, photographs, tmp_path_factory.mktemp("cache"))
    return stored


@pytest.mark.parametrize("position", range(len(SHAPES)))
def test_any_window_shows_the_photographs_pixels(
    photographs: list[Path], store: BlockStore, position: int
) -> None:
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


def test_each_level_averages_the_photograph_and_says_where_it_lies(
    photographs: list[Path], store: BlockStore
) -> None:
    for position, (height, width) in enumerate(SHAPES):
        image = read_image(photographs[position])
        for level, (rows, columns) in enumerate(level_shapes(height, width)):
            pixels, place = store.read(position, (0, 0, width, height), level)
            assert pixels.shape == (rows, columns, 3)
            np.testing.assert_allclose(place @ [columns, rows, 1], (width, height))
            averaged = cv2.resize(image, (columns, rows), interpolation=cv2.INTER_AREA).astype(
                float
            )
            assert np.abs(pixels - averaged).mean() < 2.5
            part, place = store.read(
                position, (width * 0.4, height * 0.3, width * 0.9, height * 0.8), level
            )
            x, y = np.rint(place[:, 2] * (columns / width, rows / height)).astype(int)
            np.testing.assert_array_equal(
                part, pixels[y : y + part.shape[0], x : x + part.shape[1]]
            )
    assert (
        level_shapes(1031, 517)
        == [(1031, 517), (516, 259), (258, 130)][: len(level_shapes(1031, 517))]
    )
    assert max(level_shapes(3648, 5472)[-1]) <= 512


def test_the_level_is_the_coarsest_that_shows_enough(store: BlockStore) -> None:
    chosen = [store.level_for(1, scale) for scale in (1.5, 1, 0.64, 0.62, 0.5, 0.32, 0.1, 0.001)]
    assert chosen == [0, 0, 0, 1, 1, 1, 2, 2]
    assert store.level_for(2, 0.01) == 0  # no other level


def test_a_window_reads_only_the_blocks_it_touches(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_block_outside_the_window_is_not_checked(
    photographs: list[Path], store: BlockStore, tmp_path: Path
) -> None:
    damaged = opened(BLOCKS, photographs, tmp_path)
    file, end = damaged.index.pixel_files[0], int(damaged.index.places[0, 2])
    content = bytearray(file.read_bytes())
    content[end - 9] ^= 1  # in the last level's last block
    file.write_bytes(content)
    damaged.read(0, (0, 0, 700, 300), 0)
    assert file.read_bytes() == content
    last = len(level_shapes(300, 700)) - 1
    np.testing.assert_array_equal(
        damaged.read(0, (0, 0, 700, 300), last)[0], store.read(0, (0, 0, 700, 300), last)[0]
    )
    assert file.read_bytes() == store.index.pixel_files[0].read_bytes()
