"""Runs the scaling benchmark at several numbers of processes and summarises it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from utils.measure.interconnect import bus_gb_per_s
from utils.measure.rank_processes import run_ranks
from utils.measure.scaling_rank import RankJob
from utils.measure.step_ranges import DATA, RANGES, split_collectives
from utils.measure.step_timer import PHASES

MOST_CPU_PROCESSES = 8
_RANK_CODE = "from utils.measure.scaling_rank import main; run_script(main)"

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
                        answers = run_job(replace(job, global_batch_size=batch_size), count)
                    found = {**summarise_run(answers), "other_load": others.share}
                runs.append({"scaling": scaling, "processes": count, "repeat": repeat + 1, **found})
                on_run(runs[-1])
    return runs


def run_job(job: RankJob, world_size: int) -> list[dict[str, Any]]:
    """Run a job on `world_size` ranks; return the result of `scaling_rank.measure` of each. Raises UserError."""
    advice = "raise --timeout-s, or lower --steps or --batch-size"
    return run_ranks(_RANK_CODE, world_size, asdict(job), job.timeout_s, timeout_advice=advice)


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
