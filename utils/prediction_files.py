"""What predictions look like on disk: COCO-style JSON, YOLO label text, cut-outs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np
import torch
from faster_coco_eval.core import mask as coco_mask

from utils import distributed
from utils.dataset import Sample
from utils.images import upright_size, write_jpeg
from utils.predict import Detections, Placement, photo_masks


class PredictionWriter:
    """Writes `labels/<key>.txt` per photograph and streams `predictions.json`, which appears whole when all is done."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder = folder
        self.names = names
        (folder / "labels").mkdir(parents=True, exist_ok=True)
        self._temporary = folder / f".predictions.tmp-{os.getpid()}"
        self._file = self._temporary.open("w", encoding="utf-8")
        self._num_images = 0

    def __enter__(self) -> PredictionWriter:
        self._file.write("[")
        return self

    def add(
        self,
        file: Path,
        key: str,
        shape: tuple[int, ...],
        found: Detections,
        boxes: np.ndarray,
        outlines: list[list[np.ndarray]],
    ) -> None:
        """Record one photograph of `shape` (H, W, 3): boxes (n, 4) xyxy and each detection's outlines, in its pixels."""
        height, width = shape[:2]
        class_ids, scores = found.class_ids.tolist(), found.scores.tolist()
        detections = [
            {
                "class_id": class_id,
                "class": self.names[class_id],
                "confidence": round(score, 5),
                "box_xyxy": [round(float(value), 2) for value in box],
                "polygons": [part.reshape(-1).tolist() for part in parts],
            }
            for class_id, score, box, parts in zip(class_ids, scores, boxes, outlines, strict=True)
        ]
        entry = {"file": str(file), "width": width, "height": height, "detections": detections}
        self._file.write((",\n" if self._num_images else "\n") + json.dumps(entry))
        self._num_images += 1
        lines = [
            f"{class_id} " + " ".join(f"{value:.6f}" for value in (parts[0] / (width, height)).clip(0, 1).reshape(-1))
            for class_id, parts in zip(class_ids, outlines, strict=True)
            if parts
        ]
        (self.folder / "labels" / f"{key}.txt").write_text("\n".join(lines) + "\n" * bool(lines), encoding="utf-8")

    def save_crops(self, key: str, photo: np.ndarray, found: Detections, boxes: np.ndarray) -> None:
        """Write each detection's box as crops/<class>/<key>_<number>.jpg."""
        for number, (class_id, box) in enumerate(zip(found.class_ids.tolist(), boxes, strict=True)):
            x1, y1 = np.floor(box[:2]).astype(int)
            x2, y2 = np.ceil(box[2:]).astype(int)
            cut = photo[y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)]
            if cut.size:
                folder = self.folder / "crops" / self.names[class_id]
                folder.mkdir(parents=True, exist_ok=True)
                write_jpeg(folder / f"{key}_{number}.jpg", np.ascontiguousarray(cut))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.write("\n]\n")
        self._file.close()
        if kind is None:
            os.replace(self._temporary, self.folder / "predictions.json")
        else:
            self._temporary.unlink()


def outline(mask: np.ndarray) -> list[np.ndarray]:
    """Return a mask's outer outlines, largest first, as int32 (V, 2) xy pixels; none for an empty mask."""
    contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    parts = [contour[:, 0] for contour in contours if len(contour) >= 3]
    return sorted(parts, key=lambda part: -cv2.contourArea(part))


def coco_entry(image_id: int, class_id: int, score: float, box: np.ndarray, mask: np.ndarray) -> dict[str, Any]:
    """Return one detection in COCO's result format: box xywh pixels, mask (H, W) as a compressed run-length string."""
    encoded = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    counts = encoded["counts"]
    return {
        "image_id": image_id,
        "category_id": class_id,
        "score": round(score, 5),
        "bbox": [round(float(value), 2) for value in (box[0], box[1], box[2] - box[0], box[3] - box[1])],
        "segmentation": {
            "size": [int(side) for side in mask.shape],
            "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts,
        },
    }


class CocoCollector:
    """Collects every image's detections while a split is evaluated, then joins what all ranks have.

    At most 100 detections an image are kept: COCO's rules look at no more.
    """

    MAX_PER_IMAGE = 100

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.entries: list[dict[str, Any]] = []

    def __call__(self, sample: Sample, detections: Detections, prototypes: torch.Tensor) -> None:
        """Take one image's detections; masks are made at the photograph's own size."""
        kept = slice(0, self.MAX_PER_IMAGE)
        best = Detections(
            detections.boxes[kept], detections.scores[kept], detections.class_ids[kept], detections.coefficients[kept]
        )
        width, height = upright_size(self.files[sample.index].read_bytes())
        size_px = sample.image.shape[0]
        placement = Placement(size_px, size_px / max(width, height), sample.pad, (width, height))
        masks = photo_masks(prototypes, best, placement)
        boxes = placement.boxes_to_photo(best.boxes).cpu().numpy()
        for class_id, score, box, mask in zip(best.class_ids.tolist(), best.scores.tolist(), boxes, masks, strict=True):
            entry = coco_entry(sample.index, class_id, score, box, mask)
            self.entries.append({**entry, "file_name": self.files[sample.index].name})

    def gather(self) -> list[dict[str, Any]]:
        """Return all ranks' detections, sorted by image. Every rank must reach this."""
        payload = np.frombuffer(json.dumps(self.entries).encode(), dtype=np.uint8)
        parts = distributed.gather_arrays({"json": payload})
        joined = [entry for part in parts for entry in json.loads(part["json"].tobytes())]
        return sorted(joined, key=lambda entry: (entry["image_id"], -entry["score"]))
