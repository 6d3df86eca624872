"""Measure a trained model on a split: report.html, metrics.json, COCO-format files.

python evaluate_model.py --model models/epri_distribution_ddp/best.pt
python evaluate_model.py --model models/epri_distribution_ddp/best.pt --mask-resolution native --coco-eval
python evaluate_model.py --model models/epri_distribution_ddp/best.pt --compare models/earlier/best.pt
torchrun --nproc_per_node=4 evaluate_model.py --model models/epri_distribution_ddp/best.pt
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from utils import distributed
from utils.common.config import Options, option, parse_config
from utils.common.cores import choose_threads_and_workers
from utils.common.devices import PRECISION_CHOICES, Precision, choose_device, choose_precision
from utils.common.errors import UsageError, UserError, run_script
from utils.common.files import write_text_atomic
from utils.common.signals import die_with_parent
from utils.data.dataset import SegmentationDataset, read_photos
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from utils.data.loader import ShardBatches, batch_bytes, get_dataloader, plan_loader
from utils.distributed import cleanup_ddp, setup_ddp
from utils.evaluation.coco import CocoCollector, evaluate_with_faster_coco_eval
from utils.evaluation.evaluate import FULL_PRECISION, Evaluation, PhotoPixels, evaluate
from utils.evaluation.metrics import calibration, operating_points, precision_recall_curves
from utils.evaluation.native_masks import sizes_on_disk
from utils.evaluation.report import Subject, Viewer, build_page, choose_worst, count_errors, draw_cards
from utils.evaluation.tables import class_table, coco_comparison_table, comparison_table, size_table
from utils.plots import plot_confusion_matrix, plot_pr_curves
from utils.yolo.loss import SegmentationLoss
from utils.yolo.model import class_names, load_weights, trained_size_px

PREFETCH = 4  # batches that each loader process prepares ahead
METRICS_FILES = ("metrics.json", "compared_metrics.json")


@dataclass(frozen=True)
class EvaluationConfig(Options):
    """Options of `evaluate_model.py`."""

    model: str = option(None, "trained model, such as models/epri_distribution_ddp/best.pt", required=True)
    compare: str | None = option(None, "a second model, shown beside the first in report.html", metavar="MODEL")
    data: str = option(str(DEFAULT_DATASET_YAML.name), "data-set YAML: folders and class names", metavar="YAML")
    split: str = option("val", "which split to judge on", choices=("train", "val", "test"))
    output: str = option("outputs/evaluation", "folder for the results", metavar="DIR")
    img_size: int | None = option(
        None, "side of the network input in pixels; unset: as trained", at_least=32, multiple_of=32
    )
    batch_size: int = option(16, "images per process and pass through the network", at_least=1)
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
        super().__post_init__()
        if self.coco_eval and not self.predictions:
            raise UsageError("--coco-eval judges predictions.json: leave out --no-predictions")


@dataclass(frozen=True)
class Candidate:
    """A model to measure, with the split as its network inputs."""

    path: str
    model: nn.Module
    criterion: SegmentationLoss
    dataset: SegmentationDataset


def main() -> int:
    """Evaluate; return the exit code."""
    config = parse_config(EvaluationConfig, "Measure a trained model on a split of a data set")
    ranks = distributed.read_rank_environment()
    die_with_parent()
    device = choose_device(config.device, ranks.local_rank)
    threads, workers = choose_threads_and_workers(ranks.local_world_size, config.num_workers, device.type)
    torch.set_num_threads(threads)
    paths = [config.model] + ([config.compare] if config.compare else [])
    models = [load_weights(path).to(device, memory_format=torch.channels_last) for path in paths]
    spec = load_dataset_yaml(config.data)
    for path, model in zip(paths, models, strict=True):
        check_classes(path, class_names(model), config.data, spec.names)
    photos = read_photos(spec, config.split)
    candidates = [
        Candidate(
            path, model, SegmentationLoss(model), SegmentationDataset(photos, config.img_size or trained_size_px(model))
        )
        for path, model in zip(paths, models, strict=True)
    ]
    loaders = [get_loader(candidate.dataset, config, ranks, workers, device) for candidate in candidates]
    setup_ddp(device, ranks)
    try:
        size_of = sizes_on_disk(photos)
        collector = CocoCollector([photo.file for photo in photos], size_of)
        evaluations = []
        for candidate, loader in zip(candidates, loaders, strict=True):
            is_main = candidate is candidates[0]  # the files for other programs are about --model alone
            on_masks = collector.see_masks if config.predictions and is_main else None
            evaluation = evaluate(
                candidate.model,
                loader,
                spec.names,
                candidate.criterion,
                device,
                precision=precision_of(config, device),
                on_image=collector.see_image if config.coco_eval and is_main else None,
                photo=PhotoPixels(size_of, config.mask_resolution == "native", on_masks),
            )
            evaluations.append(evaluation)
        predictions, ground_truth = collector.gather(spec.names)
        if ranks.is_main:
            files: dict[str, Any] = {"predictions.json": predictions} if config.predictions else {}
            files |= {"ground_truth.json": ground_truth} if config.coco_eval else {}
            metrics = write_results(config, candidates, evaluations, spec.names, files)
            write_page(config, candidates, evaluations, metrics, device)
            print_results(metrics, config.output)
    finally:
        cleanup_ddp()
    return 0


def check_classes(path: str, names: tuple[str, ...], data: str, expected: tuple[str, ...]) -> None:
    """Raise UserError when a model was trained on other classes."""
    if names != expected:
        raise UserError(f"{path} knows the classes {', '.join(names)} but {data} has {', '.join(expected)}")


def get_loader(
    dataset: SegmentationDataset,
    config: EvaluationConfig,
    ranks: distributed.RankInfo,
    workers: int,
    device: torch.device,
) -> Any:
    """Return the loader of this rank's share of the images; rank 0 says what had to give way."""
    batches = ShardBatches(len(dataset), config.batch_size, ranks.rank, ranks.world_size)
    bytes_per_batch = batch_bytes(config.batch_size, dataset.size_px)
    loading = plan_loader(workers, PREFETCH, bytes_per_batch, ranks.local_world_size)
    if ranks.is_main and loading.notes:
        print(*loading.notes, sep="\n")
    return get_dataloader(dataset, batches, loading.workers, device.type == "cuda", PREFETCH)


