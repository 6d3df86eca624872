"""Measure how each command's processor time and memory grow with the photographs, and extrapolate
to EPRI's data set.

    python benchmarks/scale.py --sizes 500 2000
    python benchmarks/scale.py --only parse check --megapixels 0
    python benchmarks/scale.py --photographs flight/   # real photographs of 20 megapixels

A size is a data set of small drawn photographs, none like another, with 15 objects each. 20
photographs of 20 megapixels show what pixels cost. Each command is a whole process on one thread;
its descendants count. Finished measurements are kept in --output: after an interruption run the
command again; delete lines of measured.jsonl there to repeat them. A size is left out if the
smaller ones predict that it takes too long.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# started by its path: Python would search this folder instead of the project's
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import psutil

from benchmarks.jobs import Job
from benchmarks.scale_sets import draw_large, draw_small, write_photographs
from yolo_seg_ddp.data.dataset_yaml import list_photos
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.environment import environment_report, git_revision
from yolo_seg_ddp.utils.errors import UserError, run_script
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.options import Options, option

# Sets of FEW photographs. START and NEW are small ones: the cost of a start, and what no model has
# seen. The other two are the same photographs of 20 megapixels, parsed at 1280 px and at their own
# size.
START, NEW, SHRUNK, NATIVE = "start", "new", "shrunk", "native"
FEW = 20
IMG_SIZE_PX = 128  # of the network, so small that its computations cost little beside all else
HERE = "@"  # in a command's words
FIRST_STEP = "  Batch ["  # a training prints this, and is stopped
Row = dict[str, Any]
Rows = dict[tuple[str, str], Row]  # by command and set

EPRI_PHOTOGRAPHS = 29_620
VAL_FRACTION = 0.2
DISKS = {"200 MB/s": 200e6, "3 GB/s": 3e9}  # bytes per second
# Machines, cores of each, ranks of each.
CLUSTERS = {"1 core": (1, 1, 1), "16 cores": (1, 16, 1), "4 x 64 cores": (4, 64, 8)}

# How the commands share their work; RANKS need a model. Python runs on one thread at a time, so
# threads share only what pixels cost.
ALONE, THREADS, MACHINES, RANKS = "alone", "threads", "threads of all machines", "ranks"
SHARED = {
    "parse": THREADS,
    "check": THREADS,
    "prepare": MACHINES,
    "start_1": ALONE,
    "start_2": ALONE,
    "near_duplicates": ALONE,
    "evaluate": RANKS,
    "inference": RANKS,
    "maps": THREADS,
    "unlabelled": RANKS,
}
WITHOUT_PIXELS = ("start_1", "start_2", "near_duplicates")


@dataclass(frozen=True)
class ScaleConfig(Options):
    sizes: tuple[int, ...] = option(
        (500, 2000, 8000, 30_000), "numbers of small photographs", at_least=100
    )
    megapixels: int = option(20, "size of the large photographs; 0: none", choices=(0, 20))
    photographs: str | None = option(
        None, "folder of real large photographs; unset: drawn ones", metavar="DIR"
    )
    only: tuple[str, ...] = option(tuple(SHARED), "commands to measure", choices=tuple(SHARED))
    model: str = option(
        "yolov8n-seg.yaml",
        "the measured model begins as this one, and learns from the smallest size",
    )
    most_minutes: float = option(
        15.0, "most processor time of a measurement, as predicted", above=0
    )
    most_gib: float = option(
        8.0, "most memory of a measurement; beyond it the command is ended", above=0
    )
    output: str = option(
        "outputs/benchmarks/scale", "folder for data sets, logs and results", metavar="DIR"
    )


def main() -> int:
    """Measure, and write the tables and records; return the exit code."""
    config = parse_config(ScaleConfig, __doc__)
    folder = Path(config.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "measured.jsonl"
    log.touch()
    sizes = [str(number) for number in sorted(config.sizes)]
    sets = [START, *sizes, *([SHRUNK, NATIVE] if config.megapixels else [])]

    files = list_photos(config.photographs) if config.photographs else []
    for name in (NEW, *sets):
        raw = raw_folder(name, folder)
        drawn = raw.with_name("drawn")
        if not drawn.exists():
            seed = int.from_bytes(name.encode())
            large = (draw_large(index, files) for index in range(FEW))
            small = (
                draw_small(seed, index) for index in range(int(name) if name in sizes else FEW)
            )
            write_photographs(raw, large if name in (SHRUNK, NATIVE) else small)
            drawn.touch()

    for command in config.only:
        for name in sets:
            rows = read(log)
            if (command, name) in rows or (command in WITHOUT_PIXELS and name in (SHRUNK, NATIVE)):
                continue
            row: Row = {
                "command": command,
                "set": name,
                "number": int(name) if name in sizes else FEW,
            }
            if command == "evaluate":
                row["number"] = len([*(folder / name / "data" / "val" / "images").iterdir()])
            row |= {"date": f"{time.strftime('%Y-%m-%d')}", "revision": git_revision()[:8]}
            row |= measure(row, rows, folder, config)
            with log.open("a") as file:
                print(json.dumps(row), file=file)
            print(json.dumps(row), flush=True)

    lines: list[str] = []
    records = [about(read(log))]
    for head, *table in (measured_table(read(log)), extrapolated_table(read(log))):
        lines += [
            "",
            *(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *table)),
        ]
        for first, *cells in table:
            numbers = [
                [*map(float, re.findall(r"\d+\.?\d*", cell.replace(",", "")))] for cell in cells
            ]
            values = {column: of for column, of in zip(head[1:], numbers, strict=True) if of}
            records.append(
                {
                    "in": "docs/epri.md",
                    "of": ["scale"],
                    "what": first.replace("`", ""),
                    "values": values,
                }
            )
    write_text_atomic(folder / "tables.md", "\n".join(lines) + "\n")
    write_text_atomic(folder / "records.jsonl", "\n".join(map(json.dumps, records)) + "\n")
    print(*lines, f"\nTables and records in {folder}", sep="\n")
    return 0


def read(log: Path) -> Rows:
    """Return what was measured, or left out, before."""
    rows = map(json.loads, log.read_text().splitlines())
    return {(row["command"], row["set"]): row for row in rows}


def raw_folder(name: str, folder: str | Path) -> Path:
    """Return where a set's photographs and labels are before they are parsed."""
    return Path(folder) / ("large" if name in (SHRUNK, NATIVE) else name) / "raw"


