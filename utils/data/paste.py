"""Pastes objects of other photographs into training pictures, in other colours, with the labels that remain visible."""

from __future__ import annotations

import math

import cv2
import numpy as np

from utils.data.augment import Scene
from utils.data.polygons import draw_index_map

LIGHT = (0.3, 1.6)  # gain of what is pasted: a pole may be of light wood or black
TINT = 0.15  # +- relative, of each colour
MIN_VISIBLE = 0.25  # of an object that is partly hidden; less is no longer labelled
MIN_PIECE_PX = (12.0, 1.0)  # longer and shorter side of a visible part of a wire
FEATHER_PX = 3  # side of the filter that softens the edge


def paste_objects(scene: Scene, donor: Scene, thin: tuple[int, ...], rng: np.random.Generator) -> Scene:
    """Return the scene with the donor's objects in front, except those of thin classes, which end where they are hidden."""
    size_px = len(scene.image)
    chosen = [number for number, class_id in enumerate(donor.class_ids) if class_id not in thin]
    if not chosen:
        return scene
    outlines = [donor.polygons[number] for number in chosen]
    pasted = (draw_index_map(outlines, size_px) > 0).astype(np.uint8)
    gain = math.exp(rng.uniform(*np.log(LIGHT))) * (1 + rng.uniform(-TINT, TINT, 3))
    share = cv2.GaussianBlur(pasted.astype(np.float32), (FEATHER_PX, FEATHER_PX), 0)[..., None]
    front = np.clip(donor.image * gain, 0, 255)
    image = (scene.image + (front - scene.image) * share).round().astype(np.uint8)
    class_ids = [donor.class_ids[number] for number in chosen]
    for class_id, outline in zip(scene.class_ids, scene.polygons, strict=True):
        parts = _visible_parts(outline, pasted, class_id in thin)
        class_ids += [class_id] * len(parts)
        outlines += parts
    return Scene(image, class_ids, outlines)


def _visible_parts(outline: np.ndarray, pasted: np.ndarray, is_thin: bool) -> list[np.ndarray]:
    """Return the outlines of what is left of an object behind what is pasted, uint8 (S, S)."""
    own = draw_index_map([outline], len(pasted)).astype(np.uint8)
    seen = own & ~pasted & 1
    total, left = np.count_nonzero(own), np.count_nonzero(seen)
    if left == total:
        return [outline]
    if left < MIN_VISIBLE * total and not is_thin:
        return []
    contours, _ = cv2.findContours(seen, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    parts = [contour[:, 0].astype(np.float64) + 0.5 for contour in contours if len(contour) >= 3]
    if not is_thin:
        return [max(parts, key=len)] if parts else []
    sides = [sorted(np.ptp(part, axis=0), reverse=True) for part in parts]
    return [part for part, side in zip(parts, sides, strict=True) if (side >= np.array(MIN_PIECE_PX)).all()]
