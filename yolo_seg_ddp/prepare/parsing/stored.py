"""Photographs that stay in an object storage while they are parsed: each is fetched where it is
read, and kept nowhere.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from yolo_seg_ddp.prepare.parsing.formats import find_format
from yolo_seg_ddp.prepare.parsing.sources import ReadFile
from yolo_seg_ddp.utils.errors import UserError, print_warning
from yolo_seg_ddp.utils.storage import Storage
from yolo_seg_ddp.utils.text import counted

# with lists of the classes
LABELS = (".csv", ".json", ".txt", ".xml", ".yaml", ".yml", ".rsml", ".names")


@contextmanager
def stored_input(address: str, output: Path) -> Iterator[tuple[Path, ReadFile]]:
    """Fetch the label files at an address into a temporary folder beside `output`; give it, and
    what reads its photographs.

    In the folder a file without content, which takes no room, has the name, size and time of each
    photograph.
    """
    storage = Storage(address, "--input")
    files = storage.files()
    zips = {name for name in files if name.lower().endswith(".zip")}
    if zips:
        fix = f"python download_data.py --source {storage.shown} gets them to this machine"
        print_warning(f"{storage.shown}: {counted(len(zips), 'zip')} not read: {fix}")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".labels-", dir=output.parent) as place:
        folder = Path(place)
        for suffixes in (LABELS, (*LABELS, ".png")):  # the labels may be pictures
            labels = {name: file for name, file in files.items() if name.lower().endswith(suffixes)}
            storage.fetch_all(labels, folder)
            if find_format(folder):
                break
        for name in files.keys() - labels - zips:
            file, stand_in = files[name], folder / name
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            with stand_in.open("xb") as stream:
                stream.truncate(file.size_bytes)
            os.utime(stand_in, (file.time_s, file.time_s))

        def read_file(path: Path) -> bytes:
            name = path.relative_to(folder).as_posix()
            return path.read_bytes() if name in labels else storage.read(name, files[name])

        try:
            yield folder, read_file
        except UserError as error:
            raise type(error)(str(error).replace(place, storage.shown)) from error
