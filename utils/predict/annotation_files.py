"""Predictions as annotation tools import them: COCO 1.0 for CVAT, `predictions` for Label Studio."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import numpy as np

from utils.predict.detections import PhotoPrediction
from utils.predict.prediction_files import Parts, Source, part_of, write_list
from utils.predict.regions import Region, column_runs
from utils.sources.mask_rings import MAX_MASK_RINGS, join_rings, mask_rings, signed_area

COCO_FILE, LABEL_STUDIO_FILE = "annotations/instances_default.json", "label_studio.json"
COCO_PARTS, LABEL_STUDIO_PARTS = ".coco.part-*", ".label_studio.part-*"
# Names of the tags in Label Studio's labelling interface, as in docs/labels.md.
FROM_NAME, TO_NAME = "label", "image"
Entry = dict[str, Any]


@dataclass(frozen=True)
class ToolFiles:
    """Which files to write, for which classes, and the folder to which the photographs' names are relative."""

    folder: Path
    names: tuple[str, ...]
    root: Path
    model_version: str
    has_coco: bool
    has_label_studio: bool

    @property
    def written(self) -> list[str]:
        """The names of the files, for the summary."""
        return [COCO_FILE] * self.has_coco + [LABEL_STUDIO_FILE] * self.has_label_studio


class ToolWriter:
    """Writes each photograph's entries to this rank's parts of the files; `merge_tool_files` joins all ranks' parts."""

    def __init__(self, files: ToolFiles, rank: int) -> None:
        self.files = files
        self._stack = ExitStack()
        self._coco = self._open(COCO_PARTS, rank) if files.has_coco else None
        self._label_studio = self._open(LABEL_STUDIO_PARTS, rank) if files.has_label_studio else None

    def __enter__(self) -> ToolWriter:
        return self

    def add(self, source: Source, shape: tuple[int, ...], prediction: PhotoPrediction) -> None:
        """Add a photograph of `shape` (H, W, 3) with its detections."""
        if not self._coco and not self._label_studio:
            return
        size = (shape[1], shape[0])
        found = prediction.found
        objects = [
            _Object(
                class_id, round(score, 5), region, mask_rings(region.mask, region.left, region.top)[:MAX_MASK_RINGS]
            )
            for class_id, score, region in zip(
                found.class_ids.tolist(), found.scores.tolist(), prediction.masks, strict=True
            )
            if region.mask.any()
        ]
        name = Path(os.path.relpath(source.file, self.files.root)).as_posix()
        if self._coco:
            image = {"id": source.position + 1, "width": size[0], "height": size[1], "file_name": name, "license": 0}
            annotations = [{"image_id": source.position + 1, **one.coco(size)} for one in objects]
            _write(self._coco, source, {"image": image, "annotations": annotations})
        if self._label_studio:
            _write(self._label_studio, source, self._task(name, source, size, objects))

    def _task(self, name: str, source: Source, size: tuple[int, int], objects: Sequence[_Object]) -> Entry:
        path = f"{self.files.root.absolute().name}/{name}"
        address = f"/data/local-files/?d={quote(path, errors='surrogateescape')}"
        result = [
            {"id": f"{source.position}-{number}", **one.label_studio(size, self.files.names)}
            for number, one in enumerate(objects)
        ]
        score = round(sum(one.score for one in objects) / len(objects), 5) if objects else 0.0
        prediction = {"model_version": self.files.model_version, "score": score, "result": result}
        return {"data": {"image": address}, "predictions": [prediction]}

    def _open(self, pattern: str, rank: int) -> TextIO:
        self.files.folder.mkdir(parents=True, exist_ok=True)
        return self._stack.enter_context(part_of(self.files.folder, pattern, rank).open("w", encoding="utf-8"))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()
        if kind is not None:
            for file in (self._coco, self._label_studio):
                if file:
                    Path(file.name).unlink()


@dataclass(frozen=True)
class _Object:
    """One detection with pixels; its rings are in the pixels of the mask."""

    class_id: int
    score: float
    region: Region
    rings: list[np.ndarray]

    def coco(self, size: tuple[int, int]) -> Entry:
        """Return the annotation: polygons, or run lengths if the mask has a hole, which polygons cannot have."""
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
        """Return the region: one polygon in percent, whose parts and holes bridges of zero width join."""
        percent = join_rings(self.rings) / size * 100
        return {
            "type": "polygonlabels",
            "from_name": FROM_NAME,
            "to_name": TO_NAME,
            "original_width": size[0],
            "original_height": size[1],
            "image_rotation": 0,
            "score": self.score,
            "value": {"points": percent.round(5).tolist(), "closed": True, "polygonlabels": [names[self.class_id]]},
        }


def merge_tool_files(files: ToolFiles, num_ranks: int) -> None:
    """Write the files from all ranks' parts, in the order of the photographs. Raises UserError if a part is missing."""
    if files.has_label_studio:
        parts = Parts(files.folder, LABEL_STUDIO_PARTS, num_ranks)
        with parts.merged_into(files.folder / LABEL_STUDIO_FILE) as output:
            write_list(output, "[", parts.lines(), "]\n")
    if files.has_coco:
        (files.folder / COCO_FILE).parent.mkdir(exist_ok=True)
        categories = [{"id": number, "name": name, "supercategory": ""} for number, name in enumerate(files.names, 1)]
        head = {"licenses": [{"name": "", "id": 0, "url": ""}], "info": {"description": files.model_version}}
        start = json.dumps({**head, "categories": categories})[:-1]
        parts = Parts(files.folder, COCO_PARTS, num_ranks)
        with parts.merged_into(files.folder / COCO_FILE) as output:
            images = (json.dumps(json.loads(line)["image"]) for line in parts.lines())
            write_list(output, start + ', "images": [', images, "]")
            found = (one for line in parts.lines() for one in json.loads(line)["annotations"])
            annotations = (json.dumps({"id": number, **one}) for number, one in enumerate(found, start=1))
            write_list(output, ', "annotations": [', annotations, "]}\n")


def common_folder(source: str, files: Sequence[Path]) -> Path:
    """Return the folder that the user named, or the one that holds all photographs."""
    return Path(source) if Path(source).is_dir() else Path(os.path.commonpath([file.parent for file in files]))


def _write(file: TextIO, source: Source, entry: Entry) -> None:
    file.write(f"{source.position}\t{json.dumps(entry)}\n")
