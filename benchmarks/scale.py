"""Measure how each command's processor time and memory grow with the photographs, and extrapolate to EPRI's data set.

    python benchmarks/scale.py --sizes 500 2000
    python benchmarks/scale.py --only parse check --megapixels 0
    python benchmarks/scale.py --photographs flight/   # real photographs of 20 megapixels

A size is a data set of small drawn photographs, none like another, with 15 objects each. 20 photographs of 20 megapixels
show what pixels cost. Each command is a whole process on one thread; its descendants count. Finished measurements are
kept in --output: after an interruption run the command again; delete lines of measured.jsonl there to repeat them. A size
is left out if the smaller ones predict that it takes too long.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import psutil

from benchmarks.scale_sets import draw_small, large_scenes, write_photographs
from utils.common.config import Options, option, parse_config
from utils.common.environment import PROJECT_FOLDER, environment_report, git_revision, python_path
from utils.common.errors import UsageError, UserError, run_script
from utils.common.files import write_text_atomic

# Sets of FEW photographs. START and NEW are small ones: the cost of a start, and what no model has seen. The other two are
# the same photographs of 20 megapixels, parsed at 1280 px and at their own size.
START, NEW, SHRUNK, NATIVE = "start", "new", "shrunk", "native"
FEW = 20
IMG_SIZE_PX = 128  # of the network, so small that its computations cost little beside all else
FIRST_STEP = "  Batch ["  # a training prints this, and is stopped
POLL_S = 0.5
Row = dict[str, Any]

EPRI_PHOTOGRAPHS = 29_620
VAL_FRACTION = 0.2
DISKS = {"200 MB/s": 200e6, "3 GB/s": 3e9}  # bytes per second
# Machines, cores of each, ranks of each.
CLUSTERS = {"1 core": (1, 1, 1), "16 cores": (1, 16, 1), "4 x 64 cores": (4, 64, 8)}

# How the commands share their work. Python runs on one thread at a time, so threads share only what pixels cost.
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
NEEDS_MODEL = ("evaluate", "inference", "unlabelled")
WITHOUT_PIXELS = ("start_1", "start_2", "near_duplicates")
NEAR_DUPLICATES = """
import sys
import numpy as np
from utils.sources.near_duplicates import SIGNATURE_BYTES, likely_pairs
draw = np.random.default_rng(0)
likely_pairs([draw.bytes(SIGNATURE_BYTES) for _ in range(int(sys.argv[1]))])
"""


@dataclass(frozen=True)
class ScaleConfig(Options):
    sizes: tuple[int, ...] = option((500, 2000, 8000, 30_000), "numbers of small photographs", at_least=100)
    megapixels: int = option(20, "size of the large photographs; 0: none", choices=(0, 20))
    photographs: str | None = option(None, "folder of real large photographs; unset: drawn ones", metavar="DIR")
    only: tuple[str, ...] = option(tuple(SHARED), "commands to measure", metavar="COMMAND")
    model: str = option("yolov8n-seg.yaml", "the measured model begins as this one, and learns from the smallest size")
    most_minutes: float = option(15.0, "most processor time of a measurement, as predicted", above=0)
    most_gib: float = option(8.0, "most memory of a measurement; beyond it the command is ended", above=0)
    output: str = option("outputs/benchmarks/scale", "folder for data sets, logs and results", metavar="DIR")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := {*self.only} - SHARED.keys():
            raise UsageError(f"--only {min(unknown)}: no such command; choose from {', '.join(SHARED)}")


def main() -> int:
    """Measure, and write the tables and records; return the exit code."""
    config = parse_config(ScaleConfig, __doc__)
    folder = Path(config.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "measured.jsonl"
    log.touch()
    sizes = [str(number) for number in sorted(config.sizes)]
    sets = [START, *sizes, *([SHRUNK, NATIVE] if config.megapixels else [])]

    for name in (NEW, *sets):
        raw = folder / raw_folder(name)
        if raw.with_name("drawn").exists():
            continue
        seed = int.from_bytes(name.encode())
        small = (draw_small(seed, index) for index in range(int(name) if name in sizes else FEW))
        is_large = name in (SHRUNK, NATIVE)
        write_photographs(raw, large_scenes(FEW, config.photographs) if is_large else small)
        raw.with_name("drawn").touch()
    for command in config.only:
        for name in sets:
            rows = [*map(json.loads, log.read_text().splitlines())]
            is_known = any((row["command"], row["set"]) == (command, name) for row in rows)
            if not is_known and not (name in (SHRUNK, NATIVE) and command in WITHOUT_PIXELS):
                row: Row = {"command": command, "set": name, "number": int(name) if name in sizes else FEW}
                if command == "evaluate":
                    row["number"] = len([*(folder / name / "data" / "val" / "images").iterdir()])
                row |= {"date": f"{datetime.now(UTC):%Y-%m-%d}", "revision": git_revision()[:8]}
                row |= measure(row, rows, folder, config)
                with log.open("a") as file:
                    print(json.dumps(row), file=file)
                print(json.dumps(row), flush=True)

    rows = [*map(json.loads, log.read_text().splitlines())]
    tables = [*measured_table(rows), "", *extrapolated_table(rows)]
    write_text_atomic(folder / "tables.md", "\n".join(tables) + "\n")
    write_text_atomic(folder / "records.jsonl", "".join(json.dumps(one) + "\n" for one in records_of(tables, rows)))
    print(*tables, f"\nTables and records in {folder}", sep="\n")
    return 0


def raw_folder(name: str) -> str:
    """Return where a set's photographs and labels are before they are parsed, below --output."""
    return f"{'large' if name in (SHRUNK, NATIVE) else name}/raw"


