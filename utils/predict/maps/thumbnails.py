"""Small pictures of single detections, for the work list and the map."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from utils.common.colors import class_color
from utils.common.text import plain_text
from utils.data.images import fit_long_side, write_jpeg

FOLDER = "thumbnails"
LONGEST_PX = 320
LEAST_PX = 128  # of the photograph around a small object
MARGIN = 0.25  # of the box's longer side, on each side
QUALITY = 85


def thumbnail_path(key: str, number: int) -> str:
    """Return where the thumbnail of a photograph's detection is, relative to the output folder."""
    return f"{FOLDER}/{plain_text(key)}_{number}.jpg"


def save_thumbnails(folder: Path, key: str, photo: np.ndarray, class_ids: list[int], boxes: np.ndarray) -> None:
    """Write a thumbnail of each detection: its box (n, 4) xyxy drawn on the photograph (H, W, 3), with a margin."""
    if len(class_ids):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for number, (class_id, box) in enumerate(zip(class_ids, boxes, strict=True)):
        write_jpeg(folder / thumbnail_path(key, number), thumbnail(photo, box, class_color(class_id)), QUALITY)


def thumbnail(photo: np.ndarray, box: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """Cut the surroundings of a box out of a photograph, shrink them to LONGEST_PX and draw the box."""
    height, width = photo.shape[:2]
    corners, limits = box.reshape(2, 2), np.array([width, height])
    half = np.maximum((corners[1] - corners[0]) / 2 + MARGIN * (corners[1] - corners[0]).max(), LEAST_PX / 2)
    start = np.floor(np.clip(corners.mean(axis=0) - half, 0, np.maximum(limits - 2 * half, 0))).astype(int)
    end = np.minimum(np.ceil(start + 2 * half).astype(int), limits)
    cut = np.ascontiguousarray(fit_long_side(photo[start[1] : end[1], start[0] : end[0]], LONGEST_PX)).copy()
    scale = np.array(cut.shape[1::-1]) / (end - start)
    (left, top), (right, bottom) = np.rint((corners - start) * scale).astype(int).tolist()
    cv2.rectangle(cut, (left - 1, top - 1), (right, bottom), color, 2)
    return cut
