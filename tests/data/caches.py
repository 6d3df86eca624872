"""The packed cache and the block store behind the same calls, for the tests of what they share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest

from yolo_seg_ddp.data import blocks, packed_images
from yolo_seg_ddp.data.blocks import open_blocks
from yolo_seg_ddp.data.cache import CachePlace, RecordFile
from yolo_seg_ddp.data.packed_images import open_images
from yolo_seg_ddp.utils.errors import UserError

SIZE_PX = 64
SHAPES = [(300, 700), (1031, 517), (40, 30), (256, 512)]


@dataclass(frozen=True)
class Kind:
    """A kind of cache: `opens` a split, or says why not, and reads a `whole` photograph of it."""

    suffix: str
    opens: Callable[[list[Path], CachePlace], RecordFile | str]
    whole: Callable[[Any, int], np.ndarray]
    module: ModuleType
    makes_record: str  # the function's name in the module


def place_in(folder: Path, said: list[str], split: str = "train", **more: Any) -> CachePlace:
    """Return the place of a cache in a folder of the data set."""
    return CachePlace(folder.parent, folder, split, said.append, **more)


def _open_packed(files: list[Path], place: CachePlace) -> RecordFile | str:
    return open_images(files, SIZE_PX, place)


def _open_store(files: list[Path], place: CachePlace) -> RecordFile | str:
    return open_blocks(files, place)


PACKED = Kind(".u8", _open_packed, lambda packed, at: packed.read(at), packed_images, "_pack")
BLOCKS = Kind(
    ".jpegs",
    _open_store,
    lambda store, at: store.read(at, (0, 0, *store.shape(at)[::-1]), 0)[0],
    blocks,
    "_encode",
)
EACH_KIND = pytest.mark.parametrize("kind", [PACKED, BLOCKS], ids=["packed", "blocks"])


def opened(
    kind: Kind, files: list[Path], folder: Path, said: list[str] | None = None, **more: Any
) -> Any:
    """Open a cache that must be there."""
    store = kind.opens(files, place_in(folder, [] if said is None else said, **more))
    assert not isinstance(store, str), store
    return store


def refusal(kind: Kind, files: list[Path], folder: Path, said: list[str] | None = None) -> str:
    """Return why there can be no cache."""
    try:
        why = kind.opens(files, place_in(folder, [] if said is None else said))
    except UserError as error:
        return str(error)
    assert isinstance(why, str)
    return why


def write_photo(file: Path, seed: int, shape: tuple[int, int]) -> Path:
    """Write smooth colours, as a photograph has, at the quality of a camera."""
    noise = np.random.default_rng(seed).integers(90, 160, (9, 7, 3), dtype=np.uint8)
    cv2.imwrite(str(file), cv2.resize(noise, shape[::-1], interpolation=cv2.INTER_CUBIC))
    return file


def write_photos(folder: Path) -> list[Path]:
    """Write a photograph of each of SHAPES, the second as PNG."""
    folder.mkdir(exist_ok=True)
    names = [f"1 ({number}).{'png' if number == 1 else 'JPG'}" for number in range(len(SHAPES))]
    return [write_photo(folder / name, number, SHAPES[number]) for number, name in enumerate(names)]


def packed_in(folder: Path) -> list[Path]:
    """Return the packed files and their indexes."""
    return sorted(
        path for path in folder.iterdir() if path.suffix != ".lock" and "-digests-" not in path.name
    )
