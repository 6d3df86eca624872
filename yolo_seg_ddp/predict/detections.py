"""Turns a model's raw outputs into detections with masks, alike in validation, evaluation and
inference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn

from yolo_seg_ddp.predict.line import Line
from yolo_seg_ddp.predict.mask_scores import mask_certainty, mask_logits
from yolo_seg_ddp.predict.photo_masks import Letterbox, enlarge
from yolo_seg_ddp.predict.regions import Region, Runs
from yolo_seg_ddp.utils.devices import copy_to_device
from yolo_seg_ddp.yolo.boxes import OneToOne, anchor_points, decode_boxes

MAX_CANDIDATES = 30_000  # per image, before non-maximum suppression; YOLOv8's limit
# few enough that the IoU of all pairs takes little memory, enough to fill a GPU
CANDIDATES_AT_ONCE = 256
MOST_CHAINED = 12  # longest chain of candidates in a block of which each decides the next
# A network learns the overlap of the predicted and the true box as its score. For a box that is t
# pixels of the input thick, this is about t / (t + BOX_ERROR_PX). Thinner boxes count as
# THINNEST_PX thick, so a score is raised at most threefold.
BOX_ERROR_PX, THINNEST_PX = 12.0, 6.0
# between the boxes of different classes, so that one suppression keeps the classes apart
CLASS_OFFSET_PX = 7680


@dataclass(frozen=True)
class Detections:
    """One image's detections, best first: boxes float32 (n, 4) xyxy in input pixels, coefficients
    float32 (n, 32).

    The coefficients lie on the model's device, the rest in the host's memory.
    """

    boxes: torch.Tensor
    scores: torch.Tensor  # float32 (n,)
    class_ids: torch.Tensor  # int64 (n,)
    coefficients: torch.Tensor
    # The highest confidence seen; 0 if only other images of the batch had one that was high enough.
    best_score: float = 0.0

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, part: slice | list[int]) -> Detections:
        return Detections(
            self.boxes[part], self.scores[part], self.class_ids[part], self.coefficients[part]
        )


@dataclass(frozen=True)
class PhotoPrediction:
    """The detections of a photograph, with masks and boxes, float32 (n, 4) xyxy, in its pixels.

    lines: of each detection, None where it has none; empty if no line was looked for
    (`yolo_seg_ddp/extras/wires/`). num_without_mask: how many detections were found whose mask is
    empty: only their boxes are known.
    """

    detections: Detections
    masks: Sequence[Region]
    boxes: np.ndarray
    lines: Sequence[Line | None] = ()
    num_without_mask: int = 0
    # What the photograph is like, with a guarantee: yolo_seg_ddp/predict/thresholds.py.
    features: np.ndarray | None = None
    # The highest confidence seen, if none was high enough for a detection.
    best_score: float = 0.0
    # On its inputs; on the network; on masks and joining.
    spent_s: np.ndarray = field(default_factory=lambda: np.zeros(3))

    @property
    def class_ids(self) -> np.ndarray:
        """The class of each detection, int64 (n,)."""
        return self.detections.class_ids.numpy()

    @property
    def drawn(self) -> tuple[np.ndarray, np.ndarray, Sequence[Region], np.ndarray]:
        """What `draw_instances` takes: classes, boxes, masks and confidences."""
        return self.class_ids, self.boxes, self.masks, self.detections.scores.numpy()

    def chosen(self, numbers: list[int]) -> PhotoPrediction:
        """Return some of the detections, by their numbers."""
        masks = [self.masks[number] for number in numbers]
        lines = [self.lines[number] for number in numbers] if self.lines else ()
        detections, boxes = self.detections[numbers], self.boxes[numbers]
        chosen = replace(self, detections=detections, masks=masks, boxes=boxes, lines=lines)
        return replace(chosen, num_without_mask=sum(not mask.mask.size for mask in masks))


def raw_outputs(
    model: nn.Module, images: torch.Tensor, autocast_dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Run a model in evaluation mode on (B, 3, S, S) in 0..1; return its dictionary of raw outputs.

    YOLO26 has two such dictionaries; `yolo_seg_ddp.yolo.model.load_for_prediction` chose one of
    them.
    """
    with torch.autocast(
        images.device.type, autocast_dtype or torch.bfloat16, enabled=autocast_dtype is not None
    ):
        outputs = model(images)
    raw: dict[str, Any] = outputs[1] if isinstance(outputs, tuple) else outputs
    if "one2one" in raw:
        return OneToOne(raw["one2one"]) if model.end2end else raw["one2many"]
    return raw


