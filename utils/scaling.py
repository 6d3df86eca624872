"""Runs the same training on several numbers of processes in turn, and says what the additional ones bring.

Weak scaling keeps the batch of each process, strong scaling the batch of all of them together.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from utils.errors import UserError
from utils.logs import format_table
from utils.runtime import PROJECT_FOLDER
from utils.scaling_rank import RankJob

MOST_CPU_PROCESSES = 8
_POLL_S = 0.05
# The tie to the parent comes first: importing PyTorch takes seconds, in which the parent may be killed.
_RANK_CODE = (
    "from utils.runtime import die_with_parent; die_with_parent(only_under_torchrun=False); "
    "from utils.errors import run_script; from utils.scaling_rank import main; run_script(main)"
)
_USER_ERROR = re.compile(r"^(\[rank \d+\] )?error: ")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception)\b")  # the last line of a traceback
_MEDIANS = (
    "step_ms",
    "compute_ms",
    "waiting_ms",
    "communication_ms",
    "imbalance",
    "allreduce_ms",
    "allreduce_gb_per_s",
)

Run = dict[str, Any]


def process_counts(num_devices: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to the number of devices, and that number itself."""
    doubled = [2**power for power in range(num_devices.bit_length()) if 2**power <= num_devices]
    return tuple(sorted({*doubled, max(num_devices, 1)}))


def run_benchmark(
    job: RankJob,
    counts: Sequence[int],
    scalings: Sequence[str],
    repeats: int,
    on_run: Callable[[Run], None],
) -> list[Run]:
    """Run every count and scaling `repeats` times; return one record a run.

    `job.global_batch_size` is what a single process trains with. A round measures every count before the next round
    begins, so that whatever else the machine does strikes all of them alike. Raises UserError when a run fails.
    """
    runs = []
    for repeat in range(repeats):
        for count in counts:
            for scaling in scalings:
                batch_size = job.global_batch_size * (count if scaling == "weak" else 1)
                answers = run_ranks(replace(job, global_batch_size=batch_size), count)
                run = {"scaling": scaling, "processes": count, "repeat": repeat + 1, **summarise_run(answers)}
                runs.append(run)
                on_run(run)
    return runs


