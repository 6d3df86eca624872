"""The options of train_yolo_ddp.py: the sections of the rooms in which they act, and what is the
trainer's own.
"""

from dataclasses import dataclass
from typing import ClassVar

from yolo_seg_ddp.data.augment import AugmentOptions
from yolo_seg_ddp.data.options import DataOptions
from yolo_seg_ddp.data.windows import WindowOptions
from yolo_seg_ddp.run.options import LoopOptions, RunOptions
from yolo_seg_ddp.utils.options import PRECISION_CHOICES, Options, option
from yolo_seg_ddp.yolo.options import LossOptions, ModelOptions, OptimizerOptions

# in a batch: no device holds more, and the weight decay grows with --batch-size
MOST_IMAGES = 65_536


@dataclass(frozen=True)
class MachineOptions(Options):
    """What each process takes of its machine, and how exactly it computes."""

    group: ClassVar[str] = "speed"

    batch_size: int = option(
        16,
        "images per GPU and step; auto: as many as fit",
        words={"auto": 0},
        at_least=0,
        at_most=MOST_IMAGES,
    )
    threads: int = option(
        0, "threads per process; 0: what loaders leave", at_least=0, may_differ=True
    )
    deterministic: bool = option(
        False, "bitwise equal runs on GPUs too, but slower", group="advanced"
    )
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    seed: int = option(0, "random seed", at_least=0, group="run")
    device: str = option("auto", "auto, cpu, cuda or cuda:N", may_differ=True)
    sync_bn: str = option(
        "auto",
        "batch statistics over all GPUs; auto: on GPUs with fewer than 16 images each",
        choices=("auto", "on", "off"),
        group="advanced",
    )


@dataclass(frozen=True)
class TrainConfig(
    MachineOptions,
    AugmentOptions,
    LossOptions,
    OptimizerOptions,
    LoopOptions,
    RunOptions,
    WindowOptions,
    DataOptions,
    ModelOptions,
):
    """Options of the trainer. A YAML file given with --config may hold any of them."""
