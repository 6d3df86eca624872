"""YOLO segmentation models: built from a YAML or a .pt file, partly frozen, saved for deployment;
what a file says of its training.
"""

import copy
import datetime
import logging
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from yolo_seg_ddp.data.dataset_yaml import is_stretch
from yolo_seg_ddp.utils.distributed.sync_bn import revert_sync_batchnorm
from yolo_seg_ddp.utils.environment import package_version, prepare_environment
from yolo_seg_ddp.utils.errors import UsageError, UserError, one_line, printable
from yolo_seg_ddp.utils.tensor_files import atomic_torch_save
from yolo_seg_ddp.yolo.weights_file import ForeignFile, checked_architecture, read_weights_file

YoloModel = Any  # ultralytics.nn.tasks.SegmentationModel, which has no type annotations
# Ultralytics publishes no segmentation weights of YOLO12.
OFFICIAL_WEIGHTS = tuple(
    f"{family}{size}-seg.pt" for family in ("yolov8", "yolo11", "yolo26") for size in "nsmlx"
)
UNPUBLISHED_WEIGHTS = tuple(f"yolo12{size}-seg.pt" for size in "nsmlx")
MAX_INPUT_PX = 16_384
RESIZE = "area-v1"  # how photographs are shrunk in front of the network: by area, never enlarged
DESCRIPTIONS = (".yaml", ".yml")  # endings of --model that begin with random weights
# PyTorch's value. With YOLOv8's 0.03 the running statistics are some 33 steps old, and in a short
# training the weights have moved on since: the network of the evaluation is worse than the one that
# was trained (docs/research/recipe.md).
BATCH_NORM_MOMENTUM = 0.1
# The median of COCO's YOLOv8n-seg as the rates for trained weights were measured
# (docs/research/recipe.md); 0.58 in random weights.
FILTER_LENGTH = 2.0
LAYER_MODULES = ("torch.nn.modules.", "ultralytics.nn.modules.")


def build_model(
    source: str, names: tuple[str, ...], say: Callable[[str], object] | None = None
) -> YoloModel:
    """Build a segmentation model for the classes `names`.

    `source` is the name of a description such as `yolo11n-seg.yaml` (fresh weights), a local .pt
    file, or one of OFFICIAL_WEIGHTS, which Ultralytics downloads if it is missing. The classifier
    keeps a .pt file's weights for classes of the same name; `say` is told for which, if the file
    has others. In training the
    model returns a dictionary: boxes (B, 64, A), scores (B, classes, A), mask_coefficient (B, 32,
    A), proto (B, 32, S/4, S/4), feats. YOLO26 returns two, `one2many` and `one2one`, with boxes (B,
    4, A), whose proto is the pair of those and classes of pixels (B, classes, S/8, S/8). Call it on
    every rank, before the optimizer, the EMA and DDP.
    """
    if source.endswith(DESCRIPTIONS):
        try:
            model = _build_network(_read_description(source), len(names))
        except UserError:
            raise
        except Exception as error:  # an invalid description can raise anything
            raise UserError(
                f"--model {source}: not a model description: {one_line(error)}"
            ) from error
        _require_supported(model, f"--model {source}")
        model.names = dict(enumerate(names))
    else:
        pretrained = load_weights(source)
        model = _build_network(copy.deepcopy(pretrained.yaml), len(names))
        model.names = dict(enumerate(names))  # before loading: rows are matched by name
        model.load(pretrained, verbose=False)
        known = class_names(pretrained)
        if say and known != names:
            kept, new = (
                ", ".join(name for name in names if (name in known) == is_known)
                for is_known in (True, False)
            )
            line = (
                f"Classes that {source} knows and keeps: {kept or 'none'}; classes that begin "
                f"anew: {new or 'none'}"
            )
            say(printable(line, 1000))
    model.nc = len(names)
    model.task = "segment"
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = BATCH_NORM_MOMENTUM
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for parameter in model.model[-1].dfl.parameters():  # none in YOLO26
        parameter.requires_grad_(False)  # the fixed 0, 1, 2, … of the distribution's bins
    return model


