"""Find objects in photographs with a trained model; write annotated pictures, JSON and YOLO labels.

    python inference.py --model models/epri_distribution_ddp/best.pt --source data/processed/val/images \
        --output outputs/predictions

A few photographs are read ahead on all cores, so memory does not grow with their number. Unreadable photographs are
reported and skipped. To deploy elsewhere, open the same model file with Ultralytics: `YOLO("best.pt").export(...)`.
"""

from __future__ import annotations

import glob
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from utils.common.config import FRACTION, Options, option, parse_config
from utils.common.cores import usable_cpu_count
from utils.common.devices import choose_device
from utils.common.errors import UserError, printable, run_script
from utils.common.files import walk
from utils.common.threads import ordered_map
from utils.data.dataset_yaml import IMAGE_SUFFIXES, is_photograph
from utils.data.images import ImageError, read_image
from utils.evaluation.prediction_files import PredictionWriter, outline
from utils.plots import draw_instances, save_image
from utils.yolo.model import class_names, load_weights, trained_size_px
from utils.yolo.predict import PhotoPrediction, predict_photos


@dataclass(frozen=True)
class InferenceConfig(Options):
    """Options of `inference.py`."""

    model: str = option(None, "trained model, such as models/epri_distribution_ddp/best.pt", required=True)
    source: str = option(None, "photograph, folder (with its subfolders) or quoted pattern", required=True)
    output: str = option("outputs/predictions", "folder for pictures, labels/ and predictions.json", metavar="DIR")
    conf: float = option(0.25, "minimum confidence of a detection", **FRACTION)
    iou: float = option(0.7, "IoU above which the less confident of two detections of a class is dropped", **FRACTION)
    img_size: int | None = option(
        None, "side of the network input in pixels; unset: as in training", at_least=32, multiple_of=32
    )
    classes: tuple[str, ...] | None = option(None, "find only these classes, by name or number")
    max_detections: int = option(300, "maximum number of detections per photograph", at_least=1)
    batch_size: int = option(8, "photographs per forward pass", at_least=1)
    save_crops: bool = option(False, "also write a cut-out of each detection to crops/<class>/")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")


def main() -> int:
    """Predict; return the exit code: 1 if no photograph could be read."""
    config = parse_config(InferenceConfig, "Find objects in photographs with a trained model")
    device = choose_device(config.device, 0)
    if device.type == "cpu":
        torch.set_num_threads(usable_cpu_count())
    files = list_photos(config.source)
    model = load_weights(config.model).to(device)
    names = class_names(model)
    wanted = wanted_classes(config.classes, names)
    size_px = config.img_size or trained_size_px(model)

    counts = np.zeros(len(names), int)
    unreadable = 0
    limits = {"confidence": config.conf, "iou": config.iou, "max_detections": config.max_detections}
    with PredictionWriter(Path(config.output), names) as writer:
        for batch in _batches(files, size_px, config.batch_size):
            readable = [(file, key, photo) for file, key, photo in batch if isinstance(photo, np.ndarray)]
            for file, _, error in batch:
                if not isinstance(error, np.ndarray):
                    print(f"skipped {printable(str(file), 400)}: {printable(str(error), 400)}")
                    unreadable += 1
            photos = [photo for _, _, photo in readable]
            found = predict_photos(model, photos, size_px, device, classes=wanted, **limits)
            for (file, key, photo), prediction in zip(readable, found, strict=True):
                write_results(writer, file, key, photo, prediction, names, config)
                counts += np.bincount(prediction.class_ids, minlength=len(names))
    num_read = len(files) - unreadable
    summary = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True) if count) or "nothing"
    print(f"{num_read} photographs, {unreadable} skipped; found {summary}")
    print(f"Results in {config.output}: pictures, labels/, predictions.json")
    return 0 if num_read else 1


def write_results(
    writer: PredictionWriter,
    file: Path,
    key: str,
    photo: np.ndarray,
    prediction: PhotoPrediction,
    names: tuple[str, ...],
    config: InferenceConfig,
) -> None:
    """Write one photograph's labels, picture and, with --save-crops, cut-outs."""
    found, masks, boxes = prediction.found, prediction.masks, prediction.boxes
    writer.add(file, key, photo.shape, found, boxes, [outline(mask) for mask in masks])
    picture = draw_instances(photo, prediction.class_ids, boxes, masks, found.scores.numpy(), names)
    save_image(Path(config.output) / f"{key}.jpg", picture)
    if config.save_crops:
        writer.save_crops(key, photo, found, boxes)


def _batches(files: list[Path], size_px: int, batch_size: int) -> Iterator[list[tuple[Path, str, Any]]]:
    """Yield lists of `batch_size` (file, key, photograph), with the exception in place of an unreadable photograph."""

    def read(item: tuple[Path, str]) -> tuple[Path, str, Any]:
        try:
            return *item, read_image(item[0], size_px)
        except (ImageError, OSError) as error:
            return *item, error

    stream = ordered_map(read, unique_keys(files), usable_cpu_count())
    while batch := list(itertools.islice(stream, batch_size)):
        yield batch


def list_photos(source: str) -> list[Path]:
    """Return the photographs that a file, folder or pattern names, sorted. Raises UserError if there are none."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        tree = walk(
            path,
            lambda folder: not folder.is_symlink(),
            lambda folder, reason: print(f"skipped {printable(str(folder), 400)}: {reason}"),
        )
        found: Iterator[Path] = (folder / entry.name for folder, entries in tree for entry in entries)
    else:
        try:
            found = map(Path, glob.glob(source, recursive=True))
        except RecursionError as error:
            raise UserError(f"--source {source}: folders too deep for a pattern; name the folder") from error
    files = sorted(file for file in found if is_photograph(file.name) and file.is_file())
    if not files:
        raise UserError(f"--source {source}: no photographs there ({', '.join(IMAGE_SUFFIXES)})")
    return files


def unique_keys(files: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each file with a unique name for its results: its stem, with a number if the stem occurred before."""
    seen: dict[str, int] = {}
    for file in files:
        number = seen[file.stem.lower()] = seen.get(file.stem.lower(), -1) + 1
        yield file, file.stem if number == 0 else f"{file.stem}_{number}"


def wanted_classes(classes: tuple[str, ...] | None, names: tuple[str, ...]) -> tuple[int, ...] | None:
    """Turn class names or numbers into numbers. Raises UserError for a class that the model does not have."""
    if classes is None:
        return None
    known = {**{name: index for index, name in enumerate(names)}, **{str(index): index for index in range(len(names))}}
    for name in classes:
        if name not in known:
            raise UserError(f"--classes {name}: the model knows {', '.join(names)}")
    return tuple(known[name] for name in classes)


if __name__ == "__main__":
    cv2.setNumThreads(0)
    run_script(main)
