"""What `train_yolo_ddp.py` can be told, and the arithmetic that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from utils.augment import AugmentConfig
from utils.colour import COLOUR_CHOICES
from utils.config import option
from utils.dataset_yaml import DEFAULT_DATASET_YAML
from utils.errors import UsageError, UserError
from utils.parallel import GRAD_COMPRESSION_CHOICES
from utils.runtime import PRECISION_CHOICES, choose_precision
from utils.schedule import NOMINAL_BATCH_SIZE, SGD_WARMUP_BIAS_LR, scaled_lr

if TYPE_CHECKING:
    import torch

GLOBAL_BATCH_SIZE = "global_batch_size"  # one of a run's choices: images per optimizer step
SGD_LR = 0.01  # for the nominal batch of 64
# A run continues although these differ: they change how it is run, not what is trained.
MAY_DIFFER = {
    "epochs",
    "num_workers",
    "prefetch",
    "threads",
    "device",
    "resume",
    "config",
    "patience",
    "cache",
    "save_dir",
    "tensorboard",
    "save_every_minutes",
    "val_pictures_every",
}
NOT_NEGATIVE = (
    "batch_size",
    "save_every_minutes",
    "val_pictures_every",
    "num_workers",
    "threads",
    "weight_decay",
    "warmup_epochs",
    "patience",
    "close_mosaic",
    "seed",
    "degrees",
    "freeze",
)
FRACTIONS = (
    *("mosaic", "scale", "translate", "fliplr", "flipud", "hsv_h", "hsv_s", "hsv_v", "ema_decay"),
    *("mixup", "copy_paste"),
)


@dataclass(frozen=True)
class TrainConfig:
    """Options of the trainer; every one can also stand in a YAML file given with --config."""

    model: str = option("yolov8m-seg.pt", "yolov8{n,s,m,l,x}-seg.pt, a local .pt, or yolov8n-seg.yaml (from scratch)")
    data: str = option(str(DEFAULT_DATASET_YAML.name), "data-set YAML: folders and class names", metavar="YAML")
    epochs: int = option(100, "passes over the training images")
    batch_size: int = option(
        16,
        "images per GPU (per process) and step; auto: as many as the GPU with the least memory takes",
        words={"auto": 0},
    )
    img_size: int = option(640, "side of the square network input in pixels, a multiple of 32")
    lr: float | None = option(
        None,
        f"peak learning rate at batch {NOMINAL_BATCH_SIZE}; unset: {SGD_LR} for SGD, 0.002 * 5 / (4 + classes) for AdamW",
    )
    weight_decay: float = option(5e-4, f"weight decay at batch {NOMINAL_BATCH_SIZE}")
    num_workers: int = option(8, "loader processes per GPU, at most; fewer where the cores do not suffice")
    prefetch: int = option(4, "batches each loader process prepares ahead")
    threads: int = option(0, "compute threads per process; 0: the cores which the loader processes leave")
    save_dir: str = option("models/epri_distribution_ddp", "run folder", metavar="DIR")
    resume: str | None = option(None, "continue this run: its folder, or its last.pt", metavar="RUN")
    config: str | None = option(None, "YAML file with any of these options; the command line wins", metavar="FILE")
    save_every_minutes: float = option(
        15.0, "a checkpoint within the epoch when the last is so old; 0: after epochs only"
    )
    accumulate: int = option(1, "batches per optimizer step")
    freeze: int = option(0, "layers to leave as they are, counted from the input; 10: the backbone of YOLOv8")
    multi_scale: bool = option(False, "another input size for each batch, within half of --img-size")
    class_weights: str = option(
        "none", "weight the class loss; auto: by one over the number of training objects", choices=("none", "auto")
    )
    optimizer: str = option("auto", "auto: SGD, which got further (docs/recipe.md)", choices=("auto", "sgd", "adamw"))
    compile: bool = option(False, "let torch.compile translate the network; needs a C++ compiler, minutes at the start")
    grad_compression: str = option(
        "none", "send gradients as 16-bit numbers, for slow networks", choices=GRAD_COMPRESSION_CHOICES
    )
    deterministic: bool = option(False, "equal runs give equal bits on GPUs too, more slowly; on a CPU they always do")
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    ema: bool = option(True, "judge and save the moving average of the weights")
    ema_decay: float = option(0.9999, "decay of the moving average")
    ema_ramp: float = option(2000.0, "optimizer steps over which that decay is reached")
    sync_bn: str = option(
        "auto",
        "batch statistics over all GPUs; auto: on GPUs with fewer than 16 images each",
        choices=("auto", "on", "off"),
    )
    lr_scale: str = option(
        "none", "scale the learning rate with the global batch / 64", choices=("none", "linear", "sqrt")
    )
    warmup_epochs: float = option(3.0, "linear warm-up, at most a tenth of the run")
    patience: int = option(100, "stop after so many epochs without a better --best-metric; 0: never")
    close_mosaic: int = option(10, "last epochs without mosaic, at most half of the run")
    seed: int = option(0, "everything random follows from it")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    best_metric: str = option("val_loss", "what chooses best.pt", choices=("val_loss", "mask_map", "box_map"))
    cache: str = option("auto", "packed copy of the photographs at --img-size", choices=("auto", "packed", "none"))
    tensorboard: bool = option(True, "write TensorBoard events")
    val_pictures_every: int = option(
        5, "epochs between two pictures of validation predictions beside the truth; 0: none"
    )
    mosaic: float = option(1.0, "probability of joining four photographs")
    scale: float = option(0.5, "random zoom, +- fraction")
    translate: float = option(0.1, "random shift, +- fraction of the image")
    degrees: float = option(0.0, "random rotation, +- degrees")
    shear: float = option(0.0, "random shear along both axes, +- degrees")
    fliplr: float = option(0.5, "probability of a left-right flip")
    flipud: float = option(0.0, "probability of an up-down flip")
    colour: str = option("auto", "who varies the colours; auto: the device if it is a GPU", choices=COLOUR_CHOICES)
    hsv_h: float = option(0.015, "random hue, +- fraction")
    hsv_s: float = option(0.7, "random saturation, +- fraction")
    hsv_v: float = option(0.4, "random brightness, +- fraction")
    mixup: float = option(0.0, "probability of mixing two pictures; ends with mosaic")
    copy_paste: float = option(
        0.0, "probability of pasting each object mirrored, where there is room; ends with mosaic"
    )

    def __post_init__(self) -> None:
        for name in ("epochs", "accumulate", "prefetch"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.img_size < 64 or self.img_size % 32:
            nearest = max(64, round(self.img_size / 32) * 32)
            raise UsageError(f"--img-size {self.img_size}: must be a multiple of 32 and at least 64, such as {nearest}")
        if self.lr is not None and not self.lr > 0:
            raise UsageError(f"--lr {self.lr}: must be above 0")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")
        for name in FRACTIONS:
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"--{name.replace('_', '-')} {getattr(self, name)}: must lie between 0 and 1")
        if not 0 <= self.shear < 45:
            raise UsageError(f"--shear {self.shear}: must lie between 0 and 45 degrees, 45 excluded")

    @property
    def monitor(self) -> str:
        """The reported value that chooses best.pt."""
        return {"val_loss": "val_loss", "mask_map": "mask_map50_95", "box_map": "box_map50_95"}[self.best_metric]

    @property
    def augment(self) -> AugmentConfig:
        """The augmentation part of the options."""
        return AugmentConfig(**{field.name: getattr(self, field.name) for field in fields(AugmentConfig)})

    @property
    def mosaic_epochs(self) -> int:
        """How many epochs use mosaic: all but the last `close_mosaic`, but at least half of the run."""
        return self.epochs - min(self.close_mosaic, self.epochs // 2)


@dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer and the numbers derived for it. `lr` and `weight_decay` are those really used."""

    name: str
    lr: float
    weight_decay: float
    momentum: float
    warmup_bias_lr: float
    global_batch_size: int
    arithmetic: tuple[str, ...]


