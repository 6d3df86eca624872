"""Options of a training that say where its run is kept, and how long and how its loop runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from yolo_seg_ddp.run.records import BEST_METRICS
from yolo_seg_ddp.utils.extras import require_extra
from yolo_seg_ddp.utils.options import CONFIG_HELP, FRACTION, Options, option


@dataclass(frozen=True)
class RunOptions(Options):
    """The folder of a run, what is written there, and where else it is shown."""

    group: ClassVar[str] = "run"

    save_dir: str = option(
        "models/epri_distribution_ddp", "run folder", metavar="DIR", may_differ=True
    )
    resume: str | None = option(
        None, "continue this run: its folder, or its last.pt", metavar="RUN", may_differ=True
    )
    config: str | None = option(None, CONFIG_HELP, metavar="FILE", may_differ=True)
    accept_changed_data: bool = option(
        False, "resume although photographs or labels changed", may_differ=True, group="advanced"
    )
    save_every_minutes: float = option(
        15.0, "minutes between checkpoints in an epoch; 0: none", at_least=0, may_differ=True
    )
    best_metric: str = option("val_loss", "what chooses best.pt", choices=tuple(BEST_METRICS))
    mask_score: bool = option(
        True, "judge confidences times the mean probability of the mask's pixels", group="advanced"
    )
    val_pictures_every: int = option(
        5, "epochs between validation pictures; 0: none", at_least=0, may_differ=True
    )
    mlflow: str | None = option(
        None,
        "MLflow server (yolo_seg_ddp/extras/mlflow); unset: that of MLFLOW_TRACKING_URI; empty: "
        "none",
        metavar="URI",
        may_differ=True,
    )

    mirror: str | None = option(
        None,
        "folder in an object storage, such as s3://bucket/runs, to which each save is copied "
        "(yolo_seg_ddp/extras/mirror)",
        metavar="ADDRESS",
        may_differ=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mirror:
            require_extra("mirror").run_storage(Path(self.save_dir), self.mirror)
        if self.mlflow:
            require_extra("mlflow").checked_uri(self.mlflow, "--mlflow")

    @property
    def monitor(self) -> str:
        """The reported value that chooses best.pt."""
        return BEST_METRICS[self.best_metric]


@dataclass(frozen=True)
class LoopOptions(Options):
    """What the loop does, as a script's options."""

    group: ClassVar[str] = "advanced"

    epochs: int = option(
        100, "passes over the training images", at_least=1, may_differ=True, group="run"
    )
    accumulate: int = option(1, "batches per optimizer step", at_least=1)
    ema: bool = option(True, "evaluate and save the weights' moving average")
    ema_decay: float = option(0.9999, "decay of the moving average", needs="ema", **FRACTION)
    ema_ramp: float = option(2000.0, "optimizer steps until the decay is reached", needs="ema")
    grad_compression: str = option(
        "none", "gradients, for slow networks", choices=("none", "bf16", "fp16"), group="speed"
    )
    compile: bool = option(
        False, "torch.compile: needs a C++ compiler, takes minutes", group="speed"
    )
    cuda_graph: str = option(
        "auto",
        "CUDA graphs, for small batches; auto: on one GPU, if a step takes at most a quarter of "
        "its memory",
        choices=("auto", "off"),
        may_differ=True,
        group="speed",
    )
    patience: int = option(
        100,
        "end after N epochs without progress; 0: never",
        at_least=0,
        may_differ=True,
        group="run",
    )
    tensorboard: bool = option(True, "write TensorBoard events", may_differ=True, group="run")
