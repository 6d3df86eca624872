"""A small data set on disk, shared by the tests of the data set and its loader."""

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from tests.data.caches import place_in
from tests.data.pictures import Apart, rectangle
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.dataset import SegmentationDataset, read_photos
from yolo_seg_ddp.data.dataset_yaml import load_dataset_yaml
from yolo_seg_ddp.data.labels import format_yolo_label
from yolo_seg_ddp.data.windows import WindowConfig, WindowedPhotos, open_windows

SIZE_PX = 64
SHAPES = [(48, 64), (64, 40), (96, 128), (64, 64), (30, 90), (50, 50), (80, 60)]
COLOURS = [(250, 20, 20), (20, 250, 20)]
BARS = [rectangle(0.1, 0.2, 0.6, 0.5), rectangle(0.3, 0.6, 0.9, 0.9)]


@pytest.fixture(scope="module")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write seven pictures of two bars each; the last has no label file."""
    root = tmp_path_factory.mktemp("set")
    (root / "images").mkdir()
    (root / "labels").mkdir()
    for number, (height, width) in enumerate(SHAPES):
        image = np.random.default_rng(number).integers(50, 70, (height, width, 3), dtype=np.uint8)
        for bar, colour in zip(BARS, COLOURS, strict=True):
            (left, top), (right, bottom) = np.rint(bar[[0, 2]] * (width, height)).astype(int)
            image[top:bottom, left:right] = colour
        cv2.imwrite(str(root / "images" / f"{number}.png"), image[..., ::-1])
        if number < len(SHAPES) - 1:
            (root / "labels" / f"{number}.txt").write_text(format_yolo_label(enumerate(BARS)))
    (root / "data.yaml").write_text("train: images\nnames: [first, second]\n")
    return root


@pytest.fixture
def plain_set(photo_folder: Path) -> SegmentationDataset:
    return SegmentationDataset(
        read_photos(load_dataset_yaml(photo_folder / "data.yaml"), "train"), SIZE_PX
    )


@pytest.fixture
def augmented_set(plain_set: SegmentationDataset) -> SegmentationDataset:
    return SegmentationDataset(plain_set.photos, SIZE_PX, augment=Augmentation(), mosaic_epochs=9)


WINDOWED, WINDOWED_PX = Apart(6, size=(640, 480)), 128


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> WindowedPhotos:
    """Three windows of each photograph of WINDOWED."""
    folder = tmp_path_factory.mktemp("windows")
    photos = []
    for number, photo in enumerate(WINDOWED.photos):
        cv2.imwrite(str(folder / f"{number}.png"), WINDOWED.whole(number)[..., ::-1])
        photos.append(replace(photo, file=folder / f"{number}.png"))
    return open_windows(
        photos, WINDOWED_PX, WindowConfig(3, 0.5, 1.0), 0, place_in(folder / ".cache", [])
    )


def windows_as_samples(
    windowed: WindowedPhotos, config: Augmentation, mosaic_epochs: int = 9
) -> SegmentationDataset:
    photos = list(windowed.windows.photos)
    return SegmentationDataset(
        photos, WINDOWED_PX, windowed=windowed, augment=config, mosaic_epochs=mosaic_epochs
    )
