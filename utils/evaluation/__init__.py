"""Evaluation of a trained model: metrics, COCO files, prediction files, report.html."""
