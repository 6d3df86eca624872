"""Export a trained model to ONNX, OpenVINO, TorchScript or TensorRT, and prove that it predicts the
same.

    python export.py --model models/epri_distribution_ddp/best.pt --format openvino
    python export.py --model run/best.pt --format openvino --half --int8

Ultralytics converts. Then each export is compared with the torch model: its class names and sizes,
its raw outputs, and the AP of each class on the validation split. Only exports that pass are
written. The exit code is 1 if one fails. The last line is a command with the fastest one.
`inference.py` and `evaluate_model.py` open the exports (yolo_seg_ddp/extras/exports/README.md).
"""

from yolo_seg_ddp.utils.errors import run_script
from yolo_seg_ddp.utils.extras import require_extra


def main() -> int:
    """Export and prove; return the exit code: 1 if a proof failed."""
    return int(require_extra("exports").main(__doc__)[1])


if __name__ == "__main__":
    run_script(main)
