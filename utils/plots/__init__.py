"""Figures of a run (matplotlib), and instances drawn on photographs (OpenCV).

Pictures are RGB uint8 (height, width, 3). Files are written atomically.
"""

from __future__ import annotations

from utils.plots.charts import plot_confusion_matrix, plot_pr_curves, plot_training_curves
from utils.plots.colors import class_color
from utils.plots.labels import plot_label_statistics
from utils.plots.pictures import draw_instances, image_grid, save_image

__all__ = [
    "class_color",
    "draw_instances",
    "image_grid",
    "plot_confusion_matrix",
    "plot_label_statistics",
    "plot_pr_curves",
    "plot_training_curves",
    "save_image",
]
