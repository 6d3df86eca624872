"""Augmentation: mosaic, random view (zoom, shift, flips), mixup, copy-paste, pasted objects and
colours.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import cv2
import numpy as np

from yolo_seg_ddp.data.labels import ROUGH, Photo
from yolo_seg_ddp.data.polygons import (
    draw_index_map,
    large_to_small,
    polygon_boxes,
    transform_points,
)
from yolo_seg_ddp.utils.options import FRACTION, Options, option

# both parameters of the beta distribution of the share: 0.5 +- 0.06, as in YOLOv8
MIXUP_BETA = 32.0
MAX_COVERED = 0.3  # largest share of any object's box that a pasted object may cover, as in YOLOv8
# largest share of a pasted object that may lie under objects that are not pasted with it
MAX_HIDDEN = 0.05
# Of objects of another photograph:
LIGHT = (0.3, 1.6)  # gain of what is pasted: a pole may be of light wood or black
TINT = 0.15  # +- relative, of each colour
MIN_VISIBLE = 0.25  # share of an object that stays visible; with less the object loses its label
MIN_PIECE_PX = (12.0, 1.0)  # longer and shorter side of a visible part of a wire
FEATHER_PX = 3  # side of the filter that softens the edge

COLOUR_CHOICES = ("auto", "loader", "device")
HUES = 180  # steps of OpenCV's hue circle in 8 bits
MAX_HUE_GAIN = 255 / (HUES - 1)  # with a larger gain hues overflow 8 bits


@dataclass(frozen=True)
class AugmentOptions(Options):
    """Strengths of the augmentation, with names and defaults of the recipe that trained YOLOv8's
    weights.
    """

    group: ClassVar[str] = "augmentation"

    mosaic: float = option(1.0, "probability of a mosaic of four photographs", **FRACTION)
    close_mosaic: int = option(
        10,
        "last epochs without mosaic, --mixup and the options below it; the first epoch always has "
        "them",
        at_least=0,
        needs="mosaic or mixup or copy_paste or paste or draw_wires",
    )
    scale: float = option(0.5, "random zoom, +- fraction", **FRACTION)
    translate: float = option(0.1, "random shift, +- fraction of the image", **FRACTION)
    degrees: float | None = option(
        None,
        "random rotation, +- degrees; unset: 0, or 90 with --windows and objects that lie in many "
        "directions",
        at_least=0,
    )
    shear: float = option(0.0, "random shear along both axes, +- degrees", at_least=0, below=45)
    fliplr: float = option(0.5, "probability of a left-right flip", **FRACTION)
    flipud: float | None = option(
        None,
        "probability of an up-down flip; unset: 0, or 0.5 with --windows and objects that lie in "
        "many directions",
        **FRACTION,
    )
    colour: str = option(
        "auto",
        "where colours are varied; auto: on the device if it is a GPU",
        choices=COLOUR_CHOICES,
        needs="hsv_h or hsv_s or hsv_v",
    )
    hsv_h: float = option(0.015, "random hue, +- fraction", **FRACTION)
    hsv_s: float = option(0.7, "random saturation, +- fraction", **FRACTION)
    hsv_v: float = option(0.4, "random brightness, +- fraction", **FRACTION)
    mixup: float = option(0.0, "probability of mixup of two pictures", **FRACTION)
    copy_paste: float = option(0.0, "probability of a mirrored copy of each object", **FRACTION)
    paste: float = option(0.0, "probability of objects of other photographs", **FRACTION)
    draw_wires: float | None = option(
        None,
        "probability of drawn wires, with labels; unset: 0, or 0.5 with --windows, a thin class "
        "and objects that lie in "
        "many directions",
        **FRACTION,
    )

    def mosaic_epochs(self, epochs: int) -> int:
        """Return how many of a run's epochs use mosaic: all but the last `close_mosaic`, but at
        least the first.
        """
        return max(epochs - self.close_mosaic, 1)


@dataclass(frozen=True)
class Augmentation(AugmentOptions):
    """The augmentation of a data set: its options, of which what is unset is 0, and its thin
    classes.
    """

    wire_classes: tuple[int, ...] = ()  # thin ones, whose objects are not pasted
    # of the drawn wires: those of wire_classes whose labels are straight
    drawn_classes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scene:
    """An image, uint8 (S, S, 3) RGB, with the class ids and outlines, float64 (V, 2) pixels, of its
    objects.

    Among them are the regions to ignore, with the codes of `Photo.with_regions`. No region and no
    rough outline is pasted.
    """

    image: np.ndarray
    class_ids: list[int]
    polygons: list[np.ndarray]


Draw = Callable[[np.ndarray, np.ndarray], None]  # draws on a canvas (S, S, 4) through a (2, 3) map


@dataclass(frozen=True)
class Tile:
    """A photograph or a window of one, to be drawn: its labels, its (height, width), and how to
    draw it.
    """

    labels: Photo
    shape: tuple[int, int]
    draw: Draw


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random number generator of one sample in one epoch."""
    return np.random.default_rng((seed, epoch, index))


