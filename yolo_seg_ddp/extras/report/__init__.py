"""report.html and photographs.html of an evaluation: evaluate_model.py calls `Thumbnails`, and
`write_pages` at its end.
"""

from yolo_seg_ddp.extras.report.gallery import Thumbnails
from yolo_seg_ddp.extras.report.page import write_pages
