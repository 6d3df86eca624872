"""Options of a training that say what the network is and how it learns."""

from dataclasses import dataclass
from typing import ClassVar

from yolo_seg_ddp.utils.options import Options, option

# the batch YOLOv8's learning rate, weight decay and gradient clip were tuned for
NOMINAL_BATCH_SIZE = 64
SGD_LR = 0.01  # of SGD and MuSGD, for the nominal batch
# Ultralytics' for one class; its lower rates for more are worse
# (docs/research/recipe.md#fine-tuning)
ADAMW_LR = 0.002
# below, `auto` teaches trained weights with AdamW (docs/research/recipe.md#fine-tuning)
FEW_STEPS = 1000


@dataclass(frozen=True)
class ModelOptions(Options):
    """The network, its first weights, and which layers learn."""

    group: ClassVar[str] = "model"

    model: str = option(
        "yolov8m-seg.pt",
        "yolov8, yolo11 or yolo26{n,s,m,l,x}-seg.pt, your own .pt, or a name such as "
        "yolo12n-seg.yaml (from scratch)",
    )
    freeze: int = option(
        0,
        "freeze the first N layers; the backbone has 10 in YOLOv8, 11 in YOLO11 and YOLO26, 9 in "
        "YOLO12",
        at_least=0,
    )


@dataclass(frozen=True)
class LossOptions(Options):
    """What the loss weighs, and which anchors learn an object."""

    group: ClassVar[str] = "advanced"

    class_weights: str = option(
        "auto",
        "weights in the loss; root: 1 / the root of a class's number of objects; auto: root with "
        "AdamW",
        choices=("auto", "root", "none"),
    )
    reach: str = option(
        "auto",
        "only anchors that can predict a whole box learn it, for long wires; auto: with --windows",
        choices=("auto", "on", "off"),
    )


@dataclass(frozen=True)
class OptimizerOptions(Options):
    """The optimizer, its learning rate and what changes it."""

    group: ClassVar[str] = "advanced"

    optimizer: str = option(
        "auto",
        f"auto: AdamW for trained weights and fewer than {FEW_STEPS:,} steps without --windows, "
        "else MuSGD",
        choices=("auto", "sgd", "musgd", "adamw"),
    )
    lr: float | None = option(
        None,
        f"peak learning rate at batch {NOMINAL_BATCH_SIZE}; unset: {SGD_LR}; AdamW: {ADAMW_LR}",
        above=0,
    )
    lr_scale: str = option("none", "by the global batch / 64", choices=("none", "linear", "sqrt"))
    weight_decay: float = option(5e-4, f"weight decay at batch {NOMINAL_BATCH_SIZE}", at_least=0)
    warmup_epochs: float = option(
        3.0,
        "linear warm-up, at most a tenth of the run; at least 200 steps, or a quarter of a "
        "shorter run; 0: none",
        at_least=0,
    )