def decode(
    outputs: dict[str, torch.Tensor], strides: list[float], size_px: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return boxes (B, A, 4) xyxy in input pixels and class probabilities (B, A, classes), in
    float32.

    The model's own decoding is not used: under bf16 autocast it rounds coordinates to whole pixels.
    Exports (yolo_seg_ddp/extras/exports) hold it in their graph.
    """
    if "xywh" in outputs:
        centres, sizes = outputs["xywh"].float().transpose(1, 2).chunk(2, 2)
        boxes = torch.cat([centres - sizes / 2, centres + sizes / 2], 2)
        return boxes, outputs["probabilities"].float().transpose(1, 2)
    bins = outputs["boxes"].float().transpose(1, 2)
    points, stride_column = anchor_points(strides, size_px, bins.device)
    return decode_boxes(bins, points) * stride_column, outputs["scores"].float().transpose(
        1, 2
    ).sigmoid()


def detect(
    outputs: dict[str, torch.Tensor],
    strides: list[float],
    size_px: int,
    *,
    confidence: float,
    iou: float,
    max_detections: int = 300,
    multi_label: bool = False,
    classes: tuple[int, ...] | None = None,
    thin: tuple[int, ...] = (),
    mask_score: bool = True,
) -> list[Detections]:
    """Suppress overlapping boxes of the same class and return each image's detections. Waits twice
    for a GPU.

    Of one-to-one outputs the most confident are returned, whatever `iou` is.

    With `multi_label` an anchor may become a detection of each class, as for AP. Unlike in
    Ultralytics, there is no time limit. The scores of thin boxes of `thin` classes are raised to
    those of equally good thick boxes (BOX_ERROR_PX). These scores decide what is suppressed, and
    which `max_detections` remain. Then `mask_score` multiplies them by `mask_certainty`, but for
    `thin` classes. The products have to exceed `confidence`, and are sorted.
    """
    # 1. Each anchor's box and probabilities.
    boxes, probabilities = decode(outputs, strides, size_px)

    def flags(chosen: tuple[int, ...]) -> torch.Tensor:
        is_chosen = torch.tensor(
            [float(class_id in chosen) for class_id in range(probabilities.shape[-1])]
        )
        return copy_to_device(is_chosen, probabilities.device)

    if thin:
        thickness = (
            (boxes[..., 2:] - boxes[..., :2]).amin(dim=-1, keepdim=True).clamp(min=THINNEST_PX)
        )
        factors = 1 + flags(thin) * (BOX_ERROR_PX / thickness)
        probabilities = (probabilities * factors).clamp(max=1)
    if classes is not None:
        probabilities = probabilities * flags(classes)
    coefficients = outputs["mask_coefficient"].float().transpose(1, 2)
    is_thick = 1 - flags(thin)

    def judge(
        image: int, anchor: torch.Tensor, boxes: torch.Tensor, class_ids: torch.Tensor
    ) -> torch.Tensor | float:
        if not mask_score:
            return 1.0
        maps = outputs["proto"][image]
        boxes = boxes * (maps.shape[-1] / size_px)
        certainty = mask_certainty(maps, coefficients[image, anchor], boxes)
        # A wire is narrower than a pixel of the prototypes, so its mask is sure of none.
        return 1 + is_thick[class_ids] * (certainty - 1)

    # 2. Suppression, and the scores of what is left.
    candidates = _find_candidates(boxes, probabilities, confidence, multi_label)
    if isinstance(outputs, OneToOne):
        most_confident = lambda _, scores: _best_first(scores)[:max_detections]  # noqa: E731
        # This waits once per image.
        kept = _chosen_of_each(candidates, most_confident, judge)
    else:
        kept = _suppress(candidates, iou, max_detections, judge)

    # 3. The highest score, for a user who finds nothing.
    best_scores = [0.0] * len(kept)
    if not any(candidates.counts):
        best, place = probabilities.flatten(1).max(1, keepdim=True)
        anchors = place // probabilities.shape[2]
        judged = [
            score * judge(image, anchor, boxes[image, anchor], class_id)
            for image, (score, anchor, class_id) in enumerate(
                zip(best, anchors, place % probabilities.shape[2], strict=True)
            )
        ]
        best_scores = torch.cat(judged).tolist()

    # 4. The detections of each image.
    detections = []
    for (boxes, scores, class_ids, anchor), image, best_score in zip(
        kept, coefficients, best_scores, strict=True
    ):
        first = slice(int((scores > confidence).sum()))
        best_score = max([best_score, *scores[:1].tolist()])
        detections.append(
            Detections(
                boxes[first], scores[first], class_ids[first], image[anchor[first]], best_score
            )
        )
    return detections


@dataclass(frozen=True)
class _Candidates:
    """What may become a detection: all images' candidates, image by image."""

    counts: list[int]  # of each of the B images
    image: torch.Tensor  # int64 (N,), ascending
    anchor: torch.Tensor  # int64 (N,)
    boxes: torch.Tensor  # float32 (N, 4)
    scores: torch.Tensor  # (N,)
    class_ids: torch.Tensor  # int64 (N,)

    @property
    def apart(self) -> torch.Tensor:
        """The boxes, moved so far that those of different classes do not overlap."""
        return self.boxes + self.class_ids[:, None] * CLASS_OFFSET_PX


def _find_candidates(
    boxes: torch.Tensor, probabilities: torch.Tensor, confidence: float, multi_label: bool
) -> _Candidates:
    """Find classes of anchors above a confidence: with `multi_label` all classes of an anchor, else
    its best.
    """
    if multi_label:
        scores, best_class = probabilities, None
    else:
        scores, best_class = probabilities.max(2, keepdim=True)
    is_candidate = (scores > confidence).flatten(1)
    # the first wait; from here on the sizes are known
    counts = is_candidate.sum(1, dtype=torch.int32).tolist()
    image, place = torch.nonzero_static(is_candidate, size=sum(counts)).unbind(1)
    anchor = place // scores.shape[2]
    class_ids = place % scores.shape[2] if best_class is None else best_class[image, anchor, 0]
    return _Candidates(
        counts, image, anchor, boxes[image, anchor], scores.flatten(1)[image, place], class_ids
    )


# An image's boxes, scores and class ids in the host's memory, and the anchors of its detections on
# the device.
_Kept = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
# Returns what multiplies the scores of an image's detections: of its number, and their anchors
# (n,), boxes (n, 4) and class ids (n,) on the device.
_Judge = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | float]


