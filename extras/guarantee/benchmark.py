"""Draw flights again and again from a model's recorded predictions, and count how often a guarantee fails (extras/guarantee/README.md).

    python -m extras.guarantee.benchmark --model models/mine/last.pt --data data/mine/dataset.yaml --class-name conductor

The groups of the split are taken for all flights that there are, so the true risk is their mean. Flights are drawn with replacement,
so they are independent. With fewer than LEAST_GROUPS groups each photograph counts as a flight. `as judged` has the losses of
evaluate_model.py --guarantee. `found objects` leaves out objects that are missed at every confidence: then each recall can be
reached, and single objects can be planted as the unit, which breaks the guarantee.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np

import evaluate_model
from benchmarks.results import results_file, write_results
from extras.guarantee.bounds import RECALL, Assessed, Promise
from extras.guarantee.calibration import ThresholdCalibrator
from utils.common.config import Options, option, parse_config
from utils.common.errors import run_script
from utils.common.text import format_table
from utils.data.dataset_yaml import load_dataset_yaml
from utils.evaluation.metrics.matching import LEVELS
from utils.evaluation.metrics.results import ImageResult
from utils.predict.options import wanted_classes
from utils.predict.tiles import Predictor

LEAST_GROUPS, ERROR = 10, 0.05


@dataclass(frozen=True)
class GuaranteeConfig(Options):
    model: str = option(None, "trained model", required=True)
    data: str = option(None, "data-set YAML; its validation split is judged", metavar="YAML", required=True)
    class_name: str = option(None, "class whose threshold is sought", required=True)
    recalls: tuple[float, ...] = option((0.8, 0.9, 0.95), "recalls to promise", above=0, below=1)
    flights: tuple[int, ...] = option((5, 10, 20, 50, 100, 200), "numbers of flights to draw", at_least=1)
    draws: int = option(500, "draws of each number", at_least=1)
    output: str = option("outputs/benchmarks/guarantee", "folder for the evaluation and results.json", metavar="DIR")
    json: str | None = option(None, "write the results here", metavar="FILE")


def main() -> int:
    """Judge, draw and print; return the exit code."""
    config = parse_config(GuaranteeConfig, "Count how often a guarantee fails over draws of flights")
    [class_id] = wanted_classes((config.class_name,), load_dataset_yaml(config.data).names) or ()
    results, groups = record(config)
    hits: dict[str, list[np.ndarray]] = {name: [] for name in groups}
    for name, one in zip(groups, results, strict=True):
        hits[name].append(one.scores[(one.class_ids == class_id) & one.mask_hits[:, 0]])
    objects = [1.0 - (scores[:, None] >= LEVELS) for scores in map(np.concatenate, hits.values()) if len(scores)]
    found, rows = [one.mean(axis=0, keepdims=True) for one in objects], []
    for promise in (Promise(RECALL, recall) for recall in config.recalls):
        judged = [one[None] for one in promise.losses(results, groups, class_id)]
        kinds = {"as judged": (judged, judged), "found objects": (found, found), "objects as units": (objects, found)}
        for words, (units, flights) in kinds.items():
            rows += [draw(units, flights, promise, number, config.draws, words) for number in config.flights]
    print(format_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    write_results(results_file(config), config, groups=len(hits), rows=rows)
    return 0


def record(config: GuaranteeConfig) -> tuple[list[ImageResult], list[str]]:
    """Evaluate with a guarantee; return what it is found from: each photograph's result and its group."""
    kept: list[Any] = []

    class Keeper(ThresholdCalibrator):
        def finish(self, results: Sequence[ImageResult], predictor: Predictor) -> dict[str, Any]:
            few = len(set(self.groups)) < LEAST_GROUPS
            kept.extend((results, [f"{one.image_id:09}" if few else self.groups[one.image_id] for one in results]))
            return super().finish(results, predictor)

    how: Any = {"guarantee": ("recall=0.9",), "mask_resolution": "native", "output": config.output}
    with patch("extras.guarantee.ThresholdCalibrator", Keeper):
        evaluate_model.run(evaluate_model.EvaluationConfig(config.model, data=config.data, **how))
    return kept[0], kept[1]


def draw(units: list[Any], flights: list[Any], promise: Promise, number: int, draws: int, words: str) -> dict[str, Any]:
    """Return a row: in how many percent of draws the guarantee and the naive threshold fail. units: of each flight (n, levels)."""
    rng, truth = np.random.default_rng(number), np.concatenate(flights).mean(axis=0)
    found: list[tuple[int, ...]] = []  # the highest level, -1 if none: with a guarantee, and naive
    for _ in range(draws):
        losses = np.concatenate([units[place] for place in rng.integers(0, len(units), number)])
        kept = (Assessed.of(promise, losses, ERROR).holds, losses.mean(axis=0) <= promise.limit)
        found.append(tuple(int(np.flatnonzero(one).max(initial=-1)) for one in kept))
    given = np.array([one for one in found if one[0] >= 0]).reshape(-1, 2)
    fails = 100 * ((np.append(truth, 0)[np.array(found)]) > promise.limit).mean(axis=0)  # none fails at level -1
    row = {"losses": words, "recall": promise.value, "flights": number, "given": round(100 * len(given) / draws, 1)}
    lower = f"{np.median(LEVELS[given[:, 1]] - LEVELS[given[:, 0]]):.2f}" if len(given) else "nan"
    return row | {"fails": round(fails[0], 1), "naive fails": round(fails[1], 1), "lower by": lower}


if __name__ == "__main__":
    run_script(main)
