"""Files with long names, and the lock that one process of a machine holds at a time."""

from __future__ import annotations

import os
import time
from pathlib import Path

from utils.common.files import local_rank_first, write_bytes_atomic


def test_a_long_name_of_another_alphabet_is_written(tmp_path: Path) -> None:
    file = tmp_path / ("写" * 83 + ".jpg")  # 253 bytes; a name has at most 255
    write_bytes_atomic(file, b"picture")
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"picture"]


def test_one_process_at_a_time_holds_the_machines_lock(tmp_path: Path) -> None:
    lock_file = tmp_path / "new" / "job.lock"
    reader, writer = os.pipe()
    with local_rank_first(lock_file):
        child = os.fork()
        if child == 0:
            try:
                with local_rank_first(lock_file):
                    os.write(writer, b"child")
            finally:
                os._exit(0)
        time.sleep(0.2)
        os.write(writer, b"parent ")
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"parent child"
