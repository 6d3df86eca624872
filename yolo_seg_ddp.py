"""Training, prediction and evaluation from Python, as the scripts do them: docs/python.md.

from yolo_seg_ddp import evaluate, open_model, train

Options have the scripts' names with `_` for `-` (`python inference.py --help`), and their defaults. A wrong one raises
`UsageError`. Importing this module starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utils.common.config import parse_config, words_of
from utils.common.errors import UsageError, UserError
from utils.data.images import encode_jpeg, fit_long_side, read_image
from utils.pages import NO_DETECTIONS, READABLE_PX, draw_instances, save_image
from utils.sources.mask_rings import outline_of

if TYPE_CHECKING:
    import pandas
    import shapely

    from utils.predict.detections import PhotoPrediction
    from utils.predict.regions import Region
    from utils.predict.tiles import Predictor

SHOWN_PX = 1280  # longer side of a picture in a notebook


def train(config: str | Path | None = None, **options: Any) -> dict[str, list[float]]:
    """Train with the options of a YAML file and with `options`, which win; return one list per value, an entry an epoch.

    Every rank must reach this; without a launcher it is one process. Like the script it continues an interrupted run.
    """
    from train_yolo_ddp import train as run
    from utils.run.folder import resume_arguments
    from utils.training.config import TrainConfig

    words = resume_arguments(words_of({"config": config, **options}))
    return run(parse_config(TrainConfig, "", words, exits=False))[0]


def evaluate(model: str | Path, **options: Any) -> dict[str, Any]:
    """Evaluate a checkpoint or an export; write the script's files to `output` and return what metrics.json holds.

    Every rank must reach this; ranks above 0 get an empty dictionary.
    """
    from evaluate_model import EvaluationConfig, run

    metrics = run(parse_config(EvaluationConfig, "", words_of({"model": model, **options}), exits=False))
    return metrics[0] if metrics else {}


def open_model(model: str | Path, **options: Any) -> Model:
    """Open a checkpoint or an export; `options` are those of inference.py that say how it predicts, such as `conf`."""
    from utils.predict.options import PredictOptions, open_predictor

    return Model(*open_predictor(parse_config(PredictOptions, "", words_of({"model": model, **options}), exits=False)))


@dataclass(frozen=True)
class Model:
    """A model and how it is applied to photographs."""

    predictor: Predictor
    names: tuple[str, ...]

    def predict(self, photograph: str | Path | np.ndarray) -> Prediction:
        """Find objects in a file, or in RGB uint8 (H, W, 3). Raises ImageError for a file that cannot be read."""
        from utils.yolo.model import trained_stretch

        file = "" if isinstance(photograph, np.ndarray) else str(photograph)
        stretch = trained_stretch(self.predictor.model)
        photo = photograph if isinstance(photograph, np.ndarray) else read_image(Path(photograph), stretch=stretch)
        if photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3 or not photo.size:
            raise UsageError(f"an array {photo.dtype} {photo.shape}: expected RGB uint8 (height, width, 3)")
        [(_, _, result)] = self.predictor.predict([(None, photo)])
        return Prediction(photo, self.names, result, file)


@dataclass(frozen=True)
class Prediction:
    """The objects found in a photograph, RGB uint8 (H, W, 3), upright. All coordinates are in its pixels."""

    photo: np.ndarray
    names: tuple[str, ...]  # of all classes that the model knows
    result: PhotoPrediction
    file: str = ""  # of the photograph; empty if it was an array

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def boxes(self) -> np.ndarray:
        """float32 (n, 4): left, top, right, bottom."""
        return self.result.boxes

    @property
    def scores(self) -> np.ndarray:
        """The confidence of each object, float32 (n,), from 0 to 1, in descending order."""
        return self.result.detections.scores.numpy()

    @property
    def class_ids(self) -> np.ndarray:
        """int64 (n,)."""
        return self.result.class_ids

    @property
    def class_names(self) -> list[str]:
        """The name of each object's class."""
        return [self.names[class_id] for class_id in self.class_ids]

    @property
    def regions(self) -> list[Region]:
        """The masks, each cut to its object: bool (h, w) with its upper left pixel at `left`, `top`."""
        return list(self.result.masks)

    @property
    def masks(self) -> np.ndarray:
        """bool (n, H, W): n times the photograph's pixels in bytes; `regions` take less."""
        masks = np.zeros((len(self), *self.photo.shape[:2]), bool)
        for mask, region in zip(masks, self.result.masks, strict=True):
            region.add_to(mask)
        return masks

    def arrays(self) -> dict[str, Any]:
        """Return what `supervision.Detections(**prediction.arrays())` takes; `masks` says how large `mask` is."""
        data = {"class_name": np.array(self.class_names, str)}
        scored = {"confidence": self.scores, "class_id": self.class_ids}
        return {"xyxy": self.boxes, "mask": self.masks, **scored, "data": data}

    def polygons(self) -> list[shapely.MultiPolygon]:
        """Return each object's outline, with parts and holes: it encloses the centres of exactly its mask's pixels."""
        return [outline_of(region.mask, region.left, region.top) for region in self.result.masks]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with a row for each object, all in pixels; `length_px` and `width_px` of objects with a line.

        Raises UserError if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas() needs pandas: pip install pandas") from error
        lines = [(line.length_px, line.width_px) if line else (np.nan,) * 2 for line in self.result.lines]
        columns: dict[str, Any] = {
            "image": [self.file] * len(self),
            "class": self.class_names,
            "confidence": self.scores,
            **dict(zip(("left", "top", "right", "bottom"), self.boxes.T, strict=True)),
            "area_px": [np.count_nonzero(region.mask) for region in self.result.masks],
        }
        if lines:
            columns |= dict(zip(("length_px", "width_px"), np.array(lines).T, strict=True))
        return pandas.DataFrame(columns)

    def draw(self) -> Picture:
        """Draw the objects on the photograph."""
        found = (self.class_ids, self.boxes, self.result.masks, self.scores)
        return Picture(draw_instances(self.photo, *found, self.names, nothing=NO_DETECTIONS, min_px=READABLE_PX))


@dataclass(frozen=True)
class Picture:
    """A picture that notebooks show, RGB uint8 (H, W, 3)."""

    pixels: np.ndarray

    def save(self, path: str | Path) -> None:
        """Write a .jpg or .png."""
        save_image(Path(path), self.pixels)

    def _repr_jpeg_(self) -> bytes:
        """Return it as JPEG, a quarter of a PNG in the notebook's file, shrunk to SHOWN_PX."""
        return encode_jpeg(fit_long_side(self.pixels, SHOWN_PX))