def plan_optimizer(config: TrainConfig, world_size: int, num_images: int, num_classes: int) -> OptimizerPlan:
    """Choose the optimizer and derive the effective batch, learning rate and weight decay, with lines that explain them.

    AdamW's rate is Ultralytics' rule for fine-tuning; weight decay grows with the batch as in YOLOv5. Biases warm up
    from a high rate with SGD, as in YOLOv8; not with AdamW, whose step is as long as the rate itself.
    """
    global_batch = config.batch_size * world_size * config.accumulate
    total_steps = -(-num_images // global_batch) * config.epochs
    name = "sgd" if config.optimizer == "auto" else config.optimizer
    base_lr = config.lr if config.lr is not None else SGD_LR if name == "sgd" else round(0.01 / (4 + num_classes), 6)
    lr = scaled_lr(base_lr, config.lr_scale, global_batch)
    weight_decay = config.weight_decay * global_batch / NOMINAL_BATCH_SIZE
    arithmetic = (
        f"Effective batch: {config.batch_size} images x {world_size} processes x {config.accumulate} batches per step = {global_batch}",
        f"Learning rate: {base_lr:g} x {lr / base_lr:g} ({config.lr_scale} scaling) = {lr:g} ({name.upper() if name == 'sgd' else 'AdamW'})",
        f"Weight decay: {config.weight_decay:g} x {global_batch}/{NOMINAL_BATCH_SIZE} = {weight_decay:g}",
        f"Steps: {num_images} images / {global_batch} = {-(-num_images // global_batch)} per epoch, {total_steps} in all",
    )
    momentum = 0.937 if name == "sgd" else 0.9
    warmup_bias_lr = SGD_WARMUP_BIAS_LR if name == "sgd" else 0.0
    return OptimizerPlan(name, lr, weight_decay, momentum, warmup_bias_lr, global_batch, arithmetic)


def keep_choices(config: TrainConfig, choices: dict[str, Any], device: torch.device) -> tuple[TrainConfig, list[str]]:
    """Return the options with `auto` replaced by what the run chose when it began, and lines to tell the user.

    `choices` are those of a run that continues; empty for a new one. Another version, or another machine, might choose
    otherwise: an optimizer cannot take over the other's state, and a precision should not change on the way.
    """
    lines = []
    if config.optimizer == "auto" and choices.get("optimizer") in ("sgd", "adamw"):
        config = replace(config, optimizer=choices["optimizer"])
    began = choices.get("amp")
    if config.amp == "auto" and began in PRECISION_CHOICES[1:]:
        try:
            choose_precision(began, device)
            config = replace(config, amp=began)
        except UserError:
            now = choose_precision("auto", device).name
            lines.append(f"The run began with --amp {began}, which this device has not: it goes on with {now}")
    return config, lines


def batches_per_step(config: TrainConfig, world_size: int, choices: dict[str, Any]) -> int:
    """Return how many batches each rank takes per optimizer step so that an earlier run's global batch is kept.

    `choices` are those of the run which continues, empty for a new one. With its global batch the order of the samples and
    the optimizer steps stay what they were, whatever the number of ranks. Raises UserError when that number does not divide it.
    """
    global_batch_size = choices.get(GLOBAL_BATCH_SIZE)
    if not isinstance(global_batch_size, int) or global_batch_size < 1:
        return config.accumulate
    batches, rest = divmod(global_batch_size, config.batch_size * world_size)
    if rest or not batches:
        raise UserError(
            f"{config.save_dir}: trains with {global_batch_size} images per step, which {world_size} processes with "
            f"--batch-size {config.batch_size} cannot make; start a number of processes that divides "
            f"{global_batch_size // config.batch_size}, or choose a new --save-dir"
        )
    return batches


def differences(config: TrainConfig, earlier: dict[str, Any]) -> list[str]:
    """Return what makes `config` another run than the one whose resolved options are `earlier`.

    An option that the earlier run had not yet heard of stood at its default there.
    """
    compared = [field for field in fields(config) if field.name not in MAY_DIFFER]
    values = [(field.name, earlier.get(field.name, field.default), getattr(config, field.name)) for field in compared]
    return [f"{name} {before} -> {now}" for name, before, now in values if before != now]
