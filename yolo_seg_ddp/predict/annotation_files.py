"""Predictions as annotation tools import them: COCO 1.0 for CVAT,
`predictions` for Label Studio.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from yolo_seg_ddp.data.mask_rings import MAX_MASK_RINGS, join_rings, mask_rings, signed_area
from yolo_seg_ddp.predict.detections import PhotoPrediction
from yolo_seg_ddp.predict.options import COCO_FILE, LABEL_STUDIO_FILE
from yolo_seg_ddp.predict.prediction_files import Parts, PartWriter, Source, write_list
from yolo_seg_ddp.predict.regions import Region, column_runs

COCO_PARTS, LABEL_STUDIO_PARTS = ".coco.part-*", ".label_studio.part-*"
# Names of the tags in Label Studio's labelling interface, as in docs/labels.md.
FROM_NAME, TO_NAME = "label", "image"
Entry = dict[str, Any]


@dataclass(frozen=True)
class ToolFiles:
    """The files to write, the classes, and the folder to which the
    photographs' names are relative.
    """

    folder: Path
    names: tuple[str, ...]
    root: Path
    model_version: str
    has_coco: bool
    has_label_studio: bool

    @property
    def written(self) -> list[str]:
        """The names of the files that are written."""
        return [COCO_FILE] * self.has_coco + [LABEL_STUDIO_FILE] * self.has_label_studio


class ToolWriter(PartWriter):
    """Writes each photograph's entries to this rank's parts of the files; `merge_tool_files` joins
    all ranks' parts.
    """

    def __init__(self, files: ToolFiles, rank: int) -> None:
        super().__init__(
            files.folder,
            [COCO_PARTS] * files.has_coco + [LABEL_STUDIO_PARTS] * files.has_label_studio,
            rank,
        )
        self.files = files

    def add(self, source: Source, shape: tuple[int, ...], prediction: PhotoPrediction) -> None:
        """Add a photograph of `shape` (H, W, 3) with its detections."""
        if not self.files.written:
            return
        size = (shape[1], shape[0])
        rows = zip(
            prediction.class_ids.tolist(),
            prediction.detections.scores.tolist(),
            prediction.masks,
            strict=True,
        )
        objects = [
            _Object(
                class_id,
                round(score, 5),
                mask,
                mask_rings(mask.mask, mask.left, mask.top)[:MAX_MASK_RINGS],
            )
            for class_id, score, mask in rows
            if mask.mask.any()
        ]
        name = Path(os.path.relpath(source.file, self.files.root)).as_posix()
        if self.files.has_coco:
            image = {
                "id": source.position + 1,
                "width": size[0],
                "height": size[1],
                "file_name": name,
                "license": 0,
            }
            annotations = [
                {"image_id": source.position + 1, **detection.coco(size)} for detection in objects
            ]
            self.write(COCO_PARTS, source, {"image": image, "annotations": annotations})
        if self.files.has_label_studio:
            self.write(LABEL_STUDIO_PARTS, source, self._task(name, source, size, objects))

    def _task(
        self, name: str, source: Source, size: tuple[int, int], objects: Sequence[_Object]
    ) -> Entry:
        path = f"{self.files.root.absolute().name}/{name}"
        address = f"/data/local-files/?d={quote(path, errors='surrogateescape')}"
        result = [
            {"id": f"{source.position}-{number}", **detection.label_studio(size, self.files.names)}
            for number, detection in enumerate(objects)
        ]
        score = (
            round(sum(detection.score for detection in objects) / len(objects), 5)
            if objects
            else 0.0
        )
        prediction = {"model_version": self.files.model_version, "score": score, "result": result}
        return {"data": {"image": address}, "predictions": [prediction]}


@dataclass(frozen=True)
class _Object:
    """One detection whose mask has pixels; rings: the mask's outlines in
    pixels of the photograph.
    """

    class_id: int
    score: float
    region: Region
    rings: list[np.ndarray]

    def coco(self, size: tuple[int, int]) -> Entry:
        """Return the annotation: polygons, or run lengths if the mask has a hole, because COCO's
        polygons have none.
        """
        if all(signed_area(ring) * signed_area(self.rings[0]) > 0 for ring in self.rings):
            segmentation: Any = [ring.round(2).reshape(-1).tolist() for ring in self.rings]
        else:
            segmentation = {"counts": column_runs(self.region, size), "size": [size[1], size[0]]}
        corners = np.concatenate(self.rings)
        low, high = corners.min(0), corners.max(0)
        return {
            "category_id": self.class_id + 1,
            "segmentation": segmentation,
            "area": round(float(np.count_nonzero(self.region.mask)), 2),
            "bbox": [round(float(value), 2) for value in (*low, *(high - low))],
            "iscrowd": 0,
            "score": self.score,
            "attributes": {"occluded": False},
        }

    def label_studio(self, size: tuple[int, int], names: Sequence[str]) -> Entry:
        """Return the region: one polygon in percent.

        Bridges of zero width join its parts and holes.
        """
        percent = join_rings(self.rings) / size * 100
        return {
            "type": "polygonlabels",
            "from_name": FROM_NAME,
            "to_name": TO_NAME,
            "original_width": size[0],
            "original_height": size[1],
            "image_rotation": 0,
            "score": self.score,
            "value": {
                "points": percent.round(5).tolist(),
                "closed": True,
                "polygonlabels": [names[self.class_id]],
            },
        }


def merge_tool_files(files: ToolFiles, num_ranks: int) -> None:
    """Write the files from all ranks' parts, in the order of the photographs.

    Raises UserError if a part is missing.
    """
    if files.has_label_studio:
        parts = Parts(files.folder, LABEL_STUDIO_PARTS, num_ranks)
        with parts.merged_into(files.folder / LABEL_STUDIO_FILE) as output:
            write_list(output, "[", parts.lines(), "]\n")
    if files.has_coco:
        (files.folder / COCO_FILE).parent.mkdir(exist_ok=True)
        categories = [
            {"id": number, "name": name, "supercategory": ""}
            for number, name in enumerate(files.names, 1)
        ]
        head = {
            "licenses": [{"name": "", "id": 0, "url": ""}],
            "info": {"description": files.model_version},
        }
        start = json.dumps({**head, "categories": categories})[:-1]
        parts = Parts(files.folder, COCO_PARTS, num_ranks)
        with parts.merged_into(files.folder / COCO_FILE) as output:
            images = (json.dumps(json.loads(line)["image"]) for line in parts.lines())
            write_list(output, start + ', "images": [', images, "]")
            entries = (entry for line in parts.lines() for entry in json.loads(line)["annotations"])
            annotations = (
                json.dumps({"id": number, **entry}) for number, entry in enumerate(entries, start=1)
            )
            write_list(output, ', "annotations": [', annotations, "]}\n")


def common_folder(source: str, files: Sequence[Path]) -> Path:
    """Return the folder that the user named, or the folder that holds all photographs."""
    folder = Path(source)
    parents = [file.absolute().parent for file in files]
    return folder if folder.is_dir() else Path(os.path.commonpath(parents))
