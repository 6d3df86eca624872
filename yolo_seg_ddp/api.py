"""Training, prediction and evaluation from Python, as the scripts do them: docs/python.md.

from yolo_seg_ddp import evaluate, open_model, train

Options have the scripts' names with `_` for `-` (`python inference.py --help`), and their defaults.
A wrong one raises `UsageError`. Importing this module starts nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps, ImageShow

from yolo_seg_ddp.data.dataset_yaml import list_photos
from yolo_seg_ddp.data.images import ImageError, Stretch, encode_jpeg, fit_long_side, read_image
from yolo_seg_ddp.data.mask_rings import outline_of
from yolo_seg_ddp.pages import NO_DETECTIONS, READABLE_PX, draw_instances, save_image
from yolo_seg_ddp.run.records import CONFIG_FILE, read_config
from yolo_seg_ddp.utils.config import config_of
from yolo_seg_ddp.utils.errors import UsageError, UserError, print_warning, printable
from yolo_seg_ddp.utils.extras import require_extra
from yolo_seg_ddp.utils.option_names import known_name, nearest, other_names
from yolo_seg_ddp.utils.options import flag_of, words_of
from yolo_seg_ddp.utils.text import counted, without_secrets

if TYPE_CHECKING:
    import pandas
    import shapely
    import torch

    from yolo_seg_ddp.predict.detections import PhotoPrediction
    from yolo_seg_ddp.predict.options import PredictOptions
    from yolo_seg_ddp.predict.regions import Region
    from yolo_seg_ddp.predict.tiles import Predictor

SHOWN_PX = 1280  # longer side of a picture in a notebook


def train(config: str | Path | None = None, **options: Any) -> dict[str, list[float]]:
    """Train with the options of a YAML file and with `options`, which win; return one list per
    value, an entry an epoch.

    Every rank must reach this; without a launcher it is one process. Like the script it continues
    an interrupted run.
    """
    from yolo_seg_ddp.run.folder import run_to_resume
    from yolo_seg_ddp.scripts.train_yolo_ddp import train as run
    from yolo_seg_ddp.training.config import TrainConfig

    if resume := options.get("resume"):
        given = [flag_of(name) for name, value in options.items() if value is not None]
        folder = run_to_resume(os.fspath(resume), given)
        config = config or folder / CONFIG_FILE
        options["save_dir"] = folder
    return run(config_of(TrainConfig, {"config": config, **options}))[0]


def evaluate(model: str | Path, **options: Any) -> dict[str, Any]:
    """Evaluate a checkpoint or an export; write the script's files to `output` and return what
    metrics.json holds.

    Every rank must reach this; ranks above 0 get an empty dictionary.
    """
    from yolo_seg_ddp.scripts.evaluate_model import EvaluationConfig, run

    metrics = run(config_of(EvaluationConfig, {"model": model, **options}))
    return metrics[0] if metrics else {}


def open_model(model: str | Path, **options: Any) -> Model:
    """Open a checkpoint or an export; `options` are those of inference.py that say how it predicts,
    such as `conf`.
    """
    from yolo_seg_ddp.predict.opening import open_predictor

    config = _options({"model": model}, options, ("model",))
    predictor, names = open_predictor(config)
    return Model(predictor, Names(names), {"model": model, **options})


def _options(
    opened: Mapping[str, Any], given: Mapping[str, Any], fixed: Collection[str]
) -> PredictOptions:
    from yolo_seg_ddp.predict.options import PredictOptions

    known = [each.name for each in fields(PredictOptions) if each.name not in fixed]
    for name, value in given.items():
        if known_name(name, known) not in known:
            wrong = f"unknown argument --{name}={printable(str(value))}{nearest(name, known)}"
            words = ", ".join((other_names(each, known) or [each])[0] for each in known)
            raise UsageError(f"{wrong}; known are {words}")
        if known_name(name, known) == "img_size" and isinstance(value, list | tuple):
            raise UsageError(f"{name}={value}: the network's input is square; give its side")
    return config_of(PredictOptions, {**opened, **given})


# What to type instead of Ultralytics' names that are not here.
INSTEAD = {
    **dict.fromkeys(
        ("to_df", "to_csv", "to_json", "tojson", "summary"), "prediction.to_pandas() gives a table"
    ),
    **dict.fromkeys(
        ("save_txt", "save_crop"), "python inference.py --save-crops writes labels/ and crops/"
    ),
    **dict.fromkeys(
        ("cpu", "cuda", "to", "half", "fuse"),
        'open_model(file, device="cuda:0", amp="auto") decides',
    ),
    "orig_shape": "prediction.photo.shape[:2] is the height and width",
    **dict.fromkeys(("xyxyn", "xywhn", "xyn"), "divide xyxy, xywh or xy by width and height"),
    "track": "python inference.py --source film.mp4 predicts on a film, without track numbers",
    "benchmark": "python export.py --format onnx openvino compares formats",
}


class WithAdvice:
    """What says, of a name that is not here, what to type instead."""

    def __getattr__(self, name: str) -> Any:
        advice = f"; {INSTEAD[name]}" if name in INSTEAD else nearest(name, dir(self))
        raise AttributeError(f"{type(self).__name__} has no {name}{advice} (docs/python.md)")


class Names(tuple[str, ...]):
    """The names of all classes, in the order of their numbers; also read as a dictionary of number
    and name.
    """

    def items(self) -> enumerate[str]:
        """Return each number with its name."""
        return enumerate(self)

    def values(self) -> Names:
        """Return the names."""
        return self


@dataclass(frozen=True)
class Model(WithAdvice):
    """A model and how it is applied to photographs: `model(source)` is `model.predict(source)`."""

    predictor: Predictor = field(repr=False)
    names: Names
    options: Mapping[str, Any]  # that it was opened with

    def predict(self, source: Any, *, stream: bool = False, **options: Any) -> Any:
        """Find objects in photographs; `options`, such as `conf`, hold for this call. Return
        `Predictions`, a list.

        source: a file, a folder, a pattern, a .txt file with a path a line, an https address, a PIL
        picture, an array, or a list or an iterator of these. Arrays are RGB uint8 (H, W, 3):
        `cv2.imread` gives BGR, so pass `picture[..., ::-1]`; Ultralytics expects BGR. stream:
        return an iterator instead, which holds no more photographs than a batch. Raises ImageError
        for a picture that cannot be read; in a folder it is named and skipped.
        """
        from yolo_seg_ddp.predict.opening import predictor_for
        from yolo_seg_ddp.predict.options import FIXED
        from yolo_seg_ddp.yolo.model import trained_stretch

        predictor, model = self.predictor, self.predictor.model
        if options:
            predictor = predictor_for(
                _options(self.options, options, FIXED), model, predictor.device
            )
        predicted = predictor.predict(_photos(source, trained_stretch(model)))
        predictions = (
            Prediction(photo, self.names, result, file) for file, photo, result in predicted
        )
        return predictions if stream else Predictions(predictions)

    __call__ = predict

    def train(self, **options: Any) -> dict[str, list[float]]:
        """Train on, from this model's weights, with the options of `train`; return the history."""
        return train(**{"model": self.options["model"], **options})

    def val(self, **options: Any) -> dict[str, Any]:
        """Evaluate with the options of `evaluate`; return the metrics."""
        return evaluate(self.options["model"], **options)

    def export(self, **options: Any) -> str:
        """Export with the options of export.py; return the first file. Raises UserError if a proof
        failed.

        The proof takes the photographs on which the model was trained and judged, if its run's
        folder says so.
        """
        model = self.options["model"]
        data = read_config(Path(model).parent).get("data")
        arguments = {"model": model, "data": data, **options}
        files, failed = require_extra("exports").main("", arguments)
        if failed:
            raise UserError(
                f"export {' '.join(words_of(arguments))}: a proof failed, as the lines above say"
            )
        return files[0]


