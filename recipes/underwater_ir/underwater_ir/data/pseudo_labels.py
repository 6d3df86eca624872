"""Pseudo-labels: a teacher's estimates of the kinds of degradation in a picture and of their
places.

A file `<picture's name>.pt` holds a dictionary: `masks` (K, h, w) in [0, 1] of any size; `z_d`
(2K,), the logit of each `global_prob` and then each mean intensity; `global_prob` (K,), a
distribution; `confidence` (K,); `confidence_scale` (); perhaps `text_embeddings` (K, D) and
`source`, what the scores are. Instead there may be `<name>_features.npy` (z_d), `_masks.npy` and
`_probs.npy`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch

from yolo_seg_ddp.utils.errors import UserError, one_line

PROMPTS = (
    "clear water",
    "green cast",
    "blue haze",
    "backscatter",
    "turbid water",
    "low light",
    "absorbed red",
    "shifted colours",
    "particles",
    "life in the foreground",
)
GRID = 32  # cells on a side of the masks
# as a CLIP-like teacher turns its cosines into numbers
SIMILARITY_TO_LOGIT, SIMILARITY_TO_INTENSITY = 10.0, 5.0
UNSURE = (0.5, 0.6)  # intensities in which a mask could as well be absent
FEATURES, MASKS, PROBS = "_features.npy", "_masks.npy", "_probs.npy"
COLOURS, UNKNOWN = "colour scores, not DA-CLIP's", "scores of an unnamed source"  # a label's source
NPY_CONFIDENCE = 0.8  # of labels in three .npy files, which hold none


@dataclass(frozen=True)
class Label:
    """The label of one picture, float32 on the CPU. K kinds of degradation."""

    masks: torch.Tensor  # (K, h, w), 0 to 1
    z_d: torch.Tensor  # (C,)
    global_prob: torch.Tensor  # (K,)
    confidence_scale: torch.Tensor  # ()
    text_embeddings: torch.Tensor | None  # (K, D)
    source: str = UNKNOWN

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Number of masks, length of z_d, number of kinds, length of a text embedding (0: none)."""
        text = 0 if self.text_embeddings is None else self.text_embeddings.shape[1]
        return len(self.masks), len(self.z_d), len(self.global_prob), text


def describe(image: np.ndarray) -> dict[str, object]:
    """Return the label of a picture, RGB uint8 (H, W, 3), from its colours: a stand-in, made by
    hand, for a learned teacher.
    """
    return label_of_scores(_scores(image), PROMPTS, COLOURS)


def label_of_scores(scores: np.ndarray, prompts: Sequence[str], source: str) -> dict[str, object]:
    """Return the label of scores in [-1, 1], (K, h, w): a teacher's cosine similarities of places
    in a picture with prompts.
    """
    logits = SIMILARITY_TO_LOGIT * scores
    probs = np.exp(logits - logits.max(0))
    probs /= probs.sum(0)
    intensity = 1 / (1 + np.exp(-SIMILARITY_TO_INTENSITY * scores))
    global_prob = probs.mean((1, 2))
    confidence = ((intensity >= UNSURE[0]) & (intensity <= UNSURE[1])).mean((1, 2))
    avg_intensity = intensity.mean((1, 2))
    likely = np.clip(global_prob, 1e-6, 1 - 1e-6)
    arrays = {
        "masks": intensity,
        "z_d": np.concatenate([np.log(likely / (1 - likely)), avg_intensity]),
        "global_prob": global_prob,
        "avg_intensity": avg_intensity,
        "confidence": confidence,
        "confidence_scale": 1 - confidence.mean(),
    }
    tensors = {
        name: torch.as_tensor(value, dtype=torch.float32).clone() for name, value in arrays.items()
    }
    return {**tensors, "prompts": list(prompts), "source": source}


