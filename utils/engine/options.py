"""Options of the training engine."""

from dataclasses import dataclass
from typing import ClassVar

from utils.common.config import FRACTION, Options, option
from utils.distributed.ddp import GRAD_COMPRESSION_CHOICES


@dataclass(frozen=True)
class LoopOptions(Options):
    """What the loop does, as a script's options."""

    group: ClassVar[str] = "advanced"

    epochs: int = option(100, "passes over the training images", at_least=1, may_differ=True, group="run")
    accumulate: int = option(1, "batches per optimizer step", at_least=1)
    ema: bool = option(True, "evaluate and save the weights' moving average")
    ema_decay: float = option(0.9999, "decay of the moving average", needs="ema", **FRACTION)
    ema_ramp: float = option(2000.0, "optimizer steps until the decay is reached", needs="ema")
    grad_compression: str = option(
        "none", "gradients, for slow networks", choices=GRAD_COMPRESSION_CHOICES, group="speed"
    )
    compile: bool = option(False, "torch.compile: needs a C++ compiler, takes minutes", group="speed")
    cuda_graph: str = option(
        "auto",
        "CUDA graphs, for small batches; auto: on one GPU, if a step takes at most a quarter of its memory",
        choices=("auto", "off"),
        may_differ=True,
        group="speed",
    )
    patience: int = option(
        100, "end after N epochs without progress; 0: never", at_least=0, may_differ=True, group="run"
    )
    tensorboard: bool = option(True, "write TensorBoard events", may_differ=True, group="run")


@dataclass(frozen=True)
class EngineOptions(LoopOptions):
    """How to train. Plain values: every checkpoint records them."""

    precision: str = "auto"  # auto, bf16, fp16 or off
    clip_norm: float | None = None  # the gradient's largest norm; None: no clipping
    sync_batchnorm: bool = False  # BatchNorm statistics over all ranks
    static_graph: bool = False  # every step uses the same parameters in the same order, which lets DDP do less
    find_unused_parameters: bool = False  # a step may leave weights without gradient: DDP looks for them, at a cost
    monitor: str = "val_loss"  # the reported value that chooses best.pt
    higher_is_better: bool | None = None  # None: as the task says of the value that `monitor` names
    save_best: bool = True  # write best.pt
    save_last: bool = True  # write last.pt
    save_every_s: float | None = None  # write a checkpoint within an epoch when the last one is older than this
    save_every_steps: int | None = None  # write one within an epoch after each so many optimizer steps
    seed: int | None = None  # makes random augmentation and dropout equal after a resume; None: leave generators alone
    log_interval: int = 10  # batches between two log lines
    quiet: bool = False  # print nothing and write no metrics
