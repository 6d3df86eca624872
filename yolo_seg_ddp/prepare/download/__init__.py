"""Downloads the raw data from a server or a folder. Can be interrupted and repeated."""

from yolo_seg_ddp.prepare.download.raw_data import Report, download
from yolo_seg_ddp.prepare.download.source import RetryPolicy
from yolo_seg_ddp.prepare.download.web import DEFAULT_BASE_URL, expand_circuits, open_source
