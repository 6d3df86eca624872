"""COCO files of a split (ground_truth.json, predictions.json), and their AP by faster-coco-eval."""

import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval import COCO, COCOeval_faster
from faster_coco_eval.core import mask as coco_mask

from yolo_seg_ddp.data.dataset import Sample
from yolo_seg_ddp.data.labels import ANY_CLASS
from yolo_seg_ddp.data.polygons import SIZES
from yolo_seg_ddp.evaluation.native_masks import (
    fill_outline,
    outlines_in_photo,
    place,
    regions_to_ignore,
    target_areas,
)
from yolo_seg_ddp.predict.detections import Detections, Letterbox
from yolo_seg_ddp.predict.prediction_files import PhotoLines, write_list, written_whole
from yolo_seg_ddp.predict.regions import Region, column_runs

Entry = dict[str, Any]


class CocoCollector:
    """Writes detections and, if wanted, labels to disk while a split is evaluated; `gather` then
    joins those of all ranks.

    Pass `see_masks` in `PhotoPixels.on_masks` and `see_image` in `on_image`
    (yolo_seg_ddp/evaluation/evaluate.py). Coordinates are pixels of the photographs; an image's id
    is its position in `files`. folder: of this rank, for the results.
    """

    def __init__(
        self, files: list[Path], size_of: Callable[[int], tuple[int, int]], folder: Path
    ) -> None:
        self.files = files
        self.size_of = size_of
        self.folder = folder
        self._detections, self._images, self._annotations = (PhotoLines(folder) for _ in range(3))
        self._open: list[Entry] = []  # detections of the photograph whose masks arrive now

    def see_masks(
        self, sample: Sample, placement: Letterbox, found: Detections, masks: list[Region]
    ) -> None:
        """Add some of an image's detections with their masks."""
        if self._open and self._open[0]["image_id"] != sample.index:
            self._close()
        boxes = placement.boxes_to_photo(found.boxes).numpy()
        rows = zip(found.class_ids.tolist(), found.scores.tolist(), boxes, masks, strict=True)
        for class_id, score, box, mask in rows:
            entry = {"image_id": sample.index, "category_id": class_id, "score": round(score, 5)}
            shape = {"bbox": _xywh(box), "segmentation": encode_region(mask, placement.photo_size)}
            self._open.append({**entry, **shape, "file_name": self.files[sample.index].name})

    def see_image(self, sample: Sample, detections: Detections, prototypes: torch.Tensor) -> None:
        """Add an image's labels, and its regions to ignore as crowds; a mask is the whole outline,
        filled.
        """
        width, height = self.size_of(sample.index)
        placement = place(sample, (width, height))
        file_name = self.files[sample.index].name
        self._images.add(
            sample.index,
            {"id": sample.index, "file_name": file_name, "width": width, "height": height},
        )
        annotations = []
        for is_crowd, one in enumerate((sample, regions_to_ignore(sample))):
            boxes = placement.boxes_to_photo(torch.from_numpy(one.boxes)).numpy()
            areas = target_areas(one, placement).tolist()
            outlines = outlines_in_photo(one, placement)
            for class_id, box, area, outline in zip(
                one.class_ids.tolist(), boxes, areas, outlines, strict=True
            ):
                region = fill_outline(outline, placement.photo_size)
                entry = {
                    "image_id": one.index,
                    "category_id": class_id,
                    "area": round(area, 1),
                    "iscrowd": is_crowd,
                }
                mask = encode_region(region, placement.photo_size)
                annotations.append({**entry, "bbox": _xywh(box), "segmentation": mask})
        # The objects come first.
        for number in sample.boxed:
            annotations[number]["boxed"] = 1
        self._annotations.add(sample.index, annotations)

    def _close(self) -> None:
        self._open.sort(key=lambda entry: -entry["score"])
        self._detections.add(self._open[0]["image_id"], self._open)
        self._open = []

    def gather(self) -> None:
        """Bring what all ranks saw to rank 0. Every rank must reach this."""
        if self._open:
            self._close()
        for lines in (self._detections, self._images, self._annotations):
            lines.gather()

    def write_predictions(self) -> Path:
        """Write predictions.json on rank 0: the detections, sorted by image and confidence."""
        path = self.folder / "predictions.json"
        with written_whole(path) as output:
            write_list(output, "[", (line[1:-1] for line in self._detections), "]", "")
        return path

    def write_ground_truth(self, names: tuple[str, ...]) -> Path:
        """Write ground_truth.json on rank 0: images, classes and labels."""
        categories = [{"id": class_id, "name": name} for class_id, name in enumerate(names)]
        classes = {class_id: [class_id] for class_id in range(len(names))} | {
            ANY_CLASS: [*range(len(names))]
        }
        every = (one for line in self._annotations for one in json.loads(line))
        pairs = ((one, class_id) for one in every for class_id in classes[one["category_id"]])
        # COCO's tools treat an annotation with id 0 as missing.
        numbered = (
            {"id": number, **one, "category_id": of}
            for number, (one, of) in enumerate(pairs, start=1)
        )
        path = self.folder / "ground_truth.json"
        with written_whole(path) as output:
            write_list(
                output,
                '{"images": [',
                self._images,
                f'], "categories": {json.dumps(categories)}',
                "",
            )
            write_list(output, ', "annotations": [', map(json.dumps, numbered), "]}", "")
        return path


