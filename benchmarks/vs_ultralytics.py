"""Train with this project and with Ultralytics in turn, and evaluate both results with both evaluators.

    python benchmarks/vs_ultralytics.py --epochs 8 --img-size 192 --seeds 0
    python benchmarks/vs_ultralytics.py --data data/processed/dataset.yaml --model yolov8n-seg.pt --epochs 50

Both sides get the same data, initial weights, epochs, image size, batch size, threads and loader workers. Everything else
is each side's default. After an interruption run the command again: finished trainings are kept in --output.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started by its path: Python would search this folder instead of the project's
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.comparison import Setting, compare, make_sample, open_data
from benchmarks.summary import (
    PROJECT,
    SIDES,
    Figures,
    Run,
    class_means,
    class_means_table,
    ratio,
    ratio_line,
    summarise,
    table,
)
from utils.common.config import INPUT_SIZE, Options, option, parse_config, to_dict
from utils.common.environment import environment_report
from utils.common.errors import UsageError, run_script
from utils.common.files import write_text_atomic


@dataclass(frozen=True)
class ComparisonConfig(Options):
    """Options of `benchmarks/vs_ultralytics.py`."""

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
    close_mosaic: int | None = option(
        None,
        "last epochs without mosaic, on both sides; unset: theirs 10, ours 10 but at most half of the run",
        at_least=0,
    )
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
        if self.close_mosaic is not None and self.close_mosaic > self.epochs // 2:
            raise UsageError(f"--close-mosaic {self.close_mosaic}: must be at most half of --epochs {self.epochs}")


def main() -> int:
    """Run the comparison; return the exit code."""
    config = parse_config(ComparisonConfig, "Train with this project and with Ultralytics and compare the results")
    folder = Path(config.output).resolve()
    results = Path(config.json).resolve() if config.json else folder / "results.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    yaml_file = Path(config.data) if config.data else _sample(config, folder)
    data = open_data(yaml_file, folder)
    print(
        f"{data.num_train} images for training, {data.num_val} for validation, {config.img_size} px, "
        f"batch {config.batch_size}, {config.epochs} epochs, seeds {' '.join(map(str, config.seeds))}",
        flush=True,
    )
    setting = Setting(
        model=config.model,
        epochs=config.epochs,
        img_size=config.img_size,
        batch_size=config.batch_size,
        optimizer=config.optimizer,
        close_mosaic=config.close_mosaic,
        device=config.device,
        nominal_batch=config.nominal_batch,
    )
    runs: list[Run] = []
    for position, seed in enumerate(config.seeds):
        # The sides take turns in going first, so that a drift of the machine's speed favours neither.
        for side in SIDES if position % 2 == 0 else SIDES[::-1]:
            run, is_kept = compare(setting, data, seed, side, folder)
            runs.append(run)
            announce(run, is_kept)
            write_results(results, config, data.num_train, data.num_val, runs, summarise(runs))
    figures = summarise(runs)
    print(
        f"\n{table(figures)}\n\n{class_means_table(class_means(runs))}\n\nResults in {results}\n{ratio_line(figures)}"
    )
    return 0


def _sample(config: ComparisonConfig, folder: Path) -> Path:
    return make_sample(folder, config.sample_images, config.sample_long_side, config.sample_wire_width)


def announce(run: Run, is_kept: bool) -> None:
    """Print the scores of a finished training."""
    by_us, by_them = (run["scores"][evaluator] for evaluator in SIDES)
    print(
        f"  seed {run['seed']}, {run['side']}: mask mAP50-95 {by_us['mask_map50_95']:.4f} "
        f"(by their evaluator {by_them['mask_map50_95']:.4f}), {run['wall_s']:.0f} s, "
        f"{run['images_per_s']:.1f} images/s{' (kept from before)' if is_kept else ''}",
        flush=True,
    )


def write_results(
    file: Path, config: ComparisonConfig, num_train: int, num_val: int, runs: list[Run], figures: Figures
) -> None:
    """Write all results so far, so that an interrupted comparison keeps them."""
    record: dict[str, Any] = {
        "config": to_dict(config),
        "environment": environment_report(),
        "num_train": num_train,
        "num_val": num_val,
        "best_weights_chosen_by": {PROJECT: "mask mAP50-95", "ultralytics": "mask plus box mAP50-95"},
        "summary": figures,
        "ratio": {name: ratio(figures, name) for name in figures[PROJECT]},
        "by_class": class_means(runs),
        "runs": runs,
    }
    write_text_atomic(file, json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    run_script(main)
