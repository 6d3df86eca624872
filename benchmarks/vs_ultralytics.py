"""Train with this project and with Ultralytics in turn, and evaluate both results with both evaluators.

    python benchmarks/vs_ultralytics.py --epochs 8 --img-size 192 --seeds 0
    python benchmarks/vs_ultralytics.py --data data/processed/dataset.yaml --model yolov8n-seg.pt --epochs 50

Both sides get the same data, initial weights, epochs, image size, batch size, threads and loader workers. Everything else
is each side's default. After an interruption run the command again: finished trainings are kept in --output.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.comparison import BY_CLASS, EVALUATORS, PROJECT, SIDES, Run, Setting, compare, make_sample, open_data
from benchmarks.results import results_file, write_results
from utils.common.config import INPUT_SIZE, Options, option, parse_config
from utils.common.errors import UsageError, run_script
from utils.common.text import format_table

TITLES = {
    **{f"mask_by_{evaluator}": f"mask mAP50-95 ({title})" for evaluator, title in EVALUATORS.items()},
    **{f"box_by_{evaluator}": f"box mAP50-95 ({title})" for evaluator, title in EVALUATORS.items()},
    "wall_s": "wall time, s",
    "epoch_s": "whole epoch with validation, s",
    "images_per_s": "images/s",
    "peak_memory_gb": "peak memory, GB",
    "peak_gpu_memory_gb": "peak GPU memory, GB",
}

Figures = dict[str, dict[str, dict[str, float | None]]]


@dataclass(frozen=True)
class ComparisonConfig(Options):
    data: str | None = option(None, "data-set YAML; unset: the built-in sample", metavar="YAML")
    sample_images: int = option(
        400, "photographs of that sample, a fifth of them for validation", at_least=10, needs="not data"
    )
    sample_long_side: int = option(
        1280, "their longer side in pixels, as parse_labels.py would write them", needs="not data"
    )
    sample_wire_width: int = option(14, "how wide its wires are drawn, in pixels of 1280", at_least=1, needs="not data")
    model: str = option("yolov8n-seg.yaml", "a .yaml (random weights of each seed) or a .pt to start from")
    epochs: int = option(30, "passes over the training images", at_least=1)
    img_size: int = option(320, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE)
    batch_size: int = option(16, "images per step", at_least=1)
    seeds: tuple[int, ...] = option((0, 1, 2), "one training of each side per seed", at_least=0)
    optimizer: str = option(
        "auto", "auto: as each side chooses; sgd, adamw: the same for both", choices=("auto", "sgd", "adamw")
    )
    close_mosaic: int | None = option(None, "last epochs without mosaic, on both sides; unset: 10", at_least=0)
    nominal_batch: int = option(
        64,
        "images per optimizer step of Ultralytics, which accumulates; equal to --batch-size: as many steps as ours",
        at_least=1,
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    output: str = option("outputs/benchmarks/vs_ultralytics", "folder for weights, logs and results", metavar="DIR")
    json: str | None = option(None, "write the results here; unset: results.json in --output", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.seeds)) < len(self.seeds):
            raise UsageError(f"--seeds {' '.join(map(str, self.seeds))}: must be different numbers")
        if self.close_mosaic is not None and self.close_mosaic >= self.epochs:
            raise UsageError(f"--close-mosaic {self.close_mosaic}: must be less than --epochs {self.epochs}")


def main() -> int:
    """Run the comparison; return the exit code."""
    config = parse_config(ComparisonConfig, "Train with this project and with Ultralytics and compare the results")
    folder = Path(config.output).resolve()
    results = results_file(config)
    drawn = (config.sample_images, config.sample_long_side, config.sample_wire_width)
    data = open_data(Path(config.data) if config.data else make_sample(folder, *drawn), folder)
    print(
        f"{data.num_train} images for training, {data.num_val} for validation, {config.img_size} px, "
        f"batch {config.batch_size}, {config.epochs} epochs, seeds {' '.join(map(str, config.seeds))}",
        flush=True,
    )
    setting = Setting(**{field.name: getattr(config, field.name) for field in fields(Setting) if field.name != "extra"})
    runs: list[Run] = []
    for position, seed in enumerate(config.seeds):
        # The sides take turns in going first, so that a drift of the machine's speed favours neither.
        for side in SIDES if position % 2 == 0 else SIDES[::-1]:
            run, is_kept = compare(setting, data, seed, side, folder)
            runs.append(run)
            announce(run, is_kept)
            figures = summarise(runs)
            write_results(
                results,
                config,
                num_train=data.num_train,
                num_val=data.num_val,
                best_weights_chosen_by={PROJECT: "mask mAP50-95", "ultralytics": "mask plus box mAP50-95"},
                summary=figures,
                ratio={name: ratio(figures, name) for name in TITLES},
                by_class=class_means(runs),
                runs=runs,
            )
    print(
        f"\n{table(figures)}\n\n{class_means_table(class_means(runs))}\n\nResults in {results}\n{ratio_line(figures)}"
    )
    return 0


def announce(run: Run, is_kept: bool) -> None:
    """Print the scores of a finished training."""
    by_us, by_them = (run["scores"][evaluator] for evaluator in SIDES)
    print(
        f"  seed {run['seed']}, {run['side']}: mask mAP50-95 {by_us['mask_map50_95']:.4f} "
        f"(by their evaluator {by_them['mask_map50_95']:.4f}), {run['wall_s']:.0f} s, "
        f"{run['images_per_s']:.1f} images/s{' (kept from before)' if is_kept else ''}",
        flush=True,
    )


def summarise(runs: Sequence[Run]) -> Figures:
    """Return mean and spread over the seeds as {side: {figure: {mean, spread}}}; None where there is no number.

    The spread is the sample standard deviation (n - 1), so it needs two seeds.
    """
    figures: Figures = {}
    for side in SIDES:
        by_run = [figures_of(run) for run in runs if run["side"] == side]
        figures[side] = {}
        for name in TITLES:
            values = [value for found in by_run if (value := found[name]) is not None]
            figures[side][name] = {
                "mean": statistics.fmean(values) if values else None,
                "spread": statistics.stdev(values) if len(values) > 1 else None,
            }
    return figures


def figures_of(run: Run) -> dict[str, float | None]:
    """Return the figures of one training that TITLES name."""
    gpu_bytes = run["peak_gpu_memory_bytes"]
    return {
        **{
            f"{kind}_by_{evaluator}": run["scores"][evaluator][f"{kind}_map50_95"]
            for kind in ("mask", "box")
            for evaluator in EVALUATORS
        },
        **{name: run[name] for name in ("wall_s", "epoch_s", "images_per_s")},
        "peak_memory_gb": run["peak_memory_bytes"] / 1e9,
        "peak_gpu_memory_gb": None if gpu_bytes is None else gpu_bytes / 1e9,
    }


def ratio(figures: Figures, name: str) -> float | None:
    """Return the project's mean over Ultralytics'; None where that is not a number."""
    ours, theirs = (figures[side][name]["mean"] for side in SIDES)
    return ours / theirs if ours is not None and theirs else None


def shown(value: float | None, digits: int, missing: str = "-") -> str:
    """Return a number with some decimals, or what stands for none."""
    return missing if value is None else f"{value:.{digits}f}"


def ratio_line(figures: Figures) -> str:
    """Return the last line of the benchmark: mean mask mAP50-95 by our evaluator, ours over theirs."""
    return f"ratio {shown(ratio(figures, 'mask_by_project'), 2, 'nan')}"


def table(figures: Figures) -> str:
    """Return the figures as a table, one row each: mean ± spread."""
    rows = []
    for name, title in TITLES.items():
        cells = []
        for side in SIDES:
            mean, spread = figures[side][name].values()
            digits = 4 if mean is not None and abs(mean) < 2 else 1
            cells.append(shown(mean, digits) + ("" if spread is None else f" ± {spread:.{digits}f}"))
        if cells != ["-", "-"]:
            rows.append([title, *cells, shown(ratio(figures, name), 2)])
    return format_table(["mean ± spread over the seeds", *SIDES, "ratio"], rows)


def class_means(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """Return each class's mask AP50-95, the mean over the seeds, as {class: {evaluator: {side: mean}}}."""
    names = runs[0]["scores"][PROJECT][BY_CLASS]
    return {
        name: {
            evaluator: {
                side: statistics.fmean(values)
                for side in SIDES
                if (values := [run["scores"][evaluator][BY_CLASS][name] for run in runs if run["side"] == side])
            }
            for evaluator in EVALUATORS
        }
        for name in names
    }


def class_means_table(means: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return the classes' means as a table: ours / theirs for each evaluator."""
    rows = [
        [name, *(" / ".join(shown(by[evaluator].get(side), 3) for side in SIDES) for evaluator in EVALUATORS)]
        for name, by in means.items()
    ]
    return format_table(["mask mAP50-95: ours / theirs", *EVALUATORS.values()], rows)


if __name__ == "__main__":
    run_script(main)
