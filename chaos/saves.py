"""Checkpoints whose writing process is killed, and checkpoints that are damaged afterwards."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from chaos.jobs import Job, TooSlow
from chaos.scenario import Result, Setting, spread
from utils.common.errors import UserError
from utils.run.checkpoint import MANIFEST_FILE, STATE_FILE, load_latest, save_checkpoint, verify

# A separate process that saves one step after the other; all tensors hold the step's number.
SAVER = """
import sys
from pathlib import Path
from chaos.saves import state_of
from utils.run.checkpoint import save_checkpoint
folder, first, megabytes = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
for step in range(first, first + 100_000):
    print("saving", step, flush=True)
    save_checkpoint(folder, step, state_of(step, megabytes))
"""


def state_of(step: int, megabytes: float = 0.1) -> dict[str, Any]:
    """Return a state whose tensors are filled with the step, or with its negative."""
    count = int(megabytes * 1e6 / 8)
    return {"model": torch.full((count,), float(step)), "optimizer": torch.full((count,), -float(step)), "step": step}


def whole_step(folder: Path) -> int:
    """Return the step of the newest checkpoint that loads; -1 if there is none, or if it mixes several steps."""
    try:
        found = load_latest(folder)
    except UserError:
        return -1
    if found is None:
        return -1
    state = found[1]
    fine = bool((state["model"] == state["step"]).all() and (state["optimizer"] == -state["step"]).all())
    return int(state["step"]) if fine else -1


def kills_while_saving(setting: Setting) -> Result:
    """R6: a process that saves all the time is killed at a random moment of a save."""
    result, rng = Result(), random.Random(setting.seed)
    folder = setting.folder / "checkpoint"
    first, leftovers, save_s = 1, 0, 0.05
    durations = []
    for number in range(setting.count(50, 3)):
        log = setting.folder / f"saver-{number}.log"
        with Job([sys.executable, "-c", SAVER, folder, str(first), "20"], log) as job:
            try:
                job.wait_until(lambda wanted=f"saving {first + 2}\n": wanted in job.output(), "a third save", 120)  # type: ignore[misc]
            except TooSlow as error:
                result.trial("kill", str(error))
                continue
            start_s = time.monotonic()
            job.wait_until(lambda wanted=f"saving {first + 3}\n": wanted in job.output(), "a save", 120)  # type: ignore[misc]
            save_s = time.monotonic() - start_s
            time.sleep(rng.uniform(0, 1.2 * save_s))
            job.process.send(signal.SIGKILL)
            job.popen.wait(30)
            begun = int(job.output().split()[-1])
        durations.append(save_s)
        temporaries = list(folder.glob(".tmp-*"))
        leftovers += bool(temporaries)
        step = whole_step(folder)
        problem = "" if step in (begun - 1, begun) else f"step {begun} was being saved, step {step} loads"
        save_checkpoint(folder, begun + 1, state_of(begun + 1))
        stale = [path.name for path in folder.glob(".tmp-*")]
        result.trial("kill", problem, f"{stale} left by the next save" if stale else "")
        first = begun + 2
    result.figures = {
        "killed in the middle of a write": leftovers,
        "one save": spread([s * 1000 for s in durations], "ms"),
    }
    return result


def damage(setting: Setting) -> Result:
    """R8: a random byte of the newest checkpoint is changed, or its end is cut off."""
    result, rng = Result(), random.Random(setting.seed)
    folder = setting.folder / "checkpoint"
    for step in (1, 2):
        save_checkpoint(folder, step, state_of(step))
    newest = folder / "step-00000002"
    whole = setting.folder / "whole"
    shutil.copytree(newest, whole)
    harmless = 0
    for number in range(setting.count(100, 10)):
        how, is_harmless = _damage(newest, number, rng)
        harmless += is_harmless
        found = verify(newest)
        expected = 2 if is_harmless else 1
        undetected = f"{how} was not detected" if (found is None) != is_harmless else ""
        step = whole_step(folder)
        result.trial(how, undetected, "" if step == expected else f"step {step} was loaded instead of {expected}")
        shutil.rmtree(newest)
        shutil.copytree(whole, newest)
    result.figures = {"flips that do not change the manifest's meaning": harmless}
    return result


def _damage(checkpoint: Path, number: int, rng: random.Random) -> tuple[str, bool]:
    """Damage one file; return how, and whether its meaning stayed the same."""
    file = checkpoint / (MANIFEST_FILE if number % 10 == 9 else STATE_FILE)
    data = bytearray(file.read_bytes())
    position = rng.randrange(len(data))
    if number % 4 == 3:
        os.truncate(file, position)
        return f"cut {file.name} at {position}", False
    data[position] ^= rng.randrange(1, 256)
    before = _meaning(file) if file.name == MANIFEST_FILE else None
    file.write_bytes(data)
    is_harmless = before is not None and _meaning(file) == before
    return f"flip in {file.name} at {position}", is_harmless


def _meaning(manifest: Path) -> Any:
    """Return what verification reads of a manifest, which is not its step; None if it cannot be read."""
    try:
        content = json.loads(manifest.read_text())
        return content["size_bytes"], content["sha256"]
    except (ValueError, KeyError, TypeError):
        return None