def letterbox_matrix(height: int, width: int, size_px: int) -> np.ndarray:
    """Return the (2, 3) map that fits a (height, width) photograph into a square, centred."""
    scale = size_px / max(height, width)
    return np.array(
        [[scale, 0, (size_px - width * scale) / 2], [0, scale, (size_px - height * scale) / 2]]
    )


def mosaic_matrices(
    shapes: list[tuple[int, int]], size_px: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Place four photographs of (height, width) around a random centre of a canvas of twice the
    size.

    Returns one (2, 3) map per photograph into canvas pixels, where its long side is `size_px`.
    """
    centre_x, centre_y = rng.uniform(size_px / 2, 1.5 * size_px, 2)
    matrices = []
    for tile, (height, width) in enumerate(shapes):
        scale = size_px / max(height, width)
        left = centre_x - width * scale if tile % 2 == 0 else centre_x
        top = centre_y - height * scale if tile < 2 else centre_y
        matrices.append(np.array([[scale, 0, left], [0, scale, top]]))
    return matrices


def random_view(
    canvas_px: int, size_px: int, config: Augmentation, rng: np.random.Generator
) -> np.ndarray:
    """Return a random (2, 3) map from a canvas into the (size_px, size_px) output; the centre stays
    near the centre.
    """
    degrees = config.degrees or 0.0
    angle = math.radians(rng.uniform(-degrees, degrees))
    gain = rng.uniform(1 - config.scale, 1 + config.scale)
    shift_x, shift_y = rng.uniform(0.5 - config.translate, 0.5 + config.translate, 2) * size_px
    cosine, sine = math.cos(angle) * gain, math.sin(angle) * gain
    linear = np.array([[cosine, sine], [-sine, cosine]])
    if rng.random() < config.fliplr:
        linear[0] *= -1
        shift_x = size_px - shift_x
    if rng.random() < (config.flipud or 0.0):
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


def seen_window(
    matrix: np.ndarray, shape: tuple[int, int], size_px: int, margin_px: int = 2
) -> tuple[range, range]:
    """Return the rows and columns of a (height, width) image that are visible through a (2, 3) map
    in a square.

    Includes `margin_px` more on each side for interpolation. Both are empty if nothing is visible.
    """
    square = np.array([[0, 0], [size_px, 0], [size_px, size_px], [0, size_px]], np.float64)
    seen = transform_points(square, cv2.invertAffineTransform(matrix))
    low = np.floor(seen.min(0)).astype(int) - margin_px
    high = np.ceil(seen.max(0)).astype(int) + margin_px
    columns, rows = (
        range(max(start, 0), min(stop, side))
        for start, stop, side in zip(low.tolist(), high.tolist(), shape[::-1], strict=True)
    )
    return (rows, columns) if rows and columns else (range(0), range(0))


def warp_into(output: np.ndarray, image: np.ndarray, matrix: np.ndarray) -> None:
    """Draw `image` (H, W, 3 or 4) through a (2, 3) map of pixel corners into `output`; leave all
    other pixels unchanged.

    `output` is (S, S, 3) or (S, S, 4); the fourth channel is ignored.
    """
    height, width = image.shape[:2]
    corners = transform_points(
        np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float64), matrix
    )
    x0, y0 = np.maximum(np.floor(corners.min(0)).astype(int), 0).tolist()
    x1, y1 = np.minimum(
        np.ceil(corners.max(0)).astype(int), (output.shape[1], output.shape[0])
    ).tolist()
    if x1 <= x0 or y1 <= y0:
        return
    # OpenCV maps pixel centres, `matrix` pixel corners: shift by half a pixel on both sides.
    centred = matrix.copy()
    centred[:, 2] += matrix[:, :2] @ np.full(2, 0.5) - 0.5 - np.array([x0, y0])
    cv2.warpAffine(
        cv2.cvtColor(image, cv2.COLOR_RGB2RGBA) if output.shape[2] > image.shape[2] else image,
        centred,
        (x1 - x0, y1 - y0),
        dst=output[y0:y1, x0:x1],
        flags=cv2.INTER_LINEAR,
        borderMode=cv2.BORDER_TRANSPARENT,
    )


def blend(first: Scene, second: Scene, rng: np.random.Generator) -> Scene:
    """Mix two images of equal size with a random share near one half and keep the labels of both.

    Mixup (arXiv 1710.09412) as in YOLOv8: the share is drawn from beta(32, 32), and all labels keep
    their full weight.
    """
    share = float(rng.beta(MIXUP_BETA, MIXUP_BETA))
    image = cv2.addWeighted(first.image, share, second.image, 1 - share, 0)
    return Scene(image, first.class_ids + second.class_ids, first.polygons + second.polygons)


def paste_mirrored(scene: Scene, probability: float, rng: np.random.Generator) -> Scene:
    """Paste mirrored objects into the image where there is room, each with `probability`.

    Copy-paste (arXiv 2012.07177) in YOLOv8's flip mode: an object has room if its mirrored box
    covers less than 30 % of every object's box. Two additional rules keep pixels and labels
    consistent: the smaller object lies on top, as in the masks, and an object is pasted only
    together with the objects on top of it.
    """
    size_px = scene.image.shape[1]
    order = [
        number for number in large_to_small(scene.polygons).tolist() if scene.class_ids[number] >= 0
    ]
    polygons = [scene.polygons[position] for position in order]
    mirrored = [polygon * (-1, 1) + (size_px, 0) for polygon in polygons]
    wanted = rng.random(len(polygons)) < probability
    wanted &= np.array([scene.class_ids[position] < ROUGH for position in order], bool)
    has_room = (_covered(polygon_boxes(mirrored), polygon_boxes(polygons)) < MAX_COVERED).all(1)
    owner = draw_index_map(polygons, size_px)
    chosen = _with_all_on_top(np.flatnonzero(wanted & has_room).tolist(), polygons, owner)
    if not chosen:
        return scene
    is_chosen = np.isin(np.arange(len(polygons) + 1), np.array(chosen) + 1)
    mirrored_owner = owner[:, ::-1]
    # a larger number is a smaller object
    pasted = is_chosen[mirrored_owner] & (mirrored_owner >= owner)
    image = cv2.copyTo(cv2.flip(scene.image, 1), pasted.astype(np.uint8), scene.image.copy())
    class_ids = scene.class_ids + [scene.class_ids[order[position]] for position in chosen]
    return Scene(image, class_ids, scene.polygons + [mirrored[position] for position in chosen])


def _covered(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the share of each of `others` (M, 4) that each of `boxes` (N, 4) covers: (N, M)."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return (high - low).clip(0).prod(-1) / np.maximum(
        (others[:, 2:] - others[:, :2]).prod(-1), 1e-9
    )


def _with_all_on_top(chosen: list[int], polygons: list[np.ndarray], owner: np.ndarray) -> list[int]:
    """Drop chosen objects that lie under one that is not chosen, until none is left that does;
    `owner` is the index map.
    """
    on_top = {}
    for position in chosen:
        polygon = polygons[position]
        left, top = np.floor(polygon.min(0)).astype(int).clip(0)
        around = owner[
            top : top + math.ceil(np.ptp(polygon[:, 1])) + 1,
            left : left + math.ceil(np.ptp(polygon[:, 0])) + 1,
        ]
        inside = draw_index_map([polygon - (left, top)], max(around.shape))[
            : around.shape[0], : around.shape[1]
        ]
        seen = around[inside > 0]
        counts = np.bincount(seen, minlength=len(polygons) + 1)
        on_top[position] = set((np.flatnonzero(counts > MAX_HIDDEN * len(seen)) - 1).tolist()) - {
            position
        }
    while True:
        kept = [position for position in chosen if on_top[position] <= set(chosen)]
        if len(kept) == len(chosen):
            return kept
        chosen = kept


def paste_objects(
    scene: Scene, donor: Scene, thin: tuple[int, ...], rng: np.random.Generator
) -> Scene:
    """Paste the donor's objects in front of the scene, except those of thin classes; hidden parts
    lose their labels.
    """
    size_px = len(scene.image)
    chosen = [
        number
        for number, code in enumerate(donor.class_ids)
        if 0 <= code < ROUGH and code not in thin
    ]
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
        parts = (
            [outline] if class_id < 0 else _visible_parts(outline, pasted, class_id % ROUGH in thin)
        )
        class_ids += [class_id] * len(parts)
        outlines += parts
    return Scene(image, class_ids, outlines)


def _visible_parts(outline: np.ndarray, pasted: np.ndarray, is_thin: bool) -> list[np.ndarray]:
    """Return the outlines of the parts of an object that pasted objects leave visible; pasted:
    uint8 (S, S), 1 where they are.

    Of a thin object all parts that are long enough count, of another object only the largest part.
    """
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
    return [
        part
        for part, side in zip(parts, sides, strict=True)
        if (side >= np.array(MIN_PIECE_PX)).all()
    ]


def draw_gains(config: AugmentOptions, rng: np.random.Generator) -> np.ndarray:
    """Draw random gains of hue, saturation and value: float64 (3,); 1 where the option is 0."""
    return 1 + rng.uniform(-1, 1, 3) * (config.hsv_h, config.hsv_s, config.hsv_v)


def jitter_colour(image: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Multiply hue, saturation and value of an RGB uint8 image (H, W, 3) by `gains` (3,)."""
    if (gains == 1).all():
        return image
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV)
    hue_gain, saturation_gain, value_gain = gains.tolist()
    if hue_gain > MAX_HUE_GAIN:
        circle = (np.arange(256) * hue_gain % HUES).astype(np.uint8)
        hsv[..., 0] = cv2.LUT(hsv[..., 0], circle)
        hue_gain = 1.0
    # Rounds and saturates at 255, six times as fast as a table for each channel; hues from 180 on
    # wrap around.
    hsv = cv2.transform(hsv, np.diag([hue_gain, saturation_gain, value_gain]))
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)
