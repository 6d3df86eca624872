"""The options of train_yolo_ddp.py."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from utils.common.config import FRACTION, INPUT_SIZE, Options, option
from utils.common.devices import PRECISION_CHOICES
from utils.common.errors import UsageError
from utils.data.augment import COLOUR_CHOICES, AugmentConfig
from utils.data.dataset_yaml import DEFAULT_DATASET_YAML, TRUST_LINKS_HELP
from utils.data.windows import WindowConfig
from utils.distributed.ddp import GRAD_COMPRESSION_CHOICES
from utils.run.mlflow_client import checked_uri
from utils.run.records import BEST_METRICS
from utils.yolo.optimizer import FINE_TUNING_LR, FINE_TUNING_STEPS, NOMINAL_BATCH_SIZE, SGD_LR


@dataclass(frozen=True)
class TrainConfig(Options):
    """Options of the trainer. A YAML file given with --config may hold any of them."""

    model: str = option(
        "yolov8m-seg.pt",
        "yolov8, yolo11 or yolo26{n,s,m,l,x}-seg.pt, a local .pt, or a name such as yolo12n-seg.yaml (from scratch)",
    )
    data: str = option(str(DEFAULT_DATASET_YAML.name), "data-set YAML: folders and class names", metavar="YAML")
    trust_links: bool = option(False, TRUST_LINKS_HELP, may_differ=True)
    epochs: int = option(100, "passes over the training images", at_least=1, may_differ=True)
    batch_size: int = option(
        16,
        "images per GPU (per process) and step; auto: as many as the GPU with the least memory takes",
        words={"auto": 0},
        at_least=0,
    )
    img_size: int = option(640, "side of the square network input in pixels, a multiple of 32", **INPUT_SIZE)
    windows: int = option(
        0,
        "windows of each photograph per epoch, cut from its own pixels (docs/windows.md); 0: whole photographs",
        at_least=0,
    )
    window_scale: tuple[float, ...] = option(
        (0.5, 1.0),
        "lowest and highest scale of a window; 1: the photograph's own pixels, 0.5: twice the side",
        needs="windows",
        above=0,
        at_most=1,
    )
    lr: float | None = option(
        None,
        f"peak learning rate at batch {NOMINAL_BATCH_SIZE}; unset: {SGD_LR}, or {FINE_TUNING_LR} for fewer than {FINE_TUNING_STEPS:,} "
        "steps from a .pt file, for SGD and MuSGD; 0.002 * 5 / (4 + classes) for AdamW",
        above=0,
    )
    weight_decay: float = option(5e-4, f"weight decay at batch {NOMINAL_BATCH_SIZE}", at_least=0)
    num_workers: int | None = option(
        None,
        "most loader processes per GPU; fewer where there are not enough cores; unset: 8, and up to 16 where a GPU has more "
        "than 8 cores to itself",
        at_least=0,
        may_differ=True,
    )
    prefetch: int = option(
        4, "batches each loader process prepares ahead", at_least=1, may_differ=True, wants="num_workers"
    )
    threads: int = option(
        0, "compute threads per process; 0: the cores that the loader processes leave", at_least=0, may_differ=True
    )
    save_dir: str = option("models/epri_distribution_ddp", "run folder", metavar="DIR", may_differ=True)
    resume: str | None = option(None, "continue this run: its folder, or its last.pt", metavar="RUN", may_differ=True)
    config: str | None = option(
        None, "YAML file with any of these options; the command line wins", metavar="FILE", may_differ=True
    )
    save_every_minutes: float = option(
        15.0,
        "minutes after which a checkpoint is written within an epoch; 0: only after epochs",
        at_least=0,
        may_differ=True,
    )
    accumulate: int = option(1, "batches per optimizer step", at_least=1)
    freeze: int = option(
        0,
        "freeze this many layers, counted from the input; the backbone has 10 in YOLOv8, 11 in YOLO11 and YOLO26, 9 in YOLO12",
        at_least=0,
    )
    multi_scale: bool = option(False, "random input size for each batch, 0.5 to 1.5 times --img-size")
    class_weights: str = option(
        "none",
        "weights of the class loss; auto: inverse to each class's number of training objects",
        choices=("none", "auto"),
    )
    reach: str = option(
        "auto",
        "assign objects only to anchors that can predict the whole box, so that long wires are found whole; auto: with "
        "--windows",
        choices=("auto", "on", "off"),
    )
    optimizer: str = option("auto", "auto: MuSGD (docs/recipe.md says why)", choices=("auto", "sgd", "musgd", "adamw"))
    compile: bool = option(
        False, "compile the network with torch.compile; needs a C++ compiler and takes minutes at the start"
    )
    grad_compression: str = option(
        "none", "send gradients between ranks as 16-bit numbers, for slow networks", choices=GRAD_COMPRESSION_CHOICES
    )
    deterministic: bool = option(
        False, "bitwise equal results on GPUs too, but slower; CPU runs are always deterministic"
    )
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    ema: bool = option(True, "evaluate and save the moving average of the weights")
    ema_decay: float = option(0.9999, "decay of the moving average", needs="ema", **FRACTION)
    ema_ramp: float = option(2000.0, "optimizer steps over which the decay is reached", needs="ema")
    sync_bn: str = option(
        "auto",
        "batch statistics over all GPUs; auto: on GPUs with fewer than 16 images each",
        choices=("auto", "on", "off"),
    )
    lr_scale: str = option(
        "none", "scale the learning rate with the global batch / 64", choices=("none", "linear", "sqrt")
    )
    warmup_epochs: float = option(3.0, "linear warm-up, at most a tenth of the run", at_least=0)
    patience: int = option(
        100, "stop after this many epochs without a better --best-metric; 0: never", at_least=0, may_differ=True
    )
    close_mosaic: int = option(
        10,
        "number of last epochs without mosaic, at most half of the run",
        at_least=0,
        needs="mosaic or mixup or copy_paste or paste or draw_wires",
    )
    seed: int = option(0, "random seed", at_least=0)
    device: str = option("auto", "auto, cpu, cuda or cuda:N", may_differ=True)
    best_metric: str = option("val_loss", "what chooses best.pt", choices=tuple(BEST_METRICS))
    cache: str = option(
        "auto",
        "packed copy of the photographs at --img-size; auto: where the disk has room; packed: end if it has none",
        choices=("auto", "packed", "none"),
        may_differ=True,
        wants="not windows",
    )
    skip_bad: bool = option(
        False, "leave out photographs that cannot be read, and list them in the run folder", may_differ=True
    )
    tensorboard: bool = option(True, "write TensorBoard events", may_differ=True)
    mlflow: str | None = option(
        None,
        "MLflow server that shows the run (docs/mlflow.md); unset: that of MLFLOW_TRACKING_URI, if set; empty: none",
        metavar="URI",
        may_differ=True,
    )
    val_pictures_every: int = option(
        5,
        "epochs between two pictures of validation predictions beside the labels; 0: none",
        at_least=0,
        may_differ=True,
    )
    mosaic: float = option(1.0, "probability of a mosaic of four photographs", **FRACTION)
    scale: float = option(0.5, "random zoom, +- fraction", **FRACTION)
    translate: float = option(0.1, "random shift, +- fraction of the image", **FRACTION)
    degrees: float | None = option(
        None,
        "random rotation, +- degrees; unset: 90 with --windows if labelled objects lie in many directions, else 0",
        at_least=0,
    )
    shear: float = option(0.0, "random shear along both axes, +- degrees", at_least=0, below=45)
    fliplr: float = option(0.5, "probability of a left-right flip", **FRACTION)
    flipud: float | None = option(
        None,
        "probability of an up-down flip; unset: 0.5 with --windows if labelled objects lie in many directions, else 0",
        **FRACTION,
    )
    colour: str = option(
        "auto",
        "where colours are varied; auto: on the device if it is a GPU, else in the loader",
        choices=COLOUR_CHOICES,
        needs="hsv_h or hsv_s or hsv_v",
    )
    hsv_h: float = option(0.015, "random hue, +- fraction", **FRACTION)
    hsv_s: float = option(0.7, "random saturation, +- fraction", **FRACTION)
    hsv_v: float = option(0.4, "random brightness, +- fraction", **FRACTION)
    mixup: float = option(0.0, "probability of mixup of two pictures; off in epochs without mosaic", **FRACTION)
    copy_paste: float = option(
        0.0,
        "probability of pasting a mirrored copy of each object where there is room; off in epochs without mosaic",
        **FRACTION,
    )
    paste: float = option(
        0.0,
        "probability of objects of another photograph in front of a picture, in other colours; all classes equally often, but "
        "no thin ones; off in epochs without mosaic",
        **FRACTION,
    )
    draw_wires: float | None = option(
        None,
        "probability of drawing wires into a picture, with labels, and bars, which have none; unset: 0.5 with --windows if a "
        "class is thin and labelled objects lie in many directions, else 0; off in epochs without mosaic",
        **FRACTION,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.window_scale) != 2 or self.window_scale[0] > self.window_scale[1]:
            raise UsageError("--window-scale: give the lowest and the highest scale, such as 0.5 1")
        if self.mlflow:
            checked_uri(self.mlflow, "--mlflow")

    @property
    def window_config(self) -> WindowConfig | None:
        """The windows of the training; None for whole photographs."""
        return WindowConfig(self.windows, *self.window_scale) if self.windows else None

    @property
    def within_reach(self) -> bool:
        """Whether objects are assigned only to anchors that can predict their whole box."""
        return self.reach == "on" or (self.reach == "auto" and self.windows > 0)

    @property
    def monitor(self) -> str:
        """The reported value that chooses best.pt."""
        return BEST_METRICS[self.best_metric]

    @property
    def augment(self) -> AugmentConfig:
        """The augmentation part of the options; what is unset is 0."""
        names = {field.name for field in fields(AugmentConfig)} & {field.name for field in fields(self)}
        options: dict[str, Any] = {name: getattr(self, name) or 0.0 for name in names}
        return AugmentConfig(**options)

    @property
    def mosaic_epochs(self) -> int:
        """How many epochs use mosaic: all but the last `close_mosaic`, but at least half of the run."""
        return self.epochs - min(self.close_mosaic, self.epochs // 2)
