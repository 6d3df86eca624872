"""From a YOLO data set on disk to batches of tensors.

In: `dataset.yaml`, photographs, label files. Out: batches (images uint8, outlines, masks) in the
order that the seed, the epoch and the rank give. Read `dataset.py` first, then `loader.py`.
"""
