"""Proves that an export predicts what the torch model predicts: metadata, raw outputs, AP of each
class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.data.dataset import Photo, SegmentationDataset
from yolo_seg_ddp.data.images import letterbox, read_image
from yolo_seg_ddp.data.label_shapes import sizes_on_disk
from yolo_seg_ddp.data.loader import ShardBatches, get_dataloader
from yolo_seg_ddp.evaluation.evaluate import AP_LIMITS, PhotoPixels, criterion_of, evaluate
from yolo_seg_ddp.evaluation.tile_search import TileSearch
from yolo_seg_ddp.extras.exports.exported import TRAINING_FIELDS, ExportedModel, ExportMetadata
from yolo_seg_ddp.predict.detections import decode, raw_outputs
from yolo_seg_ddp.predict.tiles import Predictor, Tiling
from yolo_seg_ddp.utils.progress import Progress
from yolo_seg_ddp.yolo.inputs import prepare_images

PHOTOGRAPHS_FOR_OUTPUTS = 4
BATCH_SIZE = 8
AP_NAMES = {
    "box_map50": "box mAP50",
    "box_map50_95": "box mAP50-95",
    "mask_map50": "mask mAP50",
    "mask_map50_95": "mask mAP50-95",
}
NO_AP = 0.01  # a class with a lower AP is not found
MASKS_PER_INPUT = 20
PROTOTYPE_STRIDE = 4  # input pixels per pixel of a prototype
OUTPUTS = ("boxes", "probabilities", "coefficients", "prototypes")


@dataclass(frozen=True)
class Bounds:
    """The allowed differences of an export.

    A raw output may differ by `absolute + relative * |torch's|`, boxes in input pixels; None: any
    finite value. Boxes may in addition differ by `box_share` of the input's side, because the
    distance to an edge is rounded and not its coordinate. `ap`: allowed difference of a class's AP.
    `only_losses`: a higher AP than torch's is no failure.
    """

    relative: float | None
    absolute: float | None
    ap: float
    only_losses: bool = False
    box_share: float = 0


# fp16 has 11 bits: its spacing is 0.25 px at boxes beyond 256 px, and an export decodes boxes in
# its graph. On trained weights the largest differences were 1.3 px of 320, 0.005 in probabilities
# and 0.02 in prototypes (yolo_seg_ddp/extras/exports/research.md).
BOUNDS = {
    "fp32": Bounds(1e-3, 1e-4, 0.002),
    "fp16": Bounds(2e-2, 5e-2, 0.005, box_share=0.01),
    "int8": Bounds(None, None, 0.02, only_losses=True),
}


def bounds_of(kind: str, precision: str, ap: float | None = None) -> Bounds:
    """Return the bounds of a format and precision; `ap` replaces that of AP.

    TensorRT multiplies fp32 as TensorFloat-32, with as many bits as fp16, so its raw outputs get
    the bounds of fp16.
    """
    bounds = BOUNDS[precision]
    if kind == "engine" and precision == "fp32":
        bounds = replace(BOUNDS["fp16"], ap=bounds.ap)
    return bounds if ap is None else replace(bounds, ap=ap)


def compare_metadata(expected: ExportMetadata, export: ExportedModel) -> list[str]:
    """Return the errors in the metadata that an export carries."""
    carried, failures = export.metadata, []
    if carried.names != expected.names:
        pairs = zip(expected.names, carried.names, strict=False)
        number = next(
            (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs),
            min(map(len, (expected.names, carried.names))),
        )
        failures.append(
            f"class {number} is called {(*carried.names, 'missing')[number]}, torch's "
            f"{(*expected.names, 'missing')[number]}"
        )
    on_input = ("size_px", "batch_size", "is_dynamic", "precision")
    trained = ("windows", "thin_classes", *TRAINING_FIELDS)
    for name in (*on_input, *trained, "source_sha256", "thresholds"):
        wanted, given = getattr(expected, name), getattr(carried, name)
        if wanted != given:
            failures.append(f"its {name} is {given}, expected {wanted}")
    return failures


@torch.no_grad()
def decoded_outputs(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a model's outputs for (B, 3, S, S) in the form of the suppression's input, in the
    host's memory.

    boxes (B, A, 4) xyxy in input pixels, probabilities (B, A, classes), coefficients (B, A, 32),
    prototypes (B, 32, S/4, S/4).
    """
    outputs = raw_outputs(model, images)
    strides = [float(stride) for stride in model.stride]  # type: ignore[union-attr]
    boxes, probabilities = decode(outputs, strides, images.shape[-1])
    coefficients = outputs["mask_coefficient"].float().transpose(1, 2)
    named = zip(
        OUTPUTS, (boxes, probabilities, coefficients, outputs["proto"].float()), strict=True
    )
    return {name: tensor.cpu() for name, tensor in named}