def command_line(command: str, name: str) -> str:
    """Return a command on a set, as words after `python`. HERE stands for the folder --output."""
    home = f"{HERE}/{name}"
    data = f"{home}/data/dataset.yaml"
    # A fifth of FEW would be too few.
    fraction = VAL_FRACTION if name.isdecimal() else 0.5
    side = "native" if name == NATIVE else 1280
    # It names a folder that must be new.
    again = time.time_ns()

    training = f"--data {data} --img-size {IMG_SIZE_PX} {'--windows 8' if name == NATIVE else ''}"
    start = (
        f"{training} --model yolov8n-seg.yaml --batch-size 8 --device cpu --threads 1 --save-dir "
        f"{home}/run{again}"
    )
    predict = f"--model {HERE}/model/last.pt --device cpu --threads 1 --tiles off"
    return {
        "parse": f"parse_labels.py --input {raw_folder(name, HERE)} --output {home}/data "
        "--long-side "
        f"{side} "
        f"--val-fraction {fraction}",
        "check": f"check_data.py --data {data} --output {home}/check --tolerate",
        "prepare": f"prepare_data.py {training}",
        "start_1": f"train_yolo_ddp.py {start}",
        "start_2": "-m torch.distributed.run --standalone --nproc-per-node 2 train_yolo_ddp.py "
        f"{start}",
        "near_duplicates": f"-m benchmarks.scale_sets {name if name.isdecimal() else FEW}",
        "evaluate": f"evaluate_model.py {predict} --data {data} --output {home}/evaluation "
        "--mask-resolution native",
        "inference": f"inference.py {predict} --source {home}/data/*/images/* --output "
        f"{home}/predictions",
        "maps": f"-m yolo_seg_ddp maps --predictions {home}/predictions",
        "unlabelled": f"-m yolo_seg_ddp unlabelled {predict} --labelled {data} --photos "
        f"{raw_folder(NEW, HERE)} "
        f"--output {home}/more{again}",
    }[command]


