"""Figures of a run (matplotlib), instances drawn on photographs (OpenCV), and the HTML pages.

In: metrics, records of epochs, photographs with detections. Out: PNG, JPEG and HTML files, written
atomically. Pictures are RGB uint8 (height, width, 3). Read `pictures.py` and `markup.py` first.
"""

from yolo_seg_ddp.pages.figures import (
    plot_confusion_matrix,
    plot_curves,
    plot_label_statistics,
    plot_training_curves,
)
from yolo_seg_ddp.pages.pictures import (
    NO_DETECTIONS,
    READABLE_PX,
    draw_instances,
    image_grid,
    save_image,
)