def command_line(command: str, name: str) -> str:
    """Return a command on a set, as words after `python`, for the folder --output."""
    data = f"{name}/data/dataset.yaml"
    fraction = VAL_FRACTION if name.isdecimal() else 0.5  # a fifth of FEW would be too few
    side = "native" if name == NATIVE else 1280
    again = time.time_ns()  # in the name of a folder that must be new

    training = f"--data {data} --img-size {IMG_SIZE_PX} {'--windows 8' if name == NATIVE else ''}"
    start = f"{training} --model yolov8n-seg.yaml --batch-size 8 --device cpu --threads 1 --save-dir {name}/run{again}"
    predict = "--model model/last.pt --device cpu --threads 1 --tiles off"
    return {
        "parse": f"parse_labels.py --input {raw_folder(name)} --output {name}/data --long-side {side} "
        f"--val-fraction {fraction}",
        "check": f"check_data.py --data {data} --output {name}/check --tolerate",
        "prepare": f"prepare_data.py {training}",
        "start_1": f"train_yolo_ddp.py {start}",
        "start_2": f"-m torch.distributed.run --standalone --nproc-per-node 2 train_yolo_ddp.py {start}",
        "evaluate": f"evaluate_model.py {predict} --data {data} --output {name}/evaluation --mask-resolution native",
        "inference": f"inference.py {predict} --source {name}/data/*/images/* --output {name}/predictions",
        "maps": f"-m extras.maps --predictions {name}/predictions",
        "unlabelled": f"-m extras.unlabelled {predict} --labelled {data} --photos {raw_folder(NEW)} "
        f"--output {name}/more{again}",
    }[command]


def measure(row: Row, rows: list[Row], folder: Path, config: ScaleConfig) -> Row:
    """Run the command of a row on its set; return what it took, or why it is left out."""
    command, name = row["command"], row["set"]
    if name.isdecimal() and len(sizes_of(rows, command)) > 1:
        minutes = predict(rows, command, row["number"]) / 60
        if minutes > config.most_minutes:
            return {"left_out": f"about {minutes:.0f} min"}
    if command in NEEDS_MODEL and not (folder / "model" / "last.pt").exists():
        smallest = f"--data {min(config.sizes)}/data/dataset.yaml --img-size {IMG_SIZE_PX} --model {config.model}"
        words = f"train_yolo_ddp.py {smallest} --epochs 8 --batch-size 16 --device cpu --save-dir model"
        run(words.split(), folder, "model", config.most_gib, until=None)

    words = ["-c", NEAR_DUPLICATES, str(row["number"])]
    if command != "near_duplicates":
        words = command_line(command, name).split()
    return run(words, folder, f"{command}-{name}", config.most_gib)