def _suppress(candidates: _Candidates, iou: float, most: int, judge: _Judge) -> _Kept:
    # One by one is faster on the CPU, where nothing waits for a device.
    on_cpu = candidates.boxes.device.type == "cpu"
    return (_suppress_one_by_one if on_cpu else _suppress_at_once)(candidates, iou, most, judge)


def _suppress_one_by_one(candidates: _Candidates, iou: float, most: int, judge: _Judge) -> _Kept:
    """Suppress the candidates of each image in turn. Waits several times per image for a GPU."""
    # Its import takes 1.3 s: a wrong option is reported before.
    from torchvision.ops import nms

    def choose(apart: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if len(scores) <= MAX_CANDIDATES:
            return nms(apart, scores, iou)[:most]
        best = _best_first(scores)[:MAX_CANDIDATES]
        return best[nms(apart[best], scores[best], iou)[:most]]

    return _chosen_of_each(candidates, choose, judge)


def _chosen_of_each(
    candidates: _Candidates,
    choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    judge: _Judge,
) -> _Kept:
    """Return what `choose(apart, scores)` chooses of each image's candidates, by their positions.

    They are sorted by their scores times what `judge` says.
    """
    kept: _Kept = []
    columns = (
        candidates.apart,
        candidates.boxes,
        candidates.scores,
        candidates.class_ids,
        candidates.anchor,
    )
    for number, image in enumerate(
        zip(*(column.split(candidates.counts) for column in columns), strict=True)
    ):
        apart, boxes, scores, class_ids, anchor = image
        chosen = choose(apart, scores)
        factors = judge(number, anchor[chosen], boxes[chosen], class_ids[chosen])
        scores = scores[chosen] * factors
        order = _best_first(scores)
        chosen = chosen[order]
        kept.append(
            (boxes[chosen].cpu(), scores[order].cpu(), class_ids[chosen].cpu(), anchor[chosen])
        )
    return kept


def _best_first(scores: torch.Tensor) -> torch.Tensor:
    return scores.sort(descending=True, stable=True).indices


def _suppress_at_once(candidates: _Candidates, iou: float, most: int, judge: _Judge) -> _Kept:
    """Suppress the candidates of all images together. Waits once for a GPU."""
    device = candidates.boxes.device
    num_images = len(candidates.counts)
    starts = copy_to_device(torch.tensor([0, *accumulate(candidates.counts[:-1])]), device)
    slot = torch.arange(len(candidates.image), device=device) - starts[candidates.image]
    # n slots for each image
    scores = candidates.scores.new_full((num_images, max(candidates.counts)), -1)
    scores[candidates.image, slot] = candidates.scores
    ordered = scores.sort(dim=1, descending=True, stable=True)
    # (B, n) in 0..N-1
    row = (starts[:, None] + ordered.indices[:, :MAX_CANDIDATES]).clamp(max=len(slot) - 1)
    is_candidate = ordered.values[:, :MAX_CANDIDATES] >= 0
    position, number, is_settled = suppress(
        candidates.apart[row], is_candidate, iou, min(most, row.shape[1])
    )
    row = row.gather(1, position)
    judged = [
        candidates.scores[indices]
        * judge(
            image,
            candidates.anchor[indices],
            candidates.boxes[indices],
            candidates.class_ids[indices],
        )
        for image, indices in enumerate(row)
    ]
    is_kept = torch.arange(row.shape[1], device=device) < number[:, None]
    scores, order = torch.where(is_kept, torch.stack(judged), -1).sort(
        dim=1, descending=True, stable=True
    )
    row = row.gather(1, order)
    table = torch.cat(
        [candidates.boxes[row], scores[..., None], candidates.class_ids[row][..., None]], 2
    )
    # the second wait
    packed = torch.cat([table.flatten(), number.float(), is_settled.float()[None]]).cpu()
    if not packed[-1]:
        return _suppress_one_by_one(candidates, iou, most, judge)
    numbers = packed[table.numel() : -1].int().tolist()
    table = packed[: table.numel()].view(table.shape)
    return [
        (image[:n, :4], image[:n, 4], image[:n, 5].long(), anchor[:n])
        for image, n, anchor in zip(table, numbers, candidates.anchor[row], strict=True)
    ]


def suppress(
    boxes: torch.Tensor, is_candidate: torch.Tensor, iou: float, most: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Suppress candidates; return each image's positions that stay, int64 (B, most), how many these
    are (B,), and bool ().

    torchvision's `nms` takes one image and waits for the device. Joining a batch to one call needs
    an offset between the images, and float32 coordinates so far from zero are too coarse: near the
    IoU limit other boxes would stay.

    boxes float32 (B, n, 4) xyxy, the most confident first; is_candidate bool (B, n) is False where
    an image has fewer. An image's positions beyond its number mean nothing. The last value is False
    if a chain of overlaps was longer than MOST_CHAINED; then the positions may be wrong. The
    results are those of torchvision's `nms` on a CPU, bit by bit.
    """
    num_images, num_boxes = is_candidate.shape
    # One row more, for those that are too many.
    kept = torch.zeros(num_images, most + 1, dtype=torch.int64, device=boxes.device)
    kept_boxes = boxes.new_zeros(num_images, most + 1, 4)
    number = torch.zeros(num_images, dtype=torch.int64, device=boxes.device)
    is_settled = torch.ones((), dtype=torch.bool, device=boxes.device)
    for start in range(0, num_boxes, CANDIDATES_AT_ONCE):
        block = boxes[:, start : start + CANDIDATES_AT_ONCE]
        is_free = is_candidate[:, start : start + CANDIDATES_AT_ONCE] & ~_overlap(
            kept_boxes[:, :most], block, iou
        ).any(1)
        # (B, k, k): a candidate and the less confident ones
        suppresses = _overlap(block, block, iou).triu(1)
        stays = before = is_free
        for _ in range(MOST_CHAINED):
            before = stays
            stays = is_free & ~(suppresses & stays[..., None]).any(1)
        is_settled &= (before == stays).all()
        rank = number[:, None] + stays.cumsum(1) - 1
        slot = torch.where(stays, rank, most).clamp(max=most)
        kept.scatter_(
            1,
            slot,
            torch.arange(start, start + block.shape[1], device=boxes.device).expand_as(slot),
        )
        kept_boxes.scatter_(1, slot[..., None].expand_as(block), block)
        number = (number + stays.sum(1)).clamp(max=most)
    return kept[:, :most], number, is_settled


def _overlap(first: torch.Tensor, second: torch.Tensor, iou: float) -> torch.Tensor:
    """Return which boxes (B, m, 4) and (B, n, 4) have an IoU above `iou`: bool (B, m, n)."""
    # Rounded down: a float32 exceeds it if it exceeds `iou` itself.
    limit = np.float32(iou)
    limit = limit if float(limit) <= iou else np.nextafter(limit, np.float32(-1))
    low_x, low_y, high_x, high_y = (
        choose(first[:, :, None, side], second[:, None, :, side])
        for choose, side in (
            (torch.maximum, 0),
            (torch.maximum, 1),
            (torch.minimum, 2),
            (torch.minimum, 3),
        )
    )
    shared = (high_x - low_x).clamp_(min=0).mul_((high_y - low_y).clamp_(min=0))
    areas = [
        (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])
        for boxes in (first, second)
    ]
    return shared / (areas[0][:, :, None] + areas[1][:, None] - shared) > float(limit)


def prototype_masks(prototypes: torch.Tensor, detections: Detections, size_px: int) -> torch.Tensor:
    """Return masks at prototype resolution, cut to their boxes: bool (n, h, w) from prototypes (32,
    h, w).
    """
    boxes = copy_to_device(detections.boxes * (prototypes.shape[-1] / size_px), prototypes.device)
    return mask_logits(prototypes, detections.coefficients, boxes) > 0


def photo_runs(
    prototypes: torch.Tensor,
    detections: Detections,
    placement: Letterbox,
    thin: tuple[int, ...] = (),
) -> Iterator[Runs]:
    """Yield each detection's mask in photograph pixels, cut to its box. Waits once for a GPU.

    Masks of `thin` classes keep the edge with which they are taught, see `enlarge`.
    """
    # in one copy
    both = torch.cat([detections.coefficients.T, prototypes.float().flatten(1)], 1).cpu()
    coefficients = both[:, : len(detections)].T
    maps = both[:, len(detections) :].view(prototypes.shape)
    is_thin = [class_id in thin for class_id in detections.class_ids.tolist()]
    boxes = placement.boxes_to_photo(detections.boxes)
    return enlarge(maps, coefficients, boxes, is_thin, placement)


def photo_masks(
    prototypes: torch.Tensor, detections: Detections, placement: Letterbox
) -> Iterator[Region]:
    """Yield the masks of `photo_runs` as bitmaps."""
    return (runs.region() for runs in photo_runs(prototypes, detections, placement))


def boxes_to_input(boxes: torch.Tensor, placement: Letterbox) -> torch.Tensor:
    """Map xyxy boxes (n, 4) from photograph to input pixels."""
    inner = boxes.new_tensor(placement.inner_size * 2)
    photo = boxes.new_tensor(placement.photo_size * 2)
    return boxes / photo * inner + boxes.new_tensor(placement.pad * 2)
