"""Runs that continue with another number of ranks, and data sets whose size the batch does not divide."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

from chaos.jobs import Job, TooSlow, require, run
from chaos.kills import await_training
from chaos.scenario import Result, Setting
from chaos.trainers import place, small
from utils.run.checkpoint import load_latest

SAMPLES, EPOCHS = 208, 4  # only full batches: each rank averages over its own samples


def seen_samples(run_folder: Path, split: str) -> dict[int, Counter[int]]:
    """Return how often each sample was used in each epoch, over all ranks and starts."""
    seen: dict[int, Counter[int]] = {}
    for file in run_folder.glob("samples-*.jsonl"):
        for line in file.read_text().splitlines():
            facts = json.loads(line)
            if facts["split"] == split:
                seen.setdefault(facts["epoch"], Counter()).update(facts["indices"])
    return seen


def uneven(run_folder: Path, split: str, samples: int, epochs: int) -> str:
    """Return what is wrong; empty when every sample was used exactly once in each epoch."""
    seen = seen_samples(run_folder, split)
    expected = Counter(range(samples))
    wrong = [epoch for epoch in range(epochs) if seen.get(epoch, Counter()) != expected]
    return f"{split}: epochs {wrong} did not use each of {samples} samples once" if wrong else ""


def other_world_size(setting: Setting) -> Result:
    """R5: stop a run on 2 ranks, continue it on 1, stop it, and finish it on 2, with the same global batch size."""
    result, rng, losses = Result(), random.Random(setting.seed), []
    reference = setting.folder / "reference"
    require(_command(reference, 2), reference / "log")
    expected = _last_loss(reference)
    for number in range(setting.count(3, 1)):
        folder = setting.folder / str(number)
        problems = []
        for part, ranks in enumerate((2, 1)):
            with Job(_command(folder, ranks), folder / f"log-{part}") as job:
                try:
                    await_training(job, 0, ranks)
                    time.sleep(rng.uniform(0, 1.0))
                    job.process.send(signal.SIGTERM)
                    job.wait(30)
                except TooSlow as error:
                    problems.append(str(error))
        require(_command(folder, 2), folder / "log-2")
        losses.append(abs(_last_loss(folder) / expected - 1))
        problems += [
            uneven(folder / "run", "train", SAMPLES, EPOCHS),
            "" if place(folder / "run") == place(reference / "run") else "another number of steps",
            f"loss off by {losses[-1]:.1%}" if losses[-1] > 0.02 else "",
        ]
        result.trial("2-1-2", *problems)
    result.figures = {"validation loss differs by at most": f"{max(losses):.2%}"}
    return result


def _command(folder: Path, ranks: int) -> list[str]:
    return [*small(folder, ranks=ranks, samples=SAMPLES, epochs=EPOCHS), "--sync-bn"]


def _last_loss(folder: Path) -> float:
    found = load_latest(folder / "run" / "checkpoint")
    assert found is not None
    return float(found[1]["progress"]["history"]["val_loss"][-1])


def odd_lengths(setting: Setting) -> Result:
    """R21: data sets of odd sizes: no hang, each sample once, and a clear error when there are too few samples."""
    result = Result()
    cases = (
        [(2, 1), (3, 2), (9, 7), (1, 1)] if setting.quick else [(2, 1), (3, 2), (5, 1), (7, 3), (9, 7), (33, 5), (1, 1)]
    )
    for samples, val_samples in cases:
        folder = setting.folder / f"{samples}-{val_samples}"
        name = f"{samples} and {val_samples}"
        command = small(folder, samples=samples, val_samples=val_samples, epochs=2)
        try:
            code = run(command, folder / "log", timeout_s=60)
        except TooSlow as error:
            result.trial(name, str(error))
            continue
        if samples < 2:
            is_refused = "1 training images cannot feed 2 processes" in (folder / "log").read_text()
            result.trial(name, "" if code and is_refused else "was not refused")
            continue
        problems = [uneven(folder / "run", "train", samples, 2), uneven(folder / "run", "val", val_samples, 2)]
        result.trial(name, f"exit code {code}" if code else "", *problems)
    result.figures = {"lengths": " ".join(str(samples) for samples, _ in cases)}
    return result