def run(words: list[str], folder: Path, log_name: str, most_gib: float, until: str | None = FIRST_STEP) -> Row:
    """Run a command and return its processor time, peak memory and bytes read and written, all with its descendants'.

    It is stopped as soon as it prints `until`. Raises UserError when it fails.
    """
    log_file = folder / "logs" / f"{log_name}.log"
    log_file.parent.mkdir(exist_ok=True)
    words = [str(PROJECT_FOLDER / word) if word.endswith(".py") else word for word in words]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=os.environ | one_thread, stdout=log, stderr=log
        )
    peak_bytes, is_stopped = 0, False

    # The kernel keeps the figures of an ended process until they are read: first those of its files, then the rest.
    while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(POLL_S)
        peak_bytes = max(peak_bytes, memory_bytes(process.pid))
        is_too_large = peak_bytes > most_gib * 2**30
        is_there = until is not None and until in log_file.read_text(errors="replace")
        if (is_too_large or is_there) and not is_stopped:
            process.send_signal(signal.SIGTERM)
            is_stopped = True
    traffic = dict(line.split(": ") for line in Path(f"/proc/{process.pid}/io").read_text().splitlines())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)

    if peak_bytes > most_gib * 2**30:
        return {"left_out": f"more than {most_gib:g} GiB"}
    if process.returncode and not is_stopped:
        raise UserError(f"{words[0]} ended with {process.returncode}; see {log_file}")
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(peak_bytes / 2**20),
        "traffic_mb": round((int(traffic["rchar"]) + int(traffic["wchar"])) / 1e6, 1),
    }


def memory_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants. What several of them share counts once."""
    total = 0
    with suppress(psutil.Error):  # it has just ended
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            total += process.memory_full_info().pss
    return total


def find(rows: list[Row], command: str, name: str) -> Row | None:
    """Return a command's measurement on a set, if there is one."""
    chosen = (row for row in rows if (row["command"], row["set"]) == (command, name) and "cpu_s" in row)
    return next(chosen, None)


def sizes_of(rows: list[Row], command: str) -> list[Row]:
    """Return a command's measurements on the sizes, the smallest first."""
    chosen = [row for row in rows if row["command"] == command and row["set"].isdecimal() and "cpu_s" in row]
    return sorted(chosen, key=lambda row: row["number"])


def growth(rows: list[Row], command: str) -> float:
    """Return p of N^p: the slope of log time over log N of the three largest sizes, without the time of START."""
    base = find(rows, command, START)
    largest = sizes_of(rows, command)[-3:]
    times_s = [max(row["cpu_s"] - base["cpu_s"], 0.01) for row in largest] if base else []
    if len(times_s) < 2:
        return 1.0
    return float(np.polyfit(np.log([row["number"] for row in largest]), np.log(times_s), 1)[0])


def predict(rows: list[Row], command: str, number: int) -> float:
    """Return the processor time in s on `number` small photographs: from the largest size on by the law of growth."""
    base, largest = find(rows, command, START), sizes_of(rows, command)[-1]
    start_s = base["cpu_s"] if base else 0.0
    return start_s + max(largest["cpu_s"] - start_s, 0) * (number / largest["number"]) ** growth(rows, command)


def of_pixels(rows: list[Row], command: str, name: str, what: str) -> float:
    """Return how much more a photograph of SHRUNK or NATIVE takes than a small one: `cpu_s` or `traffic_mb`."""
    small, large = find(rows, command, START), find(rows, command, name)
    return max(large[what] - small[what], 0) / large["number"] if small and large else 0.0


