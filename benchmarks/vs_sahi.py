"""Find objects in large photographs with this project's tiles and with SAHI, from the same weights, and compare.

    pip install sahi
    python download_data.py --sample 40 --sample-size 5472 --output data/large/raw
    python parse_labels.py --input data/large/raw --output data/large/processed --long-side native
    python benchmarks/vs_sahi.py --model models/windows/best.pt --data data/large/processed/dataset.yaml

SAHI works with its defaults: slices that overlap by a fifth, the whole photograph too, and boxes that are merged greedily if they
cover half of the smaller one. Each side runs in a process of its own, and the sides alternate on each photograph. The time
is measured from the file to the outlines of all objects. Masks are judged in the photographs' own pixels, by faster-coco-eval
and by this project's evaluator, on the photographs that both sides finished; wires also by their centrelines, to 3 pixels.
The last line is SAHI's seconds over ours.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.results import results_file, write_results
from benchmarks.sahi_judge import Json, judge
from utils.common.config import FRACTION, Options, option, parse_config
from utils.common.cores import usable_cpu_count
from utils.common.devices import PRECISION_CHOICES
from utils.common.environment import package_version, python_path
from utils.common.errors import UserError, run_script
from utils.common.files import write_text_atomic
from utils.common.text import format_table
from utils.data.dataset import Photo, read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.engine.meters import rss_bytes
from utils.predict.tiles import MIN_TILE_PX, OVERLAP, choose_tiling
from utils.yolo.model import class_names, load_weights
from utils.yolo.trained import trained_size_px

OURS, SAHI = SIDES = ("ours", "sahi")
SIDE_PROGRAM = ("-m", "benchmarks.sahi_sides")
POLL_S = 0.02
START_S = 300  # loading a model may take as long as this, or as --timeout-s if that is longer


@dataclass(frozen=True)
class SahiConfig(Options):
    model: str = option(None, "trained model, such as models/epri_distribution_ddp/best.pt", required=True)
    data: str = option(None, "data-set YAML of photographs at their own size", required=True, metavar="YAML")
    split: str = option("val", "which split", choices=("train", "val", "test"))
    photographs: int = option(8, "photographs to use", at_least=1)
    tiles: int | None = option(
        None,
        "side of a tile in pixels of the photograph; unset: as the model was trained, else the network's input",
        at_least=MIN_TILE_PX,
    )
    conf: float = option(
        0.1, "minimum confidence on both sides; below 0.1 SAHI drops boxes and merges none", **FRACTION
    )
    timeout_s: float = option(900, "longest time a photograph may take, in seconds", above=0)
    memory_gb: float = option(12, "most memory a side may use, in GB; a side that needs more is stopped", above=0)
    threads: int | None = option(None, "compute threads of each side; unset: as many as there are cores", at_least=1)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    amp: str = option("off", "mixed precision of our side; SAHI computes in float32", choices=PRECISION_CHOICES)
    output: str = option("outputs/benchmarks/vs_sahi", "folder for answers, logs and results", metavar="DIR")
    json: str | None = option(None, "write the results here; unset: results.json in --output", metavar="FILE")


class Unfinished(Exception):
    """A side did not finish a photograph; the message says why."""


class SideProcess:
    """A process of benchmarks/sahi_sides.py, started again after a photograph that it did not finish."""

    def __init__(self, job: Json, folder: Path, timeout_s: float, memory_gb: float) -> None:
        self.folder = folder / job["side"]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.timeout_s, self.memory_gb = timeout_s, memory_gb
        self.log = self.folder / "log.txt"
        self.job = {**job, "ready": str(self.folder / "ready.json")}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        job_file, ready = self.folder / "job.json", Path(self.job["ready"])
        ready.unlink(missing_ok=True)
        write_text_atomic(job_file, json.dumps(self.job))
        # -P: Python does not search the current folder, which may hold another `utils`.
        command = [sys.executable, "-P", *SIDE_PROGRAM, str(job_file)]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
            )
        try:
            self._wait(ready, max(START_S, self.timeout_s))
        except Unfinished as reason:
            raise UserError(f"{self.job['side']}: the model was not loaded: {reason}") from reason
        return self.process

    def find(self, photo: Path, number: int) -> Json:
        """Return the answer for a photograph. Raises Unfinished."""
        if self.process.poll() is not None:
            self._start()
        answer = self.folder / f"{number}.json"
        answer.unlink(missing_ok=True)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"photo": str(photo), "answer": str(answer)}) + "\n")
        self.process.stdin.flush()
        self._wait(answer, self.timeout_s)
        found: Json = json.loads(answer.read_text(encoding="utf-8"))
        return found

    def _wait(self, file: Path, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not file.exists():
            if self.process.poll() is not None:
                lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise Unfinished(
                    f"code {self.process.returncode}: {lines[-1] if lines else 'no output'}; see {self.log}"
                )
            if rss_bytes(self.process.pid) > self.memory_gb * 1e9:
                self.end()
                raise Unfinished(f"needs more than {self.memory_gb:g} GB (--memory-gb)")
            if time.monotonic() > deadline_s:
                self.end()
                raise Unfinished(f"not done after {timeout_s:g} s (--timeout-s)")
            time.sleep(POLL_S)

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def main() -> int:
    """Run the comparison; return the exit code."""
    config = parse_config(SahiConfig, "Find objects in large photographs with this project and with SAHI and compare")
    version = package_version("sahi")
    if version is None:
        raise UserError("SAHI is not installed: pip install sahi (only this benchmark needs it)")
    spec = load_dataset_yaml(config.data)
    photos = read_photos(spec, config.split)[: config.photographs]
    model = load_weights(config.model)
    if class_names(model) != spec.names:
        raise UserError(f"{config.model} knows the classes {', '.join(class_names(model))}, {config.data} has others")
    size_px = trained_size_px(model)
    tiling = choose_tiling("auto" if config.tiles is None else str(config.tiles), OVERLAP, model, size_px)
    job = {
        "model": str(Path(config.model).resolve()),
        "size_px": size_px,
        "tile_px": tiling.size_px if tiling else size_px,
        "conf": config.conf,
        "device": config.device,
        "amp": config.amp,
        "threads": config.threads or usable_cpu_count(),
    }
    del model
    print(
        f"{len(photos)} photographs, tiles of {job['tile_px']} px, network input {size_px} px, confidence {config.conf:g} "
        f"and above, SAHI {version}",
        flush=True,
    )
    folder = Path(config.output).resolve()
    runs = measure(photos, job, folder, config)
    judged = [number for number in range(len(photos)) if all("objects" in run[number] for run in runs.values())]
    print(f"Judging {len(judged)} photographs", flush=True)
    scores: dict[str, Json | None] = dict.fromkeys(SIDES)
    for side in SIDES if judged else ():
        found = [runs[side][number]["objects"] for number in judged]
        scores[side] = judge([photos[number] for number in judged], size_px, spec.names, found)
    figures = {side: figures_of(runs[side], scores[side]) for side in SIDES}
    seconds = [figures[side]["seconds"] for side in (SAHI, OURS)]
    record: Json = {
        "job": job,
        "num_judged": len(judged),
        "sides": figures,
        "photographs": [row(photo, number, runs) for number, photo in enumerate(photos)],
        "ratio": seconds[0] / seconds[1] if None not in seconds else None,
    }
    results = results_file(config)
    write_results(results, config, environment={"sahi": version}, **record)
    print(f"\n{table(figures)}\n\nResults in {results}\n{ratio_line(record)}")
    return 0


def measure(photos: list[Photo], job: Json, folder: Path, config: SahiConfig) -> dict[str, list[Json]]:
    """Let the sides take turns on each photograph; return each side's answers, or {"unfinished": why}.

    The first photograph is predicted once more before, to warm up.
    """
    runs: dict[str, list[Json]] = {side: [] for side in SIDES}
    processes: dict[str, SideProcess] = {}
    try:
        for side in SIDES:
            processes[side] = SideProcess({**job, "side": side}, folder, config.timeout_s, config.memory_gb)
        for number in range(-1, len(photos)):
            for side in SIDES if number % 2 else SIDES[::-1]:
                answer = ask(processes[side], photos[max(number, 0)], number)
                if number < 0:
                    continue
                runs[side].append(answer)
                said = answer.get("unfinished") or f"{answer['seconds']:.1f} s, {len(answer['objects'])} objects"
                print(f"  {photos[number].file.name}, {side}: {said}", flush=True)
    finally:
        for process in processes.values():
            process.end()
    return runs


def ask(process: SideProcess, photo: Photo, number: int) -> Json:
    """Return a side's answer for a photograph, or why there is none."""
    try:
        return process.find(photo.file.resolve(), number)
    except Unfinished as reason:
        return {"unfinished": str(reason)}


