"""The data of a training: its digest, where it is packed, and what is read for it."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_skip_bad import BAD, mend, write_set
from yolo_seg_ddp.data import cache, fingerprint, images
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import load_photo
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.data import Data, open_data
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import write_text_atomic


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = write_set(tmp_path / "set")
    for name in BAD:
        mend(tmp_path / "set", name)
    return file


def opened(
    file: Path, said: list[str] | None = None, machine: tuple[int, int] = (0, 1), **options: Any
) -> Data:
    config = TrainConfig(
        data=str(file), img_size=64, **{"save_dir": str(file.with_name("none")), **options}
    )
    spec = load_dataset_yaml(file, cache_dir=config.cache_dir)
    return open_data(
        config, spec, torch.device("cpu"), ([] if said is None else said).append, machine
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the photographs that are read, for their digest or decoded."""
    names: list[str] = []
    digest, decode = fingerprint.hashlib.file_digest, images.read_image

    def spied_digest(stream: Any, kind: Any) -> Any:
        names.append(f"digest {Path(stream.name).parent.parent.name}/{Path(stream.name).name}")
        return digest(stream, kind)

    def spied_decode(file: Path, *more: Any) -> Any:
        names.append(f"pixels {file.parent.parent.name}/{file.name}")
        return decode(file, *more)

    monkeypatch.setattr(fingerprint.hashlib, "file_digest", spied_digest)
    monkeypatch.setattr(images, "read_image", spied_decode)
    return names


WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "blocks": {"windows": 2},
    "none": {"cache": "none"},
    "none, checked": {"cache": "none", "skip_bad": True},
    "three machines": {"machine": (1, 3)},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_digest_is_the_same_with_any_cache_and_no_other_run_reads_a_photograph(
    way: str, data: Path, tmp_path: Path, read: list[str]
) -> None:
    first = opened(data, **WAYS[way])
    assert len([name for name in read if name.startswith("digest")]) == 18
    assert first.fingerprint.digest == "03248a5689716eeb"
    read.clear()
    for number in range(2):
        again = opened(data, **WAYS[way], save_dir=str(tmp_path / f"run{number}"))
        assert again.fingerprint == first.fingerprint
    assert read == []
    assert ("packed in" in first.packed) == (WAYS[way].get("cache") is None)


def test_a_killed_reading_of_digests_goes_on(
    data: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    monkeypatch.setattr(cache, "MIN_BETWEEN_SAVES", 1)
    writes: list[Path] = []

    def dying(file: Path, text: str) -> None:
        write_text_atomic(file, text)
        writes.append(file)
        if len(writes) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache, "write_text_atomic", dying)
        with pytest.raises(KeyboardInterrupt):
            opened(data, cache="none")
    read.clear()
    said: list[str] = []
    opened(data, said, cache="none")
    assert said == [
        "reading 5 train photographs for their digests",
        "reading 9 val photographs for their digests",
    ]
    assert len(read) == 14


def test_without_a_place_for_digests_the_run_folder_has_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: list[str]
) -> None:
    (data.parent / ".cache").write_text("in the way")
    said: list[str] = []
    first = opened(data, said)
    assert "packed cache off: " in said[0]
    assert re.match(
        r"not packed: .*/\.cache/train.*: Not a directory; without it a photograph is", first.packed
    )
    assert len([name for name in read if name.startswith("digest")]) == 18
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data.json").write_text(first.fingerprint.to_json())
    read.clear()
    again = opened(data, save_dir=str(tmp_path / "run"), cache="none")
    assert again.fingerprint == first.fingerprint
    monkeypatch.setenv("RANK", "1")
    for name, value in {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    opened(data, cache="none")
    assert read == [], "the first rank of the machine reads for the others"


def test_two_data_sets_share_a_cache_folder_and_links_do_not_lead_out_of_it(
    data: Path, tmp_path: Path
) -> None:
    other = write_set(tmp_path / "other" / "set")
    for name in BAD:
        mend(other.parent, name)
    fast, said = str(tmp_path / "fast" / "disk"), list[str]()
    for _ in range(2):
        for file in (data, other):
            one = opened(file, said, cache_dir=fast)
            assert one.spec.cache_folder.parent == Path(fast)
            assert len(one.train) == 9
            assert not (file.parent / ".cache").exists()
    assert sum("packing" in line for line in said) == 4
    assert len(list(Path(fast).iterdir())) == 2


def fill(number: int) -> Callable[..., int]:
    """Return an fsync that fails from its call number `number` on."""
    calls: list[int] = []

    def fsync(descriptor: int) -> int:
        calls.append(descriptor)
        if len(calls) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 0

    return fsync


def test_a_disk_that_fills_while_a_machine_packs_is_said_with_its_cost(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MIN_BETWEEN_SAVES", 2)
    with monkeypatch.context() as patch:
        patch.setattr(cache.os, "fsync", fill(3))
        with pytest.raises(
            UserError,
            match=r"--cache packed: .*No space left on device; .*make room, or use --cache auto",
        ):
            opened(data, cache="packed")
        said: list[str] = []
        full = opened(data, said)
    assert (
        "No space left on device; without it a photograph is decoded each time it is shown, in"
        in full.packed
    )
    assert sum(line.startswith("packed cache off: ") for line in said) == 2
    assert not list((data.parent / ".cache").glob("*.u8"))
    assert full.train.image(3).tobytes() == load_photo(full.train.photos[3].file, 64).tobytes()
    assert "packed in" in opened(data).packed
