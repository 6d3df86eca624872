"""Losses that are NaN, and photographs and labels that cannot be read."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from chaos.jobs import require, run
from chaos.scenario import Result, Setting
from chaos.trainers import difference, draw_sample, small, yolo, yolo_environment
from utils.engine.nonfinite import all_finite
from utils.run.checkpoint import load_latest

NUM_PHOTOS = 100


def bad_losses(setting: Setting) -> Result:
    """R19: one rank's loss is NaN. All ranks skip a few such steps; many in a row cause a roll-back to a checkpoint."""
    result = Result()
    in_a_row = (range(5, 7), range(50, 56), range(55, 61))  # the ranks check every ten steps
    cases = [(",".join(map(str, steps)), len(steps), steps[-1] == 60) for steps in in_a_row]
    for steps, least_skipped, rolls_back in cases:
        folder = setting.folder / steps.replace(",", "-")
        code = run(small(folder, epochs=6, samples=160, nan_steps=steps), folder / "log")
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        skipped = max((record["skipped"] for record in records if record["kind"] == "skip"), default=0)
        found = load_latest(folder / "run" / "checkpoint")
        assert found is not None
        parts = [*found[1]["model"].values(), *found[1]["ema"].values()]
        did_roll_back = "Rolled back from" in (folder / "log").read_text()
        result.trial(
            f"NaN at {steps}",
            f"exit code {code}" if code else "",
            "" if all_finite(parts) else "a checkpoint holds a NaN",
            "" if did_roll_back == rolls_back else "no roll-back" if rolls_back else "rolled back",
            # A roll-back also removes the records of skipped steps from the log.
            "" if rolls_back or skipped >= least_skipped else f"{skipped} steps skipped",
        )
    return result


def bad_photographs(setting: Setting) -> Result:
    """R20: photographs that are cut off, empty or random bytes."""
    result, rng = Result(), random.Random(setting.seed)
    data = draw_sample(setting.folder / "whole", 12)
    raw, processed = setting.folder / "raw", setting.folder / "processed"
    log = setting.folder / "sample.log"
    count = 24 if setting.quick else NUM_PHOTOS
    require([sys.executable, "download_data.py", "--sample", str(count), "--output", raw], log)
    victims = rng.sample(sorted(raw.rglob("*.JPG")), max(count // 100, 3))
    for number, photo in enumerate(victims):
        content = photo.read_bytes()
        photo.write_bytes((content[: len(content) // 3], b"", rng.randbytes(5000))[number % 3])
    parsing = setting.folder / "parse.log"
    require([sys.executable, "parse_labels.py", "--input", raw, "--output", processed, "--long-side=128"], parsing)
    reports = parsing.read_text() + "".join(file.read_text() for file in processed.glob("*.json"))
    for photo in victims:
        result.trial("photograph", "" if photo.name in reports else f"{photo.name} is not named")
    folders = [setting.folder / name for name in ("first", "second")]
    codes = [_train(processed / "dataset.yaml", folder) for folder in folders]
    problem = difference(folders[0] / "run", folders[1] / "run") if codes == [0, 0] else f"exit codes {codes}"
    result.trial("two trainings without them", problem)
    result.trial("damage after parsing", _damaged_later(setting.folder / "later", data))
    result.figures = {"photographs": count, "damaged": len(victims)}
    return result


def _damaged_later(folder: Path, data: Path) -> str:
    """Cut off a photograph after parsing: the trainer must name it, whether or not it continues."""
    photo = sorted((data.parent / "train" / "images").iterdir())[0]
    photo.write_bytes(photo.read_bytes()[:500])
    code = _train(data, folder)
    named = photo.name in (folder / "log").read_text()
    return "" if named else f"exit code {code}, and {photo.name} is not named"


def _train(data: Path, folder: Path) -> int:
    return run(yolo(data, folder, epochs=1), folder / "log", timeout_s=300, **yolo_environment())