def compare_outputs(
    expected: Mapping[str, torch.Tensor], exported: Mapping[str, torch.Tensor], bounds: Bounds
) -> tuple[dict[str, float], list[str]]:
    """Return the largest difference of each raw output, and a line for
    each one beyond the bounds.
    """
    largest, failures = {}, []
    for name in OUTPUTS:
        ours, theirs = expected[name], exported[name]
        if ours.shape != theirs.shape:
            failures.append(
                f"its {name} have the shape {tuple(theirs.shape)}, torch's {tuple(ours.shape)}"
            )
            continue
        num_bad = int((~theirs.isfinite()).sum())
        if num_bad:
            failures.append(
                f"{num_bad} of its {theirs.numel()} {name} are infinite or not a number"
            )
            continue
        difference = (ours - theirs).abs()
        largest[name] = float(difference.max())
        if bounds.relative is None or bounds.absolute is None:
            continue
        input_px = PROTOTYPE_STRIDE * expected["prototypes"].shape[-1]
        absolute = bounds.absolute + (bounds.box_share * input_px if name == "boxes" else 0)
        excess = difference - (absolute + bounds.relative * ours.abs())
        if float(excess.max()) > 0:
            worst = np.unravel_index(int(excess.argmax()), ours.shape)
            about = f" of class {worst[-1]}" if name == "probabilities" else ""
            failures.append(
                f"its {name}{about} differ by up to {largest[name]:.3g}: "
                f"{float(theirs[worst]):.6g} instead of "
                f"{float(ours[worst]):.6g}, allowed {absolute:g} + {bounds.relative:g} * |torch's|"
            )
    return largest, failures


