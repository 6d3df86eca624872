"""Evaluate a trained model on a split of a data set; write report.html, metrics.json and COCO
files.

python evaluate_model.py --model models/epri_distribution_ddp/best.pt
python evaluate_model.py --model run/best.pt --mask-resolution native
python evaluate_model.py --model run/best.pt --compare models/earlier/best.pt
python evaluate_model.py --model run/best.onnx   # an export (yolo_seg_ddp/extras/exports/README.md)
torchrun --nproc_per_node=4 evaluate_model.py --model run/best.pt
"""

from yolo_seg_ddp.evaluation.options import EvaluationConfig
from yolo_seg_ddp.utils.config import parse_config, show_help

if __name__ == "__main__":
    show_help(EvaluationConfig, __doc__)

# --- the command, which needs PyTorch

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.data.dataset import Photo, SegmentationDataset, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.label_shapes import SizeOf, choose_thin_classes, sizes_on_disk
from yolo_seg_ddp.data.loader import ShardBatches, batch_bytes, get_dataloader, plan_loader
from yolo_seg_ddp.evaluation.coco import CocoCollector, evaluate_with_faster_coco_eval
from yolo_seg_ddp.evaluation.evaluate import (
    AP_LIMITS,
    Evaluation,
    OnImage,
    PhotoPixels,
    criterion_of,
    evaluate,
)
from yolo_seg_ddp.evaluation.metrics import summary
from yolo_seg_ddp.evaluation.metrics.thin_objects import ThinRule
from yolo_seg_ddp.evaluation.shared_classes import number_classes_as, only_classes, shared_classes
from yolo_seg_ddp.evaluation.tables import all_tables
from yolo_seg_ddp.evaluation.tile_search import Candidate, TileSearch
from yolo_seg_ddp.pages import plot_confusion_matrix, plot_curves
from yolo_seg_ddp.predict.models import open_model
from yolo_seg_ddp.predict.opening import cores_of
from yolo_seg_ddp.predict.postprocess import steps_for
from yolo_seg_ddp.predict.tiles import Predictor, choose_tiling
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.cores import choose_threads_and_workers
from yolo_seg_ddp.utils.devices import choose_device, choose_precision
from yolo_seg_ddp.utils.distributed import cleanup_ddp, setup_ddp
from yolo_seg_ddp.utils.errors import printable, run_script
from yolo_seg_ddp.utils.extras import find_extra, require_extra
from yolo_seg_ddp.utils.files import claimed_output, write_text_atomic
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.utils.signals import die_with_parent
from yolo_seg_ddp.utils.text import next_command, without_mask_line
from yolo_seg_ddp.yolo.model import (
    choose_mask_score,
    class_names,
    require_classes,
    trained_size_px,
    trained_thin_classes,
    trained_windows,
)

PREFETCH = 4  # batches that each loader process prepares ahead
METRICS_FILES = ("metrics.json", "compared_metrics.json")
NATIVE_ONLY = ("overlap", "thin_classes", "centreline_tolerance", "centreline_confidence")


def run(config: EvaluationConfig) -> list[dict[str, Any]]:
    """Evaluate, and write the results; return each model's metrics, on rank 0.

    Every rank must reach this.
    """
    with claimed_output(config.output):
        return evaluate_models(config)


