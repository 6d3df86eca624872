"""Figures of a run (matplotlib), and instances drawn on photographs (OpenCV).

Pictures are RGB uint8 (height, width, 3). Files are written atomically.
"""

from utils.plots.charts import plot_confusion_matrix, plot_pr_curves, plot_training_curves
from utils.plots.labels import plot_label_statistics
from utils.plots.pictures import draw_instances, image_grid, save_image