def run_ranks(job: RankJob, world_size: int) -> list[dict[str, Any]]:
    """Start `world_size` ranks and return their answers in rank order; no process is left when this returns.

    Raises UserError with the reason of the first rank that failed, or when `job.timeout_s` is over.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT_FOLDER)}
    environment.update(WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    if sys.platform.startswith("linux"):
        environment.update(GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo")
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-ddp-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        deadline_s = time.monotonic() + job.timeout_s
        try:
            for rank in range(world_size):
                # -P: a folder `utils` where the user happens to stand is not ours.
                command = [sys.executable, "-P", "-c", _RANK_CODE, name]
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                with _log_file(folder, rank).open("wb") as log:
                    processes.append(subprocess.Popen(command, env={**environment, **place}, stdout=log, stderr=log))
            _wait(processes, folder, deadline_s, job.timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((folder / f"rank{rank}.json").read_bytes()) for rank in range(world_size)]


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, deadline_s: float, timeout_s: float) -> None:
    """Return when every rank is done. Raises UserError after the first failure or at the deadline."""
    of = f"of {len(processes)} process(es)"
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise UserError(f"rank {rank} {of} failed (code {code}): {_reason(_log_file(folder, rank))}")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline_s:
            missing = ", ".join(str(rank) for rank, code in enumerate(codes) if code is None)
            raise UserError(
                f"rank {missing} {of} not done after {timeout_s:g} s; raise --timeout-s, or lower --steps or --batch-size"
            )
        time.sleep(_POLL_S)


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if _USER_ERROR.match(line) or _EXCEPTION.match(line)]
    return _USER_ERROR.sub("", (telling or lines or ["it said nothing"])[-1])


def _log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


def summarise_run(answers: Sequence[dict[str, Any]]) -> Run:
    """Reduce the ranks' answers to one record; times are means over the steps, in ms.

    A step of the slowest rank takes step = compute (mean over ranks) + waiting (slowest rank's compute less the mean)
    + communication (what is left: gradients, normalisers and batch statistics not hidden behind compute). Imbalance is
    waiting / compute. Bus bandwidth is nccl-tests' 2 (n - 1) / n * bytes / time, which does not depend on n.
    """
    count = len(answers)
    step_ms = float(max(np.mean(answer["step_ms"]) for answer in answers))
    compute = np.array([np.mean(answer["compute_ms"]) for answer in answers])
    global_batch_size = sum(answer["batch_size"] for answer in answers)
    run: Run = {
        "global_batch_size": global_batch_size,
        "images_per_s": global_batch_size / step_ms * 1000,
        "step_ms": step_ms,
        "compute_ms": float(compute.mean()),
        "waiting_ms": float(compute.max() - compute.mean()),
        "communication_ms": step_ms - float(compute.max()),
        "imbalance": float(compute.max() / compute.mean() - 1),
        "gradient_bytes": answers[0]["gradient_bytes"],
        "allreduce_ms": None,
        "allreduce_gb_per_s": None,
    }
    if count > 1:
        # Nobody has the sum before the slowest rank has it.
        run["allreduce_ms"] = float(np.median(np.max([answer["allreduce_ms"] for answer in answers], axis=0)))
        moved_gb = 2 * (count - 1) / count * run["gradient_bytes"] / 1e9
        run["allreduce_gb_per_s"] = moved_gb / (run["allreduce_ms"] / 1000)
    run["compute_ms_by_rank"] = compute.tolist()
    run["phase_ms_by_rank"] = [answer["phase_ms"] for answer in answers]
    return run


def summarise(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return one row for each scaling and count: medians over the repeats, speed-up and efficiency.

    Speed-up is the median over rounds of images/s against the fewest processes of the same round; efficiency is
    speed-up over the growth of the number of processes.
    """
    by_key: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        by_key.setdefault((run["scaling"], run["processes"]), []).append(run)
    rows = []
    for (scaling, count), mine in by_key.items():
        fewest = min(other for kind, other in by_key if kind == scaling)
        base = by_key[scaling, fewest]
        speed_up = median(run["images_per_s"] / first["images_per_s"] for run, first in zip(mine, base, strict=True))
        speeds = [run["images_per_s"] for run in mine]
        row: dict[str, Any] = {
            "scaling": scaling,
            "processes": count,
            "global_batch_size": mine[0]["global_batch_size"],
            "images_per_s": median(speeds),
            "images_per_s_min": min(speeds),
            "images_per_s_max": max(speeds),
            "speed_up": speed_up,
            "efficiency": speed_up * fewest / count,
        }
        for name in _MEDIANS:
            values = [run[name] for run in mine]
            row[name] = None if None in values else median(values)
        rows.append(row)
    return sorted(rows, key=lambda row: (("weak", "strong").index(row["scaling"]), row["processes"]))


def noise_note(rows: Iterable[dict[str, Any]]) -> str | None:
    """Return a line about communication that came out below zero, or None."""
    if all(row["communication_ms"] >= 0 for row in rows):
        return None
    return (
        "Communication below 0: steps without it took longer, so the machine's load changed by more than it costs; "
        "repeat on an idle machine or with more --steps"
    )


def scaling_table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the summary out as a table; times are ms per step."""
    columns = {
        "images/s": ("images_per_s", "{:.1f}"),
        "speed-up": ("speed_up", "{:.2f}x"),
        "efficiency": ("efficiency", "{:.0%}"),
        "ms/step": ("step_ms", "{:.1f}"),
        "own work": ("compute_ms", "{:.1f}"),
        "waiting": ("waiting_ms", "{:.1f}"),
        "communic.": ("communication_ms", "{:.1f}"),
        "imbalance": ("imbalance", "{:.1%}"),
        "all-reduce": ("allreduce_ms", "{:.1f}"),
        "GB/s": ("allreduce_gb_per_s", "{:.2f}"),
    }
    header = ["scaling", "processes", "batch", *(title.rjust(9) for title in columns)]
    lines = []
    for row in rows:
        cells = ["-" if row[key] is None else form.format(row[key]) for key, form in columns.values()]
        widths = [max(9, len(title)) for title in columns]
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append([row["scaling"], row["processes"], row["global_batch_size"], *padded])
    return format_table(header, lines)
