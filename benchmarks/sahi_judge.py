"""Judges the objects that both sides of benchmarks/vs_sahi.py found, in the photographs' own pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core import mask as coco_mask

from utils.data.dataset import Photo, Sample, SegmentationDataset
from utils.evaluation.coco import CocoCollector
from utils.evaluation.evaluate import PhotoPixels, find_results
from utils.evaluation.label_shapes import choose_thin_classes, sizes_on_disk
from utils.evaluation.metrics.summary import summarise
from utils.evaluation.metrics.thin_objects import ThinRule, summarise_thin
from utils.predict.detections import Detections, boxes_to_input
from utils.predict.photo_masks import Placement
from utils.predict.regions import LazyRegions, Region

Json = dict[str, Any]


def stored_mask(thing: Json) -> Region:
    """Decode the mask of an object."""
    mask = thing["mask"]
    encoded = {"size": mask["size"], "counts": mask["counts"].encode("ascii")}
    left, top, width, height = (int(value) for value in coco_mask.toBbox(encoded))
    whole = coco_mask.decode(encoded)
    return Region(left, top, whole[top : top + height, left : left + width].astype(bool))


def judge(photos: list[Photo], size_px: int, names: tuple[str, ...], objects_of: list[list[Json]]) -> Json:
    """Return AP of the objects found in each photograph: by faster-coco-eval, by class too, and by our evaluator.

    Classes of wires also get what `summarise_thin` returns, of all objects and at its default tolerance. size_px: side of
    the network's input. Values are None for a class without labels.
    """
    ordered = [sorted(objects, key=lambda thing: -thing["score"]) for objects in objects_of]

    def find(
        samples: Sequence[Sample], placements: Sequence[Placement]
    ) -> Iterator[tuple[Detections, Sequence[Region]]]:
        for sample, placement in zip(samples, placements, strict=True):
            objects = ordered[sample.index]
            boxes = torch.tensor([thing["box"] for thing in objects], dtype=torch.float32).reshape(-1, 4)
            scores = torch.tensor([thing["score"] for thing in objects], dtype=torch.float32)
            class_ids = torch.tensor([thing["class_id"] for thing in objects], dtype=torch.int64)
            found = Detections(boxes_to_input(boxes, placement), scores, class_ids, torch.zeros(len(objects), 0))
            yield found, LazyRegions(objects, stored_mask)

    dataset = SegmentationDataset(photos, size_px)
    size_of = sizes_on_disk(photos)
    collector = CocoCollector([photo.file for photo in photos], size_of)
    thin = ThinRule(choose_thin_classes(("auto",), photos, size_of, names), min_score=0)
    pixels = PhotoPixels(size_of, True, collector.see_masks, thin)
    results = []
    for index in range(len(photos)):
        sample = dataset[(0, index)]
        (found,), judged = find_results([sample], find, len(names), pixels)
        collector.see_image(sample, found, torch.zeros(0))
        results += judged
    detections, truth = collector.gather(names)
    ours = summarise(results, names)
    answer = coco_ap(truth, detections, names)
    for name, of_class in zip(names, summarise_thin(results, len(names), thin.classes), strict=True):
        answer["by_class"][name] |= of_class
    return {**answer, "by_our_evaluator": {name: ours[f"mask_{name}"] for name in ("map50", "map50_95")}}


def coco_ap(truth: Json, detections: list[Json], names: tuple[str, ...]) -> Json:
    """Return faster-coco-eval's mask AP, the mean over the classes that have labels, and of each class."""
    # It takes a detection's size from the box if there is one.
    entries = [{name: entry[name] for name in entry if name != "bbox"} for entry in detections]
    labels = COCO(truth)
    evaluator = COCOeval_faster(labels, labels.loadRes(entries), "segm")
    evaluator.run()
    precision = evaluator.eval["precision"][:, :, :, 0, -1]  # (IoU, recall, class); -1: the class has no labels
    by_class: dict[str, Json] = {}
    for class_id, name in enumerate(names):
        of_class = precision[:, :, class_id]
        has_labels = bool((of_class > -1).any())
        values = {"map50": float(of_class[0].mean()), "map50_95": float(of_class.mean())}
        by_class[name] = values if has_labels else dict.fromkeys(values)
    means: Json = {}
    for measure in ("map50", "map50_95"):
        known = [row[measure] for row in by_class.values() if row[measure] is not None]
        means[measure] = float(np.mean(known)) if known else None
    return {**means, "by_class": by_class}