def evaluate_models(config: EvaluationConfig) -> list[dict[str, Any]]:
    """Do the work of `run`."""
    ranks = distributed.read_rank_environment()
    device = choose_device(config.device, ranks.local_rank)
    threads, workers = choose_threads_and_workers(
        ranks.local_world_size, config.num_workers, device.type
    )
    torch.set_num_threads(config.threads or threads)
    paths = [config.model, config.compare] if config.compare else [config.model]
    models = [open_model(path, device, config.amp, nms=config.nms) for path in paths]
    spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
    say = distributed.main_printer(ranks.rank)
    shared = shared_classes(models, spec.names) if config.compare else []
    for path, model in zip(paths, models, strict=True):
        if shared:
            number_classes_as(model, path, spec.names, shared)
        require_classes(path, model, config.data, spec.names)
    photos = read_photos(spec, config.split, say)
    if shared:
        photos = [
            only_classes(photo, [spec.names.index(name) for name in shared]) for photo in photos
        ]
        say(f"Compared on the classes that both models know: {printable(', '.join(shared), 1000)}")
    size_of = sizes_on_disk(photos)
    config = choose_resolution(config, models)
    is_native = config.mask_resolution == "native"
    thin_classes = thin_classes_for(config, models[0], photos, size_of, spec.names)
    asked_of = (config.certainty, config.model, spec, config.split, photos)
    guarantor = (
        require_extra("guarantee").ThresholdCalibrator(config.guarantee, *asked_of)
        if config.guarantee
        else None
    )
    thin = ThinRule(
        thin_classes,
        config.centreline_tolerance,
        config.centreline_confidence,
        guarantor is not None,
    )
    candidates = [
        get_candidate(path, model, photos, config, device, thin)
        for path, model in zip(paths, models, strict=True)
    ]
    loaders = [get_loader(candidate, config, ranks, workers) for candidate in candidates]
    setup_ddp(device, ranks)
    folder = Path(config.output)
    collector = CocoCollector([photo.file for photo in photos], size_of, folder)
    report = find_extra("report")
    thumbnails = (
        report.Thumbnails(photos, is_native, collector.see_masks, folder) if report else None
    )
    evaluations = []
    for candidate, loader in zip(candidates, loaders, strict=True):
        is_main = candidate is candidates[0]  # the COCO files are written for --model alone
        on_masks = (thumbnails or collector).see_masks if config.predictions and is_main else None
        on_image: OnImage | None = collector.see_image if config.coco_eval and is_main else None
        on_image = guarantor.watch(on_image) if guarantor and is_main else on_image
        photo = PhotoPixels(size_of, is_native, on_masks, thin, candidate.find)
        progress = Progress("batches", len(loader), ranks.is_main and candidate.find is None)
        judged = (
            candidate.model,
            distributed.apart(progress(loader)),
            spec.names,
            candidate.criterion,
            device,
        )
        options: dict[str, Any] = {"precision": candidate.precision, "limits": candidate.limits}
        evaluations.append(evaluate(*judged, **options, on_image=on_image, photo=photo))
        if candidate.find:
            number = int(
                distributed.all_reduce_sum(
                    torch.tensor([float(candidate.find.num_without_mask)])
                ).item()
            )
            if number:
                say(without_mask_line(number))
    if guarantor:
        first = candidates[0]
        applied = first.model, first.dataset.size_px, device, config.batch_size, None, first.limits
        whole = Predictor(*applied, autocast_dtype=first.precision.dtype)
        predictor = first.find.predictor if first.find else whole
        evaluations[0].metrics["guarantee"] = guarantor.finish(evaluations[0].results, predictor)
    collector.gather()
    listed = thumbnails.gather() if thumbnails else {}
    metrics: list[dict[str, Any]] = []
    if ranks.is_main:
        metrics = write_results(config, candidates, evaluations, collector)
        if guarantor:
            guarantor.write(folder)
        curves = [
            summary.precision_recall_curves(evaluation.results, spec.names)
            for evaluation in evaluations
        ]
        plot_curves(curves[0], spec.names, folder)
        plot_confusion_matrix(
            np.array(metrics[0]["confusion_matrix"]), spec.names, folder / "confusion_matrix.png"
        )
        if report:
            report.write_pages(folder, candidates, metrics, curves, listed)
    cleanup_ddp()  # not after an error: NCCL would wait for ranks that have not failed
    return metrics


def choose_resolution(config: EvaluationConfig, models: Sequence[nn.Module]) -> EvaluationConfig:
    """Return the options with `--mask-resolution auto` decided: native for tiles, and where an
    option asks for it.
    """
    if config.mask_resolution != "auto":
        return config
    has_tiles = config.tiles.isdecimal() or (
        config.tiles == "auto" and any(map(trained_windows, models))
    )
    asks = any(getattr(config, name) != getattr(EvaluationConfig, name) for name in NATIVE_ONLY)
    return replace(config, mask_resolution="native" if has_tiles or asks else "proto")


def thin_classes_for(
    config: EvaluationConfig,
    model: nn.Module,
    photos: list[Photo],
    size_of: SizeOf,
    names: tuple[str, ...],
) -> tuple[int, ...]:
    """Return the classes that are judged by their centrelines: by default those that were thin in
    the model's training.
    """
    asked = config.thin_classes if config.mask_resolution == "native" else ("none",)
    if asked == ("auto",):
        asked = tuple(names[class_id] for class_id in trained_thin_classes(model)) or asked
    return choose_thin_classes(asked, photos, size_of, names)


def get_candidate(
    path: str,
    model: nn.Module,
    photos: list[Photo],
    config: EvaluationConfig,
    device: torch.device,
    rule: ThinRule,
) -> Candidate:
    """Return a model with the split at its input size, and with the search on tiles if there are to
    be tiles.
    """
    size_px, precision = (
        config.img_size or trained_size_px(model),
        choose_precision(config.amp, device),
    )
    dataset, is_native = SegmentationDataset(photos, size_px), config.mask_resolution == "native"
    limits = {**AP_LIMITS, "mask_score": choose_mask_score(config.mask_score, model)}
    applied = criterion_of(model), dataset, class_names(model), device, precision, is_native, limits
    candidate = Candidate(path, model, *applied)
    tiling = choose_tiling(config.tiles, config.overlap, model, size_px)
    if tiling is None:
        return candidate
    if not is_native:
        print(
            f"{path} was trained on windows: evaluated on whole photographs; tiles need "
            "--mask-resolution native"
        )
        return candidate
    thin = rule.classes
    how = model, size_px, device, config.batch_size, tiling, limits
    predictor = Predictor(
        *how, autocast_dtype=precision.dtype, thin=thin, steps=steps_for(model, thin)
    )
    ranks = distributed.read_rank_environment()
    progress = Progress("photographs", len(photos[ranks.rank :: ranks.world_size]), ranks.is_main)
    return replace(candidate, find=TileSearch(predictor, photos, progress, cores_of(ranks)))


