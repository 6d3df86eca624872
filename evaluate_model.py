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
from yolo_seg_ddp.data.labels import count_searched
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
from yolo_seg_ddp.evaluation.native_masks import OnMasks
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
    # 1. This process and the models.
    ranks = distributed.read_rank_environment()
    say = distributed.main_printer(ranks.rank)
    device = choose_device(config.device, ranks.local_rank)
    threads, workers = choose_threads_and_workers(
        ranks.local_world_size, config.num_workers, device.type
    )
    torch.set_num_threads(config.threads or threads)
    paths = [config.model, config.compare] if config.compare else [config.model]
    models = [open_model(path, device, config.amp, nms=config.nms) for path in paths]

    # 2. The photographs, with the classes that all models know.
    spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
    shared = shared_classes(models, spec.names) if config.compare else []
    for path, model in zip(paths, models, strict=True):
        if shared:
            number_classes_as(model, path, spec.names, shared)
        require_classes(path, model, config.data, spec.names)
    photos = read_photos(spec, config.split, say)
    if shared:
        class_ids = [spec.names.index(name) for name in shared]
        photos = [only_classes(photo, class_ids) for photo in photos]
        say(f"Compared on the classes that both models know: {printable(', '.join(shared), 1000)}")
    size_of = sizes_on_disk(photos)

    # 3. How they are judged. What `auto` becomes depends on the models.
    config = choose_resolution(config, models)
    is_native = config.mask_resolution == "native"
    thin_classes = thin_classes_for(config, models[0], photos, size_of, spec.names)
    tolerance_px, min_score = config.centreline_tolerance, config.centreline_confidence
    thin = ThinRule(thin_classes, tolerance_px, min_score, at_levels=bool(config.guarantee))

    # 4. What else looks at the detections of --model while they are measured.
    folder = Path(config.output)
    on_image: list[OnImage] = []
    on_masks: list[OnMasks] = []
    calibrator = collector = thumbnails = None
    if config.guarantee:
        calibrator = require_extra("guarantee").ThresholdCalibrator(
            config.guarantee, config.certainty, config.model, spec, config.split, photos
        )
        on_image.append(calibrator.see_image)
    candidates = [
        get_candidate(path, model, photos, config, device, thin)
        for path, model in zip(paths, models, strict=True)
    ]
    loaders = [get_loader(candidate, config, ranks, workers) for candidate in candidates]
    setup_ddp(device, ranks)
    if config.predictions:
        collector = CocoCollector([photo.file for photo in photos], size_of, folder)
        on_masks.append(collector.see_masks)
    if collector and config.coco_eval:
        on_image.append(collector.see_image)
    report = find_extra("report")
    if report and config.predictions:
        thumbnails = report.Thumbnails(photos, is_native, folder)
        on_masks.append(thumbnails.see_masks)

    # 5. The measurement. Every rank must reach this, and all of 6.
    evaluations = []
    for candidate, loader in zip(candidates, loaders, strict=True):
        is_first = candidate is candidates[0]
        masks = on_masks if is_first else ()
        progress = Progress("batches", len(loader), ranks.is_main and candidate.find is None)
        evaluation = evaluate(
            candidate.model,
            distributed.apart(progress(loader)),
            spec.names,
            candidate.criterion,
            device,
            precision=candidate.precision,
            limits=candidate.limits,
            on_image=on_image if is_first else (),
            photo=PhotoPixels(size_of, is_native, masks, thin, candidate.find),
        )
        evaluations.append(evaluation)
        if candidate.find:
            count = torch.tensor([float(candidate.find.num_without_mask)])
            if num_without_mask := int(distributed.all_reduce_sum(count).item()):
                say(without_mask_line(num_without_mask))

    # 6. What the ranks saw comes together.
    if calibrator:
        first = candidates[0]
        predictor = first.find.predictor if first.find else whole_photos(first, config.batch_size)
        evaluations[0].metrics["guarantee"] = calibrator.finish(evaluations[0].results, predictor)
    if collector:
        collector.gather()
    listed = thumbnails.gather() if thumbnails else {}

    # 7. The files, which rank 0 writes: the pages show what the others hold.
    metrics: list[dict[str, Any]] = []
    if ranks.is_main:
        metrics = write_results(config, candidates, evaluations, collector)
        if calibrator:
            calibrator.write(folder)
        curves = [
            summary.precision_recall_curves(evaluation.results, spec.names)
            for evaluation in evaluations
        ]
        plot_curves(curves[0], spec.names, folder)
        confusion = np.array(metrics[0]["confusion_matrix"])
        plot_confusion_matrix(confusion, spec.names, folder / "confusion_matrix.png")
        if report:
            report.write_pages(folder, candidates, metrics, curves, listed)

    # Not after an error: NCCL would wait for ranks that have not failed.
    cleanup_ddp()
    return metrics