def figures_of(run: list[Json], scores: Json | None) -> Json:
    """Return a side's figures; None where it finished nothing."""
    done = [answer for answer in run if "objects" in answer]
    return {
        "scores": scores,
        "objects": statistics.fmean(len(answer["objects"]) for answer in done) if done else None,
        "seconds": statistics.median(answer["seconds"] for answer in done) if done else None,
        "cpu_seconds": statistics.median(answer["cpu_seconds"] for answer in done) if done else None,
        "peak_memory_gb": max(answer["peak_memory_bytes"] for answer in done) / 1e9 if done else None,
        "finished": len(done),
        "num_photographs": len(run),
    }


def row(photo: Photo, number: int, runs: dict[str, list[Json]]) -> Json:
    """Return the record of a photograph: everything except the masks."""
    answers = {
        side: {**run[number], **({"objects": len(run[number]["objects"])} if "objects" in run[number] else {})}
        for side, run in runs.items()
    }
    return {"file": photo.file.name, **answers}


def table(figures: dict[str, Json]) -> str:
    """Return the figures of both sides as a table."""
    scores = [figures[side]["scores"] for side in SIDES]
    rows: list[list[str]] = []

    def add(title: str, values: list[float | None], digits: int) -> None:
        rows.append([title, *("-" if value is None else f"{value:.{digits}f}" for value in values)])

    if None not in scores:
        for measure_name, title in (("map50", "mask mAP50"), ("map50_95", "mask mAP50-95")):
            add(f"{title} (faster-coco-eval)", [score[measure_name] for score in scores], 4)
            add(f"{title} (our evaluator)", [score["by_our_evaluator"][measure_name] for score in scores], 4)
        for name in scores[0]["by_class"]:
            by_class = [score["by_class"][name] for score in scores]
            if by_class[0]["map50"] is not None:
                rows.append([f"{name}: AP50 / AP50-95", *(shown(of, "map50", "map50_95") for of in by_class)])
            if by_class[0]["centreline_recall"] is not None:
                lines = ("centreline_recall", "centreline_precision")
                rows.append([f"{name}: centreline recall / precision", *(shown(of, *lines) for of in by_class)])
                add(f"{name}: pieces per object found", [of["pieces_per_object"] for of in by_class], 2)
    add("objects per photograph", [figures[side]["objects"] for side in SIDES], 1)
    add("seconds per photograph, median", [figures[side]["seconds"] for side in SIDES], 2)
    add("CPU seconds per photograph, median", [figures[side]["cpu_seconds"] for side in SIDES], 2)
    add("peak memory above the loaded model, GB", [figures[side]["peak_memory_gb"] for side in SIDES], 2)
    counts = (f"{figures[side]['finished']} of {figures[side]['num_photographs']}" for side in SIDES)
    rows.append(["photographs finished", *counts])
    return format_table(["", "ours", "SAHI"], rows, right_from=1)


def shown(of_class: Json, *names: str) -> str:
    """Return some of a class's figures with three decimals."""
    return " / ".join("-" if of_class[name] is None else f"{of_class[name]:.3f}" for name in names)


def ratio_line(record: Json) -> str:
    """Return the last line of the benchmark."""
    return "ratio nan" if record["ratio"] is None else f"ratio {record['ratio']:.2f}"


if __name__ == "__main__":
    run_script(main)
