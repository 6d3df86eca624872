"""Detection and instance-segmentation metrics, from per-image results that are merged across ranks by image id.

The definitions are those of Ultralytics 8.4 (`utils/metrics.py`, `engine/validator.py`), so that scores are comparable:
greedy one-to-one matching in descending confidence; 101-point average precision (COCO); precision, recall and F1 at the
confidence with the highest smoothed mean F1. Predictions of equal confidence are ordered by (image id, position within
the image), so scores do not depend on the order in which ranks deliver images.
"""

from utils.data.polygons import SIZES, size_classes
from utils.evaluation.metrics.confidence import calibration, operating_points
from utils.evaluation.metrics.matching import (
    CONFUSION_MIN_SCORE,
    box_iou,
    confusion_pairs,
    hit_targets,
    pair_ignoring_class,
    sizes_of_predictions,
)
from utils.evaluation.metrics.results import ImageResult, merge_results, pack_results, unpack_results
from utils.evaluation.metrics.summary import precision_recall_curves, summarise, summarise_sizes
from utils.evaluation.metrics.thin_objects import (
    MIN_SCORE,
    TOLERANCE_PX,
    ThinRule,
    elongated_classes,
    elongation,
    measure,
    summarise_thin,
)
