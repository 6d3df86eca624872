"""Small pictures of single detections, for the work list and the map."""

from pathlib import Path

import cv2
import numpy as np

from yolo_seg_ddp.data.images import fit_long_side, write_jpeg
from yolo_seg_ddp.utils.text import class_color, plain_text

FOLDER = "thumbnails"
LONGEST_PX = 320
LEAST_PX = 128  # of the photograph around a small object
MARGIN = 0.25  # of the box's longer side, on each side
QUALITY = 85
LINE_PX = 4  # from a box's side: there are the drawn line and its artefacts in the JPEG


def thumbnail_path(key: str, number: int) -> str:
    """Return where the thumbnail of a photograph's detection is, relative to the output folder."""
    return f"{FOLDER}/{plain_text(key)}_{number}.jpg"


def save_thumbnails(
    folder: Path, key: str, photo: np.ndarray, class_ids: list[int], boxes: np.ndarray
) -> None:
    """Write a thumbnail of each detection: its box (n, 4) xyxy drawn on the photograph (H, W, 3),
    with a margin.
    """
    if len(class_ids):
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    for number, (class_id, box) in enumerate(zip(class_ids, boxes, strict=True)):
        write_jpeg(
            folder / thumbnail_path(key, number),
            thumbnail(photo, box, class_color(class_id)),
            QUALITY,
        )


def thumbnail(photo: np.ndarray, box: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """Cut the surroundings of a box out of a photograph, shrink them to LONGEST_PX and draw the
    box.
    """
    start, end = _surroundings(box, photo.shape[1::-1])
    cut = np.ascontiguousarray(
        fit_long_side(photo[start[1] : end[1], start[0] : end[0]], LONGEST_PX)
    ).copy()
    (left, top), (right, bottom) = _inside(box, start, end, cut)
    cv2.rectangle(cut, (left - 1, top - 1), (right, bottom), color, 2)
    return cut


def sharpness(file: Path, box: np.ndarray, size: tuple[int, int]) -> float:
    """Return the sharpness of a thumbnail inside a box of the photograph: the spread of the second
    derivative.

    size (w, h): of the photograph. 0 if the box is too small or there is no thumbnail.
    """
    shown = cv2.imread(str(file), cv2.IMREAD_GRAYSCALE)
    if shown is None:
        return 0.0
    (left, top), (right, bottom) = _inside(box, *_surroundings(box, size), shown)
    inside = shown[top + LINE_PX : bottom - LINE_PX, left + LINE_PX : right - LINE_PX]
    return float(cv2.Laplacian(inside, cv2.CV_64F).std()) if min(inside.shape) > 2 else 0.0


def _surroundings(box: np.ndarray, size: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the corners of the part of a photograph that a box's thumbnail shows. size (w, h): of
    the photograph.
    """
    corners = box.reshape(2, 2)
    limits = np.array(size)
    half = np.maximum(
        (corners[1] - corners[0]) / 2 + MARGIN * (corners[1] - corners[0]).max(), LEAST_PX / 2
    )
    start = np.floor(
        np.clip(corners.mean(axis=0) - half, 0, np.maximum(limits - 2 * half, 0))
    ).astype(int)
    return start, np.minimum(np.ceil(start + 2 * half).astype(int), limits)


def _inside(
    box: np.ndarray, start: np.ndarray, end: np.ndarray, shown: np.ndarray
) -> list[list[int]]:
    """Return the corners of a box in its thumbnail."""
    scale = np.array(shown.shape[1::-1]) / (end - start)
    corners: list[list[int]] = np.rint((box.reshape(2, 2) - start) * scale).astype(int).tolist()
    return corners
