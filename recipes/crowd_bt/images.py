"""Images of comparisons as tensors: read, resized, for training varied at random."""

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from crowd_bt.comparisons import Comparison
from torch.utils.data import default_collate

from yolo_seg_ddp.data.images import ImageError, read_image, resize_area
from yolo_seg_ddp.data.loader import Key
from yolo_seg_ddp.utils.errors import UserError
from yolo_seg_ddp.utils.files import walk

# Of ImageNet's training images, as fractions of 255: what pretrained backbones expect.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")
BRIGHTNESS, CONTRAST, SATURATION = 0.2, 0.2, 0.1
GREY = np.array([0.299, 0.587, 0.114], np.float32)  # luma of ITU-R BT.601


class Pairs:
    """Training pairs: `pairs[epoch, index]` depends on (seed, epoch, index) only, not on loader
    workers or ranks.
    """

    collate: Callable[[list[Any]], Any] = staticmethod(default_collate)

    def __init__(
        self,
        rows: Sequence[Comparison],
        folder: Path,
        size_px: int,
        seed: int,
        rotation_deg: float = 15.0,
        annotators: Iterable[str] = (),
    ) -> None:
        """`annotators` are all names, in the order of their η."""
        self.rows = rows
        self.positions = {name: number for number, name in enumerate(annotators)}
        self.folder = folder
        self.size_px = size_px
        self.seed = seed
        self.rotation_deg = rotation_deg

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: Key) -> dict[str, Any]:
        """Return images uint8 (2, 3, S, S), label, weight and the annotator's position (0 in a
        crowd without names).
        """
        epoch, index = key
        row = self.rows[index]
        images = []
        for side, name in enumerate((row.img1, row.img2)):
            generator = np.random.default_rng((self.seed, epoch, index, side))
            images.append(
                to_tensor(
                    varied(
                        load_image(self.folder / name, self.size_px), generator, self.rotation_deg
                    )
                )
            )
        return {
            "images": torch.stack(images),
            "label": np.float32(row.label),
            "weight": np.float32(row.weight),
            "annotator": self.positions.get(row.annotator, 0),
        }


class Images:
    """Images to score: `images[_, index]` is (index, uint8 (3, S, S))."""

    collate: Callable[[list[Any]], Any] = staticmethod(default_collate)

    def __init__(self, names: Sequence[str], folder: Path, size_px: int) -> None:
        self.names = names
        self.folder = folder
        self.size_px = size_px

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, key: Key) -> tuple[int, torch.Tensor]:
        return key[1], to_tensor(load_image(self.folder / self.names[key[1]], self.size_px))


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder and below it; links to folders are not followed."""
    places = walk(folder, lambda subfolder: not subfolder.is_symlink())
    files = (place / entry.name for place, entries in places for entry in entries)
    return [file for file in files if file.name.lower().endswith(IMAGE_SUFFIXES)]


def load_image(path: Path, size_px: int) -> np.ndarray:
    """Return an image, resized to a square, as RGB uint8 (S, S, 3).

    Raises UserError that names the file.
    """
    try:
        return resize_area(read_image(path, min_long_side_px=size_px), size_px, size_px)
    except ImageError as error:
        raise UserError(f"{error}; replace the image, or remove it from the lists") from error


def to_tensor(image: np.ndarray) -> torch.Tensor:
    """Return RGB uint8 (H, W, 3) as a tensor (3, H, W)."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))


def normalised(images: torch.Tensor) -> torch.Tensor:
    """Return uint8 images (..., 3, H, W) as the network expects them: float32, ImageNet's mean 0
    and deviation 1.
    """
    mean, std = statistics_on(images.device)
    return (images.float() - mean) / std


@functools.lru_cache(maxsize=4)
def statistics_on(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ImageNet's mean and standard deviation of pixels from 0 to 255, float32 (3, 1, 1)
    each.
    """
    mean, std = (
        255 * torch.tensor(values)[:, None, None] for values in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return mean.to(device), std.to(device)


def varied(image: np.ndarray, generator: np.random.Generator, rotation_deg: float) -> np.ndarray:
    """Return an image flipped, rotated and with other colours at random, RGB uint8 of the same
    size.

    Corners that a rotation uncovers show the mirrored image. A rotation takes the nearest pixel:
    averages would blur.
    """
    flips = generator.random(2) < 0.5
    angle = generator.uniform(-1, 1) * rotation_deg
    brightness, contrast, saturation = 1 + generator.uniform(-1, 1, 3) * (
        BRIGHTNESS,
        CONTRAST,
        SATURATION,
    )
    image = image[:, ::-1] if flips[0] else image
    image = image[::-1] if flips[1] else image
    height, width = image.shape[:2]
    turned = np.ascontiguousarray(image)
    if angle:
        turn = cv2.getRotationMatrix2D(((width - 1) / 2, (height - 1) / 2), angle, 1.0)
        size = (width, height)
        turned = cv2.warpAffine(
            turned, turn, size, flags=cv2.INTER_NEAREST, borderMode=cv2.BORDER_REFLECT_101
        )
    colours = turned.astype(np.float32) * np.float32(brightness)
    grey = colours @ GREY  # (H, W)
    colours = (colours - grey.mean()) * np.float32(contrast) + grey.mean()
    grey = (colours @ GREY)[..., None]
    colours = (colours - grey) * np.float32(saturation) + grey
    return np.clip(np.rint(colours), 0, 255).astype(np.uint8)
