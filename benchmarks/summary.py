"""Summarise the runs of the comparison: means, spreads, the ratio, tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from utils.common.text import format_table

PROJECT, ULTRALYTICS = "project", "ultralytics"
SIDES = (PROJECT, ULTRALYTICS)
NATIVE = "project_native"
EVALUATORS = {
    PROJECT: "our evaluator",
    NATIVE: "ours, in the photographs' pixels",
    ULTRALYTICS: "their evaluator",
}
BY_CLASS = "mask_map50_95_by_class"
_TITLES = {
    **{f"mask_by_{evaluator}": f"mask mAP50-95 ({title})" for evaluator, title in EVALUATORS.items()},
    **{f"box_by_{evaluator}": f"box mAP50-95 ({title})" for evaluator, title in EVALUATORS.items()},
    "wall_s": "wall time, s",
    "epoch_s": "whole epoch with validation, s",
    "images_per_s": "images/s",
    "peak_memory_gb": "peak memory, GB",
    "peak_gpu_memory_gb": "peak GPU memory, GB",
}

Run = dict[str, Any]
Figures = dict[str, dict[str, dict[str, float | None]]]


def summarise(runs: Sequence[Run]) -> Figures:
    """Return mean and spread over the seeds as {side: {figure: {mean, spread}}}; None where there is no number.

    The spread is the sample standard deviation (n - 1), so it needs two seeds.
    """
    return {side: _side([_figures(run) for run in runs if run["side"] == side]) for side in SIDES}


def ratio(figures: Figures, name: str) -> float | None:
    """Return the project's mean over Ultralytics'; None where that is not a number."""
    ours, theirs = (figures[side][name]["mean"] for side in SIDES)
    return ours / theirs if ours is not None and theirs else None


def table(figures: Figures) -> str:
    """Return the figures as a table, one row each: mean ± spread."""
    rows = [
        [title, *(_shown(figures[side][name]) for side in SIDES), _shown_ratio(figures, name)]
        for name, title in _TITLES.items()
        if any(figures[side][name]["mean"] is not None for side in SIDES)
    ]
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
        [name, *(" / ".join(_mean_of(by[evaluator], side) for side in SIDES) for evaluator in EVALUATORS)]
        for name, by in means.items()
    ]
    return format_table(["mask mAP50-95: ours / theirs", *EVALUATORS.values()], rows)


def _mean_of(by_side: dict[str, float], side: str) -> str:
    return f"{by_side[side]:.3f}" if side in by_side else "-"


def ratio_line(figures: Figures) -> str:
    """Return the last line of the benchmark: mean mask mAP50-95 by our evaluator, ours over theirs."""
    value = ratio(figures, "mask_by_project")
    return "ratio nan" if value is None else f"ratio {value:.2f}"


def _figures(run: Run) -> dict[str, float | None]:
    gpu_bytes = run["peak_gpu_memory_bytes"]
    return {
        **{f"mask_by_{evaluator}": run["scores"][evaluator]["mask_map50_95"] for evaluator in EVALUATORS},
        **{f"box_by_{evaluator}": run["scores"][evaluator]["box_map50_95"] for evaluator in EVALUATORS},
        "wall_s": run["wall_s"],
        "epoch_s": run["epoch_s"],
        "images_per_s": run["images_per_s"],
        "peak_memory_gb": run["peak_memory_bytes"] / 1e9,
        "peak_gpu_memory_gb": None if gpu_bytes is None else gpu_bytes / 1e9,
    }


def _side(runs: Sequence[dict[str, float | None]]) -> dict[str, dict[str, float | None]]:
    summary: dict[str, dict[str, float | None]] = {}
    for name in _TITLES:
        values = [value for run in runs if (value := run[name]) is not None]
        summary[name] = {
            "mean": statistics.fmean(values) if values else None,
            "spread": statistics.stdev(values) if len(values) > 1 else None,
        }
    return summary


def _shown(figure: dict[str, float | None]) -> str:
    mean, spread = figure["mean"], figure["spread"]
    if mean is None:
        return "-"
    digits = 4 if abs(mean) < 2 else 1
    return f"{mean:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def _shown_ratio(figures: Figures, name: str) -> str:
    value = ratio(figures, name)
    return "-" if value is None else f"{value:.2f}"