def measure(row: Row, rows: Rows, folder: Path, config: ScaleConfig) -> Row:
    """Run the command of a row on its set; return what it took, or why it is left out."""
    command, name = row["command"], row["set"]
    if name.isdecimal() and len(sizes_of(rows, command)) > 1:
        minutes = predict(rows, command, row["number"])[0] / 60
        if minutes > config.most_minutes:
            return {"left_out": f"about {minutes:.0f} min"}
    if SHARED[command] == RANKS and not (folder / "model" / "last.pt").exists():
        data = (
            f"{HERE}/{min(config.sizes)}/data/dataset.yaml --img-size {IMG_SIZE_PX} --batch-size "
            "16 --epochs 8"
        )
        words = (
            f"train_yolo_ddp.py --data {data} --model {config.model} --device cpu --save-dir "
            f"{HERE}/model"
        )
        run(words, folder, "model", config.most_gib, until=None)

    # The first read of a file shall come from the disk.
    for file in filter(
        Path.is_file, [*raw_folder(name, folder).rglob("*"), *(folder / name).rglob("*")]
    ):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return run(command_line(command, name), folder, f"{command}-{name}", config.most_gib)


def run(
    words: str, folder: Path, log_name: str, most_gib: float, until: str | None = FIRST_STEP
) -> Row:
    """Run a command and return its processor time, peak memory and traffic with the disk, all with
    its descendants'.

    What several processes share counts once. It is stopped as soon as it prints `until`. Raises
    UserError when it fails.
    """
    log_file = folder / "logs" / f"{log_name}-{time.time_ns()}.log"
    command = [sys.executable, *(word.replace(HERE, str(folder)) for word in words.split())]
    peak_bytes, is_stopped = 0, False
    with Job(command, log_file, OPENBLAS_NUM_THREADS="1") as job:
        # The kernel keeps the figures of an ended process until they are read: first those of its
        # files, then the rest.
        while not os.waitid(os.P_PID, job.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            # One may have just ended.
            with suppress(psutil.Error):
                peak_bytes = max(
                    peak_bytes, sum(process.memory_full_info().pss for process in job.family())
                )
            is_wanted = peak_bytes < most_gib * 2**30 and (
                until is None or until not in job.output()
            )
            if not is_wanted and not is_stopped:
                job.popen.send_signal(signal.SIGTERM)
                is_stopped = True
            # The shortest command takes 0.2 s.
            time.sleep(0.05)
        traffic = dict(
            line.split(": ") for line in Path(f"/proc/{job.popen.pid}/io").read_text().splitlines()
        )
        _, status, usage = os.wait4(job.popen.pid, 0)
        job.popen.returncode = os.waitstatus_to_exitcode(status)

    if peak_bytes >= most_gib * 2**30:
        return {"left_out": f"more than {most_gib:g} GiB"}
    if job.popen.returncode and not is_stopped:
        raise UserError(
            f"{words} ended with {job.popen.returncode}: {job.last_line()}; see {log_file}"
        )
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(peak_bytes / 2**20),
        "traffic_mb": round((int(traffic["read_bytes"]) + int(traffic["write_bytes"])) / 1e6, 1),
    }


def sizes_of(rows: Rows, command: str) -> list[Row]:
    """Return a command's measurements on the sizes, the smallest first."""
    chosen = [
        row
        for (of, name), row in rows.items()
        if of == command and name.isdecimal() and "cpu_s" in row
    ]
    return sorted(chosen, key=lambda row: row["number"])


def predict(rows: Rows, command: str, number: int) -> tuple[float, float]:
    """Return the processor time in s on `number` small photographs, and p of the law N^p.

    p is the slope of log time over log N, without the time of START, of at most three sizes that
    add a tenth to that time: 1 if less than two do.
    """
    start_s = rows[command, START]["cpu_s"]
    added = [(row["number"], row["cpu_s"] - start_s) for row in sizes_of(rows, command)[-3:]]
    clear = np.array([pair for pair in added if pair[1] > 0.1 * start_s])
    power = (
        float(np.polyfit(np.log(clear[:, 0]), np.log(clear[:, 1]), 1)[0]) if len(clear) > 1 else 1.0
    )
    largest, added_s = added[-1]
    return start_s + max(added_s, 0.0) * (number / largest) ** power, power


