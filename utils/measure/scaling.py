"""The scaling benchmark: run several numbers of processes, summarise the runs, and show them as tables."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

import numpy as np
import psutil

from utils.common.text import format_bytes, format_table
from utils.distributed.rank_processes import run_ranks
from utils.engine.step_timer import PHASES
from utils.measure.scaling_rank import RankJob
from utils.measure.step_ranges import DATA, RANGES

MAX_CPU_PROCESSES = 8
_RANK_CODE = "from utils.measure.scaling_rank import main; run_script(main)"

# Column of a run -> its title: the parts that add up to a step's time.
STEP_PARTS = {
    "compute_ms": "compute",
    "communication_ms": "communication",
    "data_ms": "data wait",
    "waiting_ms": "imbalance",
}
_MEDIANS = (
    *("step_ms", *STEP_PARTS, "ranges_share", "imbalance", "backward_ms"),
    *("gradient_communication_ms", "other_collectives", "other_bytes", "gradient_bytes"),
    *("allreduce_ms", "allreduce_gb_per_s", "overlap", "other_load"),
)
MAX_OTHER_LOAD = 0.05  # share of the machine's cores; above it a note is printed
Run = dict[str, Any]


def process_counts(num_devices: int) -> tuple[int, ...]:
    """Return 1, 2, 4, … up to the number of devices, and that number itself."""
    doubled = [2**power for power in range(num_devices.bit_length()) if 2**power <= num_devices]
    return tuple(sorted({*doubled, max(num_devices, 1)}))


def run_benchmark(
    job: RankJob, counts: Sequence[int], scalings: Sequence[str], repeats: int, on_run: Callable[[Run], None]
) -> list[Run]:
    """Run every process count and scaling `repeats` times; return one record per run.

    `job.global_batch_size` is the batch size of a single process. Each round measures every count once, so that other
    load on the machine affects all counts alike. Raises UserError when a run fails.
    """
    runs: list[Run] = []
    for repeat in range(repeats):
        for count in counts:
            found: Run | None = None
            for scaling in scalings:
                if scaling == "strong" and count > job.global_batch_size:
                    continue  # some process would get no image
                if found is None or count > 1:  # with one process, weak and strong scaling are the same run
                    batch_size = job.global_batch_size * (count if scaling == "weak" else 1)
                    start = busy_s()
                    answers = run_job(replace(job, global_batch_size=batch_size), count)
                    found = {**summarise_run(answers), "other_load": other_load(start, busy_s())}
                runs.append({"scaling": scaling, "processes": count, "repeat": repeat + 1, **found})
                on_run(runs[-1])
    return runs


def run_job(job: RankJob, world_size: int) -> list[dict[str, Any]]:
    """Run a job on `world_size` ranks; return the result of `scaling_rank.measure` of each. Raises UserError."""
    advice = "raise --timeout-s, or lower --steps or --batch-size"
    return run_ranks(_RANK_CODE, world_size, asdict(job), job.timeout_s, timeout_advice=advice)


def summarise_run(answers: Sequence[dict[str, Any]]) -> Run:
    """Reduce the ranks' answers to one record. Times are means over steps and ranks, in ms.

    A step, by the host's clock on the slowest rank, is about compute + data + communication + waiting. These four are
    measured within the steps; `ranges_share` is their sum divided by the step. Communication is the time that the last
    rank to arrive spends in a collective; waiting is the time that the other ranks spend in it beyond that. Imbalance is
    the slowest rank's compute over the mean, minus one.
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
        "gradient_bytes": answers[0]["gradient_bytes"],
        **dict.fromkeys(("allreduce_ms", "allreduce_gb_per_s", "overlap")),  # None with one process
        "allreduces": allreduce_points(answers),
        "compute_ms_by_rank": in_phases.tolist(),
        "ranges_ms_by_rank": [dict(zip(RANGES, mean, strict=True)) for mean in ranges.mean(1).tolist()],
    }
    run["ranges_share"] = sum(run[name] for name in STEP_PARTS) / step_ms
    if len(answers) > 1:
        mine = next(point for point in run["allreduces"] if point["bytes"] == run["gradient_bytes"])
        run["allreduce_ms"], run["allreduce_gb_per_s"] = mine["ms"], mine["bus_gb_per_s"]
        run["overlap"] = float(np.clip(1 - run["gradient_communication_ms"] / run["allreduce_ms"], 0, 1))
    return run


