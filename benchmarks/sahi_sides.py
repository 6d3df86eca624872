"""Find objects in photographs as one side of benchmarks/vs_sahi.py: `python -m benchmarks.sahi_sides JOB.json`.

Each line of the input asks for a photograph: {"photo": file, "answer": file}. The answer holds the seconds, the process's
peak memory and the objects, with masks as run lengths. An answer without a photograph says that the model is loaded.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from utils.common.devices import choose_device, choose_precision, peak_memory_bytes
from utils.common.environment import prepare_environment
from utils.common.errors import run_script
from utils.common.files import write_text_atomic
from utils.common.signals import die_with_parent
from utils.data.images import read_image, upright_size
from utils.engine.meters import rss_bytes
from utils.evaluation.coco import encode_region
from utils.predict.detections import PhotoPrediction
from utils.predict.prediction_files import outline
from utils.predict.regions import Region
from utils.predict.tiles import OVERLAP, Predictor, choose_tiling
from utils.yolo.model import load_for_prediction

IOU, MAX_DETECTIONS = 0.7, 300  # of each tile, on both sides: the defaults of inference.py and of Ultralytics
BATCH_SIZE = 8  # tiles per forward pass, the default of inference.py; SAHI's is 1

Json = dict[str, Any]
Found = tuple[int, float, list[float], Region]  # class, confidence, box (xyxy) and mask in pixels of the photograph


class OurSide:
    """Processes a photograph as inference.py does, without writing files. `predict` is timed; it includes the outlines."""

    def __init__(self, job: Json, device: torch.device) -> None:
        model = load_for_prediction(job["model"], device)
        limits = {"confidence": job["conf"], "iou": IOU, "classes": None}
        tiling = choose_tiling(str(job["tile_px"]), OVERLAP, model, job["size_px"])
        dtype = choose_precision(job["amp"], device).dtype
        self.predictor = Predictor(model, job["size_px"], device, BATCH_SIZE, tiling, limits, MAX_DETECTIONS, dtype)

    def predict(self, photo: Path) -> PhotoPrediction:
        """Predict on tiles and on the whole photograph, and join."""
        ((_, _, prediction),) = self.predictor.predict([(None, read_image(photo))])
        for mask in prediction.masks:
            outline(mask)
        return prediction

    def objects(self, result: PhotoPrediction) -> Iterable[Found]:
        """Yield the objects; a mask is drawn when it is asked for."""
        rows = (result.class_ids.tolist(), result.found.scores.tolist(), result.boxes.tolist(), result.masks)
        return zip(*rows, strict=True)


class SahiSide:
    """SAHI with its defaults. The model file names the input size and classes; SAHI asks for the size of a slice."""

    def __init__(self, job: Json, device: torch.device) -> None:
        from sahi import AutoDetectionModel
        from sahi.predict import get_sliced_prediction

        self.get_sliced_prediction = get_sliced_prediction
        self.slices = {"slice_height": job["tile_px"], "slice_width": job["tile_px"]}
        self.model = AutoDetectionModel.from_pretrained(
            model_type="ultralytics",
            model_path=job["model"],
            confidence_threshold=job["conf"],
            device=str(device),
            image_size=job["size_px"],
        )

    def predict(self, photo: Path) -> Any:
        """Predict on slices and on the whole photograph, and merge."""
        return self.get_sliced_prediction(str(photo), self.model, **self.slices, verbose=0).object_prediction_list

    def objects(self, result: Any) -> Iterable[Found]:
        """Yield the objects, with masks filled as SAHI's `bool_mask` does, but cut to their boxes."""
        for thing in result:
            size = (thing.mask.full_shape_width, thing.mask.full_shape_height)
            region = fill_polygons(thing.mask.segmentation, size)
            yield thing.category.id, float(thing.score.value), [float(side) for side in thing.bbox.to_xyxy()], region


def fill_polygons(polygons: list[list[float]], photo_size: tuple[int, int]) -> Region:
    """Fill polygons [x1, y1, x2, y2, …] in pixels of a photograph, with their edges; overlaps are holes."""
    points = [np.array(polygon).reshape(-1, 2).round().astype(int) for polygon in polygons if polygon]
    if not points:
        return Region(0, 0, np.zeros((1, 1), bool))
    everything = np.concatenate(points)
    low = everything.min(axis=0).clip(0, np.array(photo_size) - 1)
    high = (everything.max(axis=0) + 1).clip(low + 1, photo_size)
    (left, top), (columns, rows) = low.tolist(), (high - low).tolist()
    mask = np.zeros((rows, columns), np.uint8)
    cv2.fillPoly(mask, points, (1,), offset=(-left, -top))
    return Region(left, top, mask.view(bool))


Side = OurSide | SahiSide
SIDES: dict[str, type[Side]] = {"ours": OurSide, "sahi": SahiSide}


def main() -> None:
    """Answer the requests until the input ends."""
    die_with_parent(only_under_torchrun=False)
    prepare_environment()
    cv2.setNumThreads(0)
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    side: Side = SIDES[job["side"]](job, choose_device(job["device"], 0))
    loaded_bytes = rss_bytes()
    write_text_atomic(Path(job["ready"]), "{}")
    for line in sys.stdin:
        request = json.loads(line)
        torch.set_num_threads(job["threads"])  # Ultralytics changes it in its first prediction
        write_text_atomic(Path(request["answer"]), json.dumps(answer(side, Path(request["photo"]), loaded_bytes)))


def answer(side: Side, photo: Path, loaded_bytes: float) -> Json:
    """Find the objects of a photograph; return them with the time and the memory above that of the loaded model."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    result = side.predict(photo)
    spent = {"seconds": time.perf_counter() - start_s, "cpu_seconds": time.process_time() - start_cpu_s}
    peak_bytes = peak_memory_bytes(torch.device("cpu")) - loaded_bytes
    size = upright_size(photo.read_bytes())
    objects = [
        {"class_id": class_id, "score": score, "box": box, "mask": encode_region(mask, size)}
        for class_id, score, box, mask in side.objects(result)
    ]
    return {**spent, "peak_memory_bytes": peak_bytes, "objects": objects}


if __name__ == "__main__":
    run_script(main)