def of_pixels(rows: Rows, command: str, name: str, what: str) -> float:
    """Return how much more a photograph of SHRUNK or NATIVE takes than a small one: `cpu_s` or
    `traffic_mb`.
    """
    large = rows[command, name]
    return max(large[what] - rows[command, START][what], 0) / large["number"]


def extrapolate(rows: Rows, command: str, name: str, cluster: str, disk: str) -> float:
    """Return a command's seconds on EPRI's data set: the larger of the time of the cores and that
    of the disk.
    """
    machines, cores, ranks = CLUSTERS[cluster]
    number = round(EPRI_PHOTOGRAPHS * (VAL_FRACTION if command == "evaluate" else 1))
    python_s = predict(rows, command, number)[0]
    pixels_s = number * of_pixels(rows, command, name, "cpu_s")
    disk_s = number * of_pixels(rows, command, name, "traffic_mb") * 1e6 / DISKS[disk]
    if SHARED[command] == RANKS:
        return max((python_s + pixels_s) / (machines * ranks), disk_s)
    at_once = cores * (machines if SHARED[command] == MACHINES else 1)
    return max(python_s + pixels_s / at_once, disk_s)


def measured_table(rows: Rows) -> Iterator[list[str]]:
    """Yield the cells of the measured figures; first the head."""
    numbers = sorted({name for _, name in rows if name.isdecimal()}, key=int)
    columns = ["start", *(f"{int(number):,}" for number in numbers), "N^p", "MiB"]
    yield ["command", *columns, "ms more at 1280 px", "ms more at 20 MP", "MB at 20 MP"]
    for command in SHARED:
        if measured := sizes_of(rows, command):
            of_sets = [rows.get((command, name), {"left_out": ""}) for name in (START, *numbers)]
            cells = [
                row["left_out"] if "left_out" in row else f"{row['cpu_s']:.1f}" for row in of_sets
            ]
            cells += [f"{predict(rows, command, 1)[1]:.2f}", f"{measured[-1]['peak_mib']:,}"]
            for name, what, factor in (
                (SHRUNK, "cpu_s", 1000),
                (NATIVE, "cpu_s", 1000),
                (NATIVE, "traffic_mb", 1),
            ):
                is_known = "cpu_s" in rows.get((command, name), ())
                cells.append(
                    f"{factor * of_pixels(rows, command, name, what):.0f}" if is_known else ""
                )
            yield [f"`{command}`", *cells]


def extrapolated_table(rows: Rows) -> Iterator[list[str]]:
    """Yield the cells of the times on EPRI's data set; first the head."""
    yield ["command", *(f"{cluster}, {disk}" for cluster in CLUSTERS for disk in DISKS)]
    for name, words in ((SHRUNK, "1280 px"), (NATIVE, "native")):
        for command in SHARED:
            if sizes_of(rows, command) and "cpu_s" in rows.get((command, name), ()):
                times_s = [
                    extrapolate(rows, command, name, cluster, disk)
                    for cluster in CLUSTERS
                    for disk in DISKS
                ]
                cells = [
                    f"{max(s / 60, 1):.0f} min" if s < 5400 else f"{s / 3600:.1f} h"
                    for s in times_s
                ]
                yield [f"`{command}`, {words}", *cells]


def about(rows: Rows) -> Row:
    """Return what docs/results/records.jsonl says of a measurement."""
    machine = environment_report()
    return {
        "id": "scale",
        "command": "python benchmarks/scale.py",
        "revision": ", ".join({row["revision"]: None for row in rows.values()}),
        "date": max(row["date"] for row in rows.values()),
        "machine": f"one core of an {machine['cpu']}, torch {machine['torch']}",
    }


if __name__ == "__main__":
    run_script(main)