def _communication(answers: Sequence[dict[str, Any]], num_steps: int) -> dict[str, float]:
    """Return per step the ms of all collectives, of the gradients' all-reduce and of waiting; the others' number and bytes."""
    spent_ms = np.array([[ms for step in answer["collectives"] for ms, _ in step] for answer in answers])
    transfer = spent_ms.min(0)  # the last rank to arrive does not wait
    sizes = np.array([size for step in answers[0]["collectives"] for _, size in step], np.int64)
    is_gradient = sizes == answers[0]["gradient_bytes"]
    return {
        "communication_ms": float(transfer.sum()) / num_steps,
        "waiting_ms": float((spent_ms - transfer).sum()) / num_steps / len(answers),
        "gradient_communication_ms": float(transfer[is_gradient].sum()) / num_steps,
        "other_collectives": float((~is_gradient).sum()) / num_steps,
        "other_bytes": float(sizes[~is_gradient].sum()) / num_steps,
    }


def allreduce_points(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return size, median ms, algorithm bandwidth and bus bandwidth (GB/s) of every all-reduce timed by itself.

    Bus bandwidth is defined as in nccl-tests, 2 (n - 1) / n * bytes / time: it does not depend on the number of ranks.
    """
    points = []
    for number, first in enumerate(answers[0]["allreduces"]):
        # The all-reduce ends with its slowest rank.
        slowest = np.max([answer["allreduces"][number]["ms"] for answer in answers], axis=0)
        size, ms = first["bytes"], float(np.median(slowest))
        bandwidths = {
            "gb_per_s": size / (ms * 1e6),
            "bus_gb_per_s": 2 * (len(answers) - 1) / len(answers) * size / (ms * 1e6),
        }
        points.append({"processes": len(answers), "bytes": size, "ms": ms, **bandwidths})
    return points


def summarise(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return one row per scaling and process count: medians over the repeats, speed-up and efficiency.

    Speed-up is images/s divided by that of the fewest processes in the same round (median over rounds). Efficiency is
    speed-up divided by the factor by which the number of processes grew.
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


def other_load(start: tuple[float, ...] | None, end: tuple[float, ...] | None) -> float | None:
    """Return the share (0-1) of this machine's cores that other processes used between two `busy_s`; None if unknown.

    Other load lowers the measured efficiency: it slows runs that need all cores, and hardly those that need one.
    """
    if start is None or end is None:
        return None
    elapsed_s, all_s, own_s = (after - before for after, before in zip(end, start, strict=True))
    return max(0.0, all_s - own_s) / elapsed_s / (os.cpu_count() or 1)


def busy_s() -> tuple[float, ...] | None:
    """Return seconds: the clock, all cores' work so far (with time taken by a hypervisor), ours and our children's."""
    if not psutil.LINUX:
        return None
    times, own = psutil.cpu_times(), os.times()
    all_s = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return time.monotonic(), all_s, own.user + own.system + own.children_user + own.children_system


# --- tables --------------------------------------------------------------------------------------------------------


def noise_note(rows: Iterable[dict[str, Any]]) -> str | None:
    """Return a line about other processes that used the machine during the measurement, or None."""
    largest = max((row["other_load"] for row in rows if row["other_load"] is not None), default=0.0)
    if largest <= MAX_OTHER_LOAD:
        return None
    return (
        f"Other processes used up to {largest:.0%} of this machine's cores during the measurement, which lowers the "
        "efficiency shown: repeat on an idle machine"
    )


def scaling_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `summarise` as a table; the parts of a step are shares of its time."""
    header = ["scaling", "processes", "batch", "images/s", "speed-up", "efficiency", "ms/step"]
    header += [*STEP_PARTS.values(), "sum", "overlap"]
    lines = []
    for row in rows:
        shares = [row[name] / row["step_ms"] for name in STEP_PARTS]
        cells = [f"{row['images_per_s']:.1f}", f"{row['speed_up']:.2f}x", f"{row['efficiency']:.0%}"]
        cells += [f"{row['step_ms']:.1f}", *(f"{share:.1%}" for share in [*shares, row["ranges_share"]])]
        cells.append("-" if row["overlap"] is None else f"{row['overlap']:.0%}")
        lines.append([row["scaling"], row["processes"], row["global_batch_size"], *cells])
    return format_table(header, lines, right_from=3)


def allreduce_table(points: Sequence[dict[str, Any]]) -> str:
    """Return the all-reduces that were timed by themselves as a table."""
    lines = []
    for point in points:
        speeds = [f"{point['gb_per_s']:.2f}", f"{point['bus_gb_per_s']:.2f}"]
        lines.append([point["processes"], format_bytes(point["bytes"]), f"{point['ms']:.3f}", *speeds])
    return format_table(["processes", "message", "ms", "algorithm GB/s", "bus GB/s"], lines, right_from=1)


def median_points(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return one row per process count and message size: medians over the runs."""
    by_key: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for run in runs:
        for point in run["allreduces"]:
            by_key.setdefault((point["processes"], point["bytes"]), []).append(point)
    names = ("ms", "gb_per_s", "bus_gb_per_s")
    return [
        {"processes": count, "bytes": size, **{name: median(point[name] for point in points) for name in names}}
        for (count, size), points in sorted(by_key.items())
    ]
