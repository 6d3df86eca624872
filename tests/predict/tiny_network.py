"""A tiny network with random weights whose outputs are not trivial, and a data set for it."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from yolo_seg_ddp.yolo.model import build_model, save_deployable

NAMES = ("wire", "pole", "sign")
SIZE_PX = 64
WINDOWS = {"per_photo": 2, "low_scale": 0.25, "high_scale": 1.0}
GAMMA = 0.15  # of BatchNorm; at 1 the layers of a random network multiply rounding by hundreds


def smooth_data(root: Path) -> Path:
    """A data set of 4 smooth pictures, 96 x 64, with one object each; return its YAML."""
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / split / kind).mkdir(parents=True)
        for index in range(2):
            rough = np.random.default_rng((index, len(split))).integers(0, 255, (4, 6, 3), np.uint8)
            picture = cv2.resize(rough, (96, 64), interpolation=cv2.INTER_CUBIC)
            cv2.imwrite(str(root / split / "images" / f"{index}.png"), picture)
            (root / split / "labels" / f"{index}.txt").write_text(
                f"{index} 0.1 0.1 0.6 0.1 0.6 0.7 0.1 0.7\n"
            )
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(NAMES))
    (root / "dataset.yaml").write_text(f"train: train/images\nval: val/images\nnames:\n{names}")
    return root / "dataset.yaml"


def tiny_weights(
    path: Path, windows: dict[str, float] | None = None, prototype_scale: float = 1
) -> Path:
    """Write a .pt file whose outputs differ between anchors, classes and pictures, but do not
    multiply rounding.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = build_model("yolov8n-seg.yaml", NAMES)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = 1  # the statistics of the one batch below
                layer.weight.data.fill_(GAMMA)
        model.train()(smooth_images(8))
        model.eval()
        head: Any = model.model[-1]
        for branches, mean, spread in ((head.cv2, 0, 0.2), (head.cv3, -0.5, 1.5), (head.cv4, 0, 1)):
            for branch in branches:
                _spread(model, branch[-1], mean, spread)
        _spread(model, head.proto.cv3.conv, 0, prototype_scale)
    save_deployable(
        path,
        model,
        {},
        img_size=SIZE_PX,
        data="made up",
        **({"windows": windows} if windows else {}),
    )
    return path


@torch.no_grad()
def _spread(model: nn.Module, layer: nn.Conv2d, mean: float, spread: float) -> None:
    """Scale a convolution so that its outputs on smooth pictures have this mean and standard
    deviation.
    """
    found: list[torch.Tensor] = []
    hook = layer.register_forward_hook(lambda _, __, output: found.append(output))
    model(smooth_images(8))
    hook.remove()
    (outputs,) = found
    centre = outputs.mean((0, 2, 3))
    scale = spread / (outputs - centre[:, None, None]).std()
    bias = torch.zeros_like(centre) if layer.bias is None else layer.bias
    layer.weight *= scale
    layer.bias = nn.Parameter(mean - scale * (centre - bias)) if layer.bias is not None else None


def smooth_images(count: int, size_px: int = SIZE_PX) -> torch.Tensor:
    """Return (count, 3, size_px, size_px) in 0..1.

    White noise would average out: rounding then decides deep layers.
    """
    colours = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(5))
    return F.interpolate(colours, size_px, mode="bicubic").clamp(0, 1)
