"""thresholds.yaml: confidences with a guarantee, for which model and settings, and what the judged
photographs were like.

`evaluate_model.py --guarantee` writes it, `export.py --thresholds` puts it into exports,
`inference.py` obeys it: yolo_seg_ddp/extras/guarantee/README.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from yolo_seg_ddp.predict.detections import PhotoPrediction
from yolo_seg_ddp.predict.postprocess import Context
from yolo_seg_ddp.predict.shift_features import (
    COUNTED,
    FEATURES,
    deviations,
    image_statistics,
    mean_features,
    photo_features,
)
from yolo_seg_ddp.predict.tiles import Predictor
from yolo_seg_ddp.utils.contents import BAD_CONTENT, parse_yaml, reason_of_content
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import open_regular, read_text
from yolo_seg_ddp.utils.options import words_of
from yolo_seg_ddp.yolo.model import YoloModel

VERSION = 2
AMP = {None: "off", torch.bfloat16: "bf16", torch.float16: "fp16"}
MOST_FALSE_ALARMS = 0.05
NUM_FEATURES = len(FEATURES) + 32  # and the means of the prototypes
FEWEST_GROUPS = 19  # with fewer, no group can be further off than 19 of 20
FAR = 3.0  # standard deviations beyond which a feature is named


def digest_of_model(source: str | Path) -> str:
    """Return the SHA-256 of a model's file; of an OpenVINO folder, that of its files' names and
    digests.
    """
    path = Path(source)
    if path.is_dir():
        parts = [
            f"{file.name} {digest_of_model(file)}\n"
            for file in sorted(path.iterdir())
            if file.is_file()
        ]
        return hashlib.sha256("".join(parts).encode()).hexdigest()
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Thresholds:
    """The content of thresholds.yaml, or of an export. calibration: what the judged groups are
    like, (groups, 5 + 32).
    """

    path: Path
    content: dict[str, Any]
    calibration: np.ndarray

    @classmethod
    def chosen(cls, file: str | None, source: str | Path, model: YoloModel) -> Thresholds | None:
        """Return those that `--thresholds` asks for; if it is unset those that the model, opened
        from `source`, carries.

        Only an export carries some: those of the .pt file that it was made from, whose outputs it
        was proved to have.
        """
        metadata = getattr(model, "metadata", None)
        if file is not None or metadata is None or not metadata.thresholds:
            return None if file in (None, "off") else cls.read(file, source)
        carried = cls.read(source, source, metadata.thresholds, metadata.source_sha256)
        proof = carried.content.get("proof")
        judged = "judged with the .pt file, whose outputs the export has"
        carried.content["proof"] = f"{proof}; {judged}"
        return carried

    @classmethod
    def of(cls, predictor: Predictor) -> Thresholds | None:
        """Return the thresholds that a predictor applies."""
        return next(
            (step.source for step in predictor.steps if isinstance(step, AboveThresholds)), None
        )

    @classmethod
    def read(
        cls, source: str | Path, model: str | Path, text: str = "", digest: str = ""
    ) -> Thresholds:
        """Read a file, or the text from an export of the model with this digest.

        Raises UserError if it is damaged or was made for another model file.
        """
        path = Path(source)
        try:
            content = parse_yaml(text or read_text(path))
            levels = [row["threshold"] for row in content["classes"]]
            is_possible = all(level is None or 0 < level <= 1 for level in levels)
            if content["version"] != VERSION or not is_possible:
                raise ValueError("impossible values, or of another version")
            rows = [[float(feature) for feature in row] for row in content["calibration"]]
            thresholds = cls(
                path, content, np.array(rows, np.float64).reshape(len(rows), NUM_FEATURES)
            )
            # Its parts must be there, and the settings.
            thresholds.line.encode()
            float(content["settings"]["confidence"])
            is_same = content["model_sha256"] == (digest or digest_of_model(model))
        except (OSError, *BAD_CONTENT) as error:
            cure = "evaluate_model.py --guarantee writes it"
            raise UserError(f"--thresholds {path}: {reason_of_content(error)}; {cure}") from error
        if not is_same:
            raise UserError(
                f"--thresholds {path}: made for another model file than {model}; evaluate this one"
            )
        return thresholds

    @classmethod
    def text_of(cls, source: str, model: str, size_px: int) -> str:
        """Return the text that an export of the model carries.

        Raises UserError if it is of another model or input size.
        """
        judged_px = cls.read(source, model).content["settings"]["img_size"]
        if judged_px != size_px:
            raise UserError(
                f"--thresholds {source}: judged with --img-size {judged_px}, the export's is "
                f"{size_px}"
            )
        return read_text(Path(source))

    @property
    def statement(self) -> dict[str, Any]:
        """What predictions.json says of the guarantee."""
        named = ("model_sha256", "data_fingerprint", "promises", "certainty", "unit", "proof")
        classes = [str(row.get("words")) for row in self.content["classes"]]
        return {
            "file": self.path.name,
            **{name: self.content.get(name) for name in named},
            "classes": classes,
        }

    @property
    def line(self) -> str:
        """One line that says what holds for which class."""
        levels = ", ".join(
            f"{row['class']} {row['threshold'] or 'none'}" for row in self.content["classes"]
        )
        guarantees = (
            f"{', '.join(self.content['promises'])}; {100 * self.content['certainty']:g} % certain"
        )
        return f"Thresholds of {self.path.name} ({guarantees}): {levels}"

    def apply(self, predictor: Predictor, names: Sequence[str]) -> Predictor:
        """Return the predictor with these thresholds; its own confidence holds for classes that
        have none.

        Raises UserError if it predicts otherwise than the model was judged.
        """
        rows = self.content["classes"]
        settings = self.content.get("settings") or {}
        # Earlier versions judged without it.
        judged = {"mask_score": False, **settings}
        for name, value in settings_of(predictor, names).items():
            if judged.get(name) != value:
                was, here = (
                    " ".join(words_of({name: one})) for one in (judged.get(name, "unknown"), value)
                )
                raise UserError(
                    f"--thresholds {self.path}: judged with {was}, here it is {here}; give the "
                    "same option, or judge again: "
                    "evaluate_model.py --guarantee (--thresholds off: without)"
                )
        levels = {row.get("class"): row["threshold"] for row in rows}
        rest = predictor.limits["confidence"]
        confidences = [rest if levels.get(name) is None else levels[name] for name in names]
        keep = np.array(confidences, np.float32)
        # Joined tiles and wires depend on what is less certain, too: find that as when the model
        # was judged.
        if predictor.tiling or predictor.thin:
            least = judged["confidence"]
        else:
            least = np.nextafter(min(*keep, np.float32(COUNTED)), np.float32(0))
        limits = {**predictor.limits, "confidence": float(least), "multi_label": True}
        steps = (*predictor.steps, AboveThresholds(keep, self))
        return replace(predictor, limits=limits, steps=steps)

    def compare(self, parts: Sequence[np.ndarray], files: Sequence[Path]) -> str:
        """Return in words whether new photographs are one more group like those that were judged.

        parts: of each rank, (n, 1 + 5 + 32): each photograph's position in `files`, and its
        features.
        A conformal test (Vovk, Gammerman and Shafer 2005, section 2.2): the new group's largest
        deviation is ranked among all groups'. A group like those is called unlike with a
        probability of at most MOST_FALSE_ALARMS.
        """
        groups = self.calibration
        unit = self.content.get("unit")
        if len(groups) < FEWEST_GROUPS:
            return (
                f"Not compared with the {unit} that were judged: {FEWEST_GROUPS} are needed, "
                f"{len(groups)} were judged"
            )
        photos = np.concatenate([part for part in parts if len(part)])
        features = photos[:, 1:]
        rows = deviations(np.vstack([groups, mean_features(features)]))
        furthest = np.abs(rows).max(axis=1)
        p_value = (furthest >= furthest[-1]).mean()
        if p_value > MOST_FALSE_ALARMS:
            return f"Like the {unit} it was checked on (p {p_value:.2f})"
        far = [
            words[int(value > 0)]
            for value, words in zip(rows[-1], FEATURES, strict=False)
            if abs(value) > FAR
        ]
        apart = [-np.abs(deviations(np.vstack([groups, row]))[-1]).max() for row in features]
        furthest_three = photos[np.argsort(apart, kind="stable")[:3]]
        first = ", ".join(files[int(row[0])].name for row in furthest_three)
        what = ", ".join(far) or "other features in the network"
        return (
            f"NOT like the {unit} it was checked on (p {p_value:.2f}): {what}; label first: {first}"
        )


def settings_of(predictor: Predictor, names: Sequence[str]) -> dict[str, Any]:
    """Return the options on which the detections depend, by their names on the command line."""
    tiling = predictor.tiling
    return {
        "img_size": predictor.size_px,
        "amp": AMP[predictor.autocast_dtype],
        "tiles": tiling.size_px if tiling else "off",
        "overlap": tiling.overlap if tiling else 0.0,
        "iou": predictor.limits["iou"],
        "max_detections": predictor.max_detections,
        "mask_score": predictor.limits.get("mask_score", True),
        "thin_classes": [names[class_id] for class_id in predictor.thin] or ["none"],
    }


@dataclass(frozen=True)
class AboveThresholds:
    """A predictor's step: detections with the least confidence of their class, float32 (classes,),
    and what the photograph is like.
    """

    least: np.ndarray
    source: Thresholds

    see = staticmethod(image_statistics)

    def __call__(
        self, prediction: PhotoPrediction, context: Context, seen: np.ndarray
    ) -> PhotoPrediction:
        """Return the detections that are kept."""
        detections = prediction.detections
        is_kept = detections.scores.numpy() >= self.least[prediction.class_ids]
        features = photo_features(detections, seen, context.placement.size_px)
        return replace(prediction.chosen(np.flatnonzero(is_kept).tolist()), features=features)
