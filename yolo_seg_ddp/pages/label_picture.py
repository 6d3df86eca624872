"""Draws what a label file was understood to mean: some photographs in which every class appears,
outlined and named.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from yolo_seg_ddp.data.images import load_photo
from yolo_seg_ddp.data.labels import Photo
from yolo_seg_ddp.data.polygons import polygon_boxes
from yolo_seg_ddp.pages.pictures import READABLE_PX, draw_instances, image_grid, save_image

NUM_PHOTOS, COLUMNS = 12, 4
CELL_PX, FONT_SCALE = 640, 0.6
MOST_OBJECTS = 300  # drawn on one photograph, the largest first
MOST_NAMES = 3  # of a class that are written on one photograph, at the largest objects


def save_label_picture(path: Path, photos: Sequence[Photo], names: Sequence[str]) -> None:
    """Draw at most NUM_PHOTOS photographs with their labels in a grid."""
    chosen = choose_photos(photos)
    pictures = [_drawn(photo, names) for photo in chosen]
    captions = [f"{photo.file.parents[1].name}: {photo.file.name}" for photo in chosen]
    save_image(path, image_grid(pictures, min(COLUMNS, len(pictures)), CELL_PX, captions))


def choose_photos(photos: Sequence[Photo], number: int = NUM_PHOTOS) -> list[Photo]:
    """Return photographs in which every class appears as far as `number` can show them, the rarest
    first, and others spread evenly.
    """
    classes = [set(photo.class_ids.tolist()) for photo in photos]
    missing = set().union(*classes)
    holders = {
        one: [index for index, of_photo in enumerate(classes) if one in of_photo] for one in missing
    }
    chosen: list[int] = []
    while missing and len(chosen) < number:
        rarest = min(missing, key=lambda one: (len(holders[one]), one))
        best = max(
            holders[rarest],
            key=lambda index: (len(missing & classes[index]), -len(photos[index].class_ids)),
        )
        chosen.append(best)
        missing -= classes[best]
    others = [
        index for index, of_photo in enumerate(classes) if of_photo and index not in chosen
    ] or list(range(len(photos)))
    places = (
        np.linspace(0, len(others) - 1, min(number - len(chosen), len(others))).round().astype(int)
    )
    return [photos[index] for index in sorted({*chosen, *(others[place] for place in places)})]


def _drawn(photo: Photo, names: Sequence[str]) -> np.ndarray:
    picture = load_photo(photo.file, CELL_PX)
    size = picture.shape[1::-1]
    lengths = np.ptp(polygon_boxes(photo.polygons).reshape(-1, 2, 2) * size, axis=1).max(axis=1)
    order = np.argsort(-lengths, kind="stable")[:MOST_OBJECTS].tolist()
    class_ids = [int(photo.class_ids[index]) for index in order]
    outlines = [photo.polygons[index] * size for index in order]
    labels = [
        names[one] if class_ids[:place].count(one) < MOST_NAMES else ""
        for place, one in enumerate(class_ids)
    ]
    look: dict[str, Any] = {"labels": labels, "font_scale": FONT_SCALE, "min_px": READABLE_PX}
    return draw_instances(
        picture, class_ids, None, outlines, None, names, **look, nothing="no labels"
    )
