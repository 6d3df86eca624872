"""Train YOLO segmentation on one process or many.

    python train_yolo_ddp.py --model yolov8n-seg.pt --epochs 10 --batch-size 16
    bash train_ddp.sh 4
    python -m torch.distributed.run --nproc_per_node=4 train_yolo_ddp.py

The same command again continues an interrupted run. `--help` lists every option with its default.
utils/commands/training.py has the steps in their order.
"""

import sys

from utils.commands.training import run
from utils.common.config import parse_config
from utils.common.errors import run_script
from utils.common.signals import die_with_parent
from utils.run.folder import resume_arguments, without_local_rank
from utils.training.config import TrainConfig


def main() -> int:
    """Train; return the exit code."""
    config = parse_config(TrainConfig, __doc__, resume_arguments(without_local_rank(sys.argv[1:])))
    die_with_parent()
    return run(config)[1]


if __name__ == "__main__":
    run_script(main)
