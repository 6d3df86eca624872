"""Synthetic training batches for measuring speed: no files, no decoding, targets shaped like those
of a power line.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from yolo_seg_ddp.data.augment import AugmentOptions, draw_gains
from yolo_seg_ddp.data.dataset import Batch, Sample, collate
from yolo_seg_ddp.data.target_masks import draw_masks

_DIFFERENT = 16  # images: drawing one takes 10 ms, and `--batch-size auto` asks for thousands
_WIRE_EVERY = 4  # every fourth object is a wire: long, thin, with a large box
_OUTLINE_POINTS = 12
_SMALLEST_SIDE, _LARGEST_SIDE = 0.02, 0.4  # of the image: from an insulator to a near building


def synthetic_batch(
    batch_size: int,
    size_px: int,
    num_classes: int,
    *,
    objects_per_image: int = 20,
    seed: int = 0,
    colours: AugmentOptions | None = None,
) -> Batch:
    """Make a batch of noise images with `objects_per_image` outlines each. Equal arguments give
    equal batches.

    A batch of more than 16 images repeats them.

    With `colours` the batch has gains that the device applies, as in a training that varies colours
    there.
    """
    rng = np.random.default_rng((seed, batch_size, size_px))
    different = min(batch_size, _DIFFERENT)
    samples = [
        _sample(index, size_px, num_classes, objects_per_image, rng) for index in range(different)
    ]
    samples = [samples[index % different] for index in range(batch_size)]
    if colours is not None:
        samples = [
            replace(sample, colour_gains=tuple(draw_gains(colours, rng).tolist()))
            for sample in samples
        ]
    return collate(samples)


def training_colours(device: torch.device) -> AugmentOptions | None:
    """Return `colours` as a training on `device` has it by default: a GPU varies colours itself,
    for a CPU the loader does.
    """
    return AugmentOptions() if device.type == "cuda" else None


def _sample(
    index: int, size_px: int, num_classes: int, num_objects: int, rng: np.random.Generator
) -> Sample:
    outlines = [
        _wire(rng) if number % _WIRE_EVERY == 0 else _blob(rng) for number in range(num_objects)
    ]
    polygons = [(outline.clip(0, 1) * size_px).astype(np.float32) for outline in outlines]
    # The largest come first: the last one drawn lies on top, as in the real data set.
    polygons.sort(key=lambda polygon: -float(np.prod(np.ptp(polygon, axis=0))))
    boxes = np.array(
        [[*polygon.min(0), *polygon.max(0)] for polygon in polygons], np.float32
    ).reshape(-1, 4)
    return Sample(
        index=index,
        image=rng.integers(0, 256, (size_px, size_px, 3), np.uint8),
        class_ids=rng.integers(num_classes, size=num_objects),
        boxes=boxes,
        masks=draw_masks(polygons, size_px),
        polygons=polygons,
        inner_size=(size_px, size_px),
    )


def _wire(rng: np.random.Generator) -> np.ndarray:
    """Return the outline of a slanted strip, (4, 2) as fractions of the image."""
    left, right = rng.uniform(0, 0.3), rng.uniform(0.6, 1)
    start_y, end_y = rng.uniform(0.05, 0.95, 2)
    half_width = rng.uniform(0.002, 0.006)
    upper = [(left, start_y - half_width), (right, end_y - half_width)]
    return np.array([*upper, (right, end_y + half_width), (left, start_y + half_width)])


def _blob(rng: np.random.Generator) -> np.ndarray:
    """Return the outline of an ellipse with log-uniform sides, (12, 2) as
    fractions of the image.
    """
    sides = np.exp(rng.uniform(math.log(_SMALLEST_SIDE), math.log(_LARGEST_SIDE), 2))
    angles = np.linspace(0, 2 * math.pi, _OUTLINE_POINTS, endpoint=False)
    return (
        rng.uniform(sides / 2, 1 - sides / 2)
        + np.stack([np.cos(angles), np.sin(angles)], -1) * sides / 2
    )
