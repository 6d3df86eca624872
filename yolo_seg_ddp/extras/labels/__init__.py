"""Readers of the label files of Label Studio, LabelMe, VGG Image Annotator, CVAT, RSML and Pascal
VOC, and of mask pictures.

`parse_labels.py` asks READERS. `yolo_seg_ddp/prepare/parsing/label_file.py` says what a reader is
and how to add one.
"""

from yolo_seg_ddp.extras.labels.cvat import CvatFile
from yolo_seg_ddp.extras.labels.label_studio import LabelStudioFile
from yolo_seg_ddp.extras.labels.labelme import LabelMeFile
from yolo_seg_ddp.extras.labels.mask_images import MaskFile
from yolo_seg_ddp.extras.labels.rsml import RsmlFile
from yolo_seg_ddp.extras.labels.via import ViaFile
from yolo_seg_ddp.extras.labels.voc import VocFile

READERS = (LabelStudioFile, LabelMeFile, ViaFile, CvatFile, RsmlFile, VocFile, MaskFile)
