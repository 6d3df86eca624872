"""The options of train.py, and the reconciliation of its launch flags with its launcher's
environment.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from yolo_seg_ddp.run.folder import resume_arguments
from yolo_seg_ddp.utils.config import parse_config
from yolo_seg_ddp.utils.distributed.process_group import DEFAULT_PORT
from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.options import Options, option

DATA_DIR = "data"
IMAGE_DIR = "data/images"
BEST_MODEL = "best_model.pt"


@dataclass(frozen=True)
class TrainConfig(Options):
    """The guide's flags, then those that the guide does not have."""

    backbone: str = option(
        "efficientnet_b4", "any network of timm, such as efficientnet_b3", metavar="NAME"
    )
    input_size: int = option(448, "side of the square input in pixels", at_least=32)
    epochs: int = option(20, "passes over the training pairs", at_least=1, may_differ=True)
    batch_size: int = option(32, "pairs per GPU (per process) and step", at_least=1)
    lr: float = option(1e-4, "learning rate of AdamW", above=0)
    weight_decay: float = option(1e-5, "weight decay of AdamW", at_least=0)
    data_source: str = option(
        "local", "local: lists in --data-dir; s3: annotators' logs", choices=("local", "s3")
    )
    image_dir: str = option(IMAGE_DIR, "folder of the images", metavar="DIR", may_differ=True)
    data_dir: str = option(
        DATA_DIR,
        "folder of the lists",
        metavar="DIR",
        may_differ=True,
        wants="not prepared_data_dir",
    )
    checkpoint_dir: str = option("results", "folder of the run", metavar="DIR", may_differ=True)
    num_workers: int = option(
        4, "most loader processes per GPU; fewer where cores are few", at_least=0, may_differ=True
    )
    eta_init: float = option(
        0.8,
        "first reliability of the crowd, and of annotators without gold pairs",
        at_least=0.5,
        at_most=1,
        needs="loss=crowd-bt",
    )
    learnable_eta: bool = option(
        True, "learn the reliability of the crowd, or of each annotator", needs="loss=crowd-bt"
    )
    device: str = option("auto", "auto, cuda or cpu", may_differ=True)
    distributed: bool = option(
        False, "train in several processes, which a launcher starts", may_differ=True
    )
    local_rank: int = option(
        -1,
        "set by the launcher; LOCAL_RANK of the environment has precedence",
        at_least=-1,
        may_differ=True,
    )
    world_size: int = option(
        1, "number of processes; WORLD_SIZE of the environment has precedence", may_differ=True
    )
    resume: str | None = option(
        None, "continue this run's folder with its own options", metavar="RUN", may_differ=True
    )
    auto_resume: bool = option(
        True,
        "continue the run in --checkpoint-dir if it has the same options",
        may_differ=True,
        wants="not resume",
    )
    config: str | None = option(
        None, "YAML file with any of these options", metavar="FILE", may_differ=True
    )
    prepared_data_dir: str | None = option(
        None,
        "folder in the prepared format, instead of --data-dir; with --data-source s3 the logs are "
        "downloaded into it",
        metavar="DIR",
        may_differ=True,
    )
    loss: str = option(
        "crowd-bt",
        "bradley-terry: every answer counts as reliable",
        choices=("crowd-bt", "bradley-terry"),
    )
    eta_lr: float | None = option(
        None,
        "learning rate of reliabilities; unset: 0.03 for annotators, --lr for one crowd",
        above=0,
        needs=("loss=crowd-bt", "learnable_eta"),
    )
    pretrained: bool = option(True, "begin with the weights of ImageNet, downloaded by timm")
    grad_checkpointing: bool = option(
        False, "compute features twice instead of keeping them: less memory"
    )
    amp: bool = option(False, "mixed precision: bf16 where supported, else fp16 on GPUs")
    sync_batchnorm: bool = option(False, "BatchNorm statistics over all processes")
    rotation: float = option(
        15.0,
        "largest random rotation in degrees; 0 keeps noise and JPEG blocks as they are",
        at_least=0,
    )
    seed: int = option(42, "seed of split, weights, order and augmentation", at_least=0)
    s3_bucket: str = option(
        "surface-quality-dataset", "bucket of the annotators' logs", needs="data_source=s3"
    )
    s3_prefix: str = option(
        "quack_v2_data_user_logs/", "prefix of the annotators' folders", needs="data_source=s3"
    )

    @property
    def save_dir(self) -> str:
        """The run's folder, by the name that `yolo_seg_ddp.run.folder` knows."""
        return self.checkpoint_dir

    @property
    def learns_eta(self) -> bool:
        """Whether reliabilities are learned."""
        return self.learnable_eta and self.loss == "crowd-bt"

    @property
    def prepared_folder(self) -> Path:
        """The folder of the prepared comparisons, which a download may have to fill."""
        return Path(self.prepared_data_dir or Path(self.data_dir) / "prepared")


def read_options(arguments: Sequence[str]) -> TrainConfig:
    """Build the options from a command line. `--local_rank` and `--local-rank` are the same."""
    spelt = [argument.replace("--local_rank", "--local-rank", 1) for argument in arguments]
    description = "Train the Crowd-BT quality scorer with DistributedDataParallel"
    return parse_config(TrainConfig, description, resume_arguments(spelt, "--checkpoint-dir"))


def adopt_launch_flags(config: TrainConfig) -> list[str]:
    """Complete the rank variables of the environment from the flags; return lines to print.

    The environment has precedence. Launchers before torchrun give the local rank as a flag only.
    Raises UsageError for several processes without a launcher.
    """
    environment, lines = os.environ, []
    is_launched = "RANK" in environment or "WORLD_SIZE" in environment
    if config.local_rank >= 0 and (is_launched or config.world_size > 1):
        environment.setdefault("LOCAL_RANK", str(config.local_rank))
        environment.setdefault("WORLD_SIZE", str(config.world_size))
        environment.setdefault("RANK", environment["LOCAL_RANK"])
    if "RANK" in environment:
        environment.setdefault("MASTER_ADDR", "localhost")
        environment.setdefault("MASTER_PORT", str(DEFAULT_PORT))
        actual = environment.get("WORLD_SIZE", "")
        if config.world_size > 1 and actual not in ("", str(config.world_size)):
            lines.append(
                f"--world-size {config.world_size}, but the launcher started {actual} processes: "
                f"{actual} count"
            )
    elif config.world_size > 1 or config.local_rank > 0:
        flag = (
            f"--world-size {config.world_size}"
            if config.world_size > 1
            else f"--local-rank {config.local_rank}"
        )
        raise UsageError(
            f"{flag} without a launcher; start ./train_distributed.sh {max(config.world_size, 2)} …"
        )
    elif config.distributed:
        lines.append(
            "--distributed without a launcher: a single process trains; see ./train_distributed.sh"
        )
    return lines
