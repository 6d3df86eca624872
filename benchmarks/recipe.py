"""Compare recipes of training with each other and with Ultralytics on public data sets, at equal
numbers of steps.

    python benchmarks/recipe.py --sets mushrooms seedlings --seeds 0 1 2
    python benchmarks/recipe.py \\
        --recipes "adamw: --optimizer adamw" "short ramp: --optimizer adamw --ema-ramp 100"
    python benchmarks/recipe.py \\
        --sets data/processed/dataset.yaml --model models/other/best.pt --seeds 0

A recipe is a name and options of train_yolo_ddp.py. Ultralytics trains with its defaults and as
many optimizer steps. All start from the same weights, and both evaluators judge each best.pt. The
sets of `recipe_sets.py` are fetched from their repositories at the first use. After an interruption
run the command again: finished trainings are kept in --output.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# started by its path: Python would search this folder instead of the project's
if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.comparison import NATIVE, PROJECT, ULTRALYTICS, Run, Setting, compare, open_data
from benchmarks.recipe_sets import PUBLIC_SETS, make_public_set
from benchmarks.results import results_file, write_results
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.errors import UsageError, run_script
from yolo_seg_ddp.utils.options import INPUT_SIZE, Options, option
from yolo_seg_ddp.utils.text import format_table


@dataclass(frozen=True)
class RecipeConfig(Options):
    sets: tuple[str, ...] = option(
        tuple(PUBLIC_SETS), f"names ({', '.join(PUBLIC_SETS)}) or data-set YAMLs"
    )
    recipes: tuple[str, ...] = option(
        ("default:",), 'recipes of this project, "name: options of train_yolo_ddp.py"'
    )
    model: str = option(
        "yolov8n-seg.yaml", "a .yaml (random weights of each seed) or a .pt to start from"
    )
    steps: int = option(
        500, "optimizer steps of a training, rounded up to whole epochs", at_least=1
    )
    img_size: int = option(
        256, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE
    )
    batch_size: int = option(16, "images per step", at_least=1)
    seeds: tuple[int, ...] = option((0, 1, 2), "one training of each side per seed", at_least=0)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    output: str = option(
        "outputs/benchmarks/recipe",
        "folder for data sets, weights, logs and results",
        metavar="DIR",
    )
    json: str | None = option(
        None, "write the results here; unset: results.json in --output", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.sets:
            if name not in PUBLIC_SETS and not name.endswith((".yaml", ".yml")):
                raise UsageError(
                    f"--sets {name}: neither one of {', '.join(PUBLIC_SETS)} nor a YAML file"
                )
        names = [read_recipe(text)[0] for text in self.recipes]
        if len({*names, ULTRALYTICS}) <= len(names):
            raise UsageError(
                f"--recipes {' '.join(names)}: must have different names, none of them "
                f"{ULTRALYTICS}"
            )


def read_recipe(text: str) -> tuple[str, tuple[str, ...]]:
    """Split `name: options` into both. Raises UsageError without a name."""
    name, colon, options = text.partition(":")
    if not colon or not name.strip():
        raise UsageError(f'--recipes "{text}": must be "name: options of train_yolo_ddp.py"')
    return name.strip(), tuple(shlex.split(options))


def main() -> int:
    """Run the bench; return the exit code."""
    config = parse_config(
        RecipeConfig, "Compare recipes of training on public data sets, at equal steps"
    )
    folder = Path(config.output).resolve()
    results = results_file(config)
    sets = {name: vars(PUBLIC_SETS[name]) for name in config.sets if name in PUBLIC_SETS}
    recipes = dict(map(read_recipe, config.recipes))
    places = {
        name: make_public_set(name, folder) if name in PUBLIC_SETS else Path(name)
        for name in config.sets
    }
    runs: list[Run] = []
    for seed in config.seeds:
        for name, yaml_file in places.items():
            data = open_data(yaml_file, folder / "runs")
            setting = Setting(
                model=config.model,
                epochs=-(-config.steps // -(-data.num_train // config.batch_size)),
                img_size=config.img_size,
                batch_size=config.batch_size,
                device=config.device,
                nominal_batch=config.batch_size,
            )
            for recipe in (ULTRALYTICS, *recipes):
                side = ULTRALYTICS if recipe == ULTRALYTICS else PROJECT
                run, is_kept = compare(
                    replace(setting, extra=recipes.get(recipe, ())),
                    data,
                    seed,
                    side,
                    folder / "runs",
                )
                runs.append({"set": name, "recipe": recipe, "num_train": data.num_train, **run})
                print(_line(runs[-1], is_kept), flush=True)
                write_results(results, config, sets=sets, summary=summarise(runs), runs=runs)
    means = summarise(runs)
    print(
        f"\n{table(means)}\n\nResults in {results}\nratio "
        f"{mean_ratio(means, next(iter(recipes))):.2f}"
    )
    return 0


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """Return a row for each set and recipe: means over the seeds, and in how many seeds it beats
    Ultralytics.

    mask, box: AP50-95 by our evaluator; spread: the standard deviation of mask; mask_native: the
    same in the photographs' pixels; mask_theirs: by their evaluator, in its default rectangles.
    """
    rows = []
    for name, recipe in dict.fromkeys((run["set"], run["recipe"]) for run in runs):
        chosen = [run for run in runs if (run["set"], run["recipe"]) == (name, recipe)]
        theirs = {
            run["seed"]: _mask(run)
            for run in runs
            if (run["set"], run["recipe"]) == (name, ULTRALYTICS)
        }
        masks = [_mask(run) for run in chosen]
        rows.append(
            {
                "set": name,
                "recipe": recipe,
                "seeds": len(chosen),
                "mask": statistics.fmean(masks),
                "spread": statistics.stdev(masks) if len(masks) > 1 else None,
                "mask_native": statistics.fmean(_mask(run, NATIVE) for run in chosen),
                "mask_theirs": statistics.fmean(_mask(run, ULTRALYTICS) for run in chosen),
                "box": statistics.fmean(run["scores"][PROJECT]["box_map50_95"] for run in chosen),
                "wins": sum(
                    _mask(run) > theirs[run["seed"]] for run in chosen if run["seed"] in theirs
                ),
                "epoch_s": statistics.fmean(run["epoch_s"] for run in chosen),
            }
        )
    return rows


def _mask(run: Run, evaluator: str = PROJECT) -> float:
    return float(run["scores"][evaluator]["mask_map50_95"])


def mean_ratio(rows: list[dict[str, Any]], recipe: str) -> float:
    """Return the mean over the sets of mask mAP50-95 of a recipe over Ultralytics'."""
    ours, theirs = (
        statistics.fmean(row["mask"] for row in rows if row["recipe"] == one)
        for one in (recipe, ULTRALYTICS)
    )
    return ours / theirs if theirs else float("nan")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    scores_by = ["mask mAP50-95", "in photograph pixels", "by their evaluator", "box"]
    lines = []
    for row in rows:
        mask = f"{row['mask']:.3f}" + (
            f" ± {row['spread']:.3f}" if row["spread"] is not None else ""
        )
        wins = "-" if row["recipe"] == ULTRALYTICS else f"{row['wins']} of {row['seeds']}"
        scores = [f"{row[name]:.3f}" for name in ("mask_native", "mask_theirs", "box")]
        numbers = [mask, *scores, wins, f"{row['epoch_s']:.1f}"]
        lines.append([row["set"], row["recipe"], *numbers])
    return format_table(["set", "recipe", *scores_by, "wins", "s per epoch"], lines)


def _line(run: Run, is_kept: bool) -> str:
    kept = " (kept from before)" if is_kept else ""
    scores = f"mask mAP50-95 {_mask(run):.4f} (by their evaluator {_mask(run, ULTRALYTICS):.4f})"
    return (
        f"  seed {run['seed']}, {run['set']}, {run['recipe']}: {scores}, {run['wall_s']:.0f} "
        f"s{kept}"
    )


if __name__ == "__main__":
    run_script(main)