def precision_of(config: EvaluationConfig, device: torch.device) -> Precision:
    """Return the precision that `--amp` asks for; by default none of it."""
    return choose_precision(config.amp, device) if config.amp != "off" else FULL_PRECISION


def write_results(
    config: EvaluationConfig,
    candidates: Sequence[Candidate],
    evaluations: Sequence[Evaluation],
    names: tuple[str, ...],
    files: dict[str, Any],
) -> list[dict[str, Any]]:
    """Write the COCO files, have them judged if asked to, write metrics and pictures; return the metrics of each model."""
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, content in files.items():
        write_text_atomic(folder / file_name, json.dumps(content))
    metrics = [
        metrics_of(config, candidate, evaluation, names)
        for candidate, evaluation in zip(candidates, evaluations, strict=True)
    ]
    if config.coco_eval:
        metrics[0]["coco_eval"] = evaluate_with_faster_coco_eval(
            folder / "ground_truth.json", folder / "predictions.json"
        )
    if len(metrics) < len(METRICS_FILES):  # an earlier comparison's
        (folder / METRICS_FILES[1]).unlink(missing_ok=True)
    for file_name, content in zip(METRICS_FILES, metrics, strict=False):
        write_text_atomic(folder / file_name, json.dumps(content, indent=2) + "\n")
    curves = precision_recall_curves(evaluations[0].results, list(names))
    for kind in ("box", "mask"):
        title = f"{kind} precision and recall at IoU 0.5"
        plot_pr_curves(curves[kind], list(names), folder / f"{kind}_pr_curve.png", title)
    plot_confusion_matrix(np.array(metrics[0]["confusion_matrix"]), list(names), folder / "confusion_matrix.png")
    return metrics


def metrics_of(
    config: EvaluationConfig, candidate: Candidate, evaluation: Evaluation, names: tuple[str, ...]
) -> dict[str, Any]:
    """Return what metrics.json holds of a model."""
    photos = candidate.dataset.photos
    worst = choose_worst(count_errors(evaluation.results, len(names)))
    return {
        "model": candidate.path,
        "data": config.data,
        "split": config.split,
        "img_size": candidate.dataset.size_px,
        "mask_resolution": config.mask_resolution,
        **evaluation.metrics,
        "operating_points": operating_points(evaluation.results, names),
        "calibration": calibration(evaluation.results),
        "worst_images": [{"file": photos[row["image_id"]].file.name, **row} for row in worst],
    }


def write_page(
    config: EvaluationConfig,
    candidates: Sequence[Candidate],
    evaluations: Sequence[Evaluation],
    metrics: Sequence[dict[str, Any]],
    device: torch.device,
) -> None:
    """Write report.html. The few images that it shows are looked at a second time: none is kept from the first."""
    names = class_names(candidates[0].model)
    viewers = [
        Viewer(
            candidate.model,
            candidate.criterion.strides,
            candidate.dataset,
            names,
            device,
            precision_of(config, device),
            config.mask_resolution == "native",
        )
        for candidate in candidates
    ]
    subjects = [
        Subject(values, precision_recall_curves(evaluation.results, names))
        for values, evaluation in zip(metrics, evaluations, strict=True)
    ]
    page = build_page(subjects, draw_cards(metrics[0]["worst_images"], viewers))
    write_text_atomic(Path(config.output) / "report.html", page)


def print_results(models: Sequence[dict[str, Any]], output: str) -> None:
    """Print AP by class and by size, what the other judge says, the compared model, and where everything lies."""
    metrics = models[0]
    print(class_table(metrics))
    print(f"\n{size_table(metrics)}\n")
    if "coco_eval" in metrics:
        print(f"{coco_comparison_table(metrics)}\n")
    if len(models) > 1:
        print(f"{comparison_table(models)}\n")
    print(f"Validation loss: {metrics['val_loss']:.4f}")
    print(f"Results in {output}: report.html, metrics.json, predictions.json, *_pr_curve.png, confusion_matrix.png")


if __name__ == "__main__":
    run_script(main)
