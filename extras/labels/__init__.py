"""Readers of the label files of Label Studio, LabelMe, VGG Image Annotator, CVAT and RSML, and of mask pictures.

`parse_labels.py` asks READERS. `utils/sources/parsing/label_file.py` says what a reader is and how to add one.
"""

from extras.labels.cvat import CvatFile
from extras.labels.label_studio import LabelStudioFile
from extras.labels.labelme import LabelMeFile
from extras.labels.mask_images import MaskFile
from extras.labels.rsml import RsmlFile
from extras.labels.via import ViaFile

READERS = (LabelStudioFile, LabelMeFile, ViaFile, CvatFile, RsmlFile, MaskFile)
