"""The groups of judged photographs, the proof that a model never saw them, and thresholds.yaml."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from yolo_seg_ddp.data.dataset import Photo, Sample
from yolo_seg_ddp.data.dataset_yaml import DatasetSpec
from yolo_seg_ddp.data.fingerprint import take_fingerprint
from yolo_seg_ddp.evaluation.evaluate import AP_CONFIDENCE
from yolo_seg_ddp.evaluation.metrics.matching import LEVELS
from yolo_seg_ddp.evaluation.metrics.results import ImageResult
from yolo_seg_ddp.evaluation.native_masks import place
from yolo_seg_ddp.extras.guarantee.bounds import (
    FALSE_ALARMS,
    RECALL,
    Assessed,
    Guarantee,
    report_class,
)
from yolo_seg_ddp.predict.detections import Detections
from yolo_seg_ddp.predict.shift_features import image_statistics, mean_features, photo_features
from yolo_seg_ddp.predict.thresholds import VERSION, digest_of_model, settings_of
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.run.folder import CHANGES_FILE, read_fingerprint
from yolo_seg_ddp.utils import distributed
from yolo_seg_ddp.utils.contents import mapping, read_back
from yolo_seg_ddp.utils.errors import UsageError, UserError, printable
from yolo_seg_ddp.utils.files import write_text_atomic
from yolo_seg_ddp.utils.text import counted

FILE = "thresholds.yaml"
MOST_KEPT = 500  # groups whose features are written; reading more takes seconds
MEANING = {
    RECALL: "the mean share that is found, over all {} of the kind that was judged which have an "
    "object of the class",
    FALSE_ALARMS: "the mean number, over all {} of the kind that was judged, each counted up "
    "to 5 times the limit",
}


def groups_of(spec: DatasetSpec, photos: Sequence[Photo]) -> tuple[list[str], str]:
    """Return each photograph's group, and what groups are, as a plural.

    By manifest.json they are what parse_labels.py kept on one side of the split: circuits, series
    or, if it split by a hash, photographs with their copies. Otherwise they are the folders that
    the photographs came from, or lie in.
    """
    files = [photo.file.name for photo in photos]
    try:
        manifest = read_back(
            spec.root / "manifest.json", mapping, "delete it, and each folder is a group"
        )
        split_by = manifest["options"]["split_by"]
        if split_by in ("hash", "time"):
            unit, members = (
                ("photographs", manifest["copies"])
                if split_by == "hash"
                else ("series", manifest["series"])
            )
            first_of = {file: each[0] for each in members for file in each}
            return [first_of.get(file, file) for file in files], unit
        records = {record["file"]: record for record in manifest["photographs"]}
        if split_by == "circuit":
            return [str(records[file]["circuit"]) for file in files], "circuits"
        return [str(Path(records[file]["source"]).parent) for file in files], "folders"
    except (OSError, ValueError, LookupError, TypeError):
        return [str(photo.file.parent) for photo in photos], "folders"


def prove(model: str, spec: DatasetSpec, split: str, photos: Sequence[Photo]) -> tuple[str, str]:
    """Return the digest of the judged photographs and labels, and in words whether the model never
    saw them.

    The files' contents are compared with data.json beside the model. Raises UserError if some were
    trained on.
    """
    trained = read_fingerprint(Path(model).parent)
    judged = take_fingerprint(spec.names, {split: photos}, spec.root, before=trained)
    if trained is None or (Path(model).parent / CHANGES_FILE).exists():
        reason = (
            "its run's data.json is not beside it"
            if trained is None
            else "its data changed during training"
        )
        return judged.digest, f"not proved that the model was not trained on them: {reason}"
    seen, chose = (
        {texts[0] for key, texts in trained.photographs.items() if key.startswith(f"{kind} ")}
        for kind in ("train", "val")
    )
    if both := [key for key, texts in judged.photographs.items() if texts[0] in seen]:
        such = printable(both[0], 400)
        raise UserError(
            f"--guarantee: {model} was trained on {len(both)} of the photographs, such as {such}; "
            "judge others"
        )
    is_chosen = Path(model).stem == "best" and any(
        texts[0] in chose for texts in judged.photographs.values()
    )
    caution = (
        "; the best epoch was chosen with some of them, so judge last.pt or use --split test"
        if is_chosen
        else ""
    )
    return judged.digest, f"none is among the {len(seen)} that the model was trained on{caution}"


class ThresholdCalibrator:
    """Finds the confidences that keep guarantees for a model's classes, from the photographs of an
    evaluation.
    """

    def __init__(
        self,
        words: Sequence[str],
        certainty: float,
        model: str,
        spec: DatasetSpec,
        split: str,
        photos: Sequence[Photo],
    ) -> None:
        """Raises UsageError for an odd guarantee, and UserError as `prove`."""
        self.guarantees = [Guarantee.parse(word) for word in words]
        if len({guarantee.name for guarantee in self.guarantees}) < len(self.guarantees):
            raise UsageError(
                f"--guarantee {' '.join(words)}: give recall and false_alarms at most once each"
            )
        self.groups, self.unit = groups_of(spec, photos)
        self.names = spec.names
        self.error = (1 - certainty) / len(words)
        self.unsearched = [photo.ignored_ids[photo.unsearched] for photo in photos]
        self.features: dict[int, np.ndarray] = {}
        self.calibration: list[list[float]] = []
        digest, proof = prove(model, spec, split, photos)
        self.metadata: dict[str, Any] = {
            "version": VERSION,
            "model": model,
            "model_sha256": digest_of_model(model),
            "data": str(spec.yaml_file),
            "data_fingerprint": digest,
            "split": split,
            "proof": f"{counted(len(photos), 'photograph')}, groups ({self.unit}): "
            f"{len(set(self.groups))}; {proof}",
            "unit": self.unit,
            "certainty": certainty,
            "promises": {
                guarantee.words: MEANING[guarantee.name].format(self.unit)
                for guarantee in self.guarantees
            },
        }

    def see_image(self, sample: Sample, detections: Detections, prototypes: torch.Tensor) -> None:
        """Remember what a photograph is like: an `on_image` for `evaluate`."""
        statistics = image_statistics(prototypes, sample.image, place(sample, (1, 1)))
        features = photo_features(detections, statistics, len(sample.image))
        self.features[sample.index] = features

    def finish(self, results: Sequence[ImageResult], predictor: Predictor) -> dict[str, Any]:
        """Return what is guaranteed, for metrics.json, from the results of all ranks. Every rank
        must reach this.

        predictor: what predicts as the model was judged.
        """
        mine = {
            "index": np.array([*self.features], np.int64),
            "features": np.array([*self.features.values()], np.float64),
        }
        parts = distributed.gather_arrays(mine)
        features = {
            index: row
            for part in parts
            for index, row in zip(part["index"], part["features"], strict=True)
        }
        groups = np.array([self.groups[result.image_id] for result in results])
        rows = np.stack([features[result.image_id] for result in results])
        kept = np.unique(groups)[:: 1 + len(np.unique(groups)) // MOST_KEPT]
        self.calibration = [mean_features(rows[groups == name]).round(5).tolist() for name in kept]
        self.metadata["settings"] = {
            **settings_of(predictor, self.names),
            "confidence": AP_CONFIDENCE,
        }
        classes = []
        for class_id, name in enumerate(self.names):
            # Where nobody looked for the class, a false alarm would not be seen.
            searched = [class_id not in self.unsearched[result.image_id] for result in results]
            judged = [*itertools.compress(results, searched)]
            assessed = [
                Assessed.of(one, one.losses(judged, groups[searched], class_id), self.error)
                for one in self.guarantees
            ]
            boxed = [
                is_boxed
                for result in judged
                for is_boxed in result.boxed[result.target_class_ids == class_id].tolist()
            ]
            classes.append(report_class(name, assessed, len(boxed), self.unit, sum(boxed)))
        self.metadata["classes"] = classes
        return {**self.metadata, "levels": LEVELS.astype(float).round(3).tolist()}

    def write(self, folder: Path) -> None:
        """Write thresholds.yaml: what `finish` returned without the curves, and what the groups are
        like.
        """
        rows = self.metadata["classes"]
        classes = [
            {name: value for name, value in row.items() if name != "certain"} for row in rows
        ]
        content = {**self.metadata, "classes": classes, "calibration": self.calibration}
        text = yaml.safe_dump(
            content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000
        )
        write_text_atomic(folder / FILE, text)
