"""Jobs of the security tests that need a process of their own: one that watches what is opened, and
how much memory it takes.

Called as `python -m tests.support.hostile_jobs JOB FOLDER`; prints one JSON object.
"""

import contextlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import cv2

from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.images import ImageError, read_image
from yolo_seg_ddp.data.labels import LabelError, read_photos
from yolo_seg_ddp.prepare.parsing.build import BuildOptions, build_dataset
from yolo_seg_ddp.prepare.parsing.formats import EPRI
from yolo_seg_ddp.prepare.parsing.label_csv import parse_label_text, read_label_csv
from yolo_seg_ddp.prepare.parsing.outlines import OutlineError, object_ring
from yolo_seg_ddp.prepare.parsing.photograph import PhotographOptions
from yolo_seg_ddp.prepare.parsing.sources import LABEL_CSV, Source
from yolo_seg_ddp.utils.errors import UserError

NAMES = ("conductor", "pole")
opened: list[str] = []
started: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note every file that is opened and every process that is started."""
    if event == "open" and isinstance(arguments[0], str | bytes):
        opened.append(os.path.realpath(os.fsdecode(arguments[0])))
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork"):
        started.append(event)


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def build(folder: Path) -> list[dict[str, str]]:
    """Parse `folder/raw` into `folder/processed`; return what was reported."""
    options = BuildOptions(
        PhotographOptions(NAMES, 320, 6.0, "auto"), "hash", 0.5, False, keep_unusable=True
    )
    return list(
        build_dataset(
            [Source(EPRI, "", folder / "raw")], folder / "processed", options, num_workers=1
        )["problems"]
    )


def cells(folder: Path) -> dict[str, Any]:
    """Parse a CSV of hostile cells, all at once, and each alone for its time."""
    base_mb = peak_mb()
    seconds: dict[str, float] = {}
    for row in read_label_csv(folder / "raw" / LABEL_CSV, []):
        start_s = time.process_time()
        with contextlib.suppress(LabelError, OutlineError):
            for item in parse_label_text(row.text)[0]:
                object_ring(item.kind, item.points, (400, 300), 6.0, 0.3)
        seconds[row.image_name] = time.process_time() - start_s
    problems = build(folder)
    return {
        "problems": problems,
        "seconds": seconds,
        "more_mb": peak_mb() - base_mb,
        "started": started,
    }


def names(folder: Path) -> dict[str, Any]:
    """Parse a raw folder with hostile names, then read every data-set YAML in `folder/sets`."""
    problems = build(folder)
    refused = {}
    for file in sorted((folder / "sets").glob("*.yaml")):
        try:
            photos = read_photos(load_dataset_yaml(file), "train")
            for photo in photos:
                read_image(photo.file)
            refused[file.name] = ""
        except (UserError, ImageError) as error:
            refused[file.name] = str(error)
    return {"problems": problems, "refused": refused, "opened": opened, "started": started}


def images(folder: Path) -> dict[str, Any]:
    """Decode every picture of a folder; say what came of it, how long it
    took and how much memory.
    """
    read_image(folder / "warm.jpg", 640)
    outcome: dict[str, Any] = {}
    for file in sorted(folder.iterdir()):
        before_mb, start_s = peak_mb(), time.process_time()
        try:
            words: list[int] | str = list(read_image(file, 640).shape)
        except ImageError as error:
            words = str(error)
        outcome[file.name] = [words, time.process_time() - start_s, peak_mb() - before_mb]
    return outcome


if __name__ == "__main__":
    cv2.setNumThreads(1)
    sys.addaudithook(watch)
    print(
        json.dumps(
            {"cells": cells, "names": names, "images": images}[sys.argv[1]](Path(sys.argv[2]))
        )
    )
