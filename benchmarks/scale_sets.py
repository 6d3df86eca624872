"""Draws the data sets of scale.py, in EPRI's raw layout: a folder for each circuit, and one CSV of
labels.

`python -m benchmarks.scale_sets N` looks for copies among N random pictures.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import cv2
import numpy as np

from yolo_seg_ddp.data.dataset_yaml import DEFAULT_DATASET_YAML, load_dataset_yaml
from yolo_seg_ddp.data.images import encode_jpeg, one_opencv_thread, read_image
from yolo_seg_ddp.prepare.near_duplicates import SIGNATURE_BYTES, likely_pairs
from yolo_seg_ddp.prepare.parsing.label_csv import LABEL_CSV
from yolo_seg_ddp.prepare.sample.drone import in_flight
from yolo_seg_ddp.prepare.sample.scene import Annotation, Scene, draw_scene
from yolo_seg_ddp.utils.cores import usable_cpu_count
from yolo_seg_ddp.utils.files import write_bytes_atomic
from yolo_seg_ddp.utils.text import csv_text
from yolo_seg_ddp.utils.threads import ordered_map

SMALL_SIZE_PX = (240, 180)
LARGE_PX = 5472
OBJECTS = 15
# standard deviation of a sensor's noise: with it a file of 20 megapixels has EPRI's 10 MB
NOISE = 7.0
QUALITY = 95
NAMES = load_dataset_yaml(DEFAULT_DATASET_YAML).names
NUM_LINES = 2  # the first classes are drawn as lines
COLOURS = np.random.default_rng(0).integers(0, 256, (len(NAMES), 3)).tolist()


def draw_small(seed: int, index: int) -> Scene:
    """Draw a photograph that resembles no other one: lines and boxes, OBJECTS in all.

    Depends only on the arguments.
    """
    draw = np.random.default_rng((seed, index))
    width_px, height_px = SMALL_SIZE_PX
    background = draw.integers(40, 216, (6, 8, 3), np.uint8)
    image = cv2.resize(background, SMALL_SIZE_PX, interpolation=cv2.INTER_CUBIC)
    annotations = []
    for number in range(OBJECTS):
        class_id = number % len(NAMES)
        is_line = class_id < NUM_LINES
        points = np.stack([np.linspace(0, width_px, 4), draw.uniform(0, height_px, 4)], axis=1)
        if not is_line:
            middle = draw.uniform(20, height_px - 20, 2).tolist()
            sides = draw.uniform(14, 32, 2).tolist()
            points = np.array(cv2.boxPoints((middle, sides, draw.uniform(0, 90))))
        cv2.polylines(image, [points.astype(np.int32)], not is_line, COLOURS[class_id], 3)
        annotations.append(Annotation(NAMES[class_id], points, is_line))
    return Scene(image, annotations)


def draw_large(index: int, files: Sequence[Path]) -> Scene:
    """Draw a photograph of 20 megapixels with the noise of a camera, or give a file's picture the
    labels of a drawn one.
    """
    scene = draw_scene(0, index, LARGE_PX)
    if files:
        return scene._replace(
            image=cv2.resize(read_image(files[index % len(files)]), scene.image.shape[1::-1])
        )
    noise = NOISE * np.random.default_rng(index).standard_normal(scene.image.shape, np.float32)
    return scene._replace(image=np.clip(scene.image + noise, 0, 255).astype(np.uint8))


def write_photographs(folder: Path, scenes: Iterable[Scene]) -> None:
    """Write photographs with their labels in EPRI's raw layout, and metadata of a flight.

    The label file comes last.
    """

    def write(item: tuple[int, Scene]) -> tuple[str, str]:
        index, scene = item
        circuit = "10" if index % 4 == 3 else "1"
        file = folder / f"Circuit{circuit}" / f"{circuit} ({index + 1}).JPG"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(file, in_flight(encode_jpeg(scene.image, QUALITY), index, (0, 0), 1))
        objects = []
        for name, points, is_line in scene.annotations:
            corners = [{"x": round(x, 1), "y": round(y, 1)} for x, y in points.tolist()]
            objects.append({"value": name, "line" if is_line else "polygon": corners})
        return repr({"objects": objects}), file.name

    with one_opencv_thread():
        rows = list(ordered_map(write, enumerate(scenes), usable_cpu_count()))
    write_bytes_atomic(
        folder / LABEL_CSV, csv_text(("Label", "External ID"), rows).encode("utf-8-sig")
    )


if __name__ == "__main__":
    pictures = np.random.default_rng(0)
    likely_pairs([pictures.bytes(SIGNATURE_BYTES) for _ in range(int(sys.argv[1]))])
