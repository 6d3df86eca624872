"""Machines that pack into one folder: each packs its share, and what a dead one left is packed by
the others.
"""

import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.caches import EACH_KIND, PACKED, Kind, opened, packed_in, write_photos
from tests.support.processes import wait_until
from yolo_seg_ddp.data import cache
from yolo_seg_ddp.data.images import load_photo
from yolo_seg_ddp.data.packed_images import PackedImages


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_photos(tmp_path / "photos")


def pack_as(number: int, files: list[Path], folder: Path) -> None:
    """Pack as one of two machines, slowly.

    The second is killed when it has saved its first photograph.
    """
    cache.MIN_BETWEEN_SAVES = 1
    save: Any = cache._save_part
    other_has_begun = folder.parent / "second has begun"
    if number == 0:
        wait_until(other_has_begun.exists)
    said: list[str] = []

    def dying(output: Any, part_file: Path, part: dict[str, Any]) -> None:
        save(output, part_file, part)
        if number == 1:
            other_has_begun.touch()
            time.sleep(0.5)  # the other one is done with its own share and waits
            os.kill(os.getpid(), signal.SIGKILL)

    cache._save_part = dying
    opened(PACKED, files, folder, said, machine=(number, 2))
    (folder.parent / "said").write_text("\n".join(said))


def test_a_machine_packs_what_a_killed_one_left_and_another_number_of_machines_packs_nothing(
    files: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / ".cache"
    context = multiprocessing.get_context("forkserver")
    machines = [
        context.Process(target=pack_as, args=(number, files, folder)) for number in range(2)
    ]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join(60)
    assert [machine.exitcode for machine in machines] == [0, -signal.SIGKILL]
    said = (tmp_path / "said").read_text().splitlines()
    assert re.match(
        r"packing 2 train photographs at 64 px into .*/train-64-\w+-0-of-2\.u8 ", said[0]
    )
    assert said[1] == "train: waiting for the share of machine 2 of 2, or packing it"
    assert re.match(
        r"packing 1 train photographs at 64 px into .*/train-64-\w+-1-of-2\.u8 ", said[2]
    )
    assert said[3:] == ["  continuing at 1/2"]
    assert len(packed_in(folder)) == 4
    later: list[str] = []
    for numbers in ((0, 1), (1, 2), (2, 3)):
        packed: PackedImages = opened(PACKED, files, folder, later, machine=numbers)
        for position, file in enumerate(files):
            np.testing.assert_array_equal(packed.read(position), load_photo(file, 64))
    assert later == []


@EACH_KIND
def test_a_machine_alone_completes_the_share_of_one_that_never_came(
    files: list[Path], tmp_path: Path, kind: Kind
) -> None:
    folder, said = tmp_path / ".cache", list[str]()
    store = opened(kind, files, folder, said, machine=(1, 3))
    assert [line.split(" into ")[0].split(" photographs at ")[0] for line in said] == [
        "packing 1 train",
        "train: waiting for the share of machine 3 of 3, or packing it",
        "packing 1 train",
        "train: waiting for the share of machine 1 of 3, or packing it",
        "packing 2 train",
    ]
    alone = opened(kind, files, tmp_path / "alone")
    assert store.index.sizes.tolist() == alone.index.sizes.tolist()
    for position in range(len(files)):
        np.testing.assert_array_equal(kind.whole(store, position), kind.whole(alone, position))
    for file in folder.glob("*-2-of-3*"):
        file.unlink()
    said.clear()
    opened(kind, files, folder, said)
    assert re.match(r"packing 1 train photographs .*-0-of-1", said[0])
    assert said[1:] == ["  continuing at 3/4"]
