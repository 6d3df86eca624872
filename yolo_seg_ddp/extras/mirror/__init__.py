"""Copies of a run's folder in an object storage: made after each save, fetched where the folder is
lost.
"""

from yolo_seg_ddp.extras.mirror.copying import Mirror, run_storage
from yolo_seg_ddp.extras.mirror.fetching import fetch_lost_run
