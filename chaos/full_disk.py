"""A run folder on a file system that is too small: training continues for a while, and earlier checkpoints stay valid."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from chaos.jobs import run
from chaos.scenario import Result, Setting, Skipped
from chaos.trainers import difference, draw_sample, place, status, yolo, yolo_environment

EPOCHS = 6
# A checkpoint of YOLOv8n-seg takes 52 MB and best.pt and last.pt 7 each: one of each fits, a second checkpoint does not.
SMALL_MB, LARGE_MB = 75, 300
TIMEOUT_S = 600


def filled_and_emptied(setting: Setting) -> Result:
    """R7: train where only one checkpoint fits, check the folder, enlarge the disk, and run the same command again."""
    if os.geteuid() != 0:
        raise Skipped("mounting a file system needs root")
    result = Result()
    data = draw_sample(setting.folder, 16)
    reference = setting.folder / "reference"
    code = run(yolo(data, reference, epochs=EPOCHS), reference / "log", timeout_s=TIMEOUT_S, **yolo_environment())
    result.trial("undisturbed", f"exit code {code}" if code else "")
    disk = setting.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_MB}m", "tmpfs", str(disk)], check=True)
    try:
        command, log = yolo(data, disk, epochs=EPOCHS), setting.folder / "log"
        code = run(command, log, timeout_s=TIMEOUT_S, **yolo_environment())
        result.trial("full", *_after_the_stop(disk / "run", code, log.read_text()))
        result.figures = {
            "epochs trained after the last checkpoint": _epochs_logged(disk / "run") - place(disk / "run")[0]
        }
        subprocess.run(["mount", "-o", f"remount,size={LARGE_MB}m", str(disk)], check=True)
        code = run(command, log, timeout_s=TIMEOUT_S, **yolo_environment())
        result.trial("emptied", f"exit code {code}" if code else difference(disk / "run", reference / "run"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    return result


def _after_the_stop(folder: Path, code: int, output: str) -> list[str]:
    epoch, _, step = place(folder)
    leftovers = [path.name for path in folder.rglob("*") if ".tmp" in path.name]
    return [
        "" if code else "exit code 0 although nothing could be saved",
        "" if "exitcode  : 74" in output else "no exit code 74",
        "" if step and epoch < EPOCHS else f"the newest checkpoint is of epoch {epoch}",
        "" if _epochs_logged(folder) >= epoch + 2 else "the training did not continue",
        "" if "No space left on device" in str(status(folder).get("reason")) else "status.json does not say why",
        f"half-written {leftovers[0]}" if leftovers else "",
    ]


def _epochs_logged(folder: Path) -> int:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return max((record["epoch"] for record in records if record["kind"] == "epoch"), default=0)