def choose_resolution(config: EvaluationConfig, models: Sequence[nn.Module]) -> EvaluationConfig:
    """Return the options with `--mask-resolution auto` decided: native for tiles, and where an
    option asks for it.
    """
    if config.mask_resolution != "auto":
        return config
    as_trained = config.tiles == "auto" and any(map(trained_windows, models))
    has_tiles = config.tiles.isdecimal() or as_trained
    needs_native = any(
        getattr(config, name) != getattr(EvaluationConfig, name) for name in NATIVE_ONLY
    )
    return replace(config, mask_resolution="native" if has_tiles or needs_native else "proto")


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
    classes = config.thin_classes if config.mask_resolution == "native" else ("none",)
    if classes == ("auto",):
        classes = tuple(names[class_id] for class_id in trained_thin_classes(model)) or classes
    return choose_thin_classes(classes, photos, size_of, names)


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
    size_px = config.img_size or trained_size_px(model)
    precision = choose_precision(config.amp, device)
    is_native = config.mask_resolution == "native"
    limits = {**AP_LIMITS, "mask_score": choose_mask_score(config.mask_score, model)}
    candidate = Candidate(
        path,
        model,
        criterion_of(model),
        SegmentationDataset(photos, size_px),
        class_names(model),
        device,
        precision,
        is_native,
        limits,
    )
    tiling = choose_tiling(config.tiles, config.overlap, model, size_px)
    if tiling is None:
        return candidate
    if not is_native:
        print(
            f"{path} was trained on windows: evaluated on whole photographs; tiles need "
            "--mask-resolution native"
        )
        return candidate
    predictor = replace(
        whole_photos(candidate, config.batch_size),
        tiling=tiling,
        thin=rule.classes,
        steps=steps_for(model, rule.classes),
    )
    ranks = distributed.read_rank_environment()
    progress = Progress("photographs", len(photos[ranks.rank :: ranks.world_size]), ranks.is_main)
    return replace(candidate, find=TileSearch(predictor, photos, progress, cores_of(ranks)))


def whole_photos(candidate: Candidate, batch_size: int) -> Predictor:
    """Return what predicts on whole photographs as a model is judged on them."""
    return Predictor(
        candidate.model,
        candidate.dataset.size_px,
        candidate.device,
        batch_size,
        tiling=None,
        limits=candidate.limits,
        autocast_dtype=candidate.precision.dtype,
    )


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
    collector: CocoCollector | None,
) -> list[dict[str, Any]]:
    """Write COCO files and metrics; with --coco-eval also compute COCO's AP.

    Return each model's metrics.
    """
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    metrics = [metrics_of(config, *judged) for judged in zip(candidates, evaluations, strict=True)]
    if collector:
        predictions = collector.write_predictions()
    if collector and config.coco_eval:
        ground_truth = collector.write_ground_truth(candidates[0].names)
        metrics[0]["coco_eval"] = evaluate_with_faster_coco_eval(ground_truth, predictions)
    # An earlier --compare may have left it.
    if len(metrics) < len(METRICS_FILES):
        (folder / METRICS_FILES[1]).unlink(missing_ok=True)
    for file_name, content in zip(METRICS_FILES, metrics, strict=False):
        write_text_atomic(folder / file_name, json.dumps(content, indent=2) + "\n")
    return metrics


def metrics_of(
    config: EvaluationConfig, candidate: Candidate, evaluation: Evaluation
) -> dict[str, Any]:
    """Return the content of a model's metrics.json."""
    photos = candidate.dataset.photos
    errors = summary.count_errors(evaluation.results, len(candidate.names), photos)
    if any(photo.unsearched.size for photo in photos):
        searched = [len(photos), *count_searched(photos, len(candidate.names)).tolist()]
        rows = [evaluation.metrics, *evaluation.metrics["per_class"]]
        for row, number in zip(rows, searched, strict=True):
            row["num_searched"] = number
    settings: dict[str, Any] = candidate.find.settings if candidate.find else {}
    if config.mask_resolution == "native":
        tolerance_px, min_score = config.centreline_tolerance, config.centreline_confidence
        rule = {"tolerance_px": tolerance_px, "confidence": min_score}
        settings = {**settings, "centrelines": rule}
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
    written = [name for name in names if (Path(config.output) / name).exists()]
    files = f"Results in {config.output}: {', '.join(written)}, *_curve.png, confusion_matrix.png"
    worst = [
        f"{printable(row['file'], 60)} ({summary.num_errors(row)})"
        for row in metrics["worst_images"][:3]
    ]
    pages = [f"; {config.output}/{name} shows them" for name in written if name.endswith(".html")]
    if not worst:
        return [files]
    return [files, f"Most errors: {', '.join(worst)}{''.join(pages[-1:])}"]


def main() -> int:
    """Evaluate; return the exit code."""
    config = parse_config(EvaluationConfig, __doc__)
    die_with_parent()
    if metrics := run(config):
        print(all_tables(metrics))
        print("\n".join(result_lines(config, metrics[0])))
        spec = load_dataset_yaml(config.data, trust_links=config.trust_links)
        source = os.path.relpath(spec.splits[config.split][0])
        words: list[str] = []
        # Boxes know of all objects, also where some have no outline.
        kind = "box" if "num_outlined" in metrics[0] else "mask"
        if config.guarantee:
            words = ["--thresholds", os.path.join(config.output, "thresholds.yaml")]
        elif metrics[0][f"{kind}_f1"]:
            # The confidence of the best F1.
            words = ["--conf", f"{max(metrics[0][f'{kind}_best_confidence'], 0.01):.2f}"]
        command = ("python", "inference.py", "--model", config.model, "--source", source, *words)
        print(next_command(*command))
    return 0


if __name__ == "__main__":
    run_script(main)
