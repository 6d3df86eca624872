"""Options of the training engine."""

from dataclasses import dataclass

from yolo_seg_ddp.run.options import LoopOptions


@dataclass(frozen=True)
class EngineOptions(LoopOptions):
    """How to train. Plain values: every checkpoint records them."""

    precision: str = "auto"  # auto, bf16, fp16 or off
    clip_norm: float | None = None  # the gradient's largest norm; None: no clipping
    sync_batchnorm: bool = False  # BatchNorm statistics over all ranks
    # every step uses the same parameters in the same order, which lets DDP do less
    static_graph: bool = False
    # a step may leave weights without gradient: DDP looks for them, at a cost
    find_unused_parameters: bool = False
    monitor: str = "val_loss"  # the reported value that chooses best.pt
    higher_is_better: bool | None = None  # None: as the task says of the value that `monitor` names
    save_best: bool = True  # write best.pt
    save_last: bool = True  # write last.pt
    # write a checkpoint within an epoch when the last one is older than this
    save_every_s: float | None = None
    # write one within an epoch after each so many optimizer steps
    save_every_steps: int | None = None
    # makes random augmentation and dropout equal after a resume; None: leave generators alone
    seed: int | None = None
    log_interval: int = 10  # batches between two log lines
    quiet: bool = False  # print nothing and write no metrics
