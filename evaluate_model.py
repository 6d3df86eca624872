"""Measure a trained model on a split: box and mask AP per class, curves, confusion matrix, COCO-format predictions.

python evaluate_model.py --model models/epri_distribution_ddp/best.pt
torchrun --nproc_per_node=4 evaluate_model.py --model models/epri_distribution_ddp/best.pt
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils import distributed
from utils.config import option, parse_config
from utils.dataset import SegmentationDataset, ShardBatches, get_dataloader, read_photos
from utils.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.distributed import cleanup_ddp, setup_ddp
from utils.errors import UsageError, UserError, run_script
from utils.evaluation import PRECISE, Evaluation, evaluate
from utils.files import write_text_atomic
from utils.logs import format_table
from utils.loss import SegmentationLoss
from utils.metrics import precision_recall_curves
from utils.model import class_names, load_weights
from utils.plots import plot_confusion_matrix, plot_pr_curves
from utils.prediction_files import CocoCollector
from utils.runtime import (
    PRECISION_CHOICES,
    choose_device,
    choose_precision,
    choose_threads_and_workers,
    die_with_parent,
)


@dataclass(frozen=True)
class EvaluationConfig:
    """Options of `evaluate_model.py`."""

    model: str = option(None, "trained model, such as models/epri_distribution_ddp/best.pt", required=True)
    data: str = option(str(DEFAULT_DATASET_YAML.name), "data-set YAML: folders and class names", metavar="YAML")
    split: str = option("val", "which split to judge on", choices=("train", "val", "test"))
    output: str = option("outputs/evaluation", "folder for the results", metavar="DIR")
    img_size: int | None = option(None, "side of the network input in pixels; unset: as trained")
    batch_size: int = option(16, "images per process and pass through the network")
    num_workers: int = option(8, "loader processes per process, at most; fewer where the cores do not suffice")
    amp: str = option("off", "mixed precision", choices=PRECISION_CHOICES)
    predictions: bool = option(True, "write predictions.json (COCO format, masks at the photographs' size)")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        if self.img_size is not None and (self.img_size < 32 or self.img_size % 32):
            raise UsageError(f"--img-size {self.img_size}: must be a multiple of 32")
        if self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size}: must be at least 1")


def main() -> int:
    """Evaluate; return the exit code."""
    config = parse_config(EvaluationConfig, "Measure a trained model on a split of a data set")
    ranks = distributed.read_rank_environment()
    die_with_parent()
    device = choose_device(config.device, ranks.local_rank)
    threads, workers = choose_threads_and_workers(ranks.local_world_size, config.num_workers, device.type)
    torch.set_num_threads(threads)
    model = load_weights(config.model).to(device, memory_format=torch.channels_last)
    spec = load_dataset_yaml(config.data)
    names = class_names(model)
    if names != spec.names:
        raise UserError(
            f"{config.model} knows the classes {', '.join(names)} but {config.data} has {', '.join(spec.names)}"
        )
    size_px = config.img_size or int(model.args.get("imgsz", 640))
    photos = read_photos(spec, config.split)
    dataset = SegmentationDataset(photos, size_px)
    batches = ShardBatches(len(dataset), config.batch_size, ranks.rank, ranks.world_size)
    loader = get_dataloader(dataset, batches, workers, device.type == "cuda")
    setup_ddp(device, ranks)
    try:
        collector = CocoCollector([photo.file for photo in photos]) if config.predictions else None
        precision = choose_precision(config.amp, device) if config.amp != "off" else PRECISE
        evaluation = evaluate(
            model, loader, names, SegmentationLoss(model), device, precision=precision, on_image=collector
        )
        predictions = collector.gather() if collector is not None else None
        if ranks.is_main:
            write_results(Path(config.output), config, size_px, evaluation, names, predictions)
            print_results(evaluation.metrics, config.output)
    finally:
        cleanup_ddp()
    return 0


def write_results(
    folder: Path,
    config: EvaluationConfig,
    size_px: int,
    evaluation: Evaluation,
    names: tuple[str, ...],
    predictions: list[dict[str, Any]] | None,
) -> None:
    """Write metrics.json, predictions.json and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": config.model, "data": config.data, "split": config.split, "img_size": size_px}
    write_text_atomic(folder / "metrics.json", json.dumps({**about, **evaluation.metrics}, indent=2) + "\n")
    if predictions is not None:
        write_text_atomic(folder / "predictions.json", json.dumps(predictions))
    curves = precision_recall_curves(evaluation.results, list(names))
    for kind in ("box", "mask"):
        title = f"{kind} precision and recall at IoU 0.5"
        plot_pr_curves(curves[kind], list(names), folder / f"{kind}_pr_curve.png", title)
    plot_confusion_matrix(
        np.array(evaluation.metrics["confusion_matrix"]), list(names), folder / "confusion_matrix.png"
    )


def print_results(metrics: dict[str, Any], output: str) -> None:
    """Print one row per class and one for all."""
    columns = (
        "box_precision",
        "box_recall",
        "box_map50",
        "box_map50_95",
        "mask_precision",
        "mask_recall",
        "mask_map50",
        "mask_map50_95",
    )
    overall = {"name": "all", "num_images": metrics["num_images"], "num_targets": metrics["num_targets"], **metrics}
    rows = [
        [row["name"], row["num_images"], row["num_targets"], *(_shown(row, column) for column in columns)]
        for row in [overall, *metrics["per_class"]]
    ]
    header = ["class", "images", "objects", "box P", "R", "mAP50", "mAP50-95", "mask P", "R", "mAP50", "mAP50-95"]
    print(format_table(header, rows))
    print(f"Validation loss: {metrics['val_loss']:.4f}")
    print(f"Results in {output}: metrics.json, predictions.json, *_pr_curve.png, confusion_matrix.png")


def _shown(row: dict[str, Any], column: str) -> str | None:
    """A class that the split does not contain has no score, rather than a score of zero."""
    return f"{row[column]:.3f}" if row["num_targets"] else None


if __name__ == "__main__":
    run_script(main)
