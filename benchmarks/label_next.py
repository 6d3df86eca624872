"""Measure whether labelling the photographs that `check_data.py --unlabelled` chooses is better than labelling any.

    python benchmarks/label_next.py --data data/processed/dataset.yaml --model yolov8n-seg.pt --seeds 0 1 2

The labels of a data set's train split are hidden. A first share, drawn at random, is trained on; the next share is chosen with
that model by the command, or drawn at random; each side then trains on all its labels from the same weights, with as many
steps, and chooses again. All models are evaluated on the val split. Finished trainings are kept in --output.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import check_data
from benchmarks.results import write_results
from utils.common.config import INPUT_SIZE, Options, option, parse_config, words_of
from utils.common.errors import run_script
from utils.common.files import write_text_atomic
from utils.common.text import format_table
from utils.data.dataset_yaml import DatasetSpec, label_file_for, load_dataset_yaml
from yolo_seg_ddp import evaluate, train

CHOSEN, RANDOM = "chosen", "random"
SHARED = ("img_size", "batch_size", "device", "threads")  # options of the training that the evaluation has, too


@dataclass(frozen=True)
class NextConfig(Options):
    data: str = option(None, "data-set YAML with labels", required=True, metavar="YAML")
    model: str = option("yolov8n-seg.pt", "weights from which each training starts")
    seeds: tuple[int, ...] = option((0, 1, 2), "one comparison per seed", at_least=0)
    share: float = option(0.2, "share of the train split that is labelled in each round", above=0, at_most=0.5)
    rounds: int = option(3, "trainings of each side, the first one for both", at_least=2)
    steps: int = option(200, "steps of a training, rounded up to whole epochs", at_least=1)
    img_size: int = option(160, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE)
    batch_size: int = option(8, "images per step", at_least=1)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int = option(0, "compute threads; 0: all cores", at_least=0)
    num_workers: int = option(1, "loader processes", at_least=0)
    output: str = option("outputs/benchmarks/label_next", "folder for weights, lists and results", metavar="DIR")


def main() -> int:
    """Run the comparison; return the exit code."""
    config = parse_config(NextConfig, "Compare chosen with random photographs to label")
    spec = load_dataset_yaml(config.data)
    results = {str(seed): compare(config, spec, seed) for seed in config.seeds}
    write_results(Path(config.output) / "results.json", config, results=results)
    print(table(results))
    return 0


def compare(config: NextConfig, spec: DatasetSpec, seed: int) -> dict[str, list[dict[str, float]]]:
    """Return each side's rounds: labelled photographs and objects, and the scores after training on them."""
    files = spec.image_files("train")
    drawn = [files[position] for position in np.random.default_rng(seed).permutation(len(files))]
    sizes = [round(config.share * number * len(files)) for number in range(1, config.rounds + 1)]
    root = Path(config.output).absolute() / f"seed{seed}"
    rounds: dict[str, list[dict[str, float]]] = {RANDOM: [], CHOSEN: []}
    for side, found in rounds.items():
        labelled, home = drawn[: sizes[0]], root / RANDOM / str(sizes[0])
        for size in sizes:
            if size > len(labelled):
                more = size - len(labelled)
                labelled = drawn[:size] if side == RANDOM else [*labelled, *choose(config, home, files, labelled, more)]
                home = root / side / str(size)
            found.append(train_on(config, spec, labelled, home, seed))
            print(f"seed {seed}, {side}: {found[-1]}", flush=True)
    return rounds


def train_on(
    config: NextConfig, spec: DatasetSpec, labelled: Sequence[Path], home: Path, seed: int
) -> dict[str, float]:
    """Train on some photographs and evaluate on all of val; return the scores, or those of an earlier call."""
    scores = home / "scores.json"
    if not scores.exists():
        home.mkdir(parents=True, exist_ok=True)
        write_text_atomic(home / "labelled.txt", "".join(f"{file}\n" for file in labelled))
        write_text_atomic(home / "val.txt", f"{spec.image_files('val')[0]}\n")  # its losses are not used
        splits = {"train": str(home / "labelled.txt"), "val": str(home / "val.txt")}
        data = {"path": str(spec.root), "names": dict(enumerate(spec.names)), **splits}
        write_text_atomic(home / "data.yaml", yaml.safe_dump(data))
        shared: dict[str, Any] = {name: getattr(config, name) for name in SHARED} | {"trust_links": True}
        epochs = -(-config.steps // -(-len(labelled) // config.batch_size))
        place: dict[str, Any] = {"data": home / "data.yaml", "save_dir": home / "run", "val_pictures_every": 0}
        train(model=config.model, epochs=epochs, seed=seed, num_workers=config.num_workers, **place, **shared)
        metrics = evaluate(home / "run" / "last.pt", data=config.data, output=home / "evaluation", **shared)
        objects = sum(len(label_file_for(file).read_text(encoding="utf-8").splitlines()) for file in labelled)
        found = {name: metrics[name] for name in ("mask_map50_95", "box_map50_95")}
        write_text_atomic(scores, json.dumps({"photographs": len(labelled), "objects": objects, **found}))
    kept: dict[str, float] = json.loads(scores.read_text(encoding="utf-8"))
    return kept


def choose(config: NextConfig, home: Path, files: Sequence[Path], labelled: Sequence[Path], number: int) -> list[Path]:
    """Return the photographs that the command chooses among those without labels, with the model in `home`."""
    folder = home / "unlabelled"
    folder.mkdir(exist_ok=True)
    hidden = {f"{position}{file.suffix}": file for position, file in enumerate(files) if file not in set(labelled)}
    for name, file in hidden.items():
        if not (folder / name).exists():
            os.symlink(file, folder / name)
    options = {"data": home / "data.yaml", "model": home / "run" / "last.pt", "unlabelled": folder, "next": number}
    options |= {"device": config.device, "threads": config.threads, "trust_links": True, "output": home / "next"}
    sys.argv = ["check_data.py", *words_of(options)]
    check_data.main()
    with (home / "next" / check_data.LIST).open(encoding="utf-8", newline="") as rows:
        return [hidden[Path(row["photograph"]).name] for row in csv.DictReader(rows)]


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Return a row for each round: labels, means over the seeds, and the difference with its standard deviation."""
    rows = []
    for number in range(len(next(iter(results.values()))[CHOSEN])):
        sides = {side: [found[side][number] for found in results.values()] for side in (CHOSEN, RANDOM)}
        scores = {
            side: [(one["mask_map50_95"] + one["box_map50_95"]) / 2 for one in found] for side, found in sides.items()
        }
        better = [first - second for first, second in zip(scores[CHOSEN], scores[RANDOM], strict=True)]
        deviation = f"{statistics.stdev(better):.4f}" if len(better) > 1 else None
        objects = [statistics.mean(one["objects"] for one in found) for found in sides.values()]
        means = [statistics.mean(found) for found in scores.values()]
        rows.append(
            [int(sides[CHOSEN][0]["photographs"]), *map(round, objects), *means, means[0] - means[1], deviation]
        )
    heads = ["photographs", "objects chosen", "random", "mAP50-95 chosen", "random", "difference", "deviation"]
    return format_table(heads, rows)


if __name__ == "__main__":
    run_script(main)
