"""The options of the augmentation that are left to the labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from utils.common.errors import UsageError
from utils.data.augment import AugmentConfig
from utils.data.drawn_wires import band
from utils.data.labels import Photo
from utils.training.augmentation import choose_augmentation
from utils.training.config import TrainConfig

NAMES = ("pole", "wire")
EVERYWHERE, LEVEL = np.linspace(0, np.pi, 24, endpoint=False), np.zeros(24)
FROM_ABOVE = (90.0, 0.5, 0.5)


@pytest.fixture
def photo_file(tmp_path: Path) -> Path:
    file = tmp_path / "a.jpg"
    Image.new("RGB", (400, 200)).save(file)
    return file


def strips(file: Path, directions: np.ndarray, width_px: float = 1.0, class_id: int = 1) -> Photo:
    """Label strips of 100 pixels, each with one of the directions in pixels of the photograph."""
    centre = np.array([200, 100])
    lines = [centre + np.outer([-50, 50], (np.cos(angle), np.sin(angle))) for angle in directions]
    outlines = [band(line, width_px) / (400, 200) for line in lines]
    return Photo(file, np.full(len(outlines), class_id, np.int64), outlines)


def choose(photos: list[Photo], **options: float) -> tuple[tuple[float, float, float], list[str], AugmentConfig]:
    said: list[str] = []
    augment = choose_augmentation(TrainConfig(**options), photos, NAMES, said.append)  # type: ignore[arg-type]
    return (augment.degrees, augment.flipud, augment.draw_wires), said, augment


@pytest.mark.parametrize(
    ("directions", "width_px", "options", "chosen", "line"),
    [
        (EVERYWHERE, 1.0, {"windows": 8}, FROM_ABOVE, "training with --degrees 90 --flipud 0.5 --draw-wires 0.5"),
        (EVERYWHERE, 10.0, {"windows": 8}, (90.0, 0.5, 0.0), "training with --degrees 90 --flipud 0.5"),
        (EVERYWHERE, 1.0, {}, (0.0, 0.0, 0.0), "--degrees 90 --flipud 0.5 --draw-wires 0.5 may help"),
        (EVERYWHERE, 1.0, {"windows": 8, "degrees": 0, "draw_wires": 0}, (0.0, 0.5, 0.0), "training with --flipud 0.5"),
        (EVERYWHERE[:10], 1.0, {"windows": 8}, (0.0, 0.0, 0.0), None),  # too few objects to say anything
        (LEVEL, 1.0, {"windows": 8}, (0.0, 0.0, 0.0), None),
        (LEVEL + np.pi / 2, 1.0, {"windows": 8, "degrees": 5}, (5.0, 0.0, 0.0), None),
    ],
)
def test_unset_options_follow_from_the_directions_of_the_labelled_objects(
    photo_file: Path,
    directions: np.ndarray,
    width_px: float,
    options: dict[str, float],
    chosen: tuple[float, float, float],
    line: str | None,
) -> None:
    now, said, _ = choose([strips(photo_file, directions, width_px)], **options)
    assert now == chosen
    assert [text.split(": ")[1] for text in said if text.startswith("Labelled objects lie")] == ([line] if line else [])


def test_poles_of_a_class_of_their_own_show_that_photographs_have_an_up(photo_file: Path) -> None:
    wires, poles = strips(photo_file, EVERYWHERE), strips(photo_file, LEVEL + np.pi / 2, 10.0, class_id=0)
    assert choose([wires, poles], windows=8)[0] == (0.0, 0.0, 0.0)


def test_wires_are_drawn_as_the_thin_classes_and_refused_without_one(photo_file: Path) -> None:
    wires, poles = strips(photo_file, LEVEL), strips(photo_file, LEVEL, 10.0, class_id=0)
    _, said, augment = choose([wires, poles], draw_wires=0.3)
    assert (augment.draw_wires, augment.wire_classes, said) == (0.3, (1,), ["Wires are drawn as wire"])
    with pytest.raises(UsageError, match="no class of the training labels is as thin as wires are"):
        choose([poles], draw_wires=0.3)
    assert choose([wires, poles], paste=0.3)[2].paste == 0.3
    with pytest.raises(UsageError, match="--paste: the training labels hold no object to paste"):
        choose([wires], paste=0.3)