def get_loader(
    candidate: Candidate, config: EvaluationConfig, ranks: distributed.RankInfo, workers: int
) -> Any:
    """Return the loader of this rank's share of the images; rank 0 prints what the machine's limits
    changed.
    """
    dataset = candidate.dataset
    batches = ShardBatches(len(dataset), config.batch_size, ranks.rank, ranks.world_size)
    bytes_per_batch = batch_bytes(config.batch_size, dataset.size_px)
    workers, notes = plan_loader(workers, PREFETCH, bytes_per_batch, ranks.local_world_size)
    if ranks.is_main and notes:
        print(*notes, sep="\n")
    return get_dataloader(dataset, batches, workers, candidate.device.type == "cuda", PREFETCH)


def write_results(
    config: EvaluationConfig,
    candidates: Sequence[Candidate],
    evaluations: Sequence[Evaluation],
    collector: CocoCollector,
) -> list[dict[str, Any]]:
    """Write COCO files and metrics; with --coco-eval also compute COCO's AP.

    Return each model's metrics.
    """
    folder = Path(config.output)
    metrics = [metrics_of(config, *judged) for judged in zip(candidates, evaluations, strict=True)]
    if config.predictions:
        predictions = collector.write_predictions()
    if config.coco_eval:  # needs predictions
        ground_truth = collector.write_ground_truth(candidates[0].names)
        metrics[0]["coco_eval"] = evaluate_with_faster_coco_eval(ground_truth, predictions)
    if len(metrics) < len(METRICS_FILES):  # left by an earlier --compare
        (folder / METRICS_FILES[1]).unlink(missing_ok=True)
    for file_name, content in zip(METRICS_FILES, metrics, strict=False):
        write_text_atomic(folder / file_name, json.dumps(content, indent=2) + "\n")
    return metrics


def metrics_of(
    config: EvaluationConfig, candidate: Candidate, evaluation: Evaluation
) -> dict[str, Any]:
    """Return the content of a model's metrics.json."""
    errors = summary.count_errors(
        evaluation.results, len(candidate.names), candidate.dataset.photos
    )
    settings: dict[str, Any] = candidate.find.settings if candidate.find else {}
    if config.mask_resolution == "native":
        judged = {
            "tolerance_px": config.centreline_tolerance,
            "confidence": config.centreline_confidence,
        }
        settings = {**settings, "centrelines": judged}
    return {
        "model": candidate.path,
        "data": config.data,
        "split": config.split,
        "img_size": candidate.dataset.size_px,
        "mask_resolution": config.mask_resolution,
        "mask_score": candidate.limits["mask_score"],
        **settings,
        **evaluation.metrics,
        "operating_points": summary.operating_points(evaluation.results, candidate.names),
        "calibration": summary.calibration(evaluation.results),
        "worst_images": summary.choose_worst(errors),
    }


def result_lines(config: EvaluationConfig, metrics: dict[str, Any]) -> list[str]:
    """Return the lines that name the files, and the photographs to look at: those with the most
    errors.
    """
    names = ("report.html", "photographs.html", "metrics.json", "predictions.json")
    found = [name for name in names if (Path(config.output) / name).exists()]
    files = f"Results in {config.output}: {', '.join(found)}, *_curve.png, confusion_matrix.png"
    worst = [
        f"{printable(row['file'], 60)} ({summary.num_errors(row)})"
        for row in metrics["worst_images"][:3]
    ]
    pages = [f"; {config.output}/{name} shows them" for name in found if name.endswith(".html")]
    return [files, *([f"Most errors: {', '.join(worst)}{''.join(pages[-1:])}"] if worst else [])]


def main() -> int:
    """Evaluate; return the exit code."""
    config = parse_config(EvaluationConfig, __doc__)
    die_with_parent()
    if metrics := run(config):
        print(all_tables(metrics))
        print("\n".join(result_lines(config, metrics[0])))
        spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
        source = os.path.relpath(spec.splits[config.split][0])
        words = (
            ["--thresholds", os.path.join(config.output, "thresholds.yaml")]
            if config.guarantee
            else []
        )
        if metrics[0]["mask_f1"] and not words:
            # of the best F1
            words = ["--conf", f"{max(metrics[0]['mask_best_confidence'], 0.01):.2f}"]
        print(
            next_command(
                "python", "inference.py", "--model", config.model, "--source", source, *words
            )
        )
    return 0


if __name__ == "__main__":
    run_script(main)
