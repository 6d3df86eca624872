"""Options that the commands which predict share, and the opening of a model by them."""

from dataclasses import dataclass
from typing import Any

import torch

from utils import distributed
from utils.common.config import CONFIG_HELP, FRACTION, THREADS_HELP, Options, option
from utils.common.cores import usable_cpu_count
from utils.common.devices import PRECISION_CHOICES, choose_device, choose_precision
from utils.common.errors import UserError
from utils.data.label_shapes import named_classes
from utils.predict.line_step import steps_for
from utils.predict.models import open_model
from utils.predict.thresholds import Thresholds
from utils.predict.tiles import OVERLAP, Predictor, check_tiles, choose_tiling
from utils.yolo.model import YoloModel, class_names, trained_size_px, trained_thin_classes

FIXED = ("model", "nms", "amp", "device", "threads", "config")  # options that hold as long as a model is open


def overlap_option(*needs: str) -> Any:
    """Declare `--overlap`, for commands that predict on tiles; `needs` as in `option`."""
    help = "share by which neighbouring tiles overlap, at least 128 px"
    return option(OVERLAP, help, at_least=0, at_most=0.9, needs=needs)


@dataclass(frozen=True)
class ModelOptions(Options):
    """Which model a command applies, and where."""

    model: str = option(
        None, "trained model, such as models/epri_distribution_ddp/best.pt, or an export", required=True
    )
    img_size: int | None = option(
        None, "side of the network input in pixels; unset: as in training", at_least=32, multiple_of=32
    )
    nms: bool = option(
        True, "suppress overlapping detections; --no-nms: use YOLO26's one-to-one outputs, which need none"
    )
    tiles: str = option(
        "auto",
        "side in pixels of the tiles that larger photographs are cut into; auto: as the model was trained, which is no "
        "tiles if it saw whole photographs",
        metavar="auto|off|SIZE",
    )
    overlap: float = overlap_option("not tiles=off")
    amp: str = option("off", "mixed precision; auto: the fastest that the hardware has", choices=PRECISION_CHOICES)
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int = option(0, THREADS_HELP, at_least=0)
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tiles(self.tiles)


@dataclass(frozen=True)
class PredictOptions(ModelOptions):
    """How a model predicts."""

    conf: float = option(0.25, "minimum confidence of a detection", **FRACTION)
    thresholds: str | None = option(
        None,
        "thresholds.yaml of evaluate_model.py --guarantee: each class has its own minimum; --conf is that of the others; unset: "
        "those that an export carries; off: none",
        metavar="FILE|off",
    )
    iou: float = option(
        0.7,
        "IoU above which the less confident of two detections of a class is dropped",
        needs="nms or not tiles=off",
        **FRACTION,
    )
    classes: tuple[str, ...] | None = option(None, "find only these classes, by name or number")
    max_detections: int = option(300, "maximum number of detections per photograph", at_least=1)
    batch_size: int = option(8, "photographs or tiles per forward pass", at_least=1)
    thin_classes: tuple[str, ...] = option(
        ("auto",),
        "classes whose detections get a centreline and a width, such as wires: names; auto: those of which the training's "
        "median object was 50 times as long as wide; none",
        metavar="CLASS",
    )


def open_predictor(
    config: PredictOptions, ranks: distributed.RankInfo | None = None
) -> tuple[Predictor, tuple[str, ...]]:
    """Open the model on this rank's device; return how it is applied, and the names of its classes."""
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
    limits = {"confidence": config.conf, "iou": config.iou, "classes": wanted_classes(config.classes, names)}
    asked = config.thin_classes
    thin = trained_thin_classes(model) if asked == ("auto",) else named_classes(asked, names)
    how = (limits, config.max_detections, choose_precision(config.amp, device).dtype, thin, steps_for(model, thin))
    predictor = Predictor(model, size_px, device, config.batch_size, tiling, *how)
    thresholds = Thresholds.chosen(config.thresholds, config.model, model)
    return thresholds.apply(predictor, names) if thresholds else predictor


def cores_of(ranks: distributed.RankInfo) -> int:
    """Return how many cores a rank may use."""
    return max(1, usable_cpu_count() // ranks.local_world_size)


def wanted_classes(classes: tuple[str, ...] | None, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Turn class names or numbers into numbers. Raises UserError for a class that the model does not have."""
    if classes is None:
        return None
    known = {**{name: index for index, name in enumerate(names)}, **{str(index): index for index in range(len(names))}}
    for name in classes:
        if name not in known:
            advice = "; several stand apart, as in --classes 0 1" if "," in name else ""
            raise UserError(f"--classes {name}: the model knows {', '.join(names)}{advice}")
    return tuple(known[name] for name in classes)
