"""Measure a trained model on a split: box and mask AP per class and size, curves, confusion matrix, COCO-format files.

python evaluate_model.py --model models/epri_distribution_ddp/best.pt
python evaluate_model.py --model models/epri_distribution_ddp/best.pt --mask-resolution native --coco-eval
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
from utils.coco import CocoCollector, judge_files
from utils.config import option, parse_config
from utils.dataset import SegmentationDataset, ShardBatches, get_dataloader, read_photos
from utils.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.distributed import cleanup_ddp, setup_ddp
from utils.errors import UsageError, UserError, run_script
from utils.evaluation import PRECISE, Evaluation, PhotoPixels, evaluate
from utils.evaluation_tables import class_table, judges_table, size_table
from utils.files import write_text_atomic
from utils.loss import SegmentationLoss
from utils.metrics import precision_recall_curves
from utils.model import class_names, load_weights, trained_size_px
from utils.native_masks import sizes_on_disk
from utils.plots import plot_confusion_matrix, plot_pr_curves
from utils.runtime import (
    PRECISION_CHOICES,
    choose_device,
    choose_precision,
    choose_threads_and_workers,
    die_with_parent,
)
from utils.shared_memory import batch_bytes, plan_loader

PREFETCH = 4  # batches that each loader process prepares ahead


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
    mask_resolution: str = option(
        "proto",
        "where masks are compared: proto, a quarter of the input, as Ultralytics does; native, in the photograph's "
        "pixels, boxes too",
        choices=("proto", "native"),
    )
    predictions: bool = option(True, "write predictions.json (COCO format, masks at the photographs' size)")
    coco_eval: bool = option(
        False, "write ground_truth.json too and let faster-coco-eval judge both (its masks are always native)"
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        if self.img_size is not None and (self.img_size < 32 or self.img_size % 32):
            raise UsageError(f"--img-size {self.img_size}: must be a multiple of 32")
        if self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size}: must be at least 1")
        if self.coco_eval and not self.predictions:
            raise UsageError("--coco-eval judges predictions.json: leave out --no-predictions")


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
    size_px = config.img_size or trained_size_px(model)
    photos = read_photos(spec, config.split)
    dataset = SegmentationDataset(photos, size_px)
    batches = ShardBatches(len(dataset), config.batch_size, ranks.rank, ranks.world_size)
    loading = plan_loader(workers, PREFETCH, batch_bytes(config.batch_size, size_px), ranks.local_world_size)
    if ranks.is_main and loading.notes:
        print(*loading.notes, sep="\n")
    loader = get_dataloader(dataset, batches, loading.workers, device.type == "cuda", PREFETCH)
    setup_ddp(device, ranks)
    try:
        size_of = sizes_on_disk(photos)
        collector = CocoCollector([photo.file for photo in photos], size_of)
        precision = choose_precision(config.amp, device) if config.amp != "off" else PRECISE
        photo_pixels = PhotoPixels(
            size_of, config.mask_resolution == "native", collector.see_masks if config.predictions else None
        )
        evaluation = evaluate(
            model,
            loader,
            names,
            SegmentationLoss(model),
            device,
            precision=precision,
            on_image=collector.see_image if config.coco_eval else None,
            photo=photo_pixels,
        )
        predictions, ground_truth = collector.gather(names)
        if ranks.is_main:
            files: dict[str, Any] = {"predictions.json": predictions} if config.predictions else {}
            files |= {"ground_truth.json": ground_truth} if config.coco_eval else {}
            metrics = write_results(Path(config.output), config, size_px, evaluation, names, files)
            print_results(metrics, config.output)
    finally:
        cleanup_ddp()
    return 0


def write_results(
    folder: Path,
    config: EvaluationConfig,
    size_px: int,
    evaluation: Evaluation,
    names: tuple[str, ...],
    files: dict[str, Any],
) -> dict[str, Any]:
    """Write the COCO files, have them judged if asked to, write metrics.json and the pictures; return the metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in files.items():
        write_text_atomic(folder / file_name, json.dumps(content))
    about = {"model": config.model, "data": config.data, "split": config.split, "img_size": size_px}
    metrics = {**about, "mask_resolution": config.mask_resolution, **evaluation.metrics}
    if config.coco_eval:
        metrics["coco_eval"] = judge_files(folder / "ground_truth.json", folder / "predictions.json")
    write_text_atomic(folder / "metrics.json", json.dumps(metrics, indent=2) + "\n")
    curves = precision_recall_curves(evaluation.results, list(names))
    for kind in ("box", "mask"):
        title = f"{kind} precision and recall at IoU 0.5"
        plot_pr_curves(curves[kind], list(names), folder / f"{kind}_pr_curve.png", title)
    plot_confusion_matrix(
        np.array(evaluation.metrics["confusion_matrix"]), list(names), folder / "confusion_matrix.png"
    )
    return metrics


def print_results(metrics: dict[str, Any], output: str) -> None:
    """Print AP by class and by size, what the other judge says, and where everything lies."""
    print(class_table(metrics))
    print(f"\n{size_table(metrics)}\n")
    if "coco_eval" in metrics:
        print(f"{judges_table(metrics)}\n")
    print(f"Validation loss: {metrics['val_loss']:.4f}")
    print(f"Results in {output}: metrics.json, predictions.json, *_pr_curve.png, confusion_matrix.png")


if __name__ == "__main__":
    run_script(main)
