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
from utils.interconnect import bus_gb_per_s
from utils.logs import format_bytes, format_table
from utils.measured_loader import DATA
from utils.runtime import PROJECT_FOLDER
from utils.scaling_rank import RankJob
from utils.step_ranges import RANGES, split_collectives
from utils.step_timer import PHASES

MOST_CPU_PROCESSES = 8
MOST_OTHER_LOAD = 0.05
_POLL_S = 0.05
# The tie to the parent comes first: importing PyTorch takes seconds, in which the parent may be killed.
_RANK_CODE = (
    "from utils.runtime import die_with_parent; die_with_parent(only_under_torchrun=False); "
    "from utils.errors import run_script; from utils.scaling_rank import main; run_script(main)"
)
_USER_ERROR = re.compile(r"^(\[rank \d+\] )?error: ")
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception)\b")  # the last line of a traceback
# What a step's time is made of.
STEP_PARTS = {
    "compute_ms": "compute",
    "communication_ms": "communication",
    "data_ms": "data wait",
    "waiting_ms": "imbalance",
}
_MEDIANS = (
    *("step_ms", *STEP_PARTS, "ranges_share", "imbalance", "alone_ms", "backward_ms"),
    *("gradient_communication_ms", "other_collectives", "other_bytes", "gradient_bytes"),
    *("allreduce_ms", "allreduce_gb_per_s", "overlap", "net_overlap", "other_load"),
)
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

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
    runs: list[Run] = []
    for repeat in range(repeats):
        for count in counts:
            found: Run | None = None
            for scaling in scalings:
                if scaling == "strong" and count > job.global_batch_size:
                    continue  # somebody would have nothing to do
                if found is None or count > 1:  # with one process both kinds are the same
                    batch_size = job.global_batch_size * (count if scaling == "weak" else 1)
                    with OtherLoad() as others:
                        answers = run_ranks(replace(job, global_batch_size=batch_size), count)
                    found = {**summarise_run(answers), "other_load": others.share}
                runs.append({"scaling": scaling, "processes": count, "repeat": repeat + 1, **found})
                on_run(runs[-1])
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
    """Reduce the ranks' answers to one record; times are means over steps and ranks, in ms.

    step (host's clock, slowest rank) = compute + data + communication + waiting, each from ranges measured within the
    steps; `ranges_share` is their sum over the step. Communication is what the last rank to arrive at a collective spends
    in it, waiting what the others spend beyond. Imbalance is the slowest rank's compute over the mean, less one.
    """
    ranges = np.array([answer["ranges_ms"] for answer in answers])  # (ranks, steps, 7)
    num_steps = ranges.shape[1]
    in_phases = ranges[..., [RANGES.index(phase) for phase in PHASES]].sum((1, 2)) / num_steps  # (ranks,)
    step_ms = max(answer["wall_ms"] for answer in answers) / num_steps
    global_batch_size = sum(answer["num_images"] for answer in answers) / num_steps
    run: Run = {
        "global_batch_size": round(global_batch_size),
        "images_per_s": global_batch_size / step_ms * 1000,
        "step_ms": step_ms,
        "compute_ms": float(in_phases.mean()),
        "data_ms": float(ranges[..., RANGES.index(DATA)].mean()),
        **_communication(answers, num_steps),
        "imbalance": float(in_phases.max() / in_phases.mean() - 1),
        "backward_ms": float(ranges[..., RANGES.index("backward")].mean()),
        "alone_ms": max(float(np.mean(answer["alone_ms"])) for answer in answers),
        "gradient_bytes": answers[0]["gradient_bytes"],
        "allreduce_ms": None,
        "allreduce_gb_per_s": None,
        "overlap": None,
        "net_overlap": None,
        "allreduces": allreduce_points(answers),
        "compute_ms_by_rank": in_phases.tolist(),
        "ranges_ms_by_rank": [dict(zip(RANGES, mean, strict=True)) for mean in ranges.mean(1).tolist()],
    }
    run["ranges_share"] = sum(run[name] for name in STEP_PARTS) / step_ms
    if len(answers) > 1:
        mine = next(point for point in run["allreduces"] if point["bytes"] == run["gradient_bytes"])
        run["allreduce_ms"], run["allreduce_gb_per_s"] = mine["ms"], mine["bus_gb_per_s"]
        run["overlap"] = float(np.clip(1 - run["gradient_communication_ms"] / run["allreduce_ms"], 0, 1))
        # What steps with communication take longer than without, against the time that it takes by itself.
        other_ms = run["communication_ms"] - run["gradient_communication_ms"] + run["waiting_ms"]
        run["net_overlap"] = float(np.clip(1 - (step_ms - run["alone_ms"] - other_ms) / run["allreduce_ms"], 0, 1))
    return run


