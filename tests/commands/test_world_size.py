"""The whole step on one rank and on two: same images, same steps, same weights."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.support.in_memory import InMemory
from tests.support.ranks import run_ranks
from yolo_seg_ddp.data.augment import Augmentation
from yolo_seg_ddp.data.dataset import Photo, SegmentationDataset, collate
from yolo_seg_ddp.data.loader import EpochBatches
from yolo_seg_ddp.engine import EngineOptions, TrainingEngine
from yolo_seg_ddp.utils.distributed import RankInfo
from yolo_seg_ddp.utils.distributed import rank as current_rank
from yolo_seg_ddp.yolo.loss import SegmentationLoss
from yolo_seg_ddp.yolo.model import build_model
from yolo_seg_ddp.yolo.optimizer import OptimizerPlan, build_optimizer
from yolo_seg_ddp.yolo.training_step import SegmentationStep

SIZE_PX = 64
LARGER_SIZE_PX = 160
GLOBAL_BATCH = 4
STEPS = 6
# Biases start at 0, so they hold nothing but the sum of all updates: the comparison is strict at
# any rate. At 1e-3 one rank differs from itself by half after a change of 1e-7 in its first
# weights, because targets are assigned anew at every step and each assignment is a choice; at this
# rate nothing amplifies rounding.
LEARNING_RATE = 2e-5


class Drawn(InMemory):
    """Photographs in memory, in the place of the packed cache: coloured boxes on noise, as their
    labels say.
    """

    def __init__(self, photos: list[Photo], size_px: int) -> None:
        rng = np.random.default_rng(5)
        self.images = []
        for photo in photos:
            image = rng.integers(90, 140, (size_px, size_px, 3)).astype(np.uint8)
            for class_id, polygon in zip(photo.class_ids, photo.polygons, strict=True):
                (x1, y1), (x2, y2) = (polygon[[0, 2]] * size_px).astype(int)
                image[y1:y2, x1:x2] = (40 + 90 * class_id, 200 - 80 * class_id, 60)
            self.images.append(image)

    def whole(self, position: int) -> np.ndarray:
        return self.images[position]


def photos_with_boxes(count: int) -> list[Photo]:
    """Photographs with none to four boxes each, so that ranks hold unequal numbers of targets."""
    rng = np.random.default_rng(3)
    photos = []
    for number in range(count):
        polygons = []
        for _ in range(number % 5):
            x, y = rng.uniform(0.05, 0.5, 2)
            width, height = rng.uniform(0.2, 0.45, 2)
            polygons.append(
                np.array(
                    [[x, y], [x + width, y], [x + width, y + height], [x, y + height]], np.float32
                )
            )
        class_ids = rng.integers(0, 2, len(polygons))
        photos.append(Photo(file=None, class_ids=class_ids, polygons=polygons))  # type: ignore[arg-type]
    return photos


def begin(
    world_size: int, sync_batchnorm: bool, optimizer_name: str, size_px: int
) -> tuple[TrainingEngine, Any]:
    """Return an engine in fp32 before its first step, and the loader of this rank's share."""
    torch.manual_seed(0)
    photos = photos_with_boxes(GLOBAL_BATCH * STEPS)
    packed: Any = Drawn(photos, size_px)
    dataset = SegmentationDataset(
        photos, size_px, packed=packed, augment=Augmentation(), mosaic_epochs=1, seed=1
    )
    ranks = RankInfo(current_rank(), current_rank(), world_size, world_size)
    batches = EpochBatches(len(dataset), GLOBAL_BATCH // world_size, ranks.rank, world_size, seed=1)
    model = build_model("yolov8n-seg.yaml", ("one", "two"))
    optimizer = build_optimizer(
        model, OptimizerPlan(optimizer_name, LEARNING_RATE, 5e-4, 0.9, GLOBAL_BATCH, ())
    )
    options = EngineOptions(
        epochs=1, precision="off", clip_norm=10.0, sync_batchnorm=sync_batchnorm, quiet=True
    )
    engine = TrainingEngine(model, torch.device("cpu"), options, task=SegmentationStep())
    engine.begin(optimizer, SegmentationLoss(model))
    return engine, DataLoader(dataset, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]


def train_some_steps(
    world_size: int, sync_batchnorm: bool, optimizer_name: str
) -> dict[str, np.ndarray]:
    """Train steps on this rank's share; return the weights after them."""
    engine, loader = begin(world_size, sync_batchnorm, optimizer_name, SIZE_PX)
    engine.train_one_epoch(loader)
    assert engine.progress.global_step == STEPS
    return {name: value.numpy().copy() for name, value in engine.state.model.state_dict().items()}


def first_gradient(world_size: int, sync_batchnorm: bool) -> np.ndarray:
    """Return the whole gradient of the first step, at a size where PyTorch's BatchNorm sums many
    pixels.
    """
    engine, loader = begin(world_size, sync_batchnorm, "sgd", LARGER_SIZE_PX)
    engine.model.train()
    engine.forward_backward(next(iter(loader)), 1, is_first=True, is_last=True)
    gradients = [
        parameter.grad
        for parameter in engine.state.model.parameters()
        if parameter.grad is not None
    ]
    return torch.cat([gradient.flatten() for gradient in gradients]).numpy()


def difference(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    """Return the largest difference of any tensor relative to its own largest value."""
    return max(
        float(np.abs(first[name] - second[name]).max() / max(np.abs(first[name]).max(), 1e-6))
        for name in first
        if first[name].dtype == np.float32
    )


def train_each_way(
    world_size: int, ways: list[tuple[bool, str]]
) -> tuple[list[dict[str, np.ndarray]], np.ndarray]:
    trained = [train_some_steps(world_size, sync_batchnorm, name) for sync_batchnorm, name in ways]
    return trained, first_gradient(world_size, sync_batchnorm=True)


def test_two_ranks_train_what_one_rank_trains_with_synchronised_batchnorm_and_not_without() -> None:
    """MuSGD makes the smallest directions of a gradient, where rounding differs, as long as the
    largest.
    """
    (sgd, musgd), gradient = train_each_way(1, [(True, "sgd"), (True, "musgd")])
    ways = [(True, "sgd"), (True, "musgd"), (False, "sgd")]
    (first, of_two), (second, _) = run_ranks(train_each_way, 2, 2, ways, timeout_s=300)
    for ours, theirs in zip(first[:2], second, strict=False):
        assert all((ours[name] == theirs[name]).all() for name in ours), (
            "the two ranks ended with different weights"
        )
    assert difference(sgd, first[0]) <= 1e-4
    assert difference(musgd, first[1]) <= 2e-4
    assert difference(sgd, first[2]) > 1e-2  # the control: the comparison can fail
    # PyTorch's own BatchNorm, whose kernel for channels_last rounds more on a CPU, gives 1e-3.
    assert np.linalg.norm(gradient - of_two) <= 1e-4 * np.linalg.norm(gradient)
