"""Orthophotos: GeoTIFF files of any size, predicted on in blocks, and cut with their labels into a
data set.

`__main__.py` predicts, `cut.py` cuts.
"""

from yolo_seg_ddp.extras.orthophotos.raster import is_orthophoto
