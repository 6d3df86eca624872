"""Augmentation of one sample as a pure function of (seed, epoch, index): any worker count and world size see equal pixels.

Geometry is one affine map per photograph, straight from the stored pixels into the output: mosaic, scale, translation,
rotation, shear and flips cost a single interpolation. Polygons go through the same map at their own vertices.

What is off draws no random number: with an option at 0 every sample has the bytes it had before the option existed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import cv2
import numpy as np

FILL = 114  # the grey YOLO pads with
SHIFT_BITS = 4  # cv2.fillPoly takes fixed-point coordinates: 1/16 of a pixel
MIN_SIDE_PX = 2.0  # smaller outlines after augmentation teach nothing
MIN_VISIBLE_FRACTION = 0.01  # of the outline's box area; YOLOv8's threshold for outlines
MIXUP_BETA = 32.0  # both parameters of the beta distribution of the share, as in YOLOv8: 0.5 +- 0.06
MAX_COVERED = 0.3  # of the box of any object there, for an object to be pasted; YOLOv8's
MAX_HIDDEN = 0.05  # of an object may lie under others that are not pasted with it


@dataclass(frozen=True)
class AugmentConfig:
    """Strengths, named and defaulted as in the recipe YOLOv8's weights were trained with."""

    mosaic: float = 1.0  # probability
    degrees: float = 0.0  # rotation, +- degrees
    translate: float = 0.1  # +- fraction of the image size
    scale: float = 0.5  # gain in [1 - scale, 1 + scale]
    fliplr: float = 0.5  # probability
    flipud: float = 0.0  # probability
    hsv_h: float = 0.015  # +- fraction of the hue circle
    hsv_s: float = 0.7  # +- relative
    hsv_v: float = 0.4  # +- relative
    shear: float = 0.0  # +- degrees, along x and along y
    mixup: float = 0.0  # probability
    copy_paste: float = 0.0  # probability of each object that has room to be pasted


@dataclass(frozen=True)
class Scene:
    """A picture in the making: image uint8 (S, S, 3) RGB, and outlines float64 (V, 2) in its pixels with their classes."""

    image: np.ndarray
    class_ids: list[int]
    polygons: list[np.ndarray]


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random numbers that belong to one sample of one epoch."""
    return np.random.default_rng((seed, epoch, index))


def letterbox_matrix(height: int, width: int, size_px: int) -> np.ndarray:
    """Return the (2, 3) map that centres a (height, width) photograph in a square, touching its border."""
    scale = size_px / max(height, width)
    return np.array([[scale, 0, (size_px - width * scale) / 2], [0, scale, (size_px - height * scale) / 2]])


def mosaic_matrices(shapes: list[tuple[int, int]], size_px: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Place four photographs of (height, width) around a random centre of a canvas of twice the size.

    Returns one (2, 3) map per photograph, into canvas pixels; each photograph has its long side at `size_px`.
    """
    centre_x, centre_y = rng.uniform(size_px / 2, 1.5 * size_px, 2)
    matrices = []
    for tile, (height, width) in enumerate(shapes):
        scale = size_px / max(height, width)
        left = centre_x - width * scale if tile % 2 == 0 else centre_x
        top = centre_y - height * scale if tile < 2 else centre_y
        matrices.append(np.array([[scale, 0, left], [0, scale, top]]))
    return matrices


def random_view(canvas_px: int, size_px: int, config: AugmentConfig, rng: np.random.Generator) -> np.ndarray:
    """Return a random (2, 3) map from a canvas (its centre stays near the centre) into the (size_px, size_px) output."""
    angle = math.radians(rng.uniform(-config.degrees, config.degrees))
    gain = rng.uniform(1 - config.scale, 1 + config.scale)
    shift_x, shift_y = rng.uniform(0.5 - config.translate, 0.5 + config.translate, 2) * size_px
    cosine, sine = math.cos(angle) * gain, math.sin(angle) * gain
    linear = np.array([[cosine, sine], [-sine, cosine]])
    if rng.random() < config.fliplr:
        linear[0] *= -1
        shift_x = size_px - shift_x
    if rng.random() < config.flipud:
        linear[1] *= -1
        shift_y = size_px - shift_y
    if config.shear:
        along_x, along_y = np.tan(np.radians(rng.uniform(-config.shear, config.shear, 2)))
        linear = np.array([[1, along_x], [along_y, 1]]) @ linear
    offset = np.array([shift_x, shift_y]) - linear @ np.full(2, canvas_px / 2)
    return np.hstack([linear, offset[:, None]])