def load_weights(source: str) -> YoloModel:
    """Load a segmentation model from a .pt file in Ultralytics' format: float32, in evaluation
    mode.

    No code of the file is run (yolo_seg_ddp/yolo/weights_file.py). Raises UserError that names the
    file and the fix.
    """
    path = Path(source)
    if not path.exists():
        if source in UNPUBLISHED_WEIGHTS:
            scratch = path.with_suffix(".yaml").name
            raise UserError(
                f"{source}: no such file, and Ultralytics publishes none; train from scratch: "
                f"--model {scratch}"
            )
        if (outlining := f"{path.stem}-seg.pt") in OFFICIAL_WEIGHTS:
            raise UserError(
                f"{source}: the name of a detection model, which gives boxes alone; name "
                f"{outlining}"
            )
        if source not in OFFICIAL_WEIGHTS:
            raise UserError(
                f"{source}: no such file; name a .pt file, {', '.join(OFFICIAL_WEIGHTS[::5])} (or "
                "size s, m, l, x instead "
                "of n), or yolov8n-seg.yaml"
            )
        _fetch_official(path)
    content = read_weights_file(path)
    try:
        with torch.random.fork_rng(devices=[]):  # the file's weights replace the random ones
            model = _build_network(content.architecture, len(content.names))
            # In the smallest networks the classes' layers are as wide as their number asks for, at
            # most 100, and a training keeps those of the file that it starts from: so they may be
            # wider than the number of classes in this file tells.
            shapes = [
                tensor.shape
                for name, tensor in content.state.items()
                if name.endswith(".cv3.0.2.weight")
            ]
            if shapes and model.model[-1].cv3[0][2].in_channels < shapes[0][1] <= 100:
                model.load(_build_network(content.architecture, shapes[0][1]), verbose=False)
        model.load_state_dict({name: tensor.float() for name, tensor in content.state.items()})
    except Exception as error:  # an invalid description can raise anything
        raise UserError(
            f"{path}: its weights do not fit its network description ({one_line(error)}); "
            "save a fused or pruned model again as it was trained"
        ) from error
    _require_supported(model, str(path))
    model.names = dict(enumerate(content.names))
    model.args = content.options
    model.task = "segment"
    return model.float().eval()


def load_for_prediction(source: str, device: torch.device, *, nms: bool = True) -> YoloModel:
    """Load a model as `load_weights` does, in the form that predicts fastest: BatchNorm folded into
    the convolutions.

    Its outputs differ from those of the model as trained by rounding alone. Without `nms` YOLO26
    predicts with its one-to-one outputs, which need no suppression. Raises UserError if the model
    has none.
    """
    model = load_weights(source)
    if not nms and not is_yolo26(model):
        raise UserError(f"{source}: needs non-maximum suppression; only YOLO26 can do without")
    model.end2end = not nms
    return model.fuse(verbose=False).to(device, memory_format=torch.channels_last)


def copy_for_prediction(model: YoloModel) -> YoloModel:
    """Return a copy of a model in training in the form that `load_for_prediction` gives it."""
    return copy.deepcopy(model).fuse(verbose=False).to(memory_format=torch.channels_last)


def weights_or_description(model: str) -> tuple[str, str | None]:
    """Return the source to build `model` from and, if it differs from `model`, a line that says so.

    The speed of a training step does not depend on the weights' values, so official weights are not
    downloaded.
    """
    path = Path(model)
    if path.name not in OFFICIAL_WEIGHTS or path.exists():
        return model, None
    description = path.with_suffix(".yaml").name
    note = (
        f"{model} is not here: built with fresh weights from {description}, which train at the "
        "same speed"
    )
    return description, note


def class_names(model: YoloModel) -> tuple[str, ...]:
    """Return the classes a loaded model predicts, in order."""
    names = model.names
    return (
        tuple(names[index] for index in range(len(names)))
        if isinstance(names, dict)
        else tuple(names)
    )


