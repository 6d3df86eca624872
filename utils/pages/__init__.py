"""Figures of a run (matplotlib), and instances drawn on photographs (OpenCV).

Pictures are RGB uint8 (height, width, 3). Files are written atomically.
"""

from utils.pages.charts import plot_confusion_matrix, plot_pr_curves, plot_training_curves
from utils.pages.labels import plot_label_statistics
from utils.pages.pictures import draw_instances, image_grid, save_image