def extrapolate(rows: list[Row], command: str, name: str, cluster: str, disk: str) -> float:
    """Return a command's seconds on EPRI's data set: the larger of the time of the cores and that of the disk."""
    machines, cores, ranks = CLUSTERS[cluster]
    number = round(EPRI_PHOTOGRAPHS * (VAL_FRACTION if command == "evaluate" else 1))
    python_s = predict(rows, command, number)
    pixels_s = number * of_pixels(rows, command, name, "cpu_s")
    disk_s = number * of_pixels(rows, command, name, "traffic_mb") * 1e6 / DISKS[disk]
    if SHARED[command] == RANKS:
        return max((python_s + pixels_s) / (machines * ranks), disk_s)
    at_once = {ALONE: 1, THREADS: cores, MACHINES: machines * cores}[SHARED[command]]
    return max(python_s + pixels_s / at_once, disk_s)


def measured_table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the measured figures, in Markdown."""
    numbers = sorted({row["set"] for row in rows if row["set"].isdecimal()}, key=int)
    columns = ["start", *(f"{int(number):,}" for number in numbers), "N^p", "MiB"]
    yield from table_head("command", *columns, "ms more at 1280 px", "ms more at 20 MP", "MB at 20 MP")
    for command in SHARED:
        if not (measured := sizes_of(rows, command)):
            continue
        cells = []
        for name in (START, *numbers):
            of_set = [row for row in rows if (row["command"], row["set"]) == (command, name)]
            cells.append("".join(row.get("left_out") or f"{row['cpu_s']:.1f}" for row in of_set))
        cells += [f"{growth(rows, command):.2f}", f"{measured[-1]['peak_mib']:,}"]
        for name, what, factor in ((SHRUNK, "cpu_s", 1000), (NATIVE, "cpu_s", 1000), (NATIVE, "traffic_mb", 1)):
            cells.append(f"{factor * of_pixels(rows, command, name, what):.0f}" if find(rows, command, name) else "")
        yield f"| `{command}` | {' | '.join(cells)} |"


def extrapolated_table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the times on EPRI's data set, in Markdown."""
    yield from table_head("command", *(f"{cluster}, {disk}" for cluster in CLUSTERS for disk in DISKS))
    for name, words in ((SHRUNK, "1280 px"), (NATIVE, "native")):
        for command in SHARED:
            if find(rows, command, name) and sizes_of(rows, command):
                times_s = [extrapolate(rows, command, name, cluster, disk) for cluster in CLUSTERS for disk in DISKS]
                cells = [f"{max(s / 60, 1):.0f} min" if s < 5400 else f"{s / 3600:.1f} h" for s in times_s]
                yield f"| `{command}`, {words} | {' | '.join(cells)} |"


def table_head(*columns: str) -> Iterator[str]:
    """Yield the first two lines of a table."""
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)


def records_of(tables: list[str], rows: list[Row]) -> Iterator[Row]:
    """Yield a measurement and a record for each row of the tables, as docs/results/records.jsonl has them."""
    facts = environment_report()
    revision = ", ".join(dict.fromkeys(row["revision"] for row in rows))
    machine = f"one core of an {facts['cpu']}, torch {facts['torch']}"
    date = max(row["date"] for row in rows)
    yield {
        "id": "scale",
        "command": "python benchmarks/scale.py",
        "revision": revision,
        "date": date,
        "machine": machine,
    }

    columns: list[str] = []
    for line in filter(None, tables):
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if first == "command":
            columns = cells
        elif first.startswith("`"):
            numbers = [[float(text) for text in re.findall(r"\d+\.?\d*", cell.replace(",", ""))] for cell in cells]
            values = {column: of for column, of in zip(columns, numbers, strict=True) if of}
            yield {"in": "docs/epri.md", "of": ["scale"], "what": first.replace("`", ""), "values": values}


if __name__ == "__main__":
    run_script(main)
