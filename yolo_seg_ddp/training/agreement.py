"""What all machines of a training must have in common: versions, options, the run folder,
photographs, labels and classes.
"""

import json
import platform
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import cv2

from yolo_seg_ddp.data.fingerprint import Fingerprint
from yolo_seg_ddp.training.config import TrainConfig
from yolo_seg_ddp.training.data import Data
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.environment import git_revision, package_version
from yolo_seg_ddp.utils.errors import UserError, printable
from yolo_seg_ddp.utils.text import format_bytes

PACKAGES = ("yolo-seg-ddp", "torch", "torchvision", "ultralytics", "numpy")
SHOWS_LATE_S = 60.0  # after which a network file system shows a new file on other machines


def require_same_start(meeting: distributed.Meeting, config: TrainConfig) -> None:
    """Raise UserError on rank 0 if machines differ in versions, options or run folder.

    Every rank must reach this.
    """
    versions: dict[str, Any] = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "OpenCV": cv2.__version__,
    }
    versions |= {name: package_version(name) for name in PACKAGES}
    versions["revision"] = git_revision().removesuffix("+changes")
    # The data set may lie elsewhere on each machine.
    names = [
        field.name
        for field in fields(config)
        if not field.metadata["may_differ"] and field.name != "data"
    ]
    options = {f"--{name.replace('_', '-')}": getattr(config, name) for name in names}
    messages = meeting.exchange("versions and options", versions | options)

    folder = Path(config.save_dir).absolute()
    sharing = meeting.sharers(
        "run folder", folder.parent.resolve(), min(SHOWS_LATE_S, meeting.timeout_s)
    )
    folders = meeting.exchange("run folder's name", str(folder))
    if meeting.rank > 0:
        return
    here = meeting.hosts[0]
    for rank, theirs in enumerate(messages):
        there = meeting.hosts[meeting.machines[rank]]
        for name, value in messages[0].items():
            other = theirs.get(name)
            if value != other and (name in options or {None, "unknown"}.isdisjoint((value, other))):
                values = ["unset" if each is None else each for each in (other, value)]
                advice = (
                    "options" if name in options else "software, such as that of requirements.lock"
                )
                text = (
                    f"{there} has {name} {values[0]} and {here} has {name} {values[1]}: all "
                    f"machines need the same {advice}"
                )
                raise UserError(printable(text, 1000))
        if meeting.machines[rank] not in sharing or Path(folders[rank]).name != folder.name:
            raise UserError(
                f"{there} writes to another run folder ({folders[rank]}) than {here} ({folder}): "
                "name with --save-dir one that all machines share"
            )


def require_same_data(meeting: distributed.Meeting, data: Data) -> None:
    """Print a line for each machine; raise UserError on rank 0 if their data differ.

    Every rank must reach this.
    """
    place = data.spec.cache_folder.absolute()
    free_bytes = shutil.disk_usage(
        next(each for each in (place, *place.parents) if each.exists())
    ).free
    digest = data.fingerprint.digest if meeting.is_first else ""
    counts = f"{len(data.train):,} + {len(data.val):,} photographs"
    line = f"{counts}, digest {digest[:8]}, {data.packed}, {format_bytes(free_bytes)} free"
    messages = distributed.gather_json([digest, line])
    differs = meeting.is_first and digest != messages[0][0]
    fingerprints = distributed.gather_json(
        json.loads(data.fingerprint.to_json()) if differs else None
    )

    def judge() -> None:
        for host, rank in zip(meeting.hosts, meeting.first_ranks, strict=True):
            print(f"{host if len(meeting.hosts) > 1 else 'Data'}: {messages[rank][1]}", flush=True)
        for host, rank in zip(meeting.hosts, meeting.first_ranks, strict=True):
            if content := fingerprints[rank]:
                theirs = Fingerprint.of_content(content)
                raise UserError(first_difference(data.fingerprint, theirs, meeting.hosts[0], host))

    distributed.run_on_main(judge)


def first_difference(ours: Fingerprint, theirs: Fingerprint, here: str, there: str) -> str:
    """Return which class, else which photograph or label, is the first that differs between two
    machines, and how many do.
    """
    for number, (name, other) in enumerate(
        zip((*ours.names, "none"), (*theirs.names, "none"), strict=False)
    ):
        if name != other:
            text = (
                f"class {number} is {other} on {there} and {name} on {here}: copy the data set's "
                "YAML file again"
            )
            return printable(text, 1000)

    digests, others = (
        {key: each.photographs[key][:2] for key in each.photographs} for each in (ours, theirs)
    )
    keys = sorted(digests.keys() | others.keys())
    differing = [key for key in keys if digests.get(key) != others.get(key)]
    first = differing[0]
    photograph = printable(first.partition(" ")[2], 400)
    if first in digests and first in others:
        part = "another content" if digests[first][0] != others[first][0] else "other labels"
        what = f"{photograph} has {part} on {there} than on {here}"
    else:
        without, owner = (there, here) if first in digests else (here, there)
        what = f"{without} lacks {photograph}, which {owner} has"
    return f"{what} ({len(differing):,} of {len(keys):,} photographs): copy the data set again"
