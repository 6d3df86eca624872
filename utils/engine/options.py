"""Options of the training engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineOptions:
    """How to train. Plain values: every checkpoint records them."""

    epochs: int = 100
    precision: str = "auto"  # auto, bf16, fp16 or off
    accumulate: int = 1  # batches per optimizer step
    clip_norm: float | None = None  # the gradient's largest norm; None: no clipping
    ema_decay: float | None = None  # decay of the weights' moving average; None: no average
    ema_ramp: float = 2000.0  # optimizer steps over which the decay is reached
    sync_batchnorm: bool = False  # BatchNorm statistics over all ranks
    static_graph: bool = False  # every step uses the same parameters in the same order, which lets DDP do less
    grad_compression: str = "none"  # none, bf16 or fp16: how gradients travel between ranks
    compile: bool = False  # torch.compile
    monitor: str = "val_loss"  # the reported value that chooses best.pt
    higher_is_better: bool | None = None  # None: as the task says of the value that `monitor` names
    patience: int | None = None  # stop after this many epochs without a better `monitor`; None or 0: never
    save_best: bool = True  # write best.pt
    save_last: bool = True  # write last.pt
    save_every_s: float | None = None  # write a checkpoint within an epoch when the last one is older than this
    save_every_steps: int | None = None  # write one within an epoch after each so many optimizer steps
    seed: int | None = None  # makes random augmentation and dropout equal after a resume; None: leave generators alone
    log_interval: int = 10  # batches between two log lines
    tensorboard: bool = True
    quiet: bool = False  # print nothing and write no metrics
