"""What all machines of a training must have in common: photographs, labels, classes, options, versions, the run folder."""

import json
import platform
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import cv2

from utils.common.environment import git_revision, package_version
from utils.common.errors import UserError, printable
from utils.common.text import format_bytes
from utils.data.fingerprint import UNREADABLE, Fingerprint
from utils.distributed import Meeting
from utils.training.config import TrainConfig
from utils.training.data import Data

PACKAGES = ("yolo-seg-ddp", "torch", "torchvision", "ultralytics", "numpy")
SHOWS_LATE_S = 60.0  # after which a network file system shows a new file on other machines


def agree(meeting: Meeting, config: TrainConfig, data: Data) -> None:
    """Wait until all ranks are ready; print a line for each machine. Every rank must reach this.

    Raises UserError on rank 0 when a machine differs from the first one, which then ends the other ranks, too.
    """
    if meeting.is_first:
        description = describe_machine(meeting, config, data)
        meeting.tell("machine", json.dumps(description))
    else:
        meeting.tell("machine")
    meeting.wait("machine")

    machines = [json.loads(meeting.read("machine", rank)) for rank in meeting.first_ranks]
    has_other_data = machines[meeting.machine]["digest"] != machines[0]["digest"]
    if meeting.is_first and has_other_data:
        meeting.tell("photographs", data.fingerprint.to_json())
    if meeting.rank == 0:
        for number, rank in enumerate(meeting.first_ranks):
            hosts = (meeting.hosts[0], meeting.hosts[number])
            if difference := first_difference(machines[0], machines[number], hosts):
                raise UserError(difference)
            if machines[number]["digest"] != machines[0]["digest"]:
                meeting.wait("photographs", [rank])
                theirs = Fingerprint.of_content(json.loads(meeting.read("photographs", rank)))
                raise UserError(first_other_photograph(data.fingerprint, theirs, hosts))
        for host, machine in zip(meeting.hosts, machines, strict=True):
            print(f"{host if len(machines) > 1 else 'Data'}: {machine['line']}", flush=True)
        meeting.tell("agreed")
    meeting.wait("agreed", [0])


def describe_machine(meeting: Meeting, config: TrainConfig, data: Data) -> dict[str, Any]:
    """Return as JSON what the machines compare, and the line that is printed about this one."""
    versions: dict[str, Any] = {"Python": ".".join(platform.python_version_tuple()[:2]), "OpenCV": cv2.__version__}
    versions |= {name: package_version(name) for name in PACKAGES}
    revision = git_revision().removesuffix("+changes")
    versions["the revision"] = None if revision == "unknown" else revision

    # The same data set may lie at another place on each machine.
    options = [field.name for field in fields(config) if not field.metadata["may_differ"] and field.name != "data"]
    folder = data.cache_folder.absolute()
    free_bytes = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    digest = data.fingerprint.digest
    counts = f"{len(data.train):,} + {len(data.val):,} photographs, digest {digest[:8]}"
    return {
        "versions": versions,
        "options": {f"--{name.replace('_', '-')}": getattr(config, name) for name in options},
        "run folder": str(Path(config.save_dir).absolute()),
        "sees run folder": sees_run_folder(meeting, Path(config.save_dir)),
        "classes": data.names,
        "digest": digest,
        "line": ", ".join([counts, *filter(None, [data.packed]), f"{format_bytes(free_bytes)} free"]),
    }


def sees_run_folder(meeting: Meeting, folder: Path) -> bool:
    """Return whether this machine sees what rank 0 wrote beside the run folder; wait for it as long as it may take."""
    deadline_s = time.monotonic() + min(SHOWS_LATE_S, meeting.timeout_s)
    if meeting.machine > 0 and not meeting.sees_token(folder):
        meeting.announce(f"waiting until {folder} of {meeting.hosts[0]} shows here, for up to {SHOWS_LATE_S:.0f} s")
        while not meeting.sees_token(folder) and time.monotonic() < deadline_s:
            time.sleep(0.5)
    return meeting.machine == 0 or meeting.sees_token(folder)


def first_difference(ours: dict[str, Any], theirs: dict[str, Any], hosts: tuple[str, str]) -> str:
    """Return in what a machine differs from the first one, but for the photographs; empty if in nothing."""
    here, there = hosts
    for kind, advice in (
        ("versions", "install the same software on all machines, such as requirements.lock"),
        ("options", "start all machines with the same options"),
    ):
        for name, value in ours[kind].items():
            other = theirs[kind].get(name)
            if value != other and (kind == "options" or None not in (value, other)):
                values = [f"{name} unset" if each is None else f"{name} {each}" for each in (other, value)]
                return printable(f"{there} has {values[0]}, and {here} has {values[1]}: {advice}", 1000)
    if not theirs["sees run folder"]:
        return (
            f"{there} does not see the run folder of {here}: {theirs['run folder']} is another folder there, or "
            f"{ours['run folder']} is not shared; name with --save-dir one that all machines share"
        )
    if ours["classes"] != theirs["classes"]:
        pairs = zip([*ours["classes"], None], [*theirs["classes"], None], strict=False)
        number, (name, other) = next((number, pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
        classes = f"class {number} is {other or 'missing'} on {there} and {name or 'missing'} on {here}"
        return printable(f"{classes}: copy the data set's YAML file again", 1000)
    return ""


def first_other_photograph(ours: Fingerprint, theirs: Fingerprint, hosts: tuple[str, str]) -> str:
    """Return which photograph or label is the first that differs between two machines, and how many do."""
    here, there = hosts
    keys = sorted(ours.photographs.keys() | theirs.photographs.keys())
    pairs = {key: (ours.photographs.get(key), theirs.photographs.get(key)) for key in keys}
    differing = {key: pair for key, pair in pairs.items() if (pair[0] or ())[:2] != (pair[1] or ())[:2]}
    key, (mine, other) = next(iter(differing.items()))
    path = printable(key.partition(" ")[2], 400)
    if mine is None or other is None:
        lacking, having = (there, here) if other is None else (here, there)
        what = f"{lacking} lacks {path}, which {having} has"
    elif UNREADABLE in (mine, other):
        failing, reading = (there, here) if other == UNREADABLE else (here, there)
        what = f"{failing} cannot read {path}, which {reading} can"
    else:
        what = f"{path} has {'another content' if mine[0] != other[0] else 'other labels'} on {there} than on {here}"
    verb = "differs" if len(differing) == 1 else "differ"
    return f"{what} ({len(differing):,} of {len(keys):,} {verb}): copy the data set again"