def _scores(image: np.ndarray) -> np.ndarray:
    fine = (
        cv2.resize(image, (4 * GRID, 4 * GRID), interpolation=cv2.INTER_AREA).astype(np.float32)
        / 255
    )
    grey = fine.mean(2)
    detail = np.abs(cv2.Laplacian(grey, cv2.CV_32F))
    deviation = np.sqrt(np.clip(cv2.blur(grey**2, (9, 9)) - cv2.blur(grey, (9, 9)) ** 2, 0, None))

    def cells(values: np.ndarray) -> np.ndarray:
        return cv2.resize(values, (GRID, GRID), interpolation=cv2.INTER_AREA)

    red, green, blue = np.moveaxis(cells(fine), 2, 0)
    largest, smallest = (
        np.maximum(np.maximum(red, green), blue),
        np.minimum(np.minimum(red, green), blue),
    )
    contrast = np.tanh(8 * cells(deviation))  # about 0 in fog, 1 at strong edges
    cast = np.maximum(green, blue) - red
    mean_colour = fine.mean((0, 1))
    distance = np.linalg.norm(cells(fine) - mean_colour, axis=2)
    scores = [
        contrast - 2 * np.abs(cast) - 0.2,
        4 * (green - np.maximum(red, blue)),
        4 * (blue - np.maximum(red, green)),
        2 * np.minimum(green, blue) - contrast,
        0.8 - 2 * contrast,
        1 - 3 * (red + green + blue) / 3,
        3 * cast - 0.3,
        2 * (largest - smallest) / (largest + 1e-3) - 1,
        20 * (cells(detail) - float(np.median(detail))) - 0.5,
        4 * distance - 1,
    ]
    return np.clip(np.stack(scores), -1, 1)


def find_label(folder: Path, picture: Path) -> Path | None:
    """Return the label file of a picture, given by its path below its root;
    None if there is none.
    """
    stem = folder / picture.with_suffix("")
    candidates = [stem.with_name(stem.name + ".pt"), stem.with_name(stem.name + FEATURES)]
    return next((path for path in candidates if path.is_file()), None)


def read_label(path: Path) -> Label:
    """Read a label file. Raises UserError that names the file and what is wrong."""
    try:
        return label_from(_read_npy(path) if path.name.endswith(FEATURES) else _read_pt(path))
    except Exception as error:  # a foreign file can raise anything
        raise UserError(
            f"{path}: not a pseudo-label ({one_line(error)}); write it anew with "
            "export_pseudo_labels.py"
        ) from error


def label_from(values: Mapping[str, object]) -> Label:
    """Return the label that a dictionary holds. Raises ValueError."""
    label = Label(
        _tensor(values, "masks", 3),
        _tensor(values, "z_d", 1),
        _tensor(values, "global_prob", 1),
        _tensor(values, "confidence_scale", 0),
        _tensor(values, "text_embeddings", 2)
        if values.get("text_embeddings") is not None
        else None,
        str(values.get("source", UNKNOWN)),
    )
    if not (float(label.masks.min()) >= 0 and float(label.masks.max()) <= 1):
        raise ValueError("masks outside 0 to 1")
    if float(label.global_prob.min()) < 0:
        raise ValueError("global_prob below 0")
    if label.text_embeddings is not None and len(label.text_embeddings) != len(label.global_prob):
        raise ValueError(
            f"{len(label.text_embeddings)} text_embeddings for {len(label.global_prob)} global_prob"
        )
    return label


def _read_pt(path: Path) -> dict[str, object]:
    values = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(values, dict):
        raise ValueError("no dictionary")
    return values


def _read_npy(path: Path) -> dict[str, object]:
    stem = path.name.removesuffix(FEATURES)
    names = {"z_d": FEATURES, "masks": MASKS, "global_prob": PROBS}
    values: dict[str, object] = {
        name: np.load(path.with_name(stem + suffix), allow_pickle=False)
        for name, suffix in names.items()
    }
    return {**values, "confidence_scale": 1 - NPY_CONFIDENCE}


def _tensor(values: Mapping[str, object], name: str, dimensions: int) -> torch.Tensor:
    if name not in values:
        raise ValueError(f"no {name}")
    tensor = torch.as_tensor(values[name]).float()
    if tensor.dim() != dimensions or not tensor.numel():
        raise ValueError(
            f"{name} has the shape {tuple(tensor.shape)}, expected {dimensions} dimensions"
        )
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} is not finite")
    return tensor