def mask_ious(
    expected: Mapping[str, torch.Tensor], exported: Mapping[str, torch.Tensor]
) -> tuple[float, float]:
    """Return the mean and the lowest IoU of the masks of each input's most confident anchors,
    before suppression.

    Unlike AP it also compares exports of a model that finds nothing. The masks are not cut to
    boxes.
    """
    # (B, n), of torch's outputs for both
    anchors = expected["probabilities"].amax(2).topk(MASKS_PER_INPUT, 1).indices

    def masks(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        images = zip(outputs["coefficients"], anchors, outputs["prototypes"], strict=True)
        return torch.stack(
            [coefficients[rows] @ maps.flatten(1) > 0 for coefficients, rows, maps in images]
        )

    ours, theirs = masks(expected), masks(exported)
    union = (ours | theirs).sum(2)
    # two empty masks are equal
    iou = torch.where(union > 0, (ours & theirs).sum(2) / union.clamp(min=1), 1.0)
    return float(iou.mean()), float(iou.min())


def finds_nothing(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the torch model's AP is near 0 in every class, so that an equal AP says
    nothing about an export.
    """
    return all(row[f"{name}_torch"] < NO_AP for row in rows for name in AP_NAMES)


def compare_ap(
    expected: Mapping[str, Any], exported: Mapping[str, Any], bounds: Bounds
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return each class's AP beside torch's, and a line for each one beyond the bounds.

    Classes without objects are left out.
    """
    rows, failures = [], []
    for ours, theirs in zip(expected["per_class"], exported["per_class"], strict=True):
        if not ours["num_targets"]:
            continue
        rows.append(
            {"name": ours["name"], "num_targets": ours["num_targets"]}
            | {name: theirs[name] for name in AP_NAMES}
            | {f"{name}_torch": ours[name] for name in AP_NAMES}
        )
        for name, label in AP_NAMES.items():
            change = theirs[name] - ours[name]
            if change < -bounds.ap if bounds.only_losses else abs(change) > bounds.ap:
                failures.append(
                    f"{label} of {ours['name']} is {theirs[name]:.4f}, torch's {ours[name]:.4f}: "
                    f"{change:+.4f}, "
                    f"allowed {'a loss of ' if bounds.only_losses else ''}{bounds.ap:g}"
                )
    return rows, failures


def largest_change(rows: list[dict[str, Any]]) -> tuple[float, str] | None:
    """Return the largest difference of a class's AP from torch's, with its sign, and its name and
    class.
    """
    changes = [
        (row[name] - row[f"{name}_torch"], f"{label}, {row['name']}")
        for row in rows
        for name, label in AP_NAMES.items()
    ]
    return max(changes, key=lambda change: abs(change[0]), default=None)


@dataclass(frozen=True)
class Proof:
    """The result: failures, one line each; the largest differences of raw outputs; AP of each class
    beside torch's.
    """

    failures: list[str]
    largest: dict[str, float] = field(default_factory=dict)
    per_class: list[dict[str, Any]] = field(default_factory=list)
    mask_iou: tuple[float, float] | None = None  # mean and lowest, before suppression


class Judge:
    """Compares exports with one torch model on the same photographs, resized by this project.

    With a tiling AP is measured on tiles, in the photographs' pixels; without, on whole photographs
    as in training.
    """

    def __init__(
        self,
        photos: Sequence[Photo],
        names: tuple[str, ...],
        size_px: int,
        device: torch.device,
        tiling: Tiling | None,
        workers: int = 0,
    ) -> None:
        self.photos = list(photos)
        self.names = names
        self.size_px = size_px
        self.device = device
        self.tiling = tiling
        self.workers = workers
        canvases = []
        for photo in self.photos[:PHOTOGRAPHS_FOR_OUTPUTS]:
            image = read_image(photo.file)
            lower_right = image[image.shape[0] // 2 :, image.shape[1] // 2 :]
            canvases += [letterbox(part, size_px)[0] for part in (image, lower_right)]
        # float32 (2 n, 3, S, S) in 0..1
        self.inputs = prepare_images(torch.from_numpy(np.stack(canvases)), device)
        self._outputs: dict[str, torch.Tensor] = {}
        self._metrics: dict[str, Any] = {}

    def learn(self, reference: nn.Module) -> None:
        """Take the torch model's outputs and AP as the truth."""
        self._outputs = decoded_outputs(reference, self.inputs)
        self._metrics = self.metrics(reference)

    def prove(
        self, export: ExportedModel, metadata: ExportMetadata, ap_tolerance: float | None = None
    ) -> Proof:
        """Compare an export with the torch model, and its metadata with what it has to carry."""
        failures = compare_metadata(metadata, export)
        if failures:
            return Proof(failures)
        bounds = bounds_of(export.kind, metadata.precision, ap_tolerance)
        outputs = decoded_outputs(export, self.inputs)
        largest, failures = compare_outputs(self._outputs, outputs, bounds)
        # Of another shape, or not finite: there is nothing to measure AP on.
        if len(largest) < len(OUTPUTS):
            return Proof(failures, largest)
        per_class, too_far = compare_ap(self._metrics, self.metrics(export), bounds)
        return Proof(too_far + failures, largest, per_class, mask_ious(self._outputs, outputs))

    def metrics(self, model: nn.Module) -> dict[str, Any]:
        """Return this project's metrics of a model on the photographs."""
        dataset = SegmentationDataset(self.photos, self.size_px)
        batches = ShardBatches(len(dataset), BATCH_SIZE, 0, 1)
        loader = get_dataloader(dataset, batches, self.workers, self.device.type == "cuda")
        criterion = criterion_of(model)
        if self.tiling is None:
            batches_shown = Progress("batches", len(loader))(loader)
            return evaluate(model, batches_shown, self.names, criterion, self.device).metrics
        predictor = Predictor(model, self.size_px, self.device, BATCH_SIZE, self.tiling, AP_LIMITS)
        find = TileSearch(predictor, self.photos, Progress("photographs", len(self.photos)))
        pixels = PhotoPixels(sizes_on_disk(self.photos), compare=True, find=find)
        return evaluate(model, loader, self.names, criterion, self.device, photo=pixels).metrics