def _communication(answers: Sequence[dict[str, Any]], num_steps: int) -> dict[str, float]:
    """Return the ms per step of all collectives, of the gradients' one and of waiting; number and bytes of the others."""
    durations_ms = [[ms for step in answer["collectives"] for ms, _ in step] for answer in answers]
    transfer, waiting = split_collectives(durations_ms)
    sizes = np.array([size for step in answers[0]["collectives"] for _, size in step], np.int64)
    is_gradient = sizes == answers[0]["gradient_bytes"]
    return {
        "communication_ms": float(transfer.sum()) / num_steps,
        "waiting_ms": float(waiting.sum()) / num_steps / len(answers),
        "gradient_communication_ms": float(transfer[is_gradient].sum()) / num_steps,
        "other_collectives": float((~is_gradient).sum()) / num_steps,
        "other_bytes": float(sizes[~is_gradient].sum()) / num_steps,
    }


def allreduce_points(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return size, median ms, algorithm and bus bandwidth in GB/s of every all-reduce that was timed by itself."""
    points = []
    for number, first in enumerate(answers[0]["allreduces"]):
        # Nobody has the sum before the slowest rank has it.
        slowest = np.max([answer["allreduces"][number]["ms"] for answer in answers], axis=0)
        size, ms = first["bytes"], float(np.median(slowest))
        bandwidths = {"gb_per_s": size / (ms * 1e6), "bus_gb_per_s": bus_gb_per_s(len(answers), size, ms)}
        points.append({"processes": len(answers), "bytes": size, "ms": ms, **bandwidths})
    return points


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


class OtherLoad:
    """How much of this machine's cores other processes used inside the context: `share`, 0-1; None where unknown.

    Scaling compares one busy core with all of them busy: whoever else computes meanwhile takes from the latter only.
    """

    def __init__(self) -> None:
        self.share: float | None = None
        self._start: tuple[float, float, float] | None = None

    def __enter__(self) -> OtherLoad:
        self._start = _busy_s()
        return self

    def __exit__(self, *_: Any) -> None:
        end = _busy_s()
        if self._start is not None and end is not None:
            elapsed_s, busy_s, own_s = (after - before for after, before in zip(end, self._start, strict=True))
            self.share = max(0.0, busy_s - own_s) / elapsed_s / (os.cpu_count() or 1)


def _busy_s(file: Path = Path("/proc/stat")) -> tuple[float, float, float] | None:
    """Return seconds: the clock, all cores' work so far (with what a hypervisor took), our own and our children's."""
    if not file.is_file():
        return None
    user, nice, system, _, _, interrupt, soft_interrupt, steal = map(float, file.read_text().split()[1:9])
    own = os.times()
    own_s = own.user + own.system + own.children_user + own.children_system
    return time.monotonic(), (user + nice + system + interrupt + soft_interrupt + steal) / _CLOCK_TICKS, own_s


def noise_note(rows: Iterable[dict[str, Any]]) -> str | None:
    """Return a line about other processes that took part in the measurement, or None."""
    most = max((row["other_load"] for row in rows if row["other_load"] is not None), default=0.0)
    if most <= MOST_OTHER_LOAD:
        return None
    return (
        f"Other processes took up to {most:.0%} of this machine's cores meanwhile, which lowers the efficiency shown: "
        "repeat on an idle machine"
    )


def scaling_table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the summary out as a table; the parts of a step are shares of its time."""
    header = ["scaling", "processes", "batch", "images/s", "speed-up", "efficiency", "ms/step"]
    header += [*STEP_PARTS.values(), "sum", "overlap", "net overlap"]
    lines = []
    for row in rows:
        shares = [row[name] / row["step_ms"] for name in STEP_PARTS]
        cells = [f"{row['images_per_s']:.1f}", f"{row['speed_up']:.2f}x", f"{row['efficiency']:.0%}"]
        cells += [f"{row['step_ms']:.1f}", *(f"{share:.1%}" for share in [*shares, row["ranges_share"]])]
        cells += ["-" if row[name] is None else f"{row[name]:.0%}" for name in ("overlap", "net_overlap")]
        lines.append([row["scaling"], row["processes"], row["global_batch_size"], *cells])
    return aligned(header, lines, 3)


def allreduce_table(points: Sequence[dict[str, Any]]) -> str:
    """Lay out the all-reduces that were timed by themselves."""
    lines = [
        [
            point["processes"],
            *(format_bytes(point["bytes"]), f"{point['ms']:.3f}"),
            *(f"{point['gb_per_s']:.2f}", f"{point['bus_gb_per_s']:.2f}"),
        ]
        for point in points
    ]
    return aligned(["processes", "message", "ms", "algorithm GB/s", "bus GB/s"], lines, 1)


def median_points(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return one all-reduce for each count and size: the medians over the runs."""
    by_key: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for run in runs:
        for point in run["allreduces"]:
            by_key.setdefault((point["processes"], point["bytes"]), []).append(point)
    names = ("ms", "gb_per_s", "bus_gb_per_s")
    return [
        {"processes": count, "bytes": size, **{name: median(point[name] for point in points) for name in names}}
        for (count, size), points in sorted(by_key.items())
    ]


def aligned(header: Sequence[str], rows: Sequence[Sequence[Any]], num_plain: int) -> str:
    """Return a table whose columns, from the one numbered `num_plain` on, are texts set to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(str(cell)) for cell in column) for column in columns]
    padded = [
        [
            str(cell).rjust(width) if number >= num_plain else cell
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in (header, *rows)
    ]
    return format_table(padded[0], padded[1:])
