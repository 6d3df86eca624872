"""Exported models (ONNX, OpenVINO, TorchScript, TensorRT) and the proof that they find what the
checkpoint finds.

In: a checkpoint. Out: an exported model with its metadata, a report. Read `command.py` first, then
`conversion.py` and `proof.py`.
"""

from collections.abc import Mapping
from typing import Any

from yolo_seg_ddp.extras.exports.options import ExportConfig
from yolo_seg_ddp.utils.config import show_help

# Each function imports what it needs: `export.py --help` needs no PyTorch, and to open an export
# needs no evaluation, whose memory would be measured with it.


def open_export(*arguments: Any, **options: Any) -> Any:
    """Open an export, as `exported.open_export` says."""
    from yolo_seg_ddp.extras.exports import exported

    return exported.open_export(*arguments, **options)


def main(description: str, arguments: Mapping[str, Any] | None = None) -> tuple[list[str], int]:
    """Run the command `export.py`, or its steps with options by their Python names; return the
    files and the exit code.
    """
    show_help(ExportConfig, description)
    from yolo_seg_ddp.extras.exports.command import run

    return run(description, arguments)