def require_classes(path: str, model: YoloModel, data: str, names: tuple[str, ...]) -> None:
    """Raise UserError if a loaded model predicts other classes than those of
    a data set, `names`.
    """
    learned = class_names(model)
    if learned != names:
        known, wanted = (
            textwrap.shorten(", ".join(classes), 120, placeholder=" ...")
            for classes in (learned, names)
        )
        fix = f"train_yolo_ddp.py --model {path} --data {data} teaches it those"
        raise UserError(f"{path} knows the classes {known} but {data} has {wanted}; {fix}")


def freeze_layers(model: YoloModel, num_layers: int) -> None:
    """Freeze the first `num_layers` layers: no gradients, and no updates of their BatchNorm
    statistics.

    Call it before the optimizer and DDP are built. The head always trains. `model.train()` would
    switch the statistics' updates on again, so a hook switches them off before each forward pass;
    it stands on the whole model because the conversion to synchronised BatchNorm replaces layers.
    """
    most = len(model.model) - 1
    if num_layers > most:
        raise UsageError(
            f"--freeze {num_layers}: the model has {most} layers before its head, which must train"
        )
    if num_layers < 1:
        return
    for layer in model.model[:num_layers]:
        layer.requires_grad_(False)
    model.register_forward_pre_hook(partial(_keep_frozen, num_layers))


def _keep_frozen(num_layers: int, model: YoloModel, _: Any) -> None:
    for layer in model.model[:num_layers]:
        if layer.training:
            layer.eval()


@torch.no_grad()
def equalise_filters(model: YoloModel) -> None:
    """Give every filter in front of a BatchNorm the length FILTER_LENGTH, in place, but for frozen
    ones.

    BatchNorm divides by that length again, so the length of a published filter says nothing. But a
    step of an optimizer turns a short filter further than a long one. With one length the rates,
    which were measured, suit all files. The running statistics follow: in evaluation the network
    computes what it did, up to rounding.
    """
    for layer in model.modules():
        conv, norm = getattr(layer, "conv", None), getattr(layer, "bn", None)
        if not (isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)):
            continue
        if not conv.weight.requires_grad:
            continue
        length = torch.linalg.vector_norm(conv.weight, dim=(1, 2, 3), dtype=torch.float64)
        factor = torch.where(length > 0, FILTER_LENGTH / length, 1.0)
        conv.weight.mul_(factor[:, None, None, None])
        statistics = norm.state_dict(keep_vars=True)
        statistics["running_mean"].mul_(factor)
        # BatchNorm adds `eps` to the variance, which does not grow with the filter.
        variance = statistics["running_var"]
        variance.copy_(((variance + norm.eps) * factor**2 - norm.eps).clamp(min=0))


