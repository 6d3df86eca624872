"""A small data set and a small network for the recipe's tests."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from underwater_ir.commands.make_data import write_png
from underwater_ir.student.network import Curves, Student

SIZE_PX = 16
WIDTH = 4
NO_VGG = {"perc": 0}


def photograph(seed: int, height: int = 48, width: int = 48) -> np.ndarray:
    """Return a smooth picture with an edge, RGB uint8."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 255, (4, 4, 3)).astype(np.uint8)
    picture = np.array(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC), np.uint8)
    picture[: height // 3, : width // 2] = picture[: height // 3, : width // 2] // 2
    return picture


def write_photographs(folder: Path, number: int) -> Path:
    for index in range(number):
        write_png(folder / f"{index}.png", photograph(index))
    return folder


def write_losses(folder: Path, weights: dict[str, float] | None = None) -> Path:
    file = folder / "losses.json"
    file.write_text(json.dumps(NO_VGG if weights is None else weights))
    return file


def student(seed: int = 0, kind: type[Student | Curves] = Student, **keywords: Any) -> Any:
    """Return a small network whose gradients reach every weight: the last layer does not begin at
    zero.
    """
    torch.manual_seed(seed)
    network = kind(WIDTH, 10, 20, 10, **keywords)
    torch.nn.init.normal_(network.head.weight, std=0.05)
    return network


def batch(number: int, text_dim: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a random batch of the data set's form."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        "picture": torch.rand(number, 3, SIZE_PX, SIZE_PX, generator=rng),
        "target": torch.rand(number, 3, SIZE_PX, SIZE_PX, generator=rng),
        "masks": torch.rand(number, 10, SIZE_PX, SIZE_PX, generator=rng),
        "z_d": torch.randn(number, 20, generator=rng),
        "global_prob": torch.rand(number, 10, generator=rng).softmax(1),
        "confidence_scale": torch.rand(number, generator=rng),
    }
    return tensors | (
        {"text_embeddings": torch.randn(number, 10, text_dim, generator=rng)} if text_dim else {}
    )