def _photos(source: Any, stretch: Stretch | None) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each photograph of a source: its file or address, empty for
    an array, and its pixels.
    """
    if isinstance(source, list | tuple | Iterator):
        for each in source:
            yield from _photos(each, stretch)
    elif isinstance(source, np.ndarray | Image.Image):
        photo = np.asarray(source)
        # these have more than 8 bits
        if isinstance(source, Image.Image) and source.mode[0] not in "IF":
            photo = np.asarray(ImageOps.exif_transpose(source).convert("RGB"))
        if photo.dtype != np.uint8 or photo.ndim != 3 or photo.shape[2] != 3 or not photo.size:
            raise UsageError(
                f"an array {photo.dtype} {photo.shape}: expected RGB uint8 (height, width, 3)"
            )
        yield getattr(source, "filename", ""), photo
    elif isinstance(source, str) and "://" in source:
        from yolo_seg_ddp.prepare.download.web import fetch_picture

        yield without_secrets(source), fetch_picture(source, stretch)
    elif isinstance(source, str | os.PathLike):
        for file in list_photos(str(source)):
            try:
                yield str(file), read_image(file, stretch=stretch)
            except ImageError as error:
                if file == Path(source):
                    raise
                print_warning(f"skipped {error}")
    else:
        raise UsageError(
            f"a source of type {type(source).__name__}: expected a path, address or picture, or a "
            "list"
        )


class Rows(WithAdvice, np.ndarray):
    """An array with a row for each object.

    Ultralytics' names give tensors of the same objects, in the photograph's pixels.
    """

    of: Prediction
    # There are no track numbers.
    id = None
    conf = property(attrgetter("of.result.detections.scores"))  # float32 (n,)
    cls = property(attrgetter("of.result.detections.class_ids"))  # int64 (n,)

    @property
    def xyxy(self) -> torch.Tensor:
        """float32 (n, 4): left, top, right, bottom."""
        from torch import from_numpy

        return from_numpy(self.of.result.boxes)

    @property
    def xywh(self) -> torch.Tensor:
        """float32 (n, 4): centre x, centre y, width, height."""
        from torchvision.ops import box_convert

        return box_convert(self.xyxy, "xyxy", "cxcywh")

    @property
    def xy(self) -> list[np.ndarray]:
        """The largest outline of each mask, int32 (V, 2); `polygons()` has all parts and holes."""
        from yolo_seg_ddp.predict.prediction_files import outline

        return [
            next(iter(outline(region)), np.zeros((0, 2), np.int32)) for region in self.of.regions
        ]

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        if isinstance(part, Rows) and not isinstance(index, tuple):
            part.of = self.of[index]
        return part

    def __array_wrap__(self, array: Any, *_: Any) -> Any:
        # What is computed from rows is a plain array or number.
        return np.asarray(array)[()]


class Predictions(list["Prediction"]):
    """A prediction for each photograph.

    If there is one photograph, its attributes are here, too: `predictions.boxes`.
    """

    def __getattr__(self, name: str) -> Any:
        if len(self) != 1 or name.startswith("_"):
            raise AttributeError(
                f"{name} of {len(self)} photographs: take one, such as predictions[0].{name}"
            )
        return getattr(self[0], name)

    def __repr__(self) -> str:
        counts = Counter(
            name for prediction in self for name in prediction.class_names
        ).most_common()
        classes = f" of {counted(len(counts), 'class')}" if counts else ""
        sizes = [
            f"{prediction.photo.shape[1]} x {prediction.photo.shape[0]}" for prediction in self
        ]
        place = sizes[0] if len(self) == 1 else counted(len(self), "photograph")
        each = ", ".join(f"{number} {printable(name)}" for name, number in counts)
        return (
            f"{counted(sum(map(len, self)), 'detection')}{classes} in "
            f"{place}{': ' * bool(each)}{each}"
        )


@dataclass(frozen=True)
class Prediction(WithAdvice):
    """The objects found in a photograph, RGB uint8 (H, W, 3), upright.

    All coordinates are in its pixels.
    """

    photo: np.ndarray
    names: Names  # of all classes that the model knows
    result: PhotoPrediction
    file: str = ""  # of the photograph; empty if it was an array
    path = property(attrgetter("file"))
    orig_img = property(attrgetter("photo"))

    def __repr__(self) -> str:
        return repr(Predictions([self]))

    def __len__(self) -> int:
        return len(self.result.boxes)

    def __getitem__(self, index: Any) -> Prediction:
        """Return a prediction with some of the objects: by a number, a slice, or an array of
        numbers or bools.
        """
        numbers = np.atleast_1d(np.arange(len(self))[index]).tolist()
        return replace(self, result=self.result.chosen(numbers))

    @property
    def speed(self) -> dict[str, float]:
        """Milliseconds: to make the network's inputs, to run it and suppress overlaps, to make
        masks and join tiles.
        """
        return dict(
            zip(
                ("preprocess", "inference", "postprocess"),
                (1000 * self.result.spent_s).tolist(),
                strict=True,
            )
        )

    @property
    def boxes(self) -> Rows:
        """float32 (n, 4): left, top, right, bottom."""
        return self._rows(self.result.boxes)

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
        """The masks, each cut to its object: bool (h, w) with its upper left pixel at `left`,
        `top`.
        """
        return list(self.result.masks)

    @property
    def masks(self) -> Rows:
        """bool (n, H, W): n times the photograph's pixels in bytes; `regions` take less."""
        masks = np.zeros((len(self), *self.photo.shape[:2]), bool)
        for mask, region in zip(masks, self.result.masks, strict=True):
            region.add_to(mask)
        return self._rows(masks)

    def _rows(self, array: np.ndarray) -> Rows:
        rows = array.view(Rows)
        rows.of = self
        return rows

    def arrays(self) -> dict[str, Any]:
        """Return what `supervision.Detections(**prediction.arrays())` takes; `masks` says how large
        `mask` is.
        """
        data = {"class_name": np.array(self.class_names, str)}
        scored = {"confidence": self.scores, "class_id": self.class_ids}
        return {"xyxy": self.result.boxes, "mask": np.asarray(self.masks), **scored, "data": data}

    def polygons(self) -> list[shapely.MultiPolygon]:
        """Return each object's outline, with parts and holes: it encloses the centres of exactly
        its mask's pixels.
        """
        return [outline_of(region.mask, region.left, region.top) for region in self.result.masks]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a table with a row for each object, all in pixels; `length_px` and `width_px` of
        objects with a line.

        Raises UserError if pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas() needs pandas: pip install pandas") from error
        lines = [
            (line.length_px, line.width_px) if line else (np.nan,) * 2 for line in self.result.lines
        ]
        columns: dict[str, Any] = {
            "image": [self.file] * len(self),
            "class": self.class_names,
            "confidence": self.scores,
            **dict(zip(("left", "top", "right", "bottom"), self.result.boxes.T, strict=True)),
            "area_px": [np.count_nonzero(region.mask) for region in self.result.masks],
        }
        if lines:
            columns |= dict(zip(("length_px", "width_px"), np.array(lines).T, strict=True))
        return pandas.DataFrame(columns)

    def draw(self) -> Picture:
        """Draw the objects on the photograph."""
        pixels = draw_instances(
            self.photo, *self.result.drawn, self.names, nothing=NO_DETECTIONS, min_px=READABLE_PX
        )
        return Picture(pixels)

    def plot(self) -> np.ndarray:
        """Return the drawn photograph as an array, RGB uint8 (H, W, 3); Ultralytics' is BGR."""
        return self.draw().pixels

    def save(self, path: str | Path = "") -> str:
        """Write the drawn photograph as .jpg or .png, by default to `results_<name>.jpg` here;
        return its path.
        """
        path = path or f"results_{Path(self.file).stem or 'array'}.jpg"
        self.draw().save(path)
        return str(path)

    def show(self) -> None:
        """Show the drawn photograph, in a notebook there.

        Raises UserError where no program shows pictures.
        """
        if not ImageShow.show(Image.fromarray(self.plot())):
            raise UserError(
                "show(): this machine has no program that shows pictures; save() writes the picture"
            )


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
