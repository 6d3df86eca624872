"""Random targets and network outputs, shared by the tests of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from utils.yolo.inputs import Targets

NAMES = ("pole", "wire", "insulator")
SIZE_PX = 64
WINDOWS = {"per_photo": 4, "low_scale": 0.5, "high_scale": 1.0}


def targets_of(counts: list[int], size_px: int, seed: int = 0) -> Targets:
    """Return `counts[k]` random objects for image k: boxes of all sizes, thin ones too, each filled in the mask."""
    generator = torch.Generator().manual_seed(seed)
    number = sum(counts)
    centre = (0.1 + 0.8 * torch.rand(number, 2, generator=generator)) * size_px
    half = (0.01 + 0.3 * torch.rand(number, 2, generator=generator) ** 2) * size_px
    boxes = torch.cat([centre - half, centre + half], 1)
    boxes[::3] = (boxes[::3] / 4).floor() * 4 + torch.tensor([0, 0, 4, 4])  # some end exactly between two mask pixels
    boxes = boxes.clamp(0, size_px)
    masks = torch.zeros(len(counts), size_px // 4, size_px // 4, dtype=torch.int32)
    batch_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for row, image in enumerate(batch_index.tolist()):
        x1, y1, x2, y2 = (boxes[row] / 4).round().int().tolist()
        masks[image, y1:y2, x1:x2] = row - sum(counts[:image]) + 1
    class_ids = torch.randint(0, len(NAMES), (number,), generator=generator)
    return Targets(batch_index, class_ids, boxes, masks, size_px)


def batch_of(targets: Targets) -> dict[str, torch.Tensor]:
    """Return the batch that Ultralytics would make of the same objects."""
    boxes, masks = targets.boxes.double(), targets.masks
    classes = torch.zeros_like(masks)
    for image in range(len(masks)):
        ids = targets.class_ids[targets.batch_index == image]
        if len(ids):
            classes[image] = ids[masks[image].long() - 1]
    return {
        "batch_idx": targets.batch_index.double(),
        "cls": targets.class_ids.double()[:, None],
        "bboxes": torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1) / targets.size_px,
        "masks": masks.double(),
        "sem_masks": classes.double(),
        "img": torch.zeros(len(masks), 3, targets.size_px, targets.size_px),
    }


class Operators(TorchDispatchMode):
    """Tells `note` of each operator that PyTorch computes: the operator, its arguments and its result."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        self.note(operator, arguments, result)
        return result


def random_outputs(model: Any, batch_size: int, size_px: int, seed: int) -> dict[str, Any]:
    """Return outputs in the model's own format, as leaves with widely spread random values."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        outputs = model(torch.zeros(batch_size, 3, size_px, size_px))
    spread = {"boxes": 2.0, "scores": 1.0, "mask_coefficient": 0.5, "proto": 0.5}
    for name, scale in spread.items():
        noise = torch.randn(outputs[name].shape, generator=generator) * scale
        outputs[name] = (noise - 2 * (name == "scores")).requires_grad_()
    return outputs


def assert_same_gradients(loss: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """Each leaf's gradient of `loss` differs from that of `expected` by at most 1e-5 of its norm."""
    ours = torch.autograd.grad(loss, leaves)
    theirs = torch.autograd.grad(expected, leaves, allow_unused=True)
    for leaf, gradient, wanted in zip(leaves, ours, theirs, strict=True):
        wanted = torch.zeros_like(leaf) if wanted is None else wanted
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9