def encode_region(region: Region, photo_size: tuple[int, int]) -> Entry:
    """Return a mask in a photograph of (width, height) pixels as COCO's compressed run lengths.

    That is `size` [height, width] and `counts`, ASCII: how many pixels are outside and inside in
    turn, column by column.
    """
    width, height = photo_size
    runs = {"size": [height, width], "counts": column_runs(region, photo_size)}
    encoded = coco_mask.frPyObjects(runs, height, width)["counts"]
    return {
        "size": [height, width],
        "counts": encoded.decode("ascii") if isinstance(encoded, bytes) else encoded,
    }


def evaluate_with_faster_coco_eval(ground_truth: Path, predictions: Path) -> Entry:
    """Return faster-coco-eval's AP of two COCO files, under this project's names; None where it
    gives none.

    The names are `<kind>_map50`, `<kind>_map50_95`, and `by_size` with `<kind>_map50_95`. It uses
    an image's 100 most confident detections of each class. A detection's size is its box's area for
    boxes, its mask's area for masks.
    """
    truth = COCO(str(ground_truth))
    found = json.loads(predictions.read_text(encoding="utf-8"))
    metrics: Entry = {"by_size": {size: {} for size in SIZES}}
    boxed = [one for one in truth.anns.values() if "boxed" in one]
    class_in_image = itemgetter("image_id", "category_id")
    for kind, iou_type in (("box", "bbox"), ("mask", "segm")):
        if kind == "mask":
            # As `without_boxed` does with objects without an outline.
            for one in boxed:
                one["iscrowd"] = 1
            outlined = (one for one in truth.anns.values() if not one["iscrowd"])
            bare = {*map(class_in_image, boxed)}.difference(map(class_in_image, outlined))
            found = [one for one in found if class_in_image(one) not in bare]
        # It takes a detection's size from the box if there is one, so the boxes are left out for
        # masks.
        entries = [
            {name: entry[name] for name in entry if kind == "box" or name != "bbox"}
            for entry in found
        ]
        coco_evaluator = COCOeval_faster(truth, truth.loadRes(entries), iou_type)
        coco_evaluator.run()
        stats = {
            name: None if value < 0 else float(value)
            for name, value in coco_evaluator.stats_as_dict.items()
        }
        metrics[f"{kind}_map50"], metrics[f"{kind}_map50_95"] = stats["AP_50"], stats["AP_all"]
        for size in SIZES:
            metrics["by_size"][size][f"{kind}_map50_95"] = stats[f"AP_{size}"]
    return metrics


def _xywh(box: np.ndarray) -> list[float]:
    return [round(float(value), 2) for value in (box[0], box[1], box[2] - box[0], box[3] - box[1])]
