"""The YOLO segmentation network, its loss and its predictions."""
