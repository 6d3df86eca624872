"""Made-up scenes: true masks, and what a detector would find of them in each tile."""

from collections.abc import Iterable, Sequence

import cv2
import numpy as np

from yolo_seg_ddp.predict.merge_tiles import TileDetection
from yolo_seg_ddp.predict.regions import Corners, Region, Runs

Truth = tuple[int, np.ndarray]  # class, mask bool (H, W)


def stroke(
    size: tuple[int, int], points: Sequence[tuple[float, float]], width_px: int
) -> np.ndarray:
    """Draw a line through points (x, y) in a photograph of (width,
    height): bool (height, width).
    """
    canvas = np.zeros((size[1], size[0]), np.uint8)
    cv2.polylines(canvas, [np.rint(points).astype(np.int32)], False, 1, width_px)
    return canvas.view(bool)


def wires_and_pole(size: tuple[int, int]) -> list[Truth]:
    """Return three diagonal wires, 8 px wide and 50 px apart, across the photograph, and a pole
    over three rows of tiles.
    """
    offsets = (0, 67, 134)  # along x; the wires rise by 48 degrees
    wires = [(0, stroke(size, [(100 + dx, 880), (838 + dx, 60)], 8)) for dx in offsets]
    return [*wires, (1, stroke(size, [(1000, 40), (1000, 500)], 30))]


def blur_edges(mask: np.ndarray, rng: np.random.Generator, share: float) -> np.ndarray:
    """Change a share of the pixels on both sides of a mask's edge."""
    edge = cv2.morphologyEx(
        mask.view(np.uint8), cv2.MORPH_GRADIENT, np.ones((3, 3), np.uint8)
    ).view(bool)
    return mask ^ (edge & (rng.random(mask.shape) < share))


def seen_in_tiles(
    truth: Iterable[Truth],
    tiles: list[Corners],
    seed: int = 0,
    *,
    share: float = 0.02,
    short_px: int = 3,
    split: bool = True,
) -> list[TileDetection]:
    """Return what a detector finds in each tile: a piece for each connected part, or for each
    object unless `split`.

    A share of the pixels at the edges are wrong, and a piece ends up to `short_px` before its
    tile's border.
    """
    rng = np.random.default_rng(seed)
    pieces = []
    for number, (left, top, right, bottom) in enumerate(tiles):
        for class_id, mask in truth:
            part = mask[top:bottom, left:right].astype(np.uint8)
            count, labels = cv2.connectedComponents(part) if split else (2, part)
            for label in range(1, count):
                seen = blur_edges(labels == label, rng, share)
                x1, y1, x2, y2 = rng.integers(0, short_px + 1, 4)
                for border in (
                    seen[:y1],
                    seen[:, :x1],
                    seen[len(seen) - y2 :],
                    seen[:, seen.shape[1] - x2 :],
                ):
                    border[:] = False
                pieces += made_up_piece(
                    number, class_id, float(rng.uniform(0.3, 0.9)), seen, left, top
                )
    return pieces


def made_up_piece(
    tile: int, class_id: int, score: float, mask: np.ndarray, left: int = 0, top: int = 0
) -> list[TileDetection]:
    """Return the piece with this mask, its upper left pixel at (left, top);
    none for an empty mask.
    """
    runs = Runs.of(mask, left, top)
    return (
        [TileDetection(tile, class_id, score, np.array(runs.corners, np.float32), runs)]
        if not runs.is_empty
        else []
    )


def iou_of(region: Region, mask: np.ndarray) -> float:
    """Return the IoU of a region with a true mask (H, W)."""
    rows, columns = region.mask.shape
    there = mask[region.top : region.top + rows, region.left : region.left + columns]
    shared = np.count_nonzero(there & region.mask)
    return shared / (np.count_nonzero(mask) + np.count_nonzero(region.mask) - shared)
