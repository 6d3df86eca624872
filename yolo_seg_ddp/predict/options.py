"""Options that the commands which predict share."""

from dataclasses import dataclass
from typing import Any

from yolo_seg_ddp.utils.errors import UsageError
from yolo_seg_ddp.utils.options import (
    CONFIG_HELP,
    FRACTION,
    PRECISION_CHOICES,
    THREADS_HELP,
    Options,
    option,
)

COCO_FILE, LABEL_STUDIO_FILE = "annotations/instances_default.json", "label_studio.json"
OVERLAP = 0.2  # of a tile's side
MIN_TILE_PX = 64
# options that hold as long as a model is open
FIXED = ("model", "nms", "amp", "device", "threads", "config")


def check_tiles(tiles: str) -> None:
    """Raise UsageError unless the value of `--tiles` is auto, off or a side in pixels."""
    if tiles not in ("auto", "off") and not (tiles.isdecimal() and int(tiles) >= MIN_TILE_PX):
        raise UsageError(
            f"--tiles {tiles}: must be auto, off or a tile's side of at least {MIN_TILE_PX} pixels"
        )


def overlap_option(*needs: str) -> Any:
    """Declare `--overlap`, for commands that predict on tiles; `needs` as in `option`."""
    help = "share by which neighbouring tiles overlap, at least 128 px"
    return option(OVERLAP, help, at_least=0, at_most=0.9, needs=needs)


@dataclass(frozen=True)
class ModelOptions(Options):
    """Which model a command applies, and where."""

    model: str = option(
        None,
        "trained model, such as models/epri_distribution_ddp/best.pt, or an export",
        required=True,
    )
    img_size: int | None = option(
        None,
        "side of the network input in pixels; unset: as in training",
        at_least=32,
        multiple_of=32,
    )
    nms: bool = option(
        True,
        "suppress overlapping detections; --no-nms: use YOLO26's one-to-one outputs, which need "
        "none",
    )
    mask_score: bool | None = option(
        None,
        "multiply confidences by the mean probability of the mask's pixels; unset: as in "
        "training, where it is on",
    )
    tiles: str = option(
        "auto",
        "side in pixels of the tiles that larger photographs are cut into; auto: as the model was "
        "trained, which is no tiles if it saw whole photographs",
        metavar="auto|off|SIZE",
    )
    overlap: float = overlap_option("not tiles=off")
    amp: str = option(
        "off", "mixed precision; auto: the fastest that the hardware has", choices=PRECISION_CHOICES
    )
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    threads: int = option(0, THREADS_HELP, at_least=0)
    config: str | None = option(None, CONFIG_HELP, metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tiles(self.tiles)


@dataclass(frozen=True)
class PredictOptions(ModelOptions):
    """How a model predicts."""

    conf: float = option(0.25, "minimum confidence of a detection", **FRACTION)
    thresholds: str | None = option(
        None,
        "thresholds.yaml of evaluate_model.py --guarantee: each class has its own minimum; --conf "
        "is that of the others; unset: those that an export carries; off: none",
        metavar="FILE|off",
    )
    iou: float = option(
        0.7,
        "IoU above which the less confident of two detections of a class is dropped",
        needs="nms or not tiles=off",
        **FRACTION,
    )
    classes: tuple[str, ...] | None = option(None, "find only these classes, by name or number")
    max_detections: int = option(300, "maximum number of detections per photograph", at_least=1)
    batch_size: int = option(8, "photographs or tiles per forward pass", at_least=1)
    thin_classes: tuple[str, ...] = option(
        ("auto",),
        "classes whose detections get a centreline and a width, such as wires: names; auto: those "
        "of which the training's median object was 50 times as long as wide; none",
        metavar="CLASS",
    )


@dataclass(frozen=True)
class InferenceConfig(PredictOptions):
    """Options of `inference.py`."""

    source: str = option(
        None,
        "photograph, folder (with its subfolders), quoted pattern or .txt file with a path a line",
        required=True,
    )
    output: str = option(
        "outputs/predictions", "folder for pictures, labels/ and predictions.json", metavar="DIR"
    )
    save_crops: bool = option(False, "also write a cut-out of each detection to crops/<class>/")
    save_coco: bool = option(False, f"also write {COCO_FILE}, which CVAT imports (docs/labels.md)")
    save_label_studio: bool = option(
        False, f"also write {LABEL_STUDIO_FILE}: predictions to import into Label Studio"
    )