def save_deployable(
    path: Path,
    module: nn.Module,
    info: dict[str, Any],
    *,
    img_size: int,
    data: str,
    **metadata: Any,
) -> None:
    """Write, atomically and in half precision, a file that Ultralytics' `YOLO(path)` opens to
    predict, val or export.

    `metadata` are what `yolo_seg_ddp/yolo/model.py` reads there, of a training on parts of
    photographs and of its labels.
    """
    deployed: YoloModel = copy.deepcopy(module).cpu().eval()
    deployed = revert_sync_batchnorm(deployed).half().to(memory_format=torch.contiguous_format)
    deployed.criterion = None
    deployed._forward_pre_hooks.clear()  # code of this project, which other programs cannot load
    deployed.args = {"task": "segment", "imgsz": img_size, "data": data, **metadata}
    content = {
        "epoch": -1,
        "best_fitness": None,
        "model": deployed,
        "ema": None,
        "updates": None,
        "optimizer": None,
        "train_args": {"task": "segment", "imgsz": img_size, "data": data, "single_cls": False},
        "train_metrics": {name: float(value) for name, value in info.get("metrics", {}).items()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(),
        "version": package_version("ultralytics"),
        "trained_epochs": info.get("epoch"),
        "resize": RESIZE,
    }
    atomic_torch_save(content, path)


def _build_network(architecture: dict[str, Any], num_classes: int) -> YoloModel:
    """Build the network of a checked description.

    Raises ForeignFile for names that are not layers.
    """
    tasks = _ultralytics_tasks()
    for _, _, name, _ in architecture["backbone"] + architecture["head"]:
        place, _, last = name.rpartition(".")
        layer = getattr(nn, last, None) if place == "nn" else getattr(tasks, name, None)
        # Ultralytics would call any name of its module; some of them download files.
        if not (
            isinstance(layer, type)
            and issubclass(layer, nn.Module)
            and layer.__module__.startswith(LAYER_MODULES)
        ):
            raise ForeignFile(f"its layer {name} is not supported")
    return tasks.SegmentationModel(architecture, ch=3, nc=num_classes, verbose=False)


def _require_supported(model: YoloModel, source: str) -> None:
    """Raise UserError, which begins with `source`, unless the loss and the prediction know the
    model's last layer.
    """
    head = model.model[-1]
    kind = type(head).__name__
    head_kind = (
        kind,
        getattr(head, "reg_max", 0) > 1,
        getattr(head, "one2one_cv2", None) is not None,
    )
    if head_kind not in (("Segment", True, False), ("Segment26", False, True)):
        raise UserError(
            f"{source}: its last layer, {kind} with these settings, is not supported; the models "
            "yolov8*-seg, yolo11*-seg, "
            "yolo12*-seg and yolo26*-seg are"
        )


def is_trained(model: YoloModel) -> bool:
    """Return whether a model has seen photographs: BatchNorm's running means of random weights are
    0.
    """
    means = (
        module.running_mean
        for module in model.modules()
        if isinstance(module, torch.nn.BatchNorm2d)
    )
    return any(mean is not None and bool(mean.any()) for mean in means)


def is_yolo26(model: YoloModel) -> bool:
    """Return whether a model has YOLO26's outputs: distances instead of bins, with or without
    one-to-one outputs.
    """
    return type(model.model[-1]).__name__ == "Segment26"


def _read_description(source: str) -> dict[str, Any]:
    """Return the checked content of a model YAML, given as a file or by the name of one that
    Ultralytics ships.
    """
    tasks = _ultralytics_tasks()
    if re.match(r"[A-Za-z]{2,}:/", source):  # Ultralytics would download it
        raise UserError("--model: an address, not a file; copy the file here")
    try:
        description = tasks.yaml_model_load(source)
        return {**checked_architecture(description), "yaml_file": source}
    except FileNotFoundError as error:
        raise UserError(
            f"--model {source}: no such model description; try yolov8n-seg.yaml"
        ) from error
    except (yaml.YAMLError, OSError, TypeError, AttributeError) as error:
        raise UserError(f"--model {source}: not a model description ({one_line(error)})") from error


def _fetch_official(path: Path) -> None:
    from ultralytics.utils.downloads import attempt_download_asset

    try:
        attempt_download_asset(str(path))
    except Exception as error:  # no network, a proxy, a missing release: the fix is the same
        raise UserError(_offline_line(path)) from error
    if not path.exists():
        raise UserError(_offline_line(path))


def _offline_line(path: Path) -> str:
    scratch = path.with_suffix(".yaml").name
    return (
        f"{path.name} could not be fetched; copy the file here, or train from scratch with --model "
        f"{scratch}"
    )


def _ultralytics_tasks() -> Any:
    """Import Ultralytics with downloads, automatic installs and log messages switched off."""
    prepare_environment()
    from ultralytics.nn import tasks
    from ultralytics.utils import LOGGER

    LOGGER.setLevel(logging.ERROR)
    return tasks


MOST_MARGIN_PX, MOST_LENGTH_PX = 1000.0, 1e9  # of labels around wires; of labels
WINDOW_VALUES = ("per_photo", "low_scale", "high_scale")


def trained_size_px(model: YoloModel) -> int:
    """Return the side of the square input that a loaded model was trained with; 640 if its file
    does not say.
    """
    size_px = model.args.get("imgsz", 640)
    return (
        size_px
        if isinstance(size_px, int) and 32 <= size_px <= MAX_INPUT_PX and size_px % 32 == 0
        else 640
    )


def trained_windows(model: YoloModel) -> dict[str, float] | None:
    """Return how many windows a loaded model's training cut, and their scales; None if it saw whole
    photographs.

    `per_photo`: windows of each photograph per epoch. `low_scale`, `high_scale`: shown pixels per
    pixel of the photograph.
    """
    windows = model.args.get("windows")
    return (
        {name: windows[name] for name in WINDOW_VALUES} if are_possible_windows(windows) else None
    )


def choose_mask_score(asked: bool | None, model: YoloModel) -> bool:
    """Return whether scores know the mask: as `asked`, else as the model's file says of its
    training.

    If the file says nothing they do.
    """
    return model.args.get("mask_score") is not False if asked is None else asked


def trained_thin_classes(model: YoloModel) -> tuple[int, ...]:
    """Return the classes that were long and thin in a loaded model's training on windows; none if
    its file does not say.
    """
    return _known_classes(model, model.args.get("thin_classes"))


def trained_wire_labels(model: YoloModel) -> dict[str, Any]:
    """Return how wires were labelled in that training, as `measure_wire_labels` does; nothing that
    its file does not say.
    """
    width = model.args.get("wire_width")
    is_width = (
        isinstance(width, list)
        and len(width) == 2
        and all(type(number) is float for number in width)
    )
    is_width = is_width and all(abs(number) <= MOST_MARGIN_PX for number in width)
    return {
        "wires_end_at": [*_known_classes(model, model.args.get("wires_end_at"))],
        "wire_width": width if is_width else [],
        "wires_parallel": _numbers_of_classes(model, "wires_parallel", 1, 1.0),
        "wires_bent": [*_known_classes(model, model.args.get("wires_bent"))],
    }


def trained_stretch(model: YoloModel) -> tuple[float, float] | None:
    """Return the values of photographs of more than 8 bits that were black and white in that
    training; None if its file says none.
    """
    stretch = model.args.get("stretch")
    return (stretch[0], stretch[1]) if is_stretch(stretch) else None


def trained_label_lengths(model: YoloModel) -> list[float]:
    """Return how long labels were in that training, as `label_lengths` does; nothing if the model's
    file does not say it.
    """
    return _numbers_of_classes(model, "label_lengths", 2, MOST_LENGTH_PX)


def numbers_by_class(values: Sequence[float], count: int) -> dict[Any, Sequence[float]]:
    """Return the numbers of each class, from a model file's list of classes, each followed by
    `count` numbers.
    """
    starts = range(0, len(values), count + 1)
    return {values[start]: values[start + 1 : start + 1 + count] for start in starts}


def _numbers_of_classes(model: YoloModel, name: str, count: int, most: float) -> list[float]:
    """Return a list of classes, each followed by `count` numbers above 0 and at most `most`;
    nothing if it is anything else.
    """
    values, width = model.args.get(name), count + 1
    if not isinstance(values, list) or len(values) % width:
        return []
    are_possible = all(
        type(value) is float and 0 < value <= most for n, value in enumerate(values) if n % width
    )
    return values if are_possible and _known_classes(model, values[::width]) else []


def _known_classes(model: YoloModel, classes: Any) -> tuple[int, ...]:
    known = range(len(class_names(model)))
    is_list = isinstance(classes, list) and all(
        type(class_id) is int and class_id in known for class_id in classes
    )
    return tuple(classes) if is_list else ()


def are_possible_windows(windows: Any) -> bool:
    """Return whether the trainer's options could give these windows."""
    if not isinstance(windows, dict) or not all(
        0 < windows.get(name, 0) < math.inf for name in WINDOW_VALUES
    ):
        return False
    return bool(windows["low_scale"] <= windows["high_scale"] <= 1)
