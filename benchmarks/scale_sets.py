"""Draws the data sets of scale.py, in EPRI's raw layout: a folder for each circuit, and one CSV of labels."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import cv2
import numpy as np

from utils.common.cores import usable_cpu_count
from utils.common.files import write_bytes_atomic
from utils.common.text import csv_text
from utils.common.threads import ordered_map
from utils.data.dataset_yaml import list_photos
from utils.data.images import encode_jpeg, one_opencv_thread, read_image
from utils.sources.parsing.label_csv import LABEL_CSV
from utils.sources.sample.drone import in_flight
from utils.sources.sample.scene import Annotation, Scene, draw_scene

SMALL_SIZE_PX = (240, 180)
LARGE_PX = 5472
OBJECTS = 15
NOISE = 7.0  # standard deviation of a sensor's noise: with it a file of 20 megapixels has EPRI's 10 MB
QUALITY = 95
LINES = {"conductor": (230, 230, 230), "other_wire": (20, 20, 20)}
SOLIDS = {
    "pole": (110, 70, 40),
    "crossarm": (230, 170, 90),
    "insulator": (200, 40, 40),
    "cutouts": (240, 240, 60),
    "transformers": (60, 90, 200),
    "background_structure": (190, 60, 190),
}
CLASSES = [*LINES, *SOLIDS]


def draw_small(seed: int, index: int) -> Scene:
    """Draw a photograph that resembles no other one, with OBJECTS lines and quadrangles. Depends only on the arguments."""
    rng = np.random.default_rng((seed, index))
    width_px, height_px = SMALL_SIZE_PX
    colours = rng.integers(40, 216, (6, 8, 3), np.uint8)
    image = cv2.resize(colours, SMALL_SIZE_PX, interpolation=cv2.INTER_CUBIC)
    annotations = []

    for number in range(OBJECTS):
        name = CLASSES[number % len(CLASSES)]
        if name in LINES:
            heights = rng.uniform(0, height_px, 4)
            points = np.stack([np.linspace(-5, width_px + 5, 4), heights], axis=1)
            cv2.polylines(image, [points.astype(np.int32)], False, LINES[name], 3)
        else:
            centre = rng.uniform((20, 20), (width_px - 20, height_px - 20))
            half, turn = rng.uniform(7, 16, 2), rng.uniform(0, np.pi)
            corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * half
            turned = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
            points = corners @ turned + centre
            cv2.fillConvexPoly(image, points.astype(np.int32), SOLIDS[name])
        annotations.append(Annotation(name, points, name in LINES))
    return Scene(image, annotations)


def draw_large(seed: int, index: int) -> Scene:
    """Draw a photograph of 20 megapixels, with the noise of a camera."""
    scene = draw_scene(seed, index, LARGE_PX)
    noise = np.empty(scene.image.shape, np.int16)
    cv2.setRNGSeed(index)
    cv2.randn(noise, (0,) * 3, (NOISE,) * 3)
    image = np.clip(scene.image + noise, 0, 255).astype(np.uint8)
    return Scene(image, scene.annotations)


def write_photographs(folder: Path, scenes: Iterable[Scene]) -> None:
    """Write photographs with their labels in EPRI's raw layout, and metadata of a flight. The label file comes last."""

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
    write_bytes_atomic(folder / LABEL_CSV, csv_text(("Label", "External ID"), rows).encode("utf-8-sig"))


def large_scenes(number: int, photographs: str | None) -> Iterator[Scene]:
    """Yield drawn photographs of 20 megapixels, or those of a folder with labels of drawn ones."""
    files = list_photos(photographs) if photographs else []
    for index in range(number):
        scene = draw_large(0, index)
        if files:
            image = read_image(files[index % len(files)])
            scale = np.array(image.shape[1::-1]) / scene.image.shape[1::-1]
            scene = Scene(image, [one._replace(points=one.points * scale) for one in scene.annotations])
        yield scene
