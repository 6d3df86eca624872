"""The table at the end, and the file of results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu.plan import NO_TIME, Json, Outcome, Part, Setting
from utils.common.environment import PROJECT_FOLDER, environment_report
from utils.common.files import write_text_atomic
from utils.common.text import format_table

WIDTH = 100  # characters of the last column


def table(parts: Sequence[Part], outcomes: Mapping[str, Outcome]) -> str:
    """Return one row per part: how it ended, its seconds, what it found."""
    rows: list[list[str]] = []
    for part in parts:
        outcome = outcomes[part.name]
        seconds = "" if outcome.status == NO_TIME else f"{outcome.seconds:.0f}{' kept' if outcome.is_kept else ''}"
        lines = textwrap.wrap(outcome.said or part.what, WIDTH) or [""]
        rows.append([part.name, outcome.status, seconds, lines[0]])
        rows += [["", "", "", line] for line in lines[1:]]
    return format_table(["part", "result", "seconds", "found"], rows)


def verdict(outcomes: Mapping[str, Outcome]) -> str:
    """Return one line that counts the parts by how they ended."""
    counts = Counter(outcome.status for outcome in outcomes.values())
    return f"{len(outcomes)} parts: " + ", ".join(f"{number} {status}" for status, number in counts.items())


def hardware(setting: Setting) -> Json:
    """Return versions and hardware, without host or user names."""
    gpus = []
    for number in range(setting.num_gpus):
        facts = torch.cuda.get_device_properties(number)
        capability = f"{facts.major}.{facts.minor}"
        gpus.append({"name": facts.name, "memory_bytes": facts.total_memory, "compute_capability": capability})
    return {**environment_report(), "driver": driver_version(), "gpus": gpus}


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or `none`."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else "none"


def results_file(setting: Setting, facts: Json) -> Path:
    """Return where results go: beside the quoted figures of docs/results, those of a dry run to `setting.folder`."""
    if not setting.is_gpu:
        return setting.folder.parent / f"gpu-dry-run-{date.today().isoformat()}.json"
    slug = re.sub(r"[^a-z0-9]+", "-", facts["gpus"][0]["name"].lower()).strip("-")
    number = f"{len(facts['gpus'])}x-" if len(facts["gpus"]) > 1 else ""
    return PROJECT_FOLDER / "docs" / "results" / f"gpu-{number}{slug}-{date.today().isoformat()}.json"


def write_results(
    file: Path, facts: Json, command: str, parts: Sequence[Part], outcomes: Mapping[str, Outcome]
) -> None:
    """Write every figure, with paths relative to the project's folder."""
    found = {}
    for part in parts:
        outcome = outcomes[part.name]
        seen = {"status": outcome.status, "seconds": round(outcome.seconds, 1), "said": outcome.said}
        found[part.name] = {"what": part.what, **seen, "figures": outcome.figures}
    content = {"command": command, "environment": facts, "result": verdict(outcomes), "parts": found}
    text = json.dumps(content, indent=2).replace(f"{PROJECT_FOLDER}/", "").replace(str(Path.home()), "~")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, text + "\n")
