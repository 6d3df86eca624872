"""What the augmentation's unset options become: it follows from the directions and shapes of the labelled objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np

from utils.common.errors import UsageError
from utils.data.augment import AugmentConfig
from utils.data.labels import Photo
from utils.distributed import Say
from utils.evaluation.native_masks import choose_thin_classes, sizes_on_disk
from utils.training.config import TrainConfig

# For photographs from above: with --fliplr 0.5 every direction is equally likely. docs/wires.md has the measurement.
FROM_ABOVE = {"degrees": 90.0, "flipud": 0.5, "draw_wires": 0.5}
LONG = 3.0  # an object has a direction if its smallest rectangle is this many times as long as wide
MIN_OBJECTS = 20  # of a class, for its directions to say anything
MAX_AGREEMENT = 0.9  # poles of photographs from the ground have 1.0, wires of a drone that looks down 0.6 to 0.75
PHOTOS = 64  # whose objects are measured, spread over the split


def choose_augmentation(config: TrainConfig, photos: list[Photo], names: tuple[str, ...], say: Say) -> AugmentConfig:
    """Return the augmentation without unset options and with the thin classes, alike on all ranks; say what was chosen.

    Raises UsageError for `--draw-wires` where no class is thin, and for `--paste` where all are.
    """
    size_of, augment = sizes_on_disk(photos), config.augment
    thin = choose_thin_classes(("auto",), photos, size_of, names)
    unset = [name for name in FROM_ABOVE if getattr(config, name) is None and (thin or name != "draw_wires")]
    agreement = common_direction(photos, size_of) if unset else None
    if agreement is not None and agreement < MAX_AGREEMENT:
        options: dict[str, Any] = {name: FROM_ABOVE[name] for name in unset}
        typed = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in options.items())
        chosen = f"training with {typed}" if config.windows else f"{typed} may help"
        say(f"Labelled objects lie in many directions (agreement {agreement:.2f}): {chosen}")
        augment = replace(augment, **options) if config.windows else augment
    if augment.paste and all(np.isin(photo.class_ids, thin).all() for photo in photos):
        raise UsageError(
            "--paste: the training labels hold no object to paste; thin classes, such as wires, are not pasted"
        )
    if augment.draw_wires:
        if not thin:
            raise UsageError("--draw-wires: no class of the training labels is as thin as wires are")
        say(f"Wires are drawn as {', '.join(names[class_id] for class_id in thin)}")
    return replace(augment, wire_classes=thin)


def common_direction(photos: list[Photo], size_of: Callable[[int], tuple[int, int]]) -> float | None:
    """Return how well the long objects of a class agree in their direction: from 0, no common direction, to 1.

    That is the length of the mean of exp(2i direction) over the objects, for the class where it is largest: photographs in
    which only poles agree have an up, too. None if no class has MIN_OBJECTS long objects in PHOTOS of the photographs.
    """
    labelled = [index for index, photo in enumerate(photos) if len(photo.polygons)]
    of_class: dict[int, list[complex]] = {}
    for index in labelled[:: max(1, len(labelled) // PHOTOS)][:PHOTOS]:
        for class_id, outline in zip(photos[index].class_ids.tolist(), photos[index].polygons, strict=True):
            _, (width, height), angle = cv2.minAreaRect((outline * size_of(index)).astype(np.float32))
            if max(width, height) >= LONG * min(width, height):
                direction = np.radians(angle if width >= height else angle + 90)
                of_class.setdefault(class_id, []).append(np.exp(2j * direction))
    agreements = [float(abs(np.mean(values))) for values in of_class.values() if len(values) >= MIN_OBJECTS]
    return max(agreements, default=None)
