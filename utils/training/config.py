"""The options of train_yolo_ddp.py: the sections of the rooms in which they act, and what is the trainer's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from utils.common.config import option, section_of
from utils.common.devices import PRECISION_CHOICES
from utils.data.augment import Augmentation, AugmentOptions
from utils.data.dataset import DataOptions
from utils.data.windows import WindowOptions
from utils.engine.options import LoopOptions
from utils.run.folder import RunOptions
from utils.yolo.loss import LossOptions
from utils.yolo.model import ModelOptions
from utils.yolo.optimizer import OptimizerOptions


@dataclass(frozen=True)
class TrainConfig(
    AugmentOptions, LossOptions, OptimizerOptions, LoopOptions, RunOptions, WindowOptions, DataOptions, ModelOptions
):
    """Options of the trainer. A YAML file given with --config may hold any of them."""

    group: ClassVar[str] = "machine"

    batch_size: int = option(
        16,
        "images per GPU (per process) and step; auto: as many as the GPU with the least memory takes",
        words={"auto": 0},
        at_least=0,
    )
    threads: int = option(
        0, "compute threads per process; 0: the cores that the loader processes leave", at_least=0, may_differ=True
    )
    deterministic: bool = option(
        False, "bitwise equal results on GPUs too, but slower; CPU runs are always deterministic"
    )
    amp: str = option("auto", "mixed precision", choices=PRECISION_CHOICES)
    seed: int = option(0, "random seed", at_least=0)
    device: str = option("auto", "auto, cpu, cuda or cuda:N", may_differ=True)
    sync_bn: str = option(
        "auto",
        "batch statistics over all GPUs; auto: on GPUs with fewer than 16 images each",
        choices=("auto", "on", "off"),
    )

    @property
    def within_reach(self) -> bool:
        """Whether objects are assigned only to anchors that can predict their whole box."""
        return self.reach == "on" or (self.reach == "auto" and self.windows > 0)

    @property
    def augment(self) -> Augmentation:
        """The augmentation part of the options; what is unset is 0."""
        given = vars(section_of(self, AugmentOptions)).items()
        options: dict[str, Any] = {name: 0.0 if value is None else value for name, value in given}
        return Augmentation(**options)