def compose(outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Return the (2, 3) map that applies `inner`, then `outer`."""
    return np.hstack([outer[:, :2] @ inner[:, :2], outer[:, :2] @ inner[:, 2:] + outer[:, 2:]])


def seen_window(matrix: np.ndarray, shape: tuple[int, int], size_px: int) -> tuple[range, range]:
    """Return the rows and columns of an image of (height, width) that a (2, 3) map shows in a square of `size_px`.

    Some more on each side, so that interpolation finds what it needs; both are empty when nothing is seen.
    """
    square = np.array([[0, 0], [size_px, 0], [size_px, size_px], [0, size_px]], np.float64)
    seen = transform_points(square, cv2.invertAffineTransform(matrix))
    low = np.floor(seen.min(0)).astype(int) - 2
    high = np.ceil(seen.max(0)).astype(int) + 2
    columns, rows = (
        range(max(start, 0), min(stop, side))
        for start, stop, side in zip(low.tolist(), high.tolist(), shape[::-1], strict=True)
    )
    return (rows, columns) if rows and columns else (range(0), range(0))


def warp_into(output: np.ndarray, image: np.ndarray, matrix: np.ndarray) -> None:
    """Draw `image` (H, W, 3) through a (2, 3) map of pixel corners into `output`, touching only what it covers.

    `output` is (S, S, 3), or (S, S, 4), where the fourth channel means nothing.
    """
    height, width = image.shape[:2]
    corners = transform_points(np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64), matrix)
    x0, y0 = np.maximum(np.floor(corners.min(0)).astype(int), 0).tolist()
    x1, y1 = np.minimum(np.ceil(corners.max(0)).astype(int), (output.shape[1], output.shape[0])).tolist()
    if x1 <= x0 or y1 <= y0:
        return
    # OpenCV maps pixel centres; ours maps pixel corners: shift by half a pixel on both sides.
    centred = matrix.copy()
    centred[:, 2] += matrix[:, :2] @ np.full(2, 0.5) - 0.5 - np.array([x0, y0])
    cv2.warpAffine(
        cv2.cvtColor(image, cv2.COLOR_RGB2RGBA) if output.shape[2] == 4 else image,
        centred,
        (x1 - x0, y1 - y0),
        dst=output[y0:y1, x0:x1],
        flags=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_TRANSPARENT,
    )


def transform_points(points: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """Map points (N, 2) through a (2, 3) affine."""
    return points @ matrix[:, :2].T + matrix[:, 2]


def visible_outlines(
    class_ids: np.ndarray, points: np.ndarray, starts: np.ndarray, size_px: int
) -> tuple[list[int], list[np.ndarray]]:
    """Clip joined outlines to the (size_px, size_px) output, drop those of which next to nothing is left.

    All outlines of a picture go through each step at once; one by one they cost five times as much.
    """
    low, high = extents(points, starts)
    whole = (high - low).prod(1)
    lengths = np.diff(starts, append=len(points))
    owner = np.repeat(np.arange(len(starts)), lengths)
    is_near = np.repeat(((high > 0) & (low < size_px)).all(axis=1), lengths)
    points, owner = _clip(points[is_near], owner[is_near], size_px)
    if len(points) == 0:
        return [], []
    starts = _starts_of(owner)
    kept = owner[starts]
    low, high = extents(points, starts)
    sides = high - low
    # The longer side decides: a level wire is hundreds of pixels long and one high.
    is_enough = (sides.max(1) > MIN_SIDE_PX) & (sides.prod(1) >= MIN_VISIBLE_FRACTION * whole[kept])
    is_enough &= np.diff(starts, append=len(points)) >= 3
    outlines = split_outlines(points, starts)
    return class_ids[kept[is_enough]].tolist(), [outlines[position] for position in np.flatnonzero(is_enough).tolist()]


def clip_polygon(points: np.ndarray, size_px: float) -> np.ndarray:
    """Clip a polygon (N, 2) to the square [0, size_px]²; the result may be empty (0, 2)."""
    return _clip(points, np.zeros(len(points), np.int64), size_px)[0]


def _clip(points: np.ndarray, owner: np.ndarray, size_px: float) -> tuple[np.ndarray, np.ndarray]:
    """Clip joined outlines to the square [0, size_px]²; `owner` (V,), ascending, names the outline of each vertex.

    Sutherland and Hodgman 1974. Clamping vertices instead would bend every wire that leaves the picture.
    """
    for axis in (0, 1):
        for limit, sign in ((0.0, 1.0), (size_px, -1.0)):
            distance = (points[:, axis] - limit) * sign
            if len(points) and distance.min() < 0:
                points, owner = _clip_half_plane(points, owner, distance)
    return points, owner


def _clip_half_plane(points: np.ndarray, owner: np.ndarray, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    following = following_vertex(_starts_of(owner), len(owner))
    inside = distance >= 0
    crosses = inside != inside[following]
    starts, ends = points[crosses], points[following[crosses]]
    before, after = distance[crosses], distance[following[crosses]]
    # Each edge gives its start when inside, then its crossing: interleave the two and keep what is wanted.
    both = np.repeat(points, 2, axis=0)
    both[1::2][crosses] = starts + (ends - starts) * (before / (before - after))[:, None]
    wanted = np.stack([inside, crosses], axis=1).reshape(-1)
    return both[wanted], np.repeat(owner, 2)[wanted]


def join_outlines(polygons: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return all vertices (V, 2) of at least one outline in one array, and the row (N,) where each outline begins."""
    lengths = [len(polygon) for polygon in polygons]
    return np.concatenate(polygons), np.cumsum([0, *lengths[:-1]])


def split_outlines(points: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    """Return joined outlines one by one, as views."""
    bounds = [*starts.tolist(), len(points)]
    return [points[start:end] for start, end in itertools.pairwise(bounds)]


def extents(points: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest and the highest x, y (N, 2) of each of the joined outlines."""
    return np.minimum.reduceat(points, starts, axis=0), np.maximum.reduceat(points, starts, axis=0)


def _starts_of(owner: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.diff(owner, prepend=-1))


def following_vertex(starts: np.ndarray, num_vertices: int) -> np.ndarray:
    """Return for each vertex of the joined outlines the row of the next one around its outline."""
    following = np.arange(1, num_vertices + 1)
    following[np.append(starts[1:], num_vertices) - 1] = starts
    return following


def polygon_area(polygon: np.ndarray) -> float:
    """Return the area inside a simple outline (V, 2)."""
    return float(_areas([polygon])[0])


def _areas(polygons: list[np.ndarray]) -> np.ndarray:
    points, starts = join_outlines(polygons)
    x, y = points.T
    following = following_vertex(starts, len(points))
    # Rounded, so that copies of one object keep their order, whatever the last bits of their areas are.
    return (np.abs(np.add.reduceat(x * y[following] - y * x[following], starts)) / 2).round(6)


def large_to_small(polygons: list[np.ndarray]) -> np.ndarray:
    """Return the order in which outlines are drawn: the smallest comes last and so lies on top."""
    return np.argsort(-_areas(polygons), kind="stable") if polygons else np.zeros(0, np.int64)


def polygon_boxes(polygons: list[np.ndarray]) -> np.ndarray:
    """Return the boxes around outlines, xyxy: (N, 4) float64."""
    return np.hstack(extents(*join_outlines(polygons))) if polygons else np.zeros((0, 4))


def draw_index_map(polygons: list[np.ndarray], size_px: int) -> np.ndarray:
    """Fill outlines, drawn in the order given, with all pixels they touch: int32 (S, S), 0 is background."""
    index_map = np.zeros((size_px, size_px), np.int32)
    for value, polygon in enumerate(polygons, start=1):
        # fillPoly counts from pixel centres, outlines from pixel corners.
        fixed = np.rint((polygon - 0.5) * (1 << SHIFT_BITS)).astype(np.int32)
        cv2.fillPoly(index_map, [fixed], value, lineType=cv2.LINE_8, shift=SHIFT_BITS)
    return index_map


def blend(first: Scene, second: Scene, rng: np.random.Generator) -> Scene:
    """Mix two pictures of one size by a random share near one half and keep the labels of both.

    Mixup (arXiv 1710.09412) as YOLOv8 has it: the share comes from beta(32, 32), and no label is weakened.
    """
    share = float(rng.beta(MIXUP_BETA, MIXUP_BETA))
    image = cv2.addWeighted(first.image, share, second.image, 1 - share, 0)
    return Scene(image, first.class_ids + second.class_ids, first.polygons + second.polygons)


def paste_mirrored(scene: Scene, probability: float, rng: np.random.Generator) -> Scene:
    """Paste mirror images of objects into the picture where there is room, each with `probability`.

    Copy-paste (arXiv 2012.07177) in YOLOv8's flip mode: an object has room when its mirrored box covers less than 30 %
    of every box there is. Two rules of our own keep pixels and labels together: as in the masks the smaller object lies
    on top, and an object comes only with what lies on it.
    """
    size_px = scene.image.shape[1]
    order = large_to_small(scene.polygons)
    polygons = [scene.polygons[position] for position in order]
    mirrored = [polygon * (-1, 1) + (size_px, 0) for polygon in polygons]
    wanted = rng.random(len(polygons)) < probability
    has_room = (_covered(polygon_boxes(mirrored), polygon_boxes(polygons)) < MAX_COVERED).all(1)
    owner = draw_index_map(polygons, size_px)
    chosen = _with_all_on_top(np.flatnonzero(wanted & has_room).tolist(), polygons, owner)
    if not chosen:
        return scene
    is_chosen = np.isin(np.arange(len(polygons) + 1), np.array(chosen) + 1)
    mirrored_owner = owner[:, ::-1]
    pasted = is_chosen[mirrored_owner] & (mirrored_owner >= owner)  # a higher number is a smaller object
    image = cv2.copyTo(cv2.flip(scene.image, 1), pasted.astype(np.uint8), scene.image.copy())
    class_ids = scene.class_ids + [scene.class_ids[order[position]] for position in chosen]
    return Scene(image, class_ids, scene.polygons + [mirrored[position] for position in chosen])


def _covered(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return which share of each of `others` (M, 4) each of `boxes` (N, 4) covers: (N, M)."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return (high - low).clip(0).prod(-1) / np.maximum((others[:, 2:] - others[:, :2]).prod(-1), 1e-9)


def _with_all_on_top(chosen: list[int], polygons: list[np.ndarray], owner: np.ndarray) -> list[int]:
    """Drop the objects on which something lies that is not chosen, until none is left; `owner` is their index map."""
    on_top = {}
    for position in chosen:
        polygon = polygons[position]
        left, top = np.floor(polygon.min(0)).astype(int).clip(0)
        around = owner[
            top : top + math.ceil(np.ptp(polygon[:, 1])) + 1, left : left + math.ceil(np.ptp(polygon[:, 0])) + 1
        ]
        inside = draw_index_map([polygon - (left, top)], max(around.shape))[: around.shape[0], : around.shape[1]]
        seen = around[inside > 0]
        counts = np.bincount(seen, minlength=len(polygons) + 1)
        on_top[position] = set((np.flatnonzero(counts > MAX_HIDDEN * len(seen)) - 1).tolist()) - {position}
    while True:
        kept = [position for position in chosen if on_top[position] <= set(chosen)]
        if len(kept) == len(chosen):
            return kept
        chosen = kept
