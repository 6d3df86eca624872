"""Opens a model as the options of prediction say."""

import torch

from yolo_seg_ddp.data.label_shapes import named_classes
from yolo_seg_ddp.predict.models import open_model
from yolo_seg_ddp.predict.options import PredictOptions
from yolo_seg_ddp.predict.postprocess import steps_for
from yolo_seg_ddp.predict.thresholds import Thresholds
from yolo_seg_ddp.predict.tiles import Predictor, choose_tiling
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.devices import choose_device, choose_precision
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.extras import require_extra
from yolo_seg_ddp.yolo.model import (
    YoloModel,
    choose_mask_score,
    class_names,
    trained_size_px,
    trained_thin_classes,
)


def open_predictor(
    config: PredictOptions, ranks: distributed.RankInfo | None = None
) -> tuple[Predictor, tuple[str, ...]]:
    """Open the model on this rank's device; return how it is applied, and
    the names of its classes.
    """
    ranks = ranks or distributed.read_rank_environment()
    device = choose_device(config.device, ranks.local_rank)
    if device.type == "cpu" or config.threads:
        torch.set_num_threads(config.threads or cores_of(ranks))
    model = open_model(config.model, device, config.amp, nms=config.nms)
    return predictor_for(config, model, device), class_names(model)


def predictor_for(config: PredictOptions, model: YoloModel, device: torch.device) -> Predictor:
    """Return how an open model is applied; FIXED were decided when it was opened."""
    names = class_names(model)
    size_px = config.img_size or trained_size_px(model)
    tiling = choose_tiling(config.tiles, config.overlap, model, size_px)
    limits = {
        "confidence": config.conf,
        "iou": config.iou,
        "classes": wanted_classes(config.classes, names),
        "mask_score": choose_mask_score(config.mask_score, model),
    }
    thin = trained_thin_classes(model)
    if config.thin_classes != ("auto",):
        thin = named_classes(config.thin_classes, names)
        if thin:
            require_extra("wires")
    predictor = Predictor(
        model,
        size_px,
        device,
        config.batch_size,
        tiling,
        limits,
        config.max_detections,
        choose_precision(config.amp, device).dtype,
        thin,
        steps_for(model, thin),
    )
    thresholds = Thresholds.chosen(config.thresholds, config.model, model)
    return thresholds.apply(predictor, names) if thresholds else predictor


def cores_of(ranks: distributed.RankInfo) -> int:
    """Return how many cores a rank may use."""
    return max(1, usable_cpu_count() // ranks.local_world_size)


def wanted_classes(
    classes: tuple[str, ...] | None, names: tuple[str, ...]
) -> tuple[int, ...] | None:
    """Turn class names or numbers into numbers.

    Raises UserError for a class that the model does not have.
    """
    if classes is None:
        return None
    known = {name: index for index, name in enumerate(names)}
    known |= {str(index): index for index in range(len(names))}
    for name in classes:
        if name not in known:
            advice = "; several stand apart, as in --classes 0 1" if "," in name else ""
            raise UserError(f"--classes {name}: the model knows {', '.join(names)}{advice}")
    return tuple(known[name] for name in classes)
