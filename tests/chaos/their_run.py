"""One training with Ultralytics in its deterministic mode: `python -m tests.chaos.their_run HOW DATA FOLDER`.

HOW is `whole`; `killed` (it sends itself SIGKILL after saving the second of four epochs); `resumed`; or `saves` (after the
first epoch it only saves, again and again).
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from utils.common.environment import prepare_environment

EPOCHS, KILLED_AFTER = 4, 2


def main(how: str, data: str, folder: Path) -> None:
    """Train yolov8n-seg from random weights at 64 px on the CPU."""
    prepare_environment()
    from ultralytics import YOLO

    model = YOLO(folder / "run" / "weights" / "last.pt" if how == "resumed" else "yolov8n-seg.yaml")
    if how == "killed":
        model.add_callback("on_model_save", die)
    if how == "saves":
        model.add_callback("on_model_save", save_for_ever)
    if how == "resumed":
        model.train(resume=True)
        return
    place = {"data": data, "project": str(folder), "name": "run", "exist_ok": True}
    size = {"epochs": EPOCHS, "imgsz": 64, "batch": 4, "workers": 0, "device": "cpu", "plots": False}
    model.train(deterministic=True, seed=0, verbose=False, **place, **size)


def die(trainer: Any) -> None:
    """Kill this process after the second epoch's checkpoint is complete, which is the best case for a resume."""
    if trainer.epoch == KILLED_AFTER - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def save_for_ever(trainer: Any) -> None:
    """Save the same state again and again with the trainer's own method."""
    for number in range(100_000):
        print("saving", number, flush=True)
        trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
