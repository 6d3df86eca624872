"""COCO's files of a split (ground_truth.json, predictions.json) and faster-coco-eval's verdict on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core import mask as coco_mask

from utils import distributed
from utils.data.dataset import Sample
from utils.evaluation.metrics import SIZES
from utils.evaluation.native_masks import fill_outline, outlines_in_photo, place, target_areas
from utils.yolo.predict import Detections, Placement

Entry = dict[str, Any]


class CocoCollector:
    """Collects detections and, if wanted, the truth while a split is evaluated, then joins what all ranks have.

    `see_masks` and `see_image` are made for `utils.evaluation.evaluate.PhotoPixels.on_masks` and `evaluate`'s `on_image`.
    Everything is in pixels of the photographs, which are known by their position in `files`.
    """

    def __init__(self, files: list[Path], size_of: Callable[[int], tuple[int, int]]) -> None:
        self.files = files
        self.size_of = size_of
        self.detections: list[Entry] = []
        self.images: list[Entry] = []
        self.annotations: list[Entry] = []

    def see_masks(self, sample: Sample, placement: Placement, found: Detections, masks: np.ndarray) -> None:
        """Take some of an image's detections with their masks, bool (k, H, W)."""
        boxes = placement.boxes_to_photo(found.boxes).cpu().numpy()
        for class_id, score, box, mask in zip(
            found.class_ids.tolist(), found.scores.tolist(), boxes, masks, strict=True
        ):
            entry = {"image_id": sample.index, "category_id": class_id, "score": round(score, 5)}
            shape = {"bbox": _xywh(box), "segmentation": encode_mask(mask)}
            self.detections.append({**entry, **shape, "file_name": self.files[sample.index].name})

    def see_image(self, sample: Sample, detections: Detections, prototypes: torch.Tensor) -> None:
        """Take an image's truth: each object's full outline, filled."""
        width, height = self.size_of(sample.index)
        placement = place(sample, (width, height))
        file_name = self.files[sample.index].name
        self.images.append({"id": sample.index, "file_name": file_name, "width": width, "height": height})
        boxes = placement.boxes_to_photo(torch.from_numpy(sample.boxes)).numpy()
        areas = target_areas(sample, placement).tolist()
        outlines = outlines_in_photo(sample, placement)
        for class_id, box, area, outline in zip(sample.class_ids.tolist(), boxes, areas, outlines, strict=True):
            region = fill_outline(outline, placement.photo_size)
            mask = np.zeros((height, width), bool)
            mask[region.top : region.top + region.mask.shape[0], region.left : region.left + region.mask.shape[1]] = (
                region.mask
            )
            entry = {"image_id": sample.index, "category_id": class_id, "area": round(area, 1), "iscrowd": 0}
            self.annotations.append({**entry, "bbox": _xywh(box), "segmentation": encode_mask(mask)})

    def gather(self, names: tuple[str, ...]) -> tuple[list[Entry], Entry]:
        """Return all ranks' detections, sorted by image, and the ground truth. Every rank must reach this."""
        detections = _joined(self.detections)
        detections.sort(key=lambda entry: (entry["image_id"], -entry["score"]))
        images = sorted(_joined(self.images), key=lambda image: image["id"])
        annotations = sorted(_joined(self.annotations), key=lambda annotation: annotation["image_id"])
        categories = [{"id": class_id, "name": name} for class_id, name in enumerate(names)]
        # COCO's tools take an annotation with the id 0 for none.
        numbered = [{"id": number, **annotation} for number, annotation in enumerate(annotations, start=1)]
        return detections, {"images": images, "categories": categories, "annotations": numbered}


def encode_mask(mask: np.ndarray) -> Entry:
    """Return a mask (H, W) as COCO's compressed run lengths: `size` [H, W] and `counts`, ASCII."""
    encoded = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    counts = encoded["counts"]
    return {
        "size": [int(side) for side in mask.shape],
        "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts,
    }


def judge_files(ground_truth: Path, predictions: Path) -> Entry:
    """Let faster-coco-eval judge two files; name its figures as ours are named, None where it has none.

    `<kind>_map50`, `<kind>_map50_95`, and `by_size` with `<kind>_map50_95`. It looks at an image's 100 most confident
    detections of each class, and knows a detection's size by its box or by its mask, as the kind goes.
    """
    truth = COCO(str(ground_truth))
    found = json.loads(predictions.read_text(encoding="utf-8"))
    verdict: Entry = {"by_size": {size: {} for size in SIZES}}
    for kind, iou_type in (("box", "bbox"), ("mask", "segm")):
        # Its size of a detection is the box's wherever a box is given, so for masks none is.
        entries = [{name: entry[name] for name in entry if kind == "box" or name != "bbox"} for entry in found]
        judge = COCOeval_faster(truth, truth.loadRes(entries), iou_type)
        judge.run()
        figures = {name: None if value < 0 else float(value) for name, value in judge.stats_as_dict.items()}
        verdict[f"{kind}_map50"], verdict[f"{kind}_map50_95"] = figures["AP_50"], figures["AP_all"]
        for size in SIZES:
            verdict["by_size"][size][f"{kind}_map50_95"] = figures[f"AP_{size}"]
    return verdict


def _xywh(box: np.ndarray) -> list[float]:
    return [round(float(value), 2) for value in (box[0], box[1], box[2] - box[0], box[3] - box[1])]


def _joined(entries: list[Entry]) -> list[Entry]:
    """Return all ranks' entries, in rank order."""
    payload = np.frombuffer(json.dumps(entries).encode(), dtype=np.uint8)
    parts = distributed.gather_arrays({"json": payload})
    return [entry for part in parts for entry in json.loads(part["json"].tobytes())]
