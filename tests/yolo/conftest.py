"""What the tests share: networks, random targets and network outputs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from yolo_seg_ddp.yolo.inputs import Targets
from yolo_seg_ddp.yolo.model import build_model, save_deployable

NAMES = ("pole", "wire", "insulator")
SIZE_PX = 64
WINDOWS = {"per_photo": 4, "low_scale": 0.5, "high_scale": 1.0}
WIRE_LABELS: dict[str, Any] = {
    "wires_end_at": [0],
    "wire_width": [1.0, 2.5],
    "wires_parallel": [1, 0.4],
    "wires_bent": [0],
}
FAMILIES = ("yolov8n", "yolo11n", "yolo12n", "yolo26n")


@pytest.fixture(scope="session")
def models() -> dict[str, Any]:
    """A network of each family with random weights, in training."""
    torch.manual_seed(0)
    return {family: build_model(f"{family}-seg.yaml", NAMES).train() for family in FAMILIES}


@pytest.fixture(scope="session")
def model(models: dict[str, Any]) -> Any:
    return models["yolov8n"]


@pytest.fixture(scope="session")
def saved(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each network, saved as the trainer does, with its weights beside it."""
    paths = {}
    for family, network in models.items():
        paths[family] = tmp_path_factory.mktemp(family) / "best.pt"
        info = {"epoch": 3, "metrics": {"mask_map50": 0.5}}
        facts: dict[str, Any] = {
            "img_size": SIZE_PX,
            "data": "dataset.yaml",
            "windows": WINDOWS,
            "thin_classes": [1],
        }
        save_deployable(
            paths[family], network, info, **facts, **WIRE_LABELS, label_lengths=[2, 90.5, 0.5]
        )
        torch.save(network.state_dict(), paths[family].with_name("weights.pt"))
    return paths


def targets_of(counts: list[int], size_px: int, seed: int = 0) -> Targets:
    """Return `counts[k]` random objects for image k: boxes of all sizes, thin ones too, each filled
    in the mask.
    """
    generator = torch.Generator().manual_seed(seed)
    number = sum(counts)
    centre = (0.1 + 0.8 * torch.rand(number, 2, generator=generator)) * size_px
    half = (0.01 + 0.3 * torch.rand(number, 2, generator=generator) ** 2) * size_px
    boxes = torch.cat([centre - half, centre + half], 1)
    # some end exactly between two mask pixels
    boxes[::3] = (boxes[::3] / 4).floor() * 4 + torch.tensor([0, 0, 4, 4])
    boxes = boxes.clamp(0, size_px)
    masks = torch.zeros(len(counts), size_px // 4, size_px // 4, dtype=torch.int32)
    batch_index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    for row, image in enumerate(batch_index.tolist()):
        x1, y1, x2, y2 = (boxes[row] / 4).round().int().tolist()
        masks[image, y1:y2, x1:x2] = row - sum(counts[:image]) + 1
    class_ids = torch.randint(0, len(NAMES), (number,), generator=generator)
    return Targets(batch_index, class_ids, boxes, masks, size_px)


def with_regions(targets: Targets, *regions: tuple[int, int]) -> Targets:
    """Return the targets with the left half of some images, each for a
    class, as regions to ignore.
    """
    image = torch.tensor([image for image, _ in regions])
    ignored = torch.zeros(len(regions), *targets.masks.shape[1:], dtype=torch.bool)
    ignored[..., : ignored.shape[-1] // 2] = True
    masks = targets.masks.clone()
    for number, of_image in zip(image.tolist(), ignored, strict=True):
        masks[number][of_image & (masks[number] == 0)] = -1
    return replace(targets, masks=masks, ignored=ignored, ignored_of=torch.tensor(regions).T)


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
        "bboxes": torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)
        / targets.size_px,
        "masks": masks.double(),
        "sem_masks": classes.double(),
        "img": torch.zeros(len(masks), 3, targets.size_px, targets.size_px),
    }


def doubled(outputs: Any) -> Any:
    """Return a network's outputs in float64."""
    if isinstance(outputs, torch.Tensor):
        return outputs.double()
    if isinstance(outputs, dict):
        return {name: doubled(value) for name, value in outputs.items()}
    return type(outputs)(doubled(value) for value in outputs)


class Operators(TorchDispatchMode):
    """Tells `note` of each operator that PyTorch computes: the operator, its arguments and its
    result.
    """

    def __init__(self, note: Callable[[Any, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(
        self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
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


def assert_same_gradients(
    loss: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]
) -> None:
    """Each leaf's gradient of `loss` differs from that of `expected` by at
    most 1e-5 of its norm.
    """
    ours = torch.autograd.grad(loss, leaves)
    theirs = torch.autograd.grad(expected, leaves, allow_unused=True)
    for leaf, gradient, wanted in zip(leaves, ours, theirs, strict=True):
        wanted = torch.zeros_like(leaf) if wanted is None else wanted
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9
