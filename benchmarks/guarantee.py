"""Draw flights again and again from a model's recorded predictions, and count how often a guarantee fails (docs/guarantee.md).

    python benchmarks/guarantee.py --model models/mine/last.pt --data data/mine/dataset.yaml --class-name conductor

The groups of the split are all flights that there are, so the true risk is known: it is their mean. Flights are drawn with
replacement, so they are independent. With fewer than LEAST_GROUPS groups, each photograph counts as a flight. `as judged` has the losses
of evaluate_model.py --guarantee. `found objects` leaves out objects that are missed at every confidence: then each recall can be
reached, and single objects can be planted as the unit, which breaks the guarantee.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

from benchmarks.results import write_results
from utils.commands.evaluation import EvaluationConfig, get_candidate, get_loader, thin_classes_for
from utils.common.config import Options, option, parse_config
from utils.common.devices import choose_device
from utils.common.errors import UsageError, run_script
from utils.common.text import format_table
from utils.data.dataset import read_photos
from utils.data.dataset_yaml import load_dataset_yaml
from utils.distributed import read_rank_environment
from utils.evaluation.evaluate import PhotoPixels, evaluate
from utils.evaluation.flights import groups_of
from utils.evaluation.guarantee import RECALL, Assessed, Promise
from utils.evaluation.label_shapes import sizes_on_disk
from utils.evaluation.metrics.matching import LEVELS
from utils.evaluation.metrics.results import ImageResult
from utils.evaluation.metrics.thin_objects import MIN_SCORE, TOLERANCE_PX, ThinRule
from utils.predict.exported import open_model

LEAST_GROUPS = 10
ERROR = 0.05


@dataclass(frozen=True)
class GuaranteeConfig(Options):
    model: str = option(None, "trained model", required=True)
    data: str = option(None, "data-set YAML", metavar="YAML", required=True)
    class_name: str = option(None, "class whose threshold is sought", required=True)
    split: str = option("val", "which split", choices=("train", "val", "test"))
    recalls: tuple[float, ...] = option((0.9, 0.95), "recalls to promise", above=0, below=1)
    flights: tuple[int, ...] = option((5, 10, 20, 50, 100, 200), "numbers of flights to draw", at_least=1)
    draws: int = option(500, "draws of each number", at_least=1)
    json: str | None = option(None, "write the results here", metavar="FILE")


def main() -> int:
    """Record, draw and print; return the exit code."""
    config = parse_config(GuaranteeConfig, "Count how often a guarantee fails over draws of flights")
    results, groups, class_id = record(config)
    names = np.array(groups)
    scores = [
        scores_of([results[place] for place in np.flatnonzero(names == name)], class_id) for name in sorted(set(groups))
    ]
    objects = [1.0 - (one[:, None] >= LEVELS) for one in scores if len(one)]
    found, rows = [one.mean(axis=0, keepdims=True) for one in objects], []
    for promise in (Promise(RECALL, recall) for recall in config.recalls):
        judged = [one[None] for one in promise.losses(results, groups, class_id)]
        kinds = {"as judged": (judged, judged), "found objects": (found, found), "objects as units": (objects, found)}
        for words, (units, flights) in kinds.items():
            rows += [draw(units, flights, promise, number, config.draws, words) for number in config.flights]
    print(format_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    if config.json:
        write_results(config.json, config, groups=len(set(groups)), rows=rows)
    return 0


def record(config: GuaranteeConfig) -> tuple[list[ImageResult], list[str], int]:
    """Return what evaluate_model.py --guarantee finds in each photograph, its group, and the number of the class."""
    device, judged = (
        choose_device("auto", 0),
        EvaluationConfig(config.model, data=config.data, mask_resolution="native"),
    )
    model, spec = open_model(config.model, device), load_dataset_yaml(config.data)
    if config.class_name not in spec.names:
        raise UsageError(f"--class-name {config.class_name}: not one of {', '.join(spec.names)}")
    photos = read_photos(spec, config.split)
    size_of = sizes_on_disk(photos)
    classes = thin_classes_for(judged, model, photos, size_of, spec.names)
    thin = ThinRule(classes, TOLERANCE_PX, MIN_SCORE, True)
    candidate = get_candidate(config.model, model, photos, judged, device, thin)
    loader = get_loader(candidate, judged, read_rank_environment(), 0)
    pixels = PhotoPixels(size_of, True, None, thin, candidate.find)
    results = evaluate(candidate.model, loader, spec.names, candidate.criterion, device, photo=pixels).results
    groups = groups_of(spec, photos)[0]
    groups = groups if len(set(groups)) >= LEAST_GROUPS else [photo.file.name for photo in photos]
    return results, [groups[result.image_id] for result in results], spec.names.index(config.class_name)


def scores_of(results: list[ImageResult], class_id: int) -> np.ndarray:
    """Return the confidences of a class's detections that hit an object."""
    return np.concatenate([one.scores[(one.class_ids == class_id) & one.mask_hits[:, 0]] for one in results])


def draw(
    units: list[np.ndarray], flights: list[np.ndarray], promise: Promise, number: int, draws: int, words: str
) -> dict[str, Any]:
    """Return one row: how often the guarantee and the naive threshold fail. units: of each flight, losses (units, levels)."""
    rng, truth = np.random.default_rng(number), np.concatenate(flights).mean(axis=0)
    given, naive, lower = [], [], []
    for _ in range(draws):
        losses = np.concatenate([units[place] for place in rng.integers(0, len(units), number)])
        kept = np.flatnonzero(losses.mean(axis=0) <= promise.limit)
        naive += [kept[-1]] if len(kept) else []
        if (holds := np.flatnonzero(Assessed.of(promise, losses, ERROR).holds)).size:
            given.append(holds[-1])
            lower.append(LEVELS[kept[-1]] - LEVELS[holds[-1]])
    row = {"losses": words, "recall": promise.value, "flights": number, "given": round(100 * len(given) / draws, 1)}
    fails = [round(100 * float(np.sum(truth[levels] > promise.limit)) / draws, 1) for levels in (given, naive)]
    return row | {"fails": fails[0], "naive fails": fails[1], "lower by": f"{np.median(lower or [np.nan]):.2f}"}


if __name__ == "__main__":
    run_script(main)
