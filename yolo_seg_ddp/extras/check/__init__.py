"""Looks for mistakes in the photographs and labels of a data set: check_data.py calls `main`."""

from yolo_seg_ddp.extras.check.options import CheckConfig
from yolo_seg_ddp.utils.config import show_help


def main(description: str) -> int:
    """Run the command `check_data.py`."""
    show_help(CheckConfig, description)
    # It needs PyTorch, which is not imported before options are read.
    from yolo_seg_ddp.extras.check.command import main as check

    return check(description)
