"""Detection and instance-segmentation metrics, from per-image results that are merged across ranks
by image id.

The definitions are those of Ultralytics 8.4 (`utils/metrics.py`, `engine/validator.py`), so that
scores are comparable: greedy one-to-one matching in descending confidence; 101-point average
precision (COCO); precision, recall and F1 at the confidence with the highest smoothed mean F1.
Predictions of equal confidence are ordered by (image id, position within the image), so scores do
not depend on the order in which ranks deliver images.
"""
