"""Options of `evaluate_model.py`."""

from dataclasses import dataclass

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, TRUST_LINKS_HELP
from yolo_seg_ddp.evaluation.metrics.thin_objects import MIN_SCORE, TOLERANCE_PX
from yolo_seg_ddp.predict.options import ModelOptions, overlap_option
from yolo_seg_ddp.utils.options import option

JUDGED_BY_CENTRELINES = ("not mask_resolution=proto", "not thin_classes=none")


@dataclass(frozen=True)
class EvaluationConfig(ModelOptions):
    """Options of `evaluate_model.py`."""

    compare: str | None = option(
        None, "a second model, shown next to the first in report.html", metavar="MODEL"
    )
    data: str = option(
        DEFAULT_DATASET_YAML.name, "data-set YAML: folders and class names", metavar="YAML"
    )
    trust_links: bool = option(False, TRUST_LINKS_HELP)
    split: str = option("val", "split to evaluate on", choices=("train", "val", "test"))
    output: str = option("outputs/evaluation", "folder for the results", metavar="DIR")
    batch_size: int = option(16, "images per process and forward pass", at_least=1)
    num_workers: int = option(
        8, "loader processes per process, at most; fewer if there are too few cores"
    )
    mask_resolution: str = option(
        "auto",
        "resolution at which masks are compared: proto, a quarter of the input, as in "
        "Ultralytics; native, the "
        "photograph's own pixels, for boxes too; auto: native if a model was trained on windows, "
        "else proto",
        choices=("auto", "proto", "native"),
    )
    tiles: str = option(
        "auto",
        "side in pixels of the tiles that larger photographs are cut into, with --mask-resolution "
        "native; auto: "
        "as the model was trained, which is no tiles if it saw whole photographs",
        metavar="auto|off|SIZE",
        needs="not mask_resolution=proto",
    )
    overlap: float = overlap_option("not mask_resolution=proto", "not tiles=off")
    thin_classes: tuple[str, ...] = option(
        ("auto",),
        "classes judged by their centrelines, with --mask-resolution native: names; auto: those "
        "that were thin in the "
        "training on windows, else those whose median object is 50 times as long as wide; none",
        metavar="CLASS",
        needs="not mask_resolution=proto",
    )
    centreline_tolerance: float = option(
        TOLERANCE_PX,
        "how far a centreline may lie from the true one, in pixels of the photograph",
        at_least=0,
        at_most=20,
        needs=JUDGED_BY_CENTRELINES,
    )
    centreline_confidence: float = option(
        MIN_SCORE,
        "lowest confidence of a detection whose centreline counts",
        at_least=0.001,
        at_most=1,
        needs=JUDGED_BY_CENTRELINES,
    )
    guarantee: tuple[str, ...] | None = option(
        None,
        "also find the highest confidence of each class at which at least this share is found, "
        "recall=0.9, or a photograph "
        "has at most so many false alarms, false_alarms=2, or both; writes thresholds.yaml "
        "(yolo_seg_ddp/extras/guarantee/README.md)",
        metavar="PROMISE",
    )
    certainty: float = option(
        0.95, "probability with which the guarantee holds", above=0.5, below=1, needs="guarantee"
    )
    predictions: bool = option(
        True, "write predictions.json (COCO format, masks at the photographs' size)"
    )
    coco_eval: bool = option(
        False,
        "also write ground_truth.json and compute AP with faster-coco-eval (masks always at "
        "native resolution)",
        needs="predictions",
    )
