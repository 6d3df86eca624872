"""Opens a model for prediction: a .pt file, or an export
if yolo_seg_ddp/extras/exports is there.
"""

from pathlib import Path

import torch

from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.extras import find_extra
from yolo_seg_ddp.yolo.model import YoloModel, load_for_prediction


def open_model(
    source: str, device: torch.device, amp: str = "off", *, nms: bool = True
) -> YoloModel:
    """Open a .pt file or an export. Raises UserError: one line with the file, the problem and the
    fix.

    An export has `names`, `args` and `stride` as a loaded model has. Its `has_loss` is False; its
    `metadata` hold `source_sha256` of the .pt file, and `thresholds`: the text of a
    thresholds.yaml, or none. Only exports obey `amp` here.
    """
    path = Path(source)
    # OpenVINO writes a folder
    if not path.is_dir() and path.suffix not in (".onnx", ".torchscript", ".engine"):
        return load_for_prediction(source, device, nms=nms)
    exports = find_extra("exports")
    if exports is None:
        raise UserError(
            f"{path}: an export, which yolo_seg_ddp/extras/exports opens: get that folder from "
            "the project's repository"
        )
    return exports.open_export(path, device, amp, nms=nms)
