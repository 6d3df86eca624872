"""The table at the end, and the folder of results."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import subprocess
import tarfile
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.gpu.plan import Json, Outcome, Part, Setting
from yolo_seg_ddp.utils.environment import PROJECT_FOLDER, environment_report
from yolo_seg_ddp.utils.files import write_bytes_atomic, write_text_atomic
from yolo_seg_ddp.utils.text import format_table

WIDTH = 100  # characters of the last column
NOT_YET = Outcome("not run yet")
LOGS = ("log", "metrics.jsonl", "profiling_report.txt")
LONGEST_LOG = 2**19


def table(parts: Sequence[Part], outcomes: Mapping[str, Outcome]) -> str:
    """Return one row per part: how it ended, its seconds, what it found."""
    rows: list[list[str]] = []
    for part in parts:
        outcome = outcomes.get(part.name, NOT_YET)
        seconds = (
            ""
            if not outcome.seconds
            else f"{outcome.seconds:.0f}{' kept' if outcome.is_kept else ''}"
        )
        lines = textwrap.wrap(outcome.said or part.what, WIDTH) or [""]
        rows.append([part.name, outcome.status, seconds, lines[0]])
        rows += [["", "", "", line] for line in lines[1:]]
    return format_table(["part", "result", "seconds", "found"], rows)


def verdict(outcomes: Mapping[str, Outcome]) -> str:
    """Return one line that counts the parts by how they ended."""
    counts = Counter(outcome.status for outcome in outcomes.values())
    return f"{len(outcomes)} parts: " + ", ".join(
        f"{number} {status}" for status, number in counts.items()
    )


def hardware(setting: Setting) -> Json:
    """Return versions and hardware, without host or user names."""
    gpus = []
    for number in range(setting.num_gpus):
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        gpus.append(
            {
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "compute_capability": capability,
            }
        )
    return {**environment_report(), "driver": driver_version(), "gpus": gpus}


def driver_version() -> str:
    """Return the version of NVIDIA's driver, or `none`."""
    if shutil.which("nvidia-smi") is None:
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return (
        done.stdout.splitlines()[0].strip()
        if done.returncode == 0 and done.stdout.strip()
        else "none"
    )


def write_results(
    folder: Path,
    root: Path,
    machine: Json,
    command: str,
    parts: Sequence[Part],
    outcomes: Mapping[str, Outcome],
) -> None:
    """Write all that is needed to judge a run into `folder`: figures, the table, all logs, and the
    trace of `root`.

    Paths become relative to the project's folder. Call it after each part: what a killed run has
    found is kept.
    """
    entries = {}
    for part in parts:
        outcome = outcomes.get(part.name, NOT_YET)
        seen = {
            "status": outcome.status,
            "seconds": round(outcome.seconds, 1),
            "said": outcome.said,
        }
        entries[part.name] = {"what": part.what, **seen, "figures": outcome.figures}
    content = {
        "command": command,
        "environment": machine,
        "result": verdict(outcomes),
        "parts": entries,
    }
    text = (
        json.dumps(content, indent=2)
        .replace(f"{PROJECT_FOLDER}/", "")
        .replace(str(Path.home()), "~")
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomic(folder / "results.json", text + "\n")
    head = "\n".join(f"{name}: {value}" for name, value in machine.items())
    write_text_atomic(
        folder / "report.txt", f"{head}\n\n{table(parts, outcomes)}\n\n{verdict(outcomes)}\n"
    )
    write_bytes_atomic(folder / "logs.tar.gz", packed_logs(root))
    trace = root / "work" / "operators" / "trace.json"
    if trace.exists():
        write_bytes_atomic(folder / "trace.json.gz", gzip.compress(trace.read_bytes(), 6))


def packed_logs(root: Path) -> bytes:
    """Return a .tar.gz of the parts' logs and those of what they started; of a long one its end."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in sorted(root.rglob("*")):
            if file.suffix != ".log" and file.name not in LOGS:
                continue
            # A part that runs may begin anew.
            with suppress(FileNotFoundError):
                content = file.read_bytes()[-LONGEST_LOG:]
                header = tarfile.TarInfo(str(file.relative_to(root)))
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))
    return buffer.getvalue()
