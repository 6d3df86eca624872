"""Confidences with a guarantee: evaluate_model.py --guarantee calls `ThresholdCalibrator`."""

from extras.guarantee.calibration import ThresholdCalibrator
