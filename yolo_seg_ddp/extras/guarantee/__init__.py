"""Confidences with a guarantee: evaluate_model.py --guarantee calls `ThresholdCalibrator`."""

from yolo_seg_ddp.extras.guarantee.calibration import ThresholdCalibrator
